"""What it takes to build, calibrate, save and open an adaptive head on this CPU, and how good its answers are then."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from softsieve import AdaptiveSoftmax
from softsieve.data.synthetic_heads import make_head
from softsieve.heads import DriftWarning

ASKED = 50  # queries of another process


class Result(NamedTuple):
    """One made-up head, calibrated for several k in one call."""

    n: int
    d: int
    queries: int  # that were there to calibrate with
    used: int
    build_s: float
    calibrate_s: float  # for all k
    whole_s: float
    open_s: float  # from a file without the weight, the faster of two
    file_mb: float  # of a file with the weight
    process_mb: float  # memory of its own that a further process takes to open that and answer; NaN where none says it
    right: dict[str, float]  # by k: share of other queries whose answers are as promised
    read: dict[str, float]  # by k: share of the weight's bytes


def compile_kernels(ks: Sequence[int]) -> float:
    """Answer and calibrate with a small head, so that nothing has to be compiled later; how long it took."""
    start = time.perf_counter()
    weight, queries, _ = make_head(2000, 64, rank=16, calibration=400)
    head = AdaptiveSoftmax(weight, delta=0.1)
    head.calibrate(queries, list(ks))
    return time.perf_counter() - start


def measure(
    n: int, d: int, *, rank: int, ks: Sequence[int], delta: float, queries: int, test: int, seed: int,
    say: Callable[[str], Any] = lambda _: None,
) -> Result:  # fmt: skip
    """Build and calibrate once, then ask other queries and open the file."""
    say("making it up")
    weight, sample, others = make_head(n, d, rank=rank, calibration=2 * queries, test=test, seed=seed)
    head = AdaptiveSoftmax(weight, delta=delta, method="cascade")
    say("building")
    start = time.perf_counter()
    head.build(sample[:queries])
    built = time.perf_counter()
    say("calibrating")
    fits = head.calibrate(sample[queries:], list(ks), generator=torch.Generator().manual_seed(seed))
    done = time.perf_counter()
    say("asking")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        seen = {str(k): head.coverage(others, k) for k in ks}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "head.safetensors")
        head.save(path, weight=False)
        opened = min(_seconds(lambda: AdaptiveSoftmax.load(path, weight=weight)) for _ in range(2))
        say("asking in another process")
        head.save(path)
        file_mb = path.stat().st_size / 1e6
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            process_mb = pool.apply(own_memory, (path, others[:ASKED], ks[0]))
    return Result(
        n, d, queries, min(fit.queries for fit in fits), built - start, done - built, done - start, opened, file_mb,
        process_mb,
        {k: one.right for k, one in seen.items()}, {k: one.read for k, one in seen.items()},
    )  # fmt: skip


def own_memory(path: Path, queries: torch.Tensor, k: int) -> float:
    """MB that this process shares with no other because it opened a head and asked it, one query after the other."""
    weight, sample, _ = make_head(2000, 64, rank=16, calibration=400)
    small = AdaptiveSoftmax(weight, delta=0.1, method="cascade")
    small.calibrate(sample, k)
    small.topk(sample[:1], k)  # the libraries and the compiled code are not the head's
    before = _private()
    head = AdaptiveSoftmax.load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        for query in queries:
            head.topk(query, k)
    return _private() - before


def _private() -> float:
    """MB of this process that it has written to; only Linux says them."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return math.nan
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024 / 1e6


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
