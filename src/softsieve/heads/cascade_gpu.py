"""The cascade on a GPU: the same index, and a rule of fixed steps that never waits for the host.

All rows are estimated with one of the tiers: a GPU reads 64 bytes of each row as fast as fewer. Those that may matter
go to a longer one, or to exact rows at once. What is calibrated on a CPU says nothing about this rule, so `calibrate`
is called on the device that answers.
"""

from __future__ import annotations

import math
import threading
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from softsieve._graphs import Graphed
from softsieve.heads.cascade import Asked, Index, enveloped, is_coded, lengths

if TYPE_CHECKING:
    from softsieve.heads.cascade_calibration import CascadeCalibration
    from softsieve.kernels import cascade_triton as kernels

ROOM = 1024  # survivors, at least, that there is room for
BATCH = 64  # queries that are answered together, at most
TIERS = 4  # of those in the index, the shortest ones, that are tried
# Bytes that could be read in the time of other things: what lies around the code of one row, and one launch more.
_AROUND, _LAUNCH = 64, 12e6
_SLOW = 4  # times as long as its bytes take, an exact answer takes
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


class GpuCascade:
    """An index with its weight on a GPU, ready to be asked from any thread and stream."""

    def __init__(self, index: Index, weight: Tensor, bias: Tensor | None, beta: float) -> None:
        from softsieve.kernels import cascade_triton as kernels

        self.index, self.weight, self.beta = index, weight, beta
        self._kernels = kernels
        self.tiers = lengths(len(index.centre))[1]
        self._steps = index.tier_steps.tolist()
        probed = torch.ones(_PROBES, index.records.shape[1], dtype=torch.int8, device=weight.device)
        probed[: len(index.probes)] = index.records[index.probes]
        self._arrays = kernels.Index(
            weight,
            None if bias is None else bias.float() * beta,
            is_coded(index, weight),
            index.project,
            index.centre,
            index.mean,
            index.records,
            self._spreads(index.records),
            index.probes,
            probed,
            self._spreads(probed),
        )
        self._totals = torch.zeros(2, dtype=torch.int64, device=weight.device)
        self._counters = torch.zeros(
            64, 2 * BATCH, dtype=torch.int32, device=weight.device
        )  # graphs have only addresses
        self._zeros: list[Tensor] = list(self._counters)
        self._graphs: dict[tuple[Any, ...], Graphed] = {}
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None

    def _spreads(self, records: Tensor) -> Tensor:
        return records[:, : len(self.tiers)].view(torch.uint8).T.contiguous()

    @property
    def shapes(self) -> list[dict[str, int]]:
        """What calibration chooses from: a tier for all rows, and a longer one, or none, for those that are left."""
        some, room = range(min(TIERS, len(self.tiers))), self._kernels.CAPACITY
        return [
            {"first": first, "second": first, "tier": tier, "capacity": room}
            for first in some
            for tier in (-1, *some[first + 1 :])
        ]

    def cost(self, asked: Asked, fit: CascadeCalibration) -> Tensor:
        """Bytes that could be read in order in the time that each answer takes."""
        around = _AROUND * asked.survivors if fit.tier >= 0 else 0
        slow = (_SLOW - 1) * self.weight.numel() * self.weight.element_size() * (asked.state != 0)
        return asked.bytes_read.double() + around + slow + (_LAUNCH if fit.tier >= 0 else 0)

    def room(self, survivors: Tensor) -> int:
        """For twice as many survivors as there were."""
        most = max(2 * int(survivors.max()), ROOM)
        return min(1 << (most - 1).bit_length(), self._kernels.CAPACITY)

    def plan(self, fit: CascadeCalibration, tolerance: float | None = None, *, upper: bool = False) -> kernels.Plan:
        """What the kernels are told; the half width of log Z to reach is what eps says unless given."""
        promised = -math.log1p(-fit.eps)
        tiered = fit.tier >= 0
        return self._kernels.Plan(
            k=fit.k,
            first=fit.first,
            length=self.tiers[fit.first],
            step=self._steps[fit.first],
            tier=fit.tier,
            tier_length=self.tiers[fit.tier] if tiered else 0,
            tier_step=self._steps[fit.tier] if tiered else 0.0,
            width=fit.width,
            correction=fit.correction,
            floor=math.log(fit.eps / 2),
            doubt=fit.doubt,
            tolerance=math.log1p(fit.eps) if tolerance is None else tolerance,
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
            upper=upper,
        )

    def answer(self, x: Tensor, fit: CascadeCalibration, *, tolerance: float | None = None) -> Asked:
        """Answer queries times beta (batch, d), with everything that calibration looks at."""
        plan = self.plan(fit, tolerance)
        arrivals = torch.zeros(2 * BATCH, dtype=torch.int32, device=x.device)
        some = [self._ask(plan, part, 1.0, arrivals) for part in torch.split(x, BATCH)]
        found = self._kernels.fields(*map(torch.cat, zip(*some, strict=True)))
        whole = self.weight.numel() * self.weight.element_size()
        return Asked(
            found.state,
            found.indices,
            found.logits,
            found.log_z.double(),
            found.half.double(),
            found.coordinates,
            found.bytes_read - (found.state != 0) * whole,  # what the exact answer read is not counted there
            found.scale.double(),
            found.survivors,
            found.signal.double(),
            found.toward.double(),
            found.flat.double(),
            x.new_empty(len(x), 0),
        )

    # -- answers -------------------------------------------------------------------------------------------------------

    def solve(
        self, x: Tensor, fit: CascadeCalibration, *, scale: float, dense: torch.dtype | None = None
    ) -> tuple[kernels.Fields, Tensor | None]:
        """Answer queries (batch, d) that are times beta when scaled; with all logits if a dtype is given.

        The first call with a batch size launches kernels one by one, later ones replay a CUDA graph. While the caller
        records one, the launches become part of it. Nothing waits for the device.
        """
        x = x.float() if x.dtype == torch.float64 else x.contiguous()
        parts = [self._graphed(part, fit, scale, dense) for part in torch.split(x, BATCH)]
        whole, numbers, *logits = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return self._kernels.fields(whole, numbers), logits[0] if logits else None

    def upper_ends(self, x: Tensor, fit: CascadeCalibration) -> tuple[Tensor, Tensor]:
        """As `Cascade.upper_ends`."""
        plan = self.plan(enveloped(fit)._replace(capacity=self._kernels.CAPACITY), math.inf, upper=True)
        dense = torch.empty(len(x), len(self.weight), dtype=torch.float32, device=x.device)
        x = x.float().contiguous()
        answered = []
        for part, out in zip(torch.split(x, BATCH), torch.split(dense, BATCH), strict=True):
            arrivals = torch.zeros(2 * BATCH, dtype=torch.int32, device=x.device)
            answered.append(self._kernels.fields(*self._ask(plan, part, 1.0, arrivals, out)).state == 0)
        return dense, torch.cat(answered)

    def _graphed(
        self, x: Tensor, fit: CascadeCalibration, scale: float, dense: torch.dtype | None
    ) -> tuple[Tensor, ...]:
        if not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return self._launch(fit, scale, dense, self._arrivals(), x=x)
        with self._lock, torch.cuda.device(x.device):
            key = (fit, scale, dense)
            if key not in self._graphs:
                launch = partial(self._launch, fit, scale, dense, self._arrivals())
                self._graphs[key] = Graphed(launch, warmup=1, limit=8)
            stream = torch.cuda.current_stream()
            if self._done is not None:  # graphs have memory of their own, which another stream may still use
                stream.wait_event(self._done)
            outputs = tuple(value.clone() for value in self._graphs[key](x=x))
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)
        return outputs

    def _arrivals(self) -> Tensor:
        """Zeros for one caller: those that were made before there was a graph to record, as long as there are some."""
        if self._zeros:
            return self._zeros.pop()
        return torch.zeros(2 * BATCH, dtype=torch.int32, device=self.weight.device)

    def _launch(
        self, fit: CascadeCalibration, scale: float, dense: torch.dtype | None, arrivals: Tensor, *, x: Tensor
    ) -> tuple[Tensor, ...]:
        out = None if dense is None else torch.empty(len(x), len(self.weight), dtype=dense, device=x.device)
        found = self._ask(self.plan(fit), x, scale, arrivals, out)
        return (*found,) if out is None else (*found, out)

    def _ask(
        self,
        plan: kernels.Plan,
        x: Tensor,
        scale: float,
        arrivals: Tensor,
        dense: Tensor | None = None,
    ) -> kernels.Found:
        return self._kernels.ask(
            self._arrays,
            plan,
            x,
            scale=scale,
            beta=self.beta,
            totals=self._totals,
            arrivals=arrivals,
            dense=dense,
        )

    def counts(self) -> tuple[int, int]:
        """Queries so far, and those of them for which everything was read. Waits for the GPU."""
        asked, exactly = self._totals.tolist()
        return asked, exactly
