"""The cascade: previews of all rows from short codes, longer codes of those that may matter, exact rows of the last.

A row stays while ``estimate + width * deviation`` reaches the k-th best estimate, or a part of the normaliser that
matters. The deviation is the row's own predicted one (what its code lacks) times how large errors are for this query,
measured on some rows that are always read. Rows that left count with their last estimate, corrected for what the
exponential makes of its variance. Which width suffices is found by calibration (`cascade_calibration`).
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from softsieve.heads.basis import Moments, joint_basis

if TYPE_CHECKING:
    from softsieve.kernels import cascade_numba as kernels

BLOCK = 512  # rows of the preview that are coded together, as the kernels have it
CHUNK = 1 << 22  # entries of the weight that are worked on at a time
CLIP = 12.0  # root mean squares of a column that codes reach; a row beyond has a large error, and it is known to
LEVELS = 255  # of a predicted deviation
PROBES = 64  # rows that are always read
SAMPLES = 4  # of them that are kept, to notice that the weight has changed
STRETCH = 4096  # rows that share a checksum

Progress = Callable[[str, float], None]  # what is being done, and the share of the whole that has just been


def in_silence(what: str, share: float) -> None:
    pass


class Index(NamedTuple):
    """What is kept for queries besides the weight. ``e`` is d, and one more with a bias.

    Codes are of ``(row - centre) @ expand``, which a query meets as ``y = project @ x``.
    """

    centre: Tensor  # (e,), the mean row
    expand: Tensor  # (e, e)
    project: Tensor  # (longest, e) bfloat16, times what a code of 1 stands for
    unit: Tensor  # (longest,): what a code of 1 stands for
    columns: Tensor  # (blocks, longest of the previews, BLOCK) int8
    codes: Tensor  # (n, longest) int8: the same and more, a row at a time
    spreads: Tensor  # (levels, n) uint8: predicted deviation of an estimate's error, in steps
    steps: Tensor  # (levels,)
    probes: Tensor  # int64
    checksums: Tensor  # int64, one for each stretch of rows


def lengths(size: int) -> tuple[list[int], list[int]]:
    """Prefixes that have estimates: of previews, each half as long again as the one before, and of tiers.

    Example:
        >>> lengths(576)
        ([8, 12, 18, 27, 36], [36, 72, 144, 288])
    """
    last = max(1, size // 16)
    previews, length = [], 8
    while length < last:
        previews.append(length)
        length += length // 2
    return [*previews, last], sorted({max(1, size // part) for part in (16, 8, 4, 2)})


def build(
    weight: Tensor, bias: Tensor | None, moments: Moments, *, seed: int = 0, progress: Progress = in_silence
) -> Index:
    """Make the index of a weight for queries with these moments; of (e,) queries, see `extend`.

    Takes two passes over the weight, some rows at a time.
    """
    rows, size = len(weight), weight.shape[1] + (bias is not None)
    share = 0.3 / max(1, math.ceil(rows * size / CHUNK))
    total, second = torch.zeros(size, dtype=torch.float64), Moments(size)
    for _, part in _parts(weight, bias):
        total += part.sum(0, dtype=torch.float64)
        second.update(part)
        progress("moments of the weight", share)
    centre = total / rows
    row_moment = second.mean - torch.outer(centre, centre)
    progress("basis", 0.05)
    basis = joint_basis(moments.mean, row_moment)
    previews, tiers = lengths(size)
    longest, levels = tiers[-1], [*previews, *tiers]
    variance = (basis.expand.double() * (row_moment @ basis.expand.double())).sum(0).clamp_min(0)[:longest]
    unit = (variance.sqrt() * (CLIP / 127)).float()
    unit = unit.clamp_min(float(unit.max()) * 1e-12 or 1.0)
    generator = torch.Generator().manual_seed(seed)
    index = Index(
        centre.float(),
        basis.expand,
        (basis.project[:longest] * unit[:, None]).bfloat16(),
        unit,
        torch.zeros(math.ceil(rows / BLOCK), previews[-1], BLOCK, dtype=torch.int8),
        torch.empty(rows, longest, dtype=torch.int8),
        torch.empty(len(levels), rows, dtype=torch.uint8),
        torch.zeros(len(levels)),
        torch.randperm(rows, generator=generator)[: min(PROBES, rows)],
        torch.empty(math.ceil(rows / STRETCH), dtype=torch.int64),
    )
    deviations = torch.empty(len(levels), rows)
    for start, part in _parts(weight, bias):
        deviations[:, start : start + len(part)] = _code(index, torch.arange(start, start + len(part)), part)
        progress("codes", 2 * share)
    index.steps.copy_(deviations.amax(-1).clamp_min(1e-30) / LEVELS)
    torch.div(deviations, index.steps[:, None], out=deviations)
    index.spreads.copy_(deviations.ceil_().clamp_(1, LEVELS))
    for number in range(len(index.checksums)):
        index.checksums[number] = _checksum(weight, number)
    progress("done", 0.05)
    return index


def extend(queries: Tensor, beta: float, bias: Tensor | None) -> Tensor:
    """Queries times beta as the index meets them: with beta as one more coordinate for the bias."""
    return queries if bias is None else torch.cat([queries, queries.new_full((len(queries), 1), beta)], -1)


def update(index: Index, weight: Tensor, bias: Tensor | None, rows: Tensor) -> None:
    """Make an index right for rows of the weight that have changed, in the basis it has."""
    part = weight[rows].float()
    if bias is not None:
        part = torch.cat([part, bias[rows].float()[:, None]], -1)
    deviations = _code(index, rows, part)
    steps = torch.maximum(index.steps, deviations.amax(-1) / LEVELS)
    coarser = steps > index.steps
    if bool(coarser.any()):
        ratio = (index.steps / steps)[coarser, None]
        index.spreads[coarser] = (index.spreads[coarser] * ratio).ceil_().clamp_(1, LEVELS).byte()
        index.steps.copy_(steps)
    index.spreads[:, rows] = (deviations / index.steps[:, None]).ceil_().clamp_(1, LEVELS).byte()
    for number in torch.unique(rows // STRETCH).tolist():
        index.checksums[number] = _checksum(weight, number)


def changed(index: Index, weight: Tensor) -> list[tuple[int, int]]:
    """Stretches of rows, from and up to, that are not what the index was built of."""
    return [
        (number * STRETCH, min((number + 1) * STRETCH, len(weight)))
        for number, checksum in enumerate(index.checksums.tolist())
        if _checksum(weight, number) != checksum
    ]


def _parts(weight: Tensor, bias: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """The rows in float32, with their bias, some at a time."""
    step = max(1, CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        part = weight[start : start + step].float()
        yield start, part if bias is None else torch.cat([part, bias[start : start + step].float()[:, None]], -1)


def _code(index: Index, rows: Tensor, part: Tensor) -> Tensor:
    """Write the codes of some rows; the predicted deviation of the error of each estimate. (levels, rows)"""
    turned = (part - index.centre) @ index.expand
    longest = index.codes.shape[1]
    left = turned.square().sum(-1, dtype=torch.float64)
    turned = turned[:, :longest]
    codes = (turned / index.unit).round_().clamp_(-127, 127)
    # What a longer prefix adds to the variance that is explained; an error of coding explains less.
    gain = turned.square() - (turned - codes * index.unit).square_()
    explained = gain.double().cumsum_(-1)
    previews, tiers = lengths(len(index.centre))
    ends = torch.tensor([*previews, *tiers]) - 1
    small = codes.to(torch.int8)
    index.codes[rows] = small
    index.columns[rows // BLOCK, :, rows % BLOCK] = small[:, : index.columns.shape[1]]
    return (left[:, None] - explained[:, ends]).clamp_min_(0).sqrt_().T.float()


def _checksum(weight: Tensor, number: int) -> int:
    rows = weight[number * STRETCH : (number + 1) * STRETCH].contiguous()
    return zlib.crc32(rows.view(torch.uint8).numpy())


# -- asking ------------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What the kernel found for some queries."""

    state: Tensor  # int64, see the kernels
    indices: Tensor  # (batch, k)
    logits: Tensor  # (batch, k)
    log_z: Tensor  # (batch,) float64, as the rest
    half: Tensor
    coordinates: Tensor  # int64
    bytes_read: Tensor  # int64
    scale: Tensor  # of the errors of the preview
    dense: Tensor  # (batch, n) or (batch, 0)


