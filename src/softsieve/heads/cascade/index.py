"""The index of a cascade: codes of all rows, short ones for previews of all rows and longer ones for tiers.

A row survives while ``estimate + width * deviation`` reaches the k-th best estimate, or a part of the partition
function that matters. The deviation is the row's own predicted one (what its code lacks) times how large errors are for
this query, measured on some rows that are always read. Rows that are left out count with their last estimate, corrected
for what the exponential makes of its variance. Which width suffices is found by `calibration`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from softsieve._progress import ProgressCallback, no_progress
from softsieve.heads.cascade.basis import Moments, joint_basis
from softsieve.heads.quantised import Weight
from softsieve.heads.watching import CHUNK, checksums

BLOCK = 512  # rows of the preview that are coded together, as the kernels have it
CLIP = 12.0  # root mean squares of a column that codes reach; a row beyond has a large error, and it is known to
LEVELS = 255  # of a predicted deviation
CACHED = 1 << 20  # entries of a weight that are coded at a time on a CPU: they stay in a cache, as what is made of them
SPREADS = 8  # bytes for the spreads of tiers, before the codes of a row, as the kernels have it
PROBES = 64  # rows that are always read


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


def long_previews(size: int) -> list[int]:
    """Tiers that can be previews, too, where most rows survive the others: up to a quarter of the coordinates.

    Example:
        >>> long_previews(576), long_previews(1536)
        ([56, 120], [120, 248])
    """
    previews, tiers = lengths(size)
    return [length for length in tiers if previews[-1] < length <= size // 4]


def by_columns(index: Index, longest: int) -> Tensor:
    """Codes as previews have them, for one of these lengths: ``columns``, or longer ones made of the records."""
    blocks, own, _ = index.columns.shape
    if longest <= own:
        return index.columns
    codes = index.records[:, SPREADS : SPREADS + longest]
    filled = F.pad(codes, (0, 0, 0, blocks * BLOCK - len(codes)))
    return filled.view(blocks, BLOCK, longest).transpose(1, 2).contiguous()


def build(
    weight: Weight, bias: Tensor | None, moments: Moments, *, seed: int = 0, progress: ProgressCallback = no_progress
) -> Index:
    """Make the index of a weight for queries with these moments.

    Takes two passes over the weight, some rows at a time. The bias is not coded: estimates have it exactly, so that a
    few rows whose bias is far from the others' do not make all codes coarse.
    """
    (rows, size), device = weight.shape, weight.device
    share = 0.3 / max(1, math.ceil(rows * size / _at_once(weight)))
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


def update(index: Index, weight: Weight, bias: Tensor | None, rows: Tensor) -> None:
    """Make an index right for rows of the weight that have changed, in the basis it has."""
    own = None if bias is None else bias[rows]
    for start, part in _parts(weight[rows], own if is_coded(index, weight) else None):
        some = rows[start : start + len(part)]
        _set_spreads(index, some, _code(index, some, part))
    index.checksums[rows] = checksums(weight[rows], own)


def is_coded(index: Index, weight: Weight) -> bool:
    """Whether the bias is among the codes."""
    return len(index.centre) > weight.shape[1]


def _at_once(weight: Weight) -> int:
    """Entries that are worked on at a time."""
    return CACHED if weight.is_cpu else CHUNK


def _parts(weight: Weight, bias: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """The rows in float32, with their bias if it is coded, some at a time."""
    step = max(1, _at_once(weight) // weight.shape[1])
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


def check(index: Index, weight: Weight, bias: Tensor | None) -> None:
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
        own = (value.dtype, tuple(value.shape))
        if own != expected[name]:
            raise ValueError(f"index.{name}: expected {expected[name]}, found {own}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"index.{name}: expected finite numbers, found NaN or infinity")
    for name in ("unit", "steps", "tier_steps", "spreads"):
        if bool((getattr(index, name) <= 0).any()):
            raise ValueError(f"index.{name}: expected numbers above 0")
    if bool((index.records[:, : len(tiers)] == 0).any()):
        raise ValueError("index.records: expected spreads above 0")
    if bool(((index.probes < 0) | (index.probes >= rows)).any()):
        raise ValueError(f"index.probes: expected rows in [0, {rows - 1}]")
