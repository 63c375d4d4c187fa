"""The cascade on a GPU: the same index, and a rule of fixed steps that never waits for the host.

All rows are estimated with one of the tiers, in eight bits or four: a GPU reads 64 bytes of each row as fast as fewer.
Those that may matter go to a longer one, or to exact rows at once. What is calibrated on a CPU says nothing about this
rule, so `calibrate` is called on the device that answers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from softsieve._graphs import Graphed
from softsieve.heads.cascade import index as indexes
from softsieve.heads.cascade import packed as packing
from softsieve.heads.cascade.calibration import Trial
from softsieve.heads.cascade.engine import Cascade, gap_for
from softsieve.heads.cascade.fit import TIERS, Fallback, GpuCascadeCalibration, widened
from softsieve.heads.engine import Answer, Ends, Estimated, Layer, Promise

if TYPE_CHECKING:
    from softsieve.kernels import cascade_triton as kernels

ROOM = 1024  # survivors, at least, that there is room for
BATCH = 64  # queries that are answered together, at most
# Bytes that could be read in the time of other things: what lies around the code of one row, and one launch more.
_AROUND, _LAUNCH = 64, 12e6
_FALLBACK = 6  # passes over the weight that a fallback counts as: a batch of others waits for the one it takes
_SHORTLIST = 4  # previews that variants are tried of
_WIDER = (1.25, 1.6)  # margins, of those that the top k of a few queries need; of many they need wider ones
_FLOORS = 1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 256  # of eps / 2, shares of the partition function that make a row be read
_PROBES = 64  # lanes for the rows that are always read


def reason_against(weight: Tensor) -> str | None:
    """Why there can be no cascade for a weight that is not on a CPU; None when there can be one."""
    if weight.device.type != "cuda":
        return f"expected a weight on a CPU or a CUDA device, found one on {weight.device}"
    if find_spec("triton") is None:
        return f"expected Triton for a weight on {weight.device}, which is not installed"
    if weight.dtype == torch.float64:
        return "expected a weight of float32 or less on a GPU, found torch.float64"
    if weight.stride(1) != 1:
        return "expected rows in one piece, found a weight that is stored by columns: give weight.contiguous()"
    from softsieve.kernels.cascade_triton import MOST_ROWS

    if len(weight) > MOST_ROWS:
        return f"expected at most {MOST_ROWS} rows on a GPU, found {len(weight)}"
    return None


class GpuCascade(Cascade):
    """An index with its weight on a GPU, ready to be asked from any thread and stream."""

    on_gpu = True
    slack = 0.1  # rows that are read in full are few: later text is harder than the sample, and margins have room

    def __init__(self, layer: Layer, index: indexes.Index) -> None:
        from softsieve.kernels import cascade_triton as kernels

        super().__init__(layer, index)
        self._kernels, weight, bias = kernels, layer.weight, layer.bias
        self.tiers = indexes.lengths(len(index.centre))[1]
        self._steps = index.tier_steps.tolist()
        probed = torch.ones(_PROBES, index.records.shape[1], dtype=torch.int8, device=weight.device)
        probed[: len(index.probes)] = index.records[index.probes]
        self._arrays = kernels.Index(
            weight,
            None if bias is None else bias.float() * layer.beta,
            indexes.is_coded(index, weight),
            index.project,
            index.centre,
            index.mean,
            index.records,
            self._spreads(index.records),
            index.probes,
            probed,
            self._spreads(probed),
            self._pack(),
        )
        self._totals = torch.zeros(2, dtype=torch.int64, device=weight.device)
        # Graphs have only addresses, so there are counters that were made before the first one is recorded.
        self._counters = torch.zeros(64, BATCH, dtype=torch.int32, device=weight.device)
        self._unused: list[Tensor] = list(self._counters)
        self._graphs: dict[tuple[Any, ...], Graphed] = {}
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None

    def _spreads(self, records: Tensor) -> Tensor:
        return records[:, : len(self.tiers)].view(torch.uint8).T.contiguous()

    def _pack(self) -> dict[int, kernels.Preview]:
        """Previews in four bits of all tiers that are tried but the first one."""
        tiers, probes = self.tiers[:TIERS], self.index.probes
        self._packed_steps: list[float] = []
        if len(tiers) == 1:
            return {}
        codes, spreads, self._packed_steps = packing.pack(self.index.records, tiers, self.index.unit, self._steps)
        own, around = codes.new_ones(_PROBES, codes.shape[1]), spreads.new_ones(len(tiers), _PROBES)
        own[: len(probes)], around[:, : len(probes)] = codes[probes], spreads[:, probes]
        return {
            tier: self._kernels.Preview(
                codes, spreads[tier], packing.widen(own[:, : packing.size_of(tiers[tier])]), around[tier]
            )
            for tier in range(1, len(tiers))
        }

    # -- answers -------------------------------------------------------------------------------------------------------

    def solve(self, x: Tensor, fit: GpuCascadeCalibration, k: int) -> Answer:
        fields, _ = self.replay(x.reshape(-1, x.shape[-1]), fit, scale=self.layer.beta)
        top = (fields.indices[:, :k], fields.probs[:, :k], fields.logits[:, :k])
        numbers = fields.log_z, fields.interval, fields.coordinates, fields.bytes_read, fields.state != 0
        return Answer(*top, *numbers).shaped(x.shape[:-1])

    def logits(self, queries: Tensor, promise: Promise, dtype: torch.dtype | None = None) -> Estimated:
        fit = self.fit(self.largest_k(), promise)
        self.notice_changes()
        fields, logits = self.replay(queries, fit, scale=1.0, dense=torch.float32)
        gap = gap_for(dtype, logits.dtype, self.layer.beta)
        if gap is not None:
            # Which rows are exact besides the top k is not known here: those that are as close are lowered, too.
            kth = fields.logits.amin(-1, keepdim=True)
            limits = (kth - gap[0] * kth.abs() - gap[1]).masked_fill(fields.state[:, None] != 0, math.inf)
            logits = torch.minimum(logits, limits).scatter_(-1, fields.indices, fields.logits)
        return Estimated(logits, [], fields.bytes_read.sum(), (fields.state != 0).sum())

    def ends(self, queries: Tensor, fit: GpuCascadeCalibration) -> Ends:
        plan = self.plan(widened(fit)._replace(capacity=self._kernels.CAPACITY), math.inf, upper=True)
        logits = torch.empty(len(queries), len(self.layer.weight), dtype=torch.float32, device=queries.device)
        parts = zip(torch.split(queries.float().contiguous(), BATCH), torch.split(logits, BATCH), strict=True)
        answers = [self._kernels.fields(*self._ask(plan, x, 1.0, self._zeros(), out)) for x, out in parts]
        states, read = (torch.cat([getattr(one, name) for one in answers]) for name in ("state", "bytes_read"))
        return Ends(logits, states == Fallback.NONE, read)

    def replay(
        self, x: Tensor, fit: GpuCascadeCalibration, *, scale: float, dense: torch.dtype | None = None
    ) -> tuple[kernels.Fields, Any]:
        """Answer queries (batch, d), which are yet to be scaled; with all logits if they have a dtype.

        The first call with a batch size launches kernels one by one, later ones replay a CUDA graph. While the caller
        records one, the launches become part of it. Nothing waits for the device.
        """
        x = (x.float() if x.dtype == torch.float64 else x).detach().contiguous()
        parts = [self._replay(part, fit, scale, dense) for part in torch.split(x, BATCH)]
        top, numbers, *logits = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return self._kernels.fields(top, numbers), logits[0] if logits else None

    def _replay(
        self, x: Tensor, fit: GpuCascadeCalibration, scale: float, dense: torch.dtype | None
    ) -> tuple[Tensor, ...]:
        if not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return self._launch(fit, scale, dense, self._counter(), x=x)
        with self._lock, torch.cuda.device(x.device):
            key = (fit, scale, dense)
            if key not in self._graphs:
                self._graphs[key] = Graphed(partial(self._launch, *key, self._counter()), warmup=1, limit=8)
            stream = torch.cuda.current_stream()
            if self._done is not None:  # graphs have memory of their own, which another stream may still use
                stream.wait_event(self._done)
            outputs = tuple(value.clone() for value in self._graphs[key](x=x))
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)
        return outputs

    def _launch(
        self, fit: GpuCascadeCalibration, scale: float, dense: torch.dtype | None, counter: Tensor, *, x: Tensor
    ) -> tuple[Tensor, ...]:
        out = None if dense is None else torch.empty(len(x), len(self.layer.weight), dtype=dense, device=x.device)
        answer = self._ask(self.plan(fit), x, scale, counter, out)
        return (*answer,) if out is None else (*answer, out)

    def _ask(
        self, plan: kernels.Plan, x: Tensor, scale: float, counter: Tensor, dense: Tensor | None = None
    ) -> kernels.Found:
        beta, totals = self.layer.beta, self._totals
        return self._kernels.ask(
            self._arrays, plan, x, scale=scale, beta=beta, totals=totals, arrivals=counter, dense=dense
        )

    def _counter(self) -> Tensor:
        """Zeros for one caller, of those that were made before any graph was recorded as long as there are some."""
        return self._unused.pop() if self._unused else self._zeros()

    def _zeros(self) -> Tensor:
        return torch.zeros(BATCH, dtype=torch.int32, device=self.layer.weight.device)

    def counts(self) -> tuple[int, int]:
        """Queries so far, and those of them that fell back. Waits for the GPU."""
        answered, fallbacks = self._totals.tolist()
        return answered, fallbacks

    # -- calibration ---------------------------------------------------------------------------------------------------

    def trials(
        self, queries: Tensor, fits: Sequence[GpuCascadeCalibration], *, half_width: float | None = None
    ) -> list[Trial]:
        return [self._trial(queries, fit, half_width) for fit in fits]

    def _trial(self, queries: Tensor, fit: GpuCascadeCalibration, half_width: float | None) -> Trial:
        plan, counter = self.plan(fit, half_width), self._zeros()
        parts = [self._ask(plan, some, 1.0, counter) for some in torch.split(queries, BATCH)]
        fields = self._kernels.fields(*map(torch.cat, zip(*parts, strict=True)))
        return Trial(
            fields.state,
            fields.indices,
            fields.logits,
            fields.log_z.double(),
            fields.half.double(),
            fields.coordinates,
            fields.bytes_read - (fields.state != 0) * self.layer.bytes,
            fields.scale.double(),
            fields.survivors,
            fields.signal.double(),
            fields.toward.double(),
            fields.flat.double(),
        )

    def settings(self) -> list[dict[str, int]]:
        """A tier that previews all rows, in eight bits or four, and a longer one, or none, for the survivors."""
        some = range(min(TIERS, len(self.tiers)))
        pairs = [(first, tier) for first in some for tier in (-1, *some[first + 1 :])]
        settings = [{"first": first, "tier": tier, "bits": 8} for first, tier in pairs]
        return settings + [{"first": first, "tier": tier, "bits": 4} for first, tier in pairs if first]

    def start(self, k: int, promise: Promise, queries: int) -> GpuCascadeCalibration:
        room = self._kernels.CAPACITY
        return GpuCascadeCalibration(
            k, *promise, queries, 1.0, 1.0, 0, -1, room, math.inf, 0.5, 0.0, math.inf, 0.0, math.inf, 0
        )

    def choose(
        self, start: GpuCascadeCalibration, trials: list[tuple[GpuCascadeCalibration, Trial]]
    ) -> list[GpuCascadeCalibration]:
        """A few: how many fall back is not known before it is known how far corrected sums are off."""
        return [fit for fit, _ in sorted(trials, key=lambda one: self.cost(*one))[:_SHORTLIST]]

    def variants(self, fit: GpuCascadeCalibration) -> list[GpuCascadeCalibration]:
        """Wider margins and lower floors: some more rows read in full take less than a query that falls back."""
        return [fit._replace(width=fit.width * width, floor=floor) for width in _WIDER for floor in _FLOORS]

    def roomy(self, fit: GpuCascadeCalibration, trial: Trial) -> GpuCascadeCalibration:
        """For twice as many survivors as there were."""
        room = max(2 * int(trial.survivors.max()), ROOM)
        return fit._replace(capacity=min(1 << (room - 1).bit_length(), self._kernels.CAPACITY))

    def cost(self, fit: GpuCascadeCalibration, trial: Trial) -> float:
        """In bytes that could be read in order in the time that an answer takes, as a share of those of the weight."""
        cost = trial.bytes_read.double() + _FALLBACK * self.layer.bytes * (trial.fallback != 0)
        cost += _AROUND * trial.survivors + (_LAUNCH if fit.tier >= 0 else 0.0)
        return float(cost.mean()) / self.layer.bytes

    def plan(self, fit: GpuCascadeCalibration, half_width: float | None = None, *, upper: bool = False) -> kernels.Plan:
        """What the kernels are told; the half-width of log Z to reach is what eps says unless it is an argument."""
        promised = -math.log1p(-fit.eps)
        tiered, packed, length = fit.tier >= 0, fit.bits < 8, self.tiers[fit.first]
        return self._kernels.Plan(
            k=fit.k,
            first=fit.first,
            length=length,
            step=(self._packed_steps if packed else self._steps)[fit.first],
            tier=fit.tier,
            tier_length=self.tiers[fit.tier] if tiered else 0,
            tier_step=self._steps[fit.tier] if tiered else 0.0,
            width=fit.width,
            correction=fit.correction,
            floor=math.log(fit.floor * fit.eps / 2),
            doubt=fit.doubt,
            tolerance=math.log1p(fit.eps) if half_width is None else half_width,
            low=fit.low,
            high=fit.high,
            signal=fit.signal,
            toward_low=fit.toward_low,
            toward_high=fit.toward_high,
            survivors=fit.most,
            flat=fit.flat,
            interval=min(fit.interval, 1e30),
            least=promised if math.isinf(fit.interval) else promised / 4,
            most=promised,
            capacity=fit.capacity,
            packed=packing.size_of(length) if packed else 0,
            upper=upper,
        )
