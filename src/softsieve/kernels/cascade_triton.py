"""The cascade on a GPU, in Triton: queries through preview, one tier of codes and exact rows. Raw tensors only.

Five launches whatever the queries are, six for more than `exact_triton.TOGETHER` of them and two more with a tier; none
of them waits for the host. They are the steps of docs/cascade.md: `measure_errors`, `preview_rows`, `select_survivors`,
with a tier `refine_survivors`, `read_refined` and `estimate_log_z`, else `read_finalists`, which does both; and the
product of `exact_triton` for queries that fall back to all rows, which share one pass over them.
Runs under Triton's interpreter, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from softsieve.kernels import cascade_answers_triton as answers
from softsieve.kernels import cascade_stages_triton as stages
from softsieve.kernels import exact_triton
from softsieve.kernels.cascade_answers_triton import DRIFTED, EXPENSIVE
from softsieve.kernels.cascade_stages_triton import BLOCK, GROUP, SPREADS

__all__ = ["CHOICE", "DRIFTED", "EXPENSIVE", "Fields", "Found", "Index", "Plan", "ask", "fields"]

WARPS = 4
WARPS_OF_ONE = 8  # of a single query, whose programs are too few to fill the device
PROGRAMS = 1024  # that read the survivors of a batch
PREVIEW = {"num_warps": 8}
# From so many queries on: rows of which survivors are chosen together, each time by what all blocks say, and warps.
CHOICES = ((16, 2048, 4), (4, 1024, 4), (1, 1024, 8))
CHOICE = CHOICES[-1][1]
LANES = 16  # numbers for each row that matrix units make together, two for each query; twice as many for many queries
MOST_K = 64
MOST_BATCH = 64
ARRIVALS = MOST_BATCH  # counters, of which some are used; each call's begin where memory is aligned
MOST_ROWS = 1 << 21  # one program reads the statistics of so many
CAPACITY = 16384  # the most survivors of a query
ANSWERED = 0  # the state of a query that needs no fallback


class Preview(NamedTuple):
    """What estimates of all rows are made of."""

    codes: Tensor  # (n, bytes) int8
    spreads: Tensor  # (n,) uint8
    probe_codes: Tensor  # (PROBES, width) int8: those of the probes, one in a byte
    probe_spreads: Tensor  # (PROBES,) uint8


class Index(NamedTuple):
    """What a head keeps for its queries, on the device."""

    weight: Tensor  # (n, d), rows contiguous
    bias: Tensor | None  # (n,) float32, times beta
    coded: bool  # whether it is among the codes, or estimates have it exactly
    projection: Tensor  # (longest, d [+ 1]) bfloat16; the last column, if there is one more, goes with a coded bias
    centre: Tensor  # (d [+ 1],)
    mean: Tensor  # (d [+ 1],): the mean query, of length 1; 0 if it is not known
    records: Tensor  # (n, SPREADS + longest) int8: spreads of the tiers, as uint8, and all codes of a row
    spreads: Tensor  # (tiers, n) uint8: the same spreads
    probes: Tensor  # int64: rows that are always read
    probe_records: Tensor  # (PROBES, SPREADS + longest) int8: their records, filled up with ones
    probe_spreads: Tensor  # (tiers, PROBES) uint8
    packed: dict[int, Preview]  # those in four bits, by their tier


class Plan(NamedTuple):
    """How to answer, for one k."""

    k: int
    first: int  # the tier that all rows are estimated with
    length: int  # of it
    step: float  # of its spreads
    tier: int  # the tier for survivors; -1: none
    tier_length: int  # of it; 0: none
    tier_step: float
    width: float  # of margins, in predicted deviations
    correction: float  # what an estimate's predicted variance adds to it, see `expected_excess`
    floor: float  # the logarithm of the share of the partition function that a row must have to matter
    doubt: float  # half-width of the interval of log Z, over the corrected share of the partition function
    tolerance: float  # the half-width to reach
    low: float  # what queries of the calibration stay within, as `cascade_numba.Usual` has it
    high: float
    signal: float
    toward_low: float
    toward_high: float
    survivors: float
    flat: float
    interval: float  # the promised half-width: this times the estimated one,
    least: float  # not below this
    most: float  # nor above this
    capacity: int  # survivors that fit into the buffer, a power of two
    packed: int = 0  # bytes of a row that the preview reads, if its codes have four bits
    upper: bool = False  # all logits are to be upper ends for dropped rows, instead of corrected estimates


class Found(NamedTuple):
    """The answers, in two tensors. ``state`` says why a query fell back to all rows, where it did."""

    whole: Tensor  # (batch, k + 5) int64: indices, coordinates, bytes_read, survivors, finalists, state
    numbers: Tensor  # (batch, 2 k + 8): probs, logits, log_z, ends of its interval, half, scale, signal, toward, flat


class Fields(NamedTuple):
    """What `Found` holds."""

    indices: Tensor  # (batch, k)
    probs: Tensor  # (batch, k)
    logits: Tensor  # (batch, k)
    log_z: Tensor  # (batch,)
    interval: Tensor  # (batch, 2)
    half: Tensor  # (batch,): half-width, before what is promised is made of it
    scale: Tensor  # (batch,): of the errors of the preview
    signal: Tensor  # (batch,): size of the estimates of the probes, in sizes of their errors
    toward: Tensor  # (batch,): cosine of the angle to the mean query
    flat: Tensor  # (batch,): log Z less the k-th logit
    coordinates: Tensor  # (batch,), as the rest
    bytes_read: Tensor
    survivors: Tensor
    finalists: Tensor
    state: Tensor


def fields(whole: Tensor, numbers: Tensor) -> Fields:
    """Views of what `ask` found."""
    k = whole.shape[1] - 5
    return Fields(
        whole[:, :k],
        numbers[:, :k],
        numbers[:, k : 2 * k],
        numbers[:, 2 * k],
        numbers[:, 2 * k + 1 : 2 * k + 3],
        *(numbers[:, 2 * k + field] for field in range(3, 8)),
        *(whole[:, k + field] for field in range(5)),
    )


def choice_for(batch: int) -> tuple[int, int]:
    """Rows of which survivors are chosen together for each of so many queries, and warps that do it."""
    return next((rows, warps) for least, rows, warps in CHOICES if batch >= least)


def width_of(plan: Plan) -> int:
    """Codes that the preview multiplies, with what lies between them."""
    return 2 * plan.packed or SPREADS + plan.length


def _memory(index: Index, plan: Plan, batch: int) -> SimpleNamespace:
    """Allocate what launches leave for each other, float32 unless there is a dtype, and the answers."""
    n, blocks, tiered = len(index.weight), triton.cdiv(len(index.weight), BLOCK), plan.tier >= 0
    shapes: dict[str, tuple[int, ...]] = {
        "y": (batch, max(plan.length, plan.tier_length)),  # turned queries
        "offset": (batch,),  # what estimates begin with
        "probed": (batch, len(index.probe_records)),  # logits of the probes
        "digits": (batch, 2, width_of(plan)),  # the beginning of y as whole numbers
        "tops": (batch,),  # what 1 of these stands for
        "scales": (batch,),  # of the errors of the preview
        "signals": (batch,),  # size of the probes' estimates, in sizes of their errors
        "towards": (batch,),  # cosine of the angle to the mean query
        "unusual": (batch,),  # whether a query is unlike those of the calibration
        "limits": (batch,),  # what no estimate may reach; infinite where none does
        "units": (batch,),  # deviation of the tier's errors for a spread of 1
        "estimates": (batch, n),
        "largest": (batch, blocks),  # of the estimates
        "sums": (batch, blocks),  # of exponentials, over e^largest
        "groups": (batch, blocks, BLOCK // GROUP if plan.k > 1 else 0),  # the largest of each
        # Sum of exponentials, its corrected part, the largest estimate.
        "dropped": (batch, triton.cdiv(n, choice_for(batch)[0]), 3),
        "shifts": (batch,),  # the largest estimate of all
        "values": (batch, plan.capacity),  # estimates or logits of survivors
        "deviations": (batch, plan.capacity if tiered else 0),
        "refined": (2, batch, plan.capacity if tiered else 0),  # how much of a value was corrected, and the value
        "counts": (batch + 1,),  # survivors, and queries that fall back
        "done": (batch,),  # pieces of a query's survivors that are read
        "rows": (batch, plan.capacity),  # survivors
        "states": (batch,),  # why queries fall back, 0 for those that do not
        "whole": (batch, plan.k + 5),  # of `Found`
        "numbers": (batch, 2 * plan.k + 8),  # of `Found`
    }
    dtypes = {"digits": torch.int8, "whole": torch.int64} | dict.fromkeys(
        ("unusual", "counts", "done", "rows", "states"), torch.int32
    )
    return SimpleNamespace(
        **{
            name: torch.empty(shape, dtype=dtypes.get(name, torch.float32), device=index.weight.device)
            for name, shape in shapes.items()
        }
    )


def _count_read(index: Index, plan: Plan) -> tuple[int, int]:
    """Bytes and entries that are read for every query, whatever it is."""
    (n, size), extended, many = index.weight.shape, index.projection.shape[1], len(index.probes)
    bases = 4 * n if index.bias is not None and not index.coded else 0
    codes = plan.packed or plan.length
    read = many * (size * index.weight.element_size() + codes + 1) + n * (codes + 1) + bases
    read += 4 * extended + max(plan.length, plan.tier_length) * extended * 2
    entries = many * size + (n + many) * plan.length + many * plan.tier_length
    return read + (many * (plan.tier_length + 1) if plan.tier >= 0 else 0), entries


def _preview(index: Index, plan: Plan) -> Preview:
    if plan.packed:
        return index.packed[plan.first]
    return Preview(index.records, index.spreads[plan.first], index.probe_records, index.probe_spreads[plan.first])


def ask(
    index: Index, plan: Plan, x: Tensor, *, scale: float, beta: float, totals: Tensor, arrivals: Tensor,
    dense: Tensor | None = None,
) -> Found:  # fmt: skip
    """Answer queries (batch, d), of any floating-point dtype up to float32: logits are ``scale * weight @ x + bias``.

    Args:
        beta: what stands for the bias at the end of a query times ``scale``.
        totals: (2,) int64, to which are added the queries, and those of them that fell back to all rows.
        arrivals: (ARRIVALS,) int32 zeros, which they are again in the end. For one call at a time.
        dense: where all logits go, exact for finalists and elsewhere such that their exponentials are the estimated
            ones, or upper ends. (batch, n)
    """
    (n, size), batch, k = index.weight.shape, len(x), plan.k
    item, biased, tiered = index.weight.element_size(), index.bias is not None, plan.tier >= 0
    based, bend = biased and not index.coded, plan.width / max(2 * plan.correction, 1e-30)
    probes, many = len(index.probe_records), len(index.probes)
    extended, stride = index.projection.shape[1], index.records.stride(0)
    strides = x.stride(0), index.weight.stride(0)
    longest, width, capacity = max(plan.length, plan.tier_length), width_of(plan), plan.capacity
    (codes, spreads, probe_codes, probe_spreads) = _preview(index, plan)
    loaded = plan.packed or width
    m = _memory(index, plan, batch)
    wide = min(4096, triton.next_power_of_2(size))
    rows = max(1, 4096 // wide)
    (choice, choosing), blocks = choice_for(batch), triton.cdiv(n, BLOCK)
    parts = triton.cdiv(n, choice)
    block_width, part_width = triton.next_power_of_2(blocks), triton.next_power_of_2(parts)
    filled, out = dense is not None, m.scales if dense is None else dense
    how = exact_triton.options(x) | {"num_warps": WARPS_OF_ONE if batch == 1 else WARPS}
    kept = exact_triton.partials(index.weight, batch, k)

    stages.measure_errors[(triton.cdiv(longest, rows) + triton.cdiv(probes, rows) + 2, batch)](
        x, index.weight, index.bias, index.projection, index.centre, index.mean, index.probes,
        probe_codes, probe_spreads, index.probe_records, index.probe_spreads[plan.tier],
        m.y, m.offset, m.probed, m.digits, m.tops, m.scales, m.signals, m.towards, m.unusual, m.units,
        m.counts, m.done, arrivals, size, extended, longest, many, probe_codes.stride(0), stride, scale, beta, *strides,
        plan.step, plan.tier_step, plan.low, plan.high, plan.signal, plan.toward_low, plan.toward_high,
        BIASED=biased, CODED=biased and index.coded, BASED=based, TIER=tiered,
        WIDTH=width, PACKED=plan.packed, LONGEST=triton.next_power_of_2(width), PROBES=probes, ROWS=rows, SIZE=wide,
        **how,
    )  # fmt: skip
    lanes = LANES if batch <= LANES // 2 else 2 * LANES
    together = 1 if batch == 1 else lanes // 2
    stages.preview_rows[(blocks, triton.cdiv(batch, together))](
        codes, spreads, index.bias, m.digits, m.tops, m.offset, m.scales,
        m.estimates, m.largest, m.sums, m.groups, n, blocks, codes.stride(0), batch, plan.step, plan.correction, bend,
        BASED=based, WIDTH=width, PACKED=plan.packed, SOME=min(128, max(32, triton.next_power_of_2(loaded))),
        LANES=lanes, QUERIES=together, GROUPED=k > 1, WORDS=x.is_cuda and torch.version.hip is None, **how | PREVIEW,
    )  # fmt: skip
    stages.select_survivors[(parts, batch)](
        m.estimates, spreads, m.largest, m.sums, m.groups, m.scales, m.unusual, m.counts, m.rows, m.dropped, m.shifts,
        out, n, blocks, plan.step, plan.width, plan.correction, bend, plan.floor,
        K=k, BLOCKS=block_width, GROUPS=block_width * (BLOCK // GROUP), GROUPED=k > 1,
        CHOICE=choice, CAPACITY=capacity, DENSE=filled, UPPER=plan.upper, **how | {"num_warps": choosing},
    )  # fmt: skip
    noted = (m.scales, m.signals, m.towards, m.unusual, m.limits, m.states, m.whole, m.numbers, totals)
    costs = item, parts, *_count_read(index, plan)
    promised = plan.doubt, plan.tolerance, plan.survivors, plan.flat, plan.interval, plan.least, plan.most
    if tiered:
        programs = max(64, 1024 // batch)  # those that have nothing to do take time, too
        stages.refine_survivors[(min(programs, triton.cdiv(capacity, 16)), batch)](
            index.records, index.bias, m.y, m.offset, m.units, m.counts, m.rows, m.values, m.deviations,
            stride, longest, plan.tier_length, plan.tier, BASED=based, SOME=64, ROWS=16, CAPACITY=capacity, **how,
        )  # fmt: skip
        stages.read_refined[(min(programs, triton.cdiv(capacity, rows)), batch)](
            x, index.weight, index.bias, m.counts, m.rows, m.values, m.deviations, m.refined, m.dropped, m.shifts, out,
            n, size, parts, scale, *strides, plan.width, plan.correction, bend, plan.floor,
            K=k, BIASED=biased, DENSE=filled, UPPER=plan.upper, PARTS=part_width,
            ROWS=rows, SIZE=wide, CAPACITY=capacity, **how,
        )  # fmt: skip
        answers.estimate_log_z[(batch,)](
            m.counts, m.rows, m.refined[1], m.refined, m.dropped, m.shifts, *noted, size, *costs,
            plan.tier_length + 1, *promised, K=k, PARTS=part_width, CAPACITY=capacity, **how,
        )  # fmt: skip
    else:
        answers.read_finalists[(min(PROGRAMS, triton.cdiv(batch * capacity, rows)),)](
            x, index.weight, index.bias, m.counts, m.done, m.rows, m.values, m.dropped, m.shifts, *noted, out,
            n, size, batch, scale, *strides, *costs, *promised,
            K=k, BIASED=biased, DENSE=filled, PARTS=part_width, QUERIES=triton.next_power_of_2(batch),
            ROWS=rows, SIZE=wide, CAPACITY=capacity, **how,
        )  # fmt: skip
    exact_triton.answer(
        x, index.weight, index.bias, m.states, m.counts[batch:], kept, m.whole, m.numbers,
        k=k, scale=scale, dense=dense, limits=m.limits if filled and k > 0 and not plan.upper else None,
        below=torch.finfo(out.dtype).eps, arrivals=arrivals if batch <= exact_triton.TOGETHER else None,
    )  # fmt: skip
    return Found(m.whole, m.numbers)