class Cascade:
    """An index with its weight, ready to be asked from any thread."""

    def __init__(self, index: Index, weight: Tensor, bias: Tensor | None, beta: float) -> None:
        from softsieve.kernels import cascade_numba as kernels

        self.index, self.weight, self.beta = index, weight, beta
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        previews, tiers = lengths(len(index.centre))
        raw = raw_bits(weight)
        self._arrays = kernels.Index(
            raw,
            (torch.zeros(0) if bias is None else bias * beta).to(self.dtype).numpy(),
            raw_bits(index.project),
            index.centre.numpy(),
            index.columns.numpy(),
            index.codes.numpy(),
            torch.tensor([*previews, *tiers]).numpy(),
            index.spreads.numpy(),
            index.steps.numpy(),
            len(previews),
            index.probes.numpy(),
            raw[index.probes[:SAMPLES].numpy()],
        )
        self._bias = bias
        self._local = threading.local()

    def ask(self, x: Tensor, plan: kernels.Plan, *, dense: bool = False) -> Asked:
        """Answer queries times beta (batch, d), each by itself."""
        from softsieve.kernels import cascade_numba as kernels

        batch, rows = len(x), len(self.weight)
        asked = Asked(
            torch.empty(batch, dtype=torch.int64),
            torch.zeros(batch, plan.k, dtype=torch.int64),
            torch.zeros(batch, plan.k, dtype=self.dtype),
            *(torch.empty(batch, dtype=torch.float64) for _ in range(2)),
            *(torch.empty(batch, dtype=torch.int64) for _ in range(2)),
            torch.empty(batch, dtype=torch.float64),
            torch.empty(batch, rows if dense else 0, dtype=self.dtype),
        )
        queries, extended = x.numpy(), extend(x, self.beta, self._bias).numpy()
        top, logits, all_logits = asked.indices.numpy(), asked.logits.numpy(), asked.dense.numpy()
        with _one_at_a_time():
            scratch = self._scratch()
            for number in range(batch):
                found = kernels.ask(
                    self._arrays,
                    plan,
                    queries[number],
                    extended[number],
                    scratch,
                    top[number],
                    logits[number],
                    all_logits[number],
                )
                asked.state[number], asked.log_z[number], asked.half[number] = found[:3]
                asked.coordinates[number], asked.bytes_read[number], asked.scale[number] = found[3:6]
        return asked

    def _scratch(self) -> Any:
        """Memory of this thread."""
        if not hasattr(self._local, "scratch"):
            from softsieve.kernels import cascade_numba as kernels

            blocks, rows, probes = len(self.index.columns), len(self.weight), len(self.index.probes)
            singles = (blocks * BLOCK, blocks, blocks, blocks, blocks)
            self._local.scratch = kernels.Scratch(
                *(torch.zeros(size).numpy() for size in singles),
                *(torch.zeros(size, dtype=torch.int64).numpy() for size in (blocks, rows)),
                torch.zeros(rows).numpy(),
                torch.zeros(rows, dtype=self.dtype).numpy(),
                torch.zeros(len(self.index.unit)).numpy(),
                torch.zeros(probes, dtype=self.dtype).numpy(),
                torch.zeros(probes).numpy(),
            )
        return self._local.scratch


def raw_bits(values: Tensor) -> Any:
    """As an array, without a copy: bfloat16 as uint16 and float16 as int16, which the kernels know."""
    same = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    return values.view(same[values.dtype]).numpy() if values.dtype in same else values.numpy()


_LOCK = threading.Lock()


def _one_at_a_time() -> AbstractContextManager[object]:
    """A lock, unless numba's threads can serve several callers at once (OpenMP and TBB can)."""
    import numba

    try:
        return nullcontext() if numba.threading_layer() in ("omp", "tbb") else _LOCK
    except ValueError:  # not started yet
        return _LOCK
