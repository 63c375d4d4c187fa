"""The cascade: previews of all rows from short codes, longer codes of those that may matter, exact rows of the last.

A row stays while ``estimate + width * deviation`` reaches the k-th best estimate, or a part of the normaliser that
matters. The deviation is the row's own predicted one (what its code lacks) times how large errors are for this query,
measured on some rows that are always read. Rows that left count with their last estimate, corrected for what the
exponential makes of its variance. Which width suffices is found by calibration (`cascade_calibration`).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from softsieve._progress import Report, in_silence
from softsieve.heads.basis import Moments, joint_basis

if TYPE_CHECKING:
    from softsieve.heads.cascade_calibration import CascadeCalibration
    from softsieve.kernels import cascade_numba as kernels

BLOCK = 512  # rows of the preview that are coded together, as the kernels have it
CHUNK = 1 << 22  # entries of the weight that are worked on at a time
CLIP = 12.0  # root mean squares of a column that codes reach; a row beyond has a large error, and it is known to
LEVELS = 255  # of a predicted deviation
SPREADS = 8  # bytes for the spreads of tiers, before the codes of a row, as the kernels have it
PROBES = 64  # rows that are always read
_PAGE = 1 << 21  # bytes of a large page of memory
ROW = 192  # bytes that could be read in order in the time that one more row takes, besides its own
LOOK = 8  # columns that could be read in the time that masses and margins of a preview take
SAMPLES = 4  # of them that are kept, to notice that the weight has changed
_LOCK = threading.Lock()


class Index(NamedTuple):
    """What is kept for queries besides the weight.

    Codes are of ``(row - centre) @ expand``, which a query meets as ``y = project @ x``. ``e`` is d. Of an index that
    version 0.1 made for a head with a bias it is one more: there the bias is coded like a coordinate of the row.
    """

    centre: Tensor  # (e,), the mean row
    expand: Tensor  # (e, e)
    project: Tensor  # (longest, e) bfloat16, times what a code of 1 stands for
    unit: Tensor  # (longest,): what a code of 1 stands for
    columns: Tensor  # (blocks, longest of the previews, BLOCK) int8: codes
    spreads: Tensor  # (previews, n) uint8: predicted deviation of a preview's error, in steps
    steps: Tensor  # (previews,)
    records: Tensor  # (n, SPREADS + longest) int8: spreads of the tiers, as uint8, and all codes of a row
    tier_steps: Tensor  # (tiers,)
    probes: Tensor  # int64
    checksums: Tensor  # (n,) int64
    mean: Tensor  # (e,): the mean query, of length 1; 0 in files of version 0.1


def lengths(size: int) -> tuple[list[int], list[int]]:
    """Prefixes that have estimates: of previews, each half as long again as the one before, and of tiers.

    With the spreads before it, a tier fills one, two, four... cache lines of 64 bytes.

    Example:
        >>> lengths(576)
        ([4, 6, 9, 13, 19, 28, 36], [56, 120, 248])
    """
    last = max(1, size // 16)
    previews, length = [], 4
    while length < last:
        previews.append(length)
        length += length // 2
    tiers: list[int] = []
    length = 64
    while length - SPREADS <= size // 2 and len(tiers) < SPREADS:
        tiers.append(length - SPREADS)
        length *= 2
    return [*previews, last], tiers or [max(1, size // 2)]


def build(
    weight: Tensor, bias: Tensor | None, moments: Moments, *, seed: int = 0, progress: Report = in_silence
) -> Index:
    """Make the index of a weight for queries with these moments.

    Takes two passes over the weight, some rows at a time. The bias is not coded: estimates have it exactly, so that a
    few rows whose bias is far from the others' do not make all codes coarse.
    """
    (rows, size), device = weight.shape, weight.device
    share = 0.3 / max(1, math.ceil(rows * size / CHUNK))
    total, second = torch.zeros(size, dtype=torch.float64, device=device), Moments(size, device)
    for _, part in _parts(weight, None):
        total += part.sum(0, dtype=torch.float64)
        second.update(part)
        progress("moments of the weight", share)
    centre = total / rows
    row_moment = second.mean - torch.outer(centre, centre)
    progress("basis", 0.05)
    basis = joint_basis(moments.mean.to(device), row_moment)
    previews, tiers = lengths(size)
    longest = max(tiers[-1], previews[-1])
    variance = (basis.expand.double() * (row_moment @ basis.expand.double())).sum(0).clamp_min(0)[:longest]
    unit = (variance.sqrt() * (CLIP / 127)).float()
    unit = unit.clamp_min(float(unit.max()) * 1e-12 or 1.0)
    generator = torch.Generator().manual_seed(seed)
    index = Index(
        centre.float(),
        basis.expand,
        (basis.project[:longest] * unit[:, None]).bfloat16(),
        unit,
        torch.zeros(math.ceil(rows / BLOCK), previews[-1], BLOCK, dtype=torch.int8, device=device),
        torch.empty(len(previews), rows, dtype=torch.uint8, device=device),
        torch.zeros(len(previews), dtype=torch.float32, device=device),
        torch.zeros(rows, SPREADS + longest, dtype=torch.int8, device=device),
        torch.zeros(len(tiers), dtype=torch.float32, device=device),
        torch.randperm(rows, generator=generator)[: min(PROBES, rows)].to(device),
        checksums(weight, bias),
        F.normalize(moments.first.to(device), dim=0).float(),
    )
    deviations = torch.empty(len(previews) + len(tiers), rows, dtype=torch.float32, device=device)
    every = torch.arange(rows, device=device)
    for start, part in _parts(weight, None):
        deviations[:, start : start + len(part)] = _code(index, every[start : start + len(part)], part)
        progress("codes", 2 * share)
    _set_spreads(index, every, deviations)
    progress("codes", 0.05)
    return index


def _set_spreads(index: Index, rows: Tensor, deviations: Tensor) -> None:
    """Write the predicted deviations of some rows, with coarser steps where they need it."""
    tiers = index.records[:, : len(index.tier_steps)].view(torch.uint8).T
    count = len(index.steps)
    for spreads, steps, own in (
        (index.spreads, index.steps, deviations[:count]),
        (tiers, index.tier_steps, deviations[count:]),
    ):
        coarser = torch.maximum(steps, own.amax(-1).clamp_min(1e-30) / LEVELS)
        if len(rows) < spreads.shape[1] and bool((coarser > steps).any()):
            spreads.copy_((spreads * (steps / coarser)[:, None]).ceil_().clamp_(1, LEVELS))
        steps.copy_(coarser)
        spreads[:, rows] = (own / steps[:, None]).ceil_().clamp_(1, LEVELS).byte()


def extend(queries: Tensor, beta: float) -> Tensor:
    """Queries times beta as an index with a coded bias meets them: with beta as one more coordinate."""
    return torch.cat([queries, queries.new_full((len(queries), 1), beta)], -1)


def update(index: Index, weight: Tensor, bias: Tensor | None, rows: Tensor) -> None:
    """Make an index right for rows of the weight that have changed, in the basis it has."""
    own = None if bias is None else bias[rows]
    for start, part in _parts(weight[rows], own if is_coded(index, weight) else None):
        some = rows[start : start + len(part)]
        _set_spreads(index, some, _code(index, some, part))
    index.checksums[rows] = checksums(weight[rows], own)


def is_coded(index: Index, weight: Tensor) -> bool:
    """Whether the bias is among the codes."""
    return len(index.centre) > weight.shape[1]


def checksums(weight: Tensor, bias: Tensor | None) -> Tensor:
    """A number for the bits of every row: their sum with random odd factors, modulo 2^64."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (weight.shape[1] + 1,), generator=generator) * 2 + 1
    factors = factors.to(weight.device)
    found = torch.empty(len(weight), dtype=torch.int64, device=weight.device)
    step = max(1, CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        some = slice(start, start + step)
        found[some] = (_integers(weight[some]) * factors[:-1]).sum(-1)
        if bias is not None:
            found[some] += _integers(bias[some]) * factors[-1]
    return found


def _integers(values: Tensor) -> Tensor:
    """Their bits."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds[values.element_size()]).to(torch.int64)


def _parts(weight: Tensor, bias: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """The rows in float32, with their bias if it is coded, some at a time."""
    step = max(1, CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        part = weight[start : start + step].float()
        yield start, part if bias is None else torch.cat([part, bias[start : start + step].float()[:, None]], -1)


def _code(index: Index, rows: Tensor, part: Tensor) -> Tensor:
    """Write the codes of some rows; the predicted deviation of the error of each estimate. (levels, rows)"""
    turned = (part - index.centre) @ index.expand
    longest = len(index.unit)
    left = turned.square().sum(-1, dtype=torch.float64)
    turned = turned[:, :longest]
    codes = (turned / index.unit).round_().clamp_(-127, 127)
    # What a longer prefix adds to the variance that is explained; an error of coding explains less.
    gain = turned.square() - (turned - codes * index.unit).square_()
    explained = gain.double().cumsum_(-1)
    previews, tiers = lengths(len(index.centre))
    ends = torch.tensor([*previews, *tiers], device=part.device) - 1
    small = codes.to(torch.int8)
    index.records[rows, SPREADS:] = small
    index.columns[rows // BLOCK, :, rows % BLOCK] = small[:, : index.columns.shape[1]]
    return (left[:, None] - explained[:, ends]).clamp_min_(0).sqrt_().T.float()


def check(index: Index, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse an index that is not one for a weight of this shape.

    Raises:
        ValueError: naming the tensor, what was expected and what was found.
    """
    rows, size = len(weight), weight.shape[1] + (bias is not None and is_coded(index, weight))
    previews, tiers = lengths(size)
    longest, blocks = max(tiers[-1], previews[-1]), math.ceil(rows / BLOCK)
    expected = {
        "centre": (torch.float32, (size,)),
        "expand": (torch.float32, (size, size)),
        "project": (torch.bfloat16, (longest, size)),
        "unit": (torch.float32, (longest,)),
        "columns": (torch.int8, (blocks, previews[-1], BLOCK)),
        "spreads": (torch.uint8, (len(previews), rows)),
        "steps": (torch.float32, (len(previews),)),
        "records": (torch.int8, (rows, SPREADS + longest)),
        "tier_steps": (torch.float32, (len(tiers),)),
        "probes": (torch.int64, (min(PROBES, rows),)),
        "checksums": (torch.int64, (rows,)),
        "mean": (torch.float32, (size,)),
    }
    for name, value in index._asdict().items():
        found = (value.dtype, tuple(value.shape))
        if found != expected[name]:
            raise ValueError(f"index.{name}: expected {expected[name]}, found {found}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"index.{name}: expected finite numbers, found NaN or infinity")
    for name in ("unit", "steps", "tier_steps", "spreads"):
        if bool((getattr(index, name) <= 0).any()):
            raise ValueError(f"index.{name}: expected numbers above 0")
    if bool((index.records[:, : len(tiers)] == 0).any()):
        raise ValueError("index.records: expected spreads above 0")
    if bool(((index.probes < 0) | (index.probes >= rows)).any()):
        raise ValueError(f"index.probes: expected rows in [0, {rows - 1}]")


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
    survivors: Tensor  # int64: of the preview
    signal: Tensor  # size of the estimates of the probes, in sizes of their errors
    toward: Tensor  # cosine of the angle to the mean query
    flat: Tensor  # log Z less the k-th logit
    dense: Tensor  # (batch, n) or (batch, 0)


class Cascade:
    """An index with its weight on a CPU, ready to be asked from any thread."""

    def __init__(self, index: Index, weight: Tensor, bias: Tensor | None, beta: float) -> None:
        from softsieve.kernels import cascade_numba as kernels

        index = index._replace(records=_in_large_pages(index.records))
        self.index, self.weight, self.beta = index, weight, beta
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        previews, tiers = lengths(len(index.centre))
        self.previews = len(previews)
        self.again = float(LOOK * len(weight))  # what a second preview costs besides its columns, in bytes
        raw = raw_bits(weight)
        coded = is_coded(index, weight)
        scaled = ((torch.zeros(0) if bias is None else bias).to(self.dtype) * beta).numpy()
        self._arrays = kernels.Index(
            raw,
            scaled,
            scaled[: 0 if coded else None],
            raw_bits(index.project),
            index.centre.numpy(),
            index.mean.numpy(),
            torch.tensor(previews).numpy(),
            index.columns.numpy(),
            index.spreads.numpy(),
            index.steps.numpy(),
            torch.tensor(tiers).numpy(),
            index.records.numpy(),
            index.tier_steps.numpy(),
            index.probes.numpy(),
            raw[index.probes[:SAMPLES].numpy()],
        )
        self._coded = coded
        self._kind = np.float64 if self.dtype == torch.float64 else np.float32
        self._ask = kernels.ask
        self._local = threading.local()

    @property
    def shapes(self) -> list[dict[str, int]]:
        """What calibration chooses from."""
        return [{"first": level, "second": level} for level in range(self.previews)]

    def cost(self, asked: Asked, fit: CascadeCalibration) -> Tensor:
        """Bytes that could be read in order in the time that each answer takes, but for exact ones."""
        return asked.bytes_read.double() + ROW * asked.survivors.double()

    def answer(
        self, x: Tensor, fit: CascadeCalibration, *, tolerance: float | None = None, dense: bool = False
    ) -> Asked:
        """Answer queries times beta (batch, d); the half width of log Z to reach is what eps says unless given."""
        return self.ask(x, plan_of(fit, tolerance), dense=dense)

    def ask(self, x: Tensor, plan: kernels.Plan, *, dense: bool = False) -> Asked:
        """Answer queries times beta (batch, d), each by itself."""
        everywhere = torch.empty(len(x), len(self.weight) if dense else 0, dtype=self.dtype)
        indices, logits, numbers = self.raw(x, plan, everywhere.numpy())
        state, coordinates, read, survivors = (
            torch.from_numpy(numbers[:, field].astype(np.int64)) for field in (0, 3, 4, 6)
        )
        log_z, half, scale, signal, toward, flat = (
            torch.from_numpy(numbers[:, field]) for field in (1, 2, 5, 8, 9, 10)
        )
        top, values = torch.from_numpy(indices), torch.from_numpy(logits)
        return Asked(
            state, top, values, log_z, half, coordinates, read, scale, survivors, signal, toward, flat, everywhere
        )

    def raw(self, x: Tensor, plan: kernels.Plan, dense: Any = None) -> tuple[Any, Any, Any]:
        """The same as arrays, whose small operations take a fraction of torch's time: top k, logits, `Found` as floats.

        Whole numbers among these are below 2^53.
        """
        batch, queries = len(x), x.numpy()
        extended = extend(x, self.beta).numpy() if self._coded else queries
        indices, logits = np.zeros((batch, plan.k), np.int64), np.zeros((batch, plan.k), self._kind)
        dense = np.empty((batch, 0), self._kind) if dense is None else dense
        ask = self._ask
        with one_at_a_time():
            scratch = self._scratch()
            found = [
                ask(self._arrays, plan, queries[i], extended[i], scratch, indices[i], logits[i], dense[i])
                for i in range(batch)
            ]
        return indices, logits, np.array(found)

    def fill(self, x: Tensor, plan: kernels.Plan, out: Any) -> list[kernels.Found]:
        """Write all logits of queries times beta to an array (batch, n), with as little around the kernel as can be."""
        queries = x.numpy()
        extended = extend(x, self.beta).numpy() if self._coded else queries
        ask, arrays = self._ask, self._arrays
        with one_at_a_time():
            scratch = self._scratch()
            top, logits = self._local.top, self._local.logits
            if top.size != plan.k:
                top, logits = self._local.top, self._local.logits = (
                    np.zeros(plan.k, np.int64),
                    np.zeros(plan.k, self._kind),
                )
            return [ask(arrays, plan, queries[i], extended[i], scratch, top, logits, out[i]) for i in range(len(x))]

    def upper_ends(self, x: Tensor, fit: CascadeCalibration) -> tuple[Tensor, Tensor]:
        """What no logit of queries times beta is above, as far as the calibration knows, and which were answered.

        Exact for the finalists, elsewhere the last estimate and as many deviations as the envelope has. (batch, n) and
        (batch,) bool.
        """
        found = self.ask(x, plan_of(enveloped(fit), math.inf, upper=True), dense=True)
        return found.dense, found.state == 0

    def _scratch(self) -> Any:
        """Memory of this thread."""
        if not hasattr(self._local, "scratch"):
            from softsieve.kernels import cascade_numba as kernels

            blocks, probes = len(self.index.columns), len(self.index.probes)
            rows = blocks * BLOCK
            self._local.top, self._local.logits = np.zeros(0, np.int64), np.zeros(0, self._kind)
            self._local.scratch = kernels.Scratch(
                estimates=np.zeros(rows, np.float32),
                largest=np.zeros(blocks, np.float32),
                reach=np.zeros(blocks, np.float32),
                masses=np.zeros(blocks, np.float32),
                doubts=np.zeros(blocks, np.float32),
                counts=np.zeros(blocks, np.int64),
                marks=np.zeros(rows, np.uint8),
                rows=np.zeros(rows, np.int32),
                values=np.zeros(rows, np.float32),
                near=np.zeros(rows, np.float32),
                exact=torch.zeros(rows, dtype=self.dtype).numpy(),
                gone=np.zeros(rows + 1, np.float32),
                gone_added=np.zeros(rows + 1, np.float32),
                y=np.zeros(SPREADS + len(self.index.unit), np.float32),
                probed=torch.zeros(probes, dtype=self.dtype).numpy(),
                known=np.zeros(probes, np.float32),
                previewed=np.zeros(probes, np.float32),
                around=np.zeros(probes, np.float32),
                tally=np.zeros(2, np.int64),
            )
        return self._local.scratch


def _in_large_pages(values: Tensor) -> Tensor:
    """A copy that begins with a large page of memory: rows lie in whole cache lines, and are found faster."""
    size = values.numel() * values.element_size()
    room = np.empty(size + _PAGE, np.uint8)  # if this is large, numpy asks for large pages
    start = -room.ctypes.data % _PAGE
    return torch.from_numpy(room[start : start + size]).view(values.dtype).view(values.shape).copy_(values)


def raw_bits(values: Tensor) -> Any:
    """As an array, without a copy: bfloat16 as uint16 and float16 as int16, which the kernels know."""
    same = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    return values.view(same[values.dtype]).numpy() if values.dtype in same else values.numpy()


def enveloped(fit: CascadeCalibration) -> CascadeCalibration:
    """The same with margins that no row that is left out is beyond."""
    return fit._replace(width=fit.envelope, most=math.inf)


@functools.lru_cache
def plan_of(fit: CascadeCalibration, tolerance: float | None = None, *, upper: bool = False) -> kernels.Plan:
    """What the kernel is told; the half width of log Z to reach is what eps says unless given."""
    from softsieve.kernels.cascade_numba import Plan, Usual

    return Plan(
        fit.k,
        fit.first,
        fit.second,
        fit.limit,
        fit.width,
        fit.correction,
        math.log(fit.eps / 2),
        fit.doubt,
        math.log1p(fit.eps) if tolerance is None else tolerance,
        Usual(fit.low, fit.high, fit.signal, fit.toward_low, fit.toward_high, fit.most, fit.flat),
        upper,
    )


@functools.cache
def one_at_a_time() -> AbstractContextManager[object]:
    """A lock, the same for all, unless numba's threads, which the kernels have started, can serve several callers."""
    from numba.np.ufunc.parallel import threading_layer

    return nullcontext() if threading_layer() in ("omp", "tbb") else _LOCK  # type: ignore[no-untyped-call]
