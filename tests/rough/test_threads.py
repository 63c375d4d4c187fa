"""Several threads at one head, and at the losses: the same answers as one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax, SolvedSampler, as_cross_entropy, linear_as_cross_entropy
from softsieve.reference.heads import topk_softmax

THREADS, TIMES = 8, 6
KS = [3, 1, 5]
ROWS, SIZE = 1500, 24
SPREAD = torch.arange(1, SIZE + 1) ** -0.5


def made(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * SPREAD


def head(method: str, guarantee: str = "calibrated") -> AdaptiveSoftmax:
    """One that has answered nothing so far."""
    return _fitted(method, guarantee).to("cpu")


@cache
def _fitted(method: str, guarantee: str) -> AdaptiveSoftmax:
    found = AdaptiveSoftmax(made(ROWS, 0), torch.arange(ROWS) / ROWS, method=method, guarantee=guarantee, delta=0.1)
    if guarantee == "calibrated" and method != "exact":
        for k in (0, 5):
            found.calibrate(3 * made(200, 1), k, generator=torch.Generator().manual_seed(2))
    return found


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls give, all of them begun together."""
    gate = threading.Barrier(len(calls))

    def wait_and_call(call: Callable[[], Any]) -> Any:
        gate.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(wait_and_call, call) for call in calls]]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    return len(found) == len(expected) and all(same(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("method", "guarantee"),
    [
        ("exact", "calibrated"),
        ("coordinates", "calibrated"),
        ("coordinates", "pac"),
        ("cascade", "calibrated"),
        ("cascade", "pac"),
    ],
)
def test_eight_threads_are_answered_as_one_after_the_other(method: str, guarantee: str) -> None:
    """Each has queries, a k and a seed of its own; also what is made at the first question."""

    def questions(asked: AdaptiveSoftmax, number: int) -> list[Any]:
        answers: list[Any] = []
        for turn in range(TIMES):
            x, seed = 3 * made(1 + turn % 3, 100 * number + turn), torch.Generator().manual_seed(number)
            answers += [
                asked.topk(x, 5, generator=seed),
                asked.log_partition(x, generator=seed),
                asked.logits(x),
                asked.sample(x, 0.7, 5, 0.9, generator=seed),
                asked.sample(x, generator=seed),
            ]
        return answers

    alone, together = head(method, guarantee), head(method, guarantee)
    expected = [questions(alone, number) for number in range(THREADS)]
    found = at_once([lambda n=number: questions(together, n) for number in range(THREADS)])  # type: ignore[misc]
    assert same(found, expected)


def test_eight_threads_with_losses_give_the_gradients_of_one_after_the_other() -> None:
    def work(number: int) -> list[Tensor]:
        results = []
        for turn in range(TIMES):
            g = torch.Generator().manual_seed(10 * number + turn)
            logits = torch.randn(64, 300, generator=g).mul_(4).requires_grad_()
            hidden, weight = (torch.randn(n, 32, generator=g).requires_grad_() for n in (64, 300))
            target = torch.randint(300, (64,), generator=g)
            loss, stats = as_cross_entropy(logits, target, return_stats=True)
            linear = linear_as_cross_entropy(hidden, weight, target)
            gradients = torch.autograd.grad(loss + linear, (logits, hidden, weight))
            results += [loss.detach(), linear.detach(), stats.solved, stats.kept, *gradients]
        return results

    expected = [work(number) for number in range(THREADS)]
    assert same(at_once([lambda n=number: work(n) for number in range(THREADS)]), expected)  # type: ignore[misc]


def test_others_ask_while_one_builds_calibrates_and_saves(tmp_path: Path) -> None:
    """Answers are right for the old or the new index; or it is said that nothing is calibrated."""
    asked = head("cascade")
    stop, files = threading.Event(), list[Path]()

    def fit() -> None:
        try:
            for turn in range(2):
                asked.build(3 * made(200, 50 + turn))
                for k in KS:
                    asked.calibrate(3 * made(100, 60 + turn), k, generator=torch.Generator().manual_seed(turn))
                    files.append(tmp_path / f"{turn}-{k}")
                    asked.save(files[-1])
        finally:
            stop.set()

    def ask(number: int) -> tuple[int, int, int]:
        right = count = refused = 0
        while not stop.is_set() or count == 0:
            time.sleep(0.005)  # the one who fits needs a turn, too
            x = 3 * made(4, 1000 * number + count)
            try:
                answer, logits = asked.topk(x, 2), asked.logits(x)
            except RuntimeError as error:
                if "not calibrated for k = " not in str(error):
                    raise
                refused += 1
                continue
            assert torch.isfinite(logits).all()
            truth = topk_softmax(asked.weight.double(), x.double(), 2, asked.bias.double())  # type: ignore[union-attr]
            right += int((answer.indices.sort().values == truth.indices.sort().values).all(-1).sum())
            count += 4
        return right, count, refused

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, *found = at_once([fit, *(lambda n=number: ask(n) for number in range(THREADS - 1))])
    right, count, refused = (sum(numbers) for numbers in zip(*found, strict=True))
    assert right >= (1 - 2 * asked.delta) * count
    assert refused  # between an index and its first calibration there is none
    for path in files:  # each of one index with its own calibrations
        again = AdaptiveSoftmax.load(path)
        assert list(again.calibrations) == KS[: 1 + KS.index(int(path.name[-1]))]


def test_a_calibration_is_never_used_with_another_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build just between choosing the engine and asking it."""
    asked = head("cascade")
    chosen, before, x = AdaptiveSoftmax._choose, asked._engine, 3 * made(20, 9)
    expected = asked.topk(x, 5)

    def choose(self: AdaptiveSoftmax, k: int, batch: int) -> Any:
        engine = chosen(self, k, batch)
        self.build(3 * made(200, 7))
        self.calibrate(3 * made(300, 8), 5, generator=torch.Generator().manual_seed(0))
        return engine

    monkeypatch.setattr(AdaptiveSoftmax, "_choose", choose)
    answer = asked.topk(x, 5)
    assert asked._engine is not before
    assert all(map(torch.equal, answer, expected))


def test_calibrations_that_another_thread_reads_do_not_change() -> None:
    for method in ("cascade", "coordinates"):
        asked = head(method)
        known = asked.calibrations
        before = list(known)
        asked.calibrate(3 * made(200, 8), 7, generator=torch.Generator().manual_seed(0))
        assert list(known) == before
        assert list(asked.calibrations) == [*before, 7]


def test_a_sampler_may_be_told_by_several_threads_one_at_a_time() -> None:
    """It has no lock of its own: what loaders do is ask it from one thread."""
    told, lock = SolvedSampler(800), threading.Lock()

    def tell(number: int) -> None:
        rows = torch.arange(100 * number, 100 * number + 100)
        with lock:
            told.update(rows, rows % 2 == 0)

    at_once([lambda n=number: tell(n) for number in range(THREADS)])  # type: ignore[misc]
    told.next_epoch()
    told.next_epoch()
    assert told.solved.tolist() == [row % 2 == 0 for row in range(800)]


def test_threads_of_numba_that_serve_one_caller_at_a_time_are_not_shared() -> None:
    """The threading layer workqueue ends the process when two callers meet: the first questions come all at once."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import torch; from tests.rough import test_threads as t\n"
        "from softsieve.heads.cascade import cpu as cascade; from numba.np.ufunc import parallel\n"
        "asked = t.head('cascade'); x = 3 * t.made(40, 1); layer = parallel.threading_layer\n"
        "cascade.one_at_a_time.cache_clear()\n"
        "parallel.threading_layer = lambda: (time.sleep(0.2), layer())[1]\n"  # so that all come before the first knows
        "[lock] = set(t.at_once([cascade.one_at_a_time] * 8)); assert hasattr(lock, 'locked')\n"
        "assert t.same(t.at_once([lambda: asked.topk(x, 5)] * 8), [asked.topk(x, 5)] * 8)\n"
        "print(layer())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[2])],
        env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "workqueue"
