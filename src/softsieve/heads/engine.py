"""The protocol of engines: what answers for one method on one kind of device, and what all of them share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from softsieve import _checks
from softsieve._progress import ProgressCallback
from softsieve.heads.above import AT_ONCE, RowsAbove
from softsieve.heads.cascade.basis import Moments
from softsieve.heads.quantised import Weight
from softsieve.heads.reader import Reader
from softsieve.heads.watching import Watch

QUERIES = 4096  # for which the exact product is made together, at most


class Options(NamedTuple):
    """What a head was made with besides its weight: arguments of `AdaptiveSoftmax`."""

    beta: float = 1.0
    method: str = "exact"
    guarantee: str = "calibrated"
    noise: float | None = None
    read_chosen: bool = True
    rotate: bool = False
    seed: int = 0


class Promise(NamedTuple):
    """What is promised of an answer."""

    eps: float  # relative error of a probability
    delta: float  # chance of a wrong answer


class Layer:
    """The layer that engines answer for. Its logits are ``beta * (weight @ x + bias)``."""

    def __init__(self, weight: Weight, bias: Tensor | None = None, options: Options = Options()) -> None:  # noqa: B008
        self.weight: Any = weight
        self.bias, self.options, self.beta = bias, options, options.beta
        self.reader, self.watch = Reader(weight), Watch(weight, bias)
        self.bytes = weight.nbytes

    def scaled(self, x: Tensor, name: str | None = None) -> Tensor:
        """Queries (..., d) times beta in the dtype that is computed with, (batch, d); finite ones if a name is given.

        Raises:
            ValueError: when some are beyond that dtype, naming them.
        """
        scaled = x.detach().reshape(-1, x.shape[-1]).to(self.reader.dtype)
        if self.beta != 1:
            scaled = scaled * self.beta
        if name is not None and (self.beta != 1 or torch.promote_types(x.dtype, scaled.dtype) != scaled.dtype):
            _checks.finite(name if self.beta == 1 else f"{name} times beta", scaled)
        return scaled

    def scaled_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.to(self.reader.dtype) * self.beta

    def logits(self, queries: Tensor) -> Tensor:
        """Exact logits of scaled queries, (batch, n)."""
        logits, bias = self.reader.full(queries), self.scaled_bias()
        return logits if bias is None else logits.add_(bias)

    def blocks(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The same, some rows at a time, so many that memory stays small, with the number of the first row."""
        bias = self.scaled_bias()
        for start, logits in self.reader.blocks(queries, AT_ONCE):
            yield start, logits if bias is None else logits.add_(bias[start : start + logits.shape[-1]])

    def above(self, queries: Tensor, threshold: float) -> RowsAbove:
        """Rows whose exact logits are above a threshold, of scaled queries (batch, d)."""
        parts = [self._above(some, threshold) for some in torch.split(queries, QUERIES)]
        return parts[0] if len(parts) == 1 else RowsAbove.join(parts)

    def _above(self, queries: Tensor, threshold: float) -> RowsAbove:
        found: list[tuple[Tensor, ...]] = []
        for start, logits in self.blocks(queries):
            in_range(logits, wait=True)  # NaN is above nothing
            query, row = (logits > threshold).nonzero(as_tuple=True)
            found.append((query, row + start, logits[query, row]))
        none = queries.new_zeros(0)
        query, row, logit = map(torch.cat, zip((none.long(), none.long(), none), *found, strict=True))
        read = torch.full((len(queries),), self.bytes, dtype=torch.int64, device=queries.device)
        return RowsAbove(query, row, logit, read, torch.ones_like(read, dtype=torch.bool))

    def logits_of(self, queries: Tensor, query: Tensor, row: Tensor) -> Tensor:
        """Exact logits of pairs of a scaled query and a row, by their numbers."""
        logits, bias = self.reader.pairs(query, row, queries), self.scaled_bias()
        return logits if bias is None else logits.add_(bias[row])


class Answer(NamedTuple):
    """What an engine answers, with the fields of `TopK`, in the leading shape of the queries."""

    indices: Tensor
    probs: Tensor
    logits: Tensor
    log_z: Tensor
    log_z_interval: Tensor
    coordinates: Tensor
    bytes_read: Tensor
    exact: Tensor

    def shaped(self, shape: tuple[int, ...]) -> Answer:
        """The same for queries of another leading shape."""
        return Answer(*(value.reshape((*shape, *value.shape[1:])) for value in self))


def right(answer: Answer, logits: Callable[[Tensor], Tensor], queries: Tensor, eps: float, *, rows: int) -> Tensor:
    """Whether answers to queries (batch, d) are right by their exact logits, up to rounding. (batch,)

    That is: the values of the top k, every probability within eps, and the partition function within its interval,
    which is all there is for k = 0 and has then to be within eps, too.
    """
    k, parts = answer.indices.shape[-1], []
    for some in torch.split(torch.arange(len(queries), device=queries.device), max(1, (1 << 24) // rows)):
        exact = logits(queries[some])
        best, log_z, chosen = exact.topk(k).values, exact.logsumexp(-1), exact.gather(-1, answer.indices[some])
        largest = torch.cat([best, log_z[:, None]], -1).abs().amax(-1)
        rounding = 16 * torch.finfo(best.dtype).eps * (1 + largest)
        same = ((chosen.sort(-1, descending=True).values - best).abs() <= rounding[:, None]).all(-1)
        p = (chosen - log_z[:, None]).exp()
        close = ((answer.probs[some] - p).abs() <= (eps + rounding[:, None]) * p).all(-1)
        low, high = answer.log_z_interval[some].unbind(-1)
        inside = (low - rounding <= log_z) & (log_z <= high + rounding)
        near = (answer.log_z[some] - log_z).expm1().abs() <= eps + rounding
        parts.append(same & close & inside & near if k == 0 else same & close & inside)
    return torch.cat(parts)


class Estimated(NamedTuple):
    """Logits of all rows, times beta."""

    logits: Tensor  # (batch, n): exact for rows that were read in full, estimates elsewhere
    fallbacks: list[int]  # queries that have to be answered exactly; their logits are undefined
    bytes_read: int | Tensor  # in all
    exactly: int | Tensor = 0  # queries whose logits are all exact because a fallback was answered already


class State(NamedTuple):
    """What an engine is made of, besides its layer."""

    tensors: dict[str, Tensor]
    settings: dict[str, Any]  # that JSON can hold
    fitted_to: Tensor | None = None  # checksums to compare the weight with before the first answer; None: no need


class Engine(Protocol):
    """Answers for one method on one kind of device. Any number of threads may ask it at once.

    Queries are checked before they come here. What was fitted belongs to one engine: `build` makes another one, so
    that who holds an engine has calibrations and index of the same weight.
    """

    layer: Layer
    calibrations: Any = MappingProxyType({})  # by k, 0 for `log_partition`; replaced by others, never changed
    levels: Any = MappingProxyType({})  # calibrations for `above`, by their least threshold; replaced, never changed
    index: Any = None  # what a cascade keeps besides the weight
    has_estimates: bool = False  # whether it has to be built, and estimates logits
    fitted_to: Tensor | None = None  # checksums of the rows that something was fitted to

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    @classmethod
    def build(cls, layer: Layer, moments: Moments, *, progress: ProgressCallback) -> Engine:
        """An engine for queries with these moments."""
        raise ValueError("build: expected method='cascade' or 'auto' and guarantee='calibrated'")

    def calibrate(
        self,
        queries: Tensor,
        ks: list[int],
        promise: Promise,
        *,
        generator: torch.Generator | None,
        progress: ProgressCallback,
    ) -> list[Any]:
        """Fit what the promise takes on sample queries, for every k; what was fitted is kept in `calibrations`."""
        raise ValueError("calibrate: expected a method that can be calibrated")

    def calibrate_above(
        self,
        queries: Tensor,
        level: float,
        promise: Promise,
        *,
        generator: torch.Generator | None,
        progress: ProgressCallback,
    ) -> Any:
        """Fit what `above` takes for thresholds from a level on; what was fitted is kept in `levels`."""
        raise ValueError("threshold: expected a method that can be calibrated for one")

    @staticmethod
    def needed(delta: float) -> int:
        """The fewest sample queries for which a promise can be made."""
        return 0

    def updated(self, rows: Tensor | Sequence[int]) -> Engine:
        """The engine of the same basis and calibrations for a weight of which these rows have changed.

        Raises:
            WeightChanged: when other rows have changed, too.
        """
        raise RuntimeError("no index yet: call build(queries) and calibrate(queries), or calibrate alone")

    def serves(self, k: int, batch: int | None, promise: Promise) -> bool:
        """Whether to ask it rather than the exact product; None queries at a time: however many there are.

        Raises:
            RuntimeError: when it has to be calibrated for this k, unless ``batch`` leaves the choice.
        """
        return True

    @abstractmethod
    def topk(self, x: Tensor, k: int, promise: Promise, generator: torch.Generator | None) -> Answer:
        """The k largest softmax values of queries (..., d); k = 0: the partition function alone."""

    def log_partition(self, x: Tensor, promise: Promise, generator: torch.Generator | None) -> Answer:
        """The partition function, with no rows."""
        return self.topk(x, 0, promise, generator)

    def logits(self, queries: Tensor, promise: Promise, dtype: torch.dtype | None = None) -> Estimated:
        """All logits of scaled queries (batch, d): exact ones, where an engine has no estimates.

        Estimates are below the k-th largest logit, with a dtype also when they are divided by beta and rounded to it.
        """
        return Estimated(self.layer.logits(queries), [], len(queries) * self.layer.bytes, len(queries))

    def upper_ends(self, queries: Tensor, promise: Promise) -> Ends | None:
        """What no logit of scaled queries (batch, d) is above; None: not known."""
        return None

    def serves_above(self, threshold: float, batch: int | None, promise: Promise) -> bool:
        """Whether to ask it for rows above a threshold rather than the exact product, as `serves` says it for a k."""
        return True

    def above(self, queries: Tensor, threshold: float, promise: Promise) -> RowsAbove:
        """Rows whose logits are above a threshold, of scaled queries (batch, d): all by the exact product, unless an
        engine knows better.
        """
        return self.layer.above(queries, threshold)

    def check_weight(self) -> None:
        """Compare the weight with the one that something was fitted to, if anything was.

        Raises:
            WeightChanged: when they differ.
        """
        return

    def state(self) -> State:
        """Tensors and settings that `from_state` makes the same engine of."""
        return State({}, {"calibrations": {}, "elsewhere": {}})

    @classmethod
    def from_state(cls, layer: Layer, promise: Promise, state: State) -> Engine:
        """The engine of what `state` gave, whose dictionaries are used up; the promise is what is promised now.

        Raises:
            LookupError, TypeError, ValueError: when the state does not belong to this layer.
        """
        return cls(layer)


class Ends(NamedTuple):
    """What no logit is above."""

    logits: Tensor  # (batch, n): upper ends, exact where a row was read in full; undefined for fallbacks
    answered: Tensor  # (batch,) bool: no fallback
    bytes_read: Tensor  # (batch,) int64


def in_range(logits: Tensor, name: str = "x", *, wait: bool = False) -> Tensor:
    """The same, refused when some are beyond their dtype; on a GPU that is not seen unless it is waited for."""
    if logits.is_cpu or wait:
        total = logits if logits.numel() == 1 else logits.sum(dtype=torch.float64)  # NaN and infinities stay in it
        if not math.isfinite(total):
            raise ValueError(f"{name}: expected logits that {logits.dtype} can hold, found some beyond")
    return logits


def not_calibrated(k: int, calibrations: Any, remark: str = "") -> RuntimeError:
    """The error of a question for which nothing was fitted."""
    ks = ", ".join(map(str, calibrations))
    found = f"found calibrations for k = {ks}" if ks else "found none"
    return RuntimeError(
        f"not calibrated for k = {k}, {found}{remark}: call calibrate(queries, k={k}) first, or ask for guarantee='pac'"
    )
