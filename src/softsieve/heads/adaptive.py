"""`AdaptiveSoftmax`: the largest softmax values of a linear head without reading all of its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.heads.cascade.index import Index
from softsieve.heads.engine import Answer, Engine, Estimated, Layer, Options, Promise, in_range, not_calibrated, right
from softsieve.heads.engines import check_cascade, engine_for
from softsieve.heads.exact import Exact
from softsieve.heads.fitted import Fitted
from softsieve.heads.modes import in_own_modes
from softsieve.heads.quantised import QuantisedWeight, Weight
from softsieve.heads.results import Above, Coverage, LogPartition, TopK
from softsieve.heads.sampling import draw, draw_rows

METHODS = ("auto", "exact", "coordinates", "cascade")
GUARANTEES = ("calibrated", "pac")


class AdaptiveSoftmax(Fitted):
    """The top k softmax values of ``beta * (weight @ x + bias)`` from a part of the weight.

    Defined by the exact answer, which it gives up to ``eps`` with probability at least ``1 - delta``::

        logits = beta * (weight @ x + bias)
        probs, indices = logits.softmax(-1).topk(k)

    that is: the rows returned have the k largest logits (of tied rows any), and ``|p_hat - p| <= eps * p`` for each.

    Any number of threads may ask at once. One of them may build, calibrate or save meanwhile: the others are answered
    with what was fitted before or what is fitted then, or told that nothing is calibrated. The weight must not change
    while others ask. When it changes later, what was fitted to it is refused (`WeightChanged`), and what needs no
    fitting is made anew; docs/cascade.md says which changes are noticed. Answers are the same under autocast, in
    inference mode and with any default dtype. A head can be copied and pickled.

    Args:
        weight: kept as it is, without a copy. (n, d). A `QuantisedWeight` is read row by row as it is, too: what is
            promised is about the product with its dequantised rows, for ``"exact"`` and the cascade on a CPU.
        bias: (n,).
        eps, delta: what is guaranteed, both in (0, 1).
        beta: inverse temperature.
        method: ``"cascade"``, ours: short codes of all rows, longer ones of those that may matter, exact rows of the
            last; for a weight on a CPU, or on a GPU with Triton. ``"coordinates"``, the algorithm of `Adaptive Sampling
            for Efficient Softmax Approximation` (NeurIPS 2024) for any k: entries are read in a weighted random order
            until intervals decide. ``"exact"`` reads everything. ``"auto"`` takes what is faster: once calibrated the
            cascade, for batches up to the size that `calibrate` measured, else ``"exact"``.
        guarantee: what answers rest on.
            ``"pac"``: nothing fitted; intervals hold for every weight and query. Those of the cascade by the dither of
            its codes, of ``"coordinates"`` by bounds computed from both or, with ``noise``, if that is true.
            ``"calibrated"``: widths are such that answers to sample queries are right (`calibrate`, a conformal
            quantile). That holds for queries exchangeable with these, and promises nothing about others; the cascade
            notices queries that are much unlike them, and answers these exactly.
        noise: declared sub-Gaussian variance of a pull ``beta * d * weight[i, j] * x[j]`` with j uniform, for
            ``"pac"``; of the rotated pulls with ``rotate``.
        read_chosen: whether the k rows of the answer are read in full, so that their logits are exact; otherwise they
            are estimates, and what is read need not grow with d.
        rotate: whether a randomized Hadamard rotation comes first: two copies of the weight more, filled up to a power
            of two, in which no coordinate stands out.
        seed: of what the index of a cascade draws, and of the signs of the rotation.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> weight = torch.randn(1000, 4096) / 64
        >>> x = weight[7] * 64 * 0.2
        >>> head = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac")
        >>> answer = head.topk(x, generator=torch.Generator().manual_seed(0))
        >>> answer.indices.tolist(), answer.exact.item(), (weight @ x).argmax().item()
        ([7], False, 7)
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        eps: float = 0.3,
        delta: float = 0.01,
        beta: float = 1.0,
        method: str = "auto",
        guarantee: str = "calibrated",
        noise: float | None = None,
        read_chosen: bool = True,
        rotate: bool = False,
        seed: int = 0,
    ) -> None:
        options = _checked(weight, bias, Options(beta, method, guarantee, noise, read_chosen, rotate, seed))
        self.weight: Any = weight.detach()  # a tensor or a `QuantisedWeight`
        self.bias = None if bias is None else bias.detach()
        self.eps, self.delta = _checks.open_unit("eps", eps), _checks.open_unit("delta", delta)
        self.beta, self.method, self.guarantee, self.noise, self.read_chosen, self.rotate, self.seed = options
        self._device_type = weight.device.type
        self._layer = Layer(self.weight, self.bias, options)
        self._exact = Exact(self._layer)
        self._kind = engine_for(options, self.weight)
        # An engine that has to be built is None until then. It is replaced as a whole, with all that was fitted to it.
        self._engine: Engine | None = None if self._kind.has_estimates else self._kind(self._layer)

    def __repr__(self) -> str:
        size, promise = " x ".join(map(str, self.weight.shape)), f"eps={self.eps:g}, delta={self.delta:g}"
        return f"{type(self).__name__}({size}, {promise}, method={self.method!r}, guarantee={self.guarantee!r})"

    @property
    def calibrations(self) -> dict[int, Any]:
        """What was calibrated, by k; 0 for `log_partition`."""
        return {} if self._engine is None else self._engine.calibrations

    @property
    def thresholds(self) -> dict[float, Any]:
        """What was calibrated for `above`, by the least threshold that it serves for."""
        return {} if self._engine is None else self._engine.levels

    @property
    def index(self) -> Index | None:
        """What a cascade keeps besides the weight."""
        return None if self._engine is None else self._engine.index

    @in_own_modes
    def topk(self, x: Tensor, k: int = 1, *, generator: torch.Generator | None = None) -> TopK:
        """The k largest softmax values of every query.

        Args:
            x: queries, (..., d), of any floating-point dtype.
            k: how many, 1 to n.
            generator: of the random order of the coordinates; the global one unless given.

        Raises:
            TypeError, ValueError: when a query has a wrong shape, dtype or device, or k is out of range.
            RuntimeError: when ``guarantee="calibrated"`` and `calibrate` was not called.
        """
        _checks.whole_number("k", k, 1, len(self.weight))
        return TopK(*self._answer("x", x, k, generator))

    @in_own_modes
    def log_partition(self, x: Tensor, *, generator: torch.Generator | None = None) -> LogPartition:
        """The logarithm of ``sum_i exp(logits_i)``, whose sum is within ``eps`` of the true one, relatively."""
        return LogPartition(*self._answer("x", x, 0, generator)[3:])

    def _answer(
        self, name: str, x: Tensor, k: int, generator: torch.Generator | None, batch: int | None = None
    ) -> Answer:
        """Check queries (..., d), choose an engine as if they came so many at a time, and ask it."""
        drawing = self.method == "coordinates"
        _checks.generator(generator, self.weight.device if drawing else None)
        _checks.queries(name, x, self.weight, look=self.weight.is_cpu or drawing)  # on a GPU, looking is waiting for it
        engine = self._choose(k, x.numel() // x.shape[-1] if batch is None else batch)
        answer = engine.topk(x, k, self._promise, generator)
        in_range(answer.log_z, name, wait=drawing)
        return answer

    @property
    def _promise(self) -> Promise:
        return Promise(self.eps, self.delta)

    def _choose(self, k: int, batch: int) -> Engine:
        """The engine that answers so many queries at a time; ``"auto"`` takes the exact one where that is faster."""
        engine = self._engine
        if engine is None:
            if self.method == "auto":
                return self._exact
            raise not_calibrated(k, {})
        return engine if engine.serves(k, batch if self.method == "auto" else None, self._promise) else self._exact

    def _choose_for_logits(self, batch: int) -> Engine:
        """The same for all logits, which the largest calibrated k serves for."""
        return self._choose(max(self.calibrations, default=0) or 1, batch) if self._kind.has_estimates else self._exact

    @in_own_modes
    def logits(self, x: Tensor) -> Tensor:
        """All logits, (..., n): exact for the rows that a cascade reads in full, estimates elsewhere.

        Estimates are such that the sum of exponentials is the one of `topk`. What is read in full is what the largest k
        takes that was calibrated. Other methods, and a cascade that is not calibrated with ``method="auto"``, give the
        exact ones.
        """
        queries = self._queries(x)
        engine = self._choose_for_logits(len(queries))
        logits, fallbacks, *_ = engine.logits(queries, self._promise)
        if fallbacks:
            logits[fallbacks] = self._layer.logits(queries[fallbacks])
        return in_range(logits).reshape(*x.shape[:-1], -1)

    @in_own_modes
    def exact_logits(self, x: Tensor) -> Tensor:
        """All logits by the exact product, (..., n), whatever the method is.

        Example:
            >>> AdaptiveSoftmax(torch.eye(2), beta=2.0).exact_logits(torch.tensor([1.0, 3.0]))
            tensor([2., 6.])
        """
        return in_range(self._layer.logits(self._queries(x))).reshape(*x.shape[:-1], -1)

    @in_own_modes
    def above(self, x: Tensor, threshold: float = 0.0) -> Above:
        """Every class whose logit is above a threshold: what a multi-label classifier predicts.

        Defined by the exact answer::

            logits = beta * (weight @ x + bias)
            indices = (logits > threshold).nonzero()

        All that is returned is above, because its rows are read in full; with probability at least ``1 - delta``
        nothing that is above is missing. What that rests on:

        - the cascade, calibrated for this threshold or a lower one (``calibrate(queries, threshold=0.0)``): a row is
          read in full if its upper end reaches that one, where margins are such that this finds all rows above, for
          queries like the sample;
        - the cascade, calibrated for a k alone, or on a GPU: upper ends of all rows, which hold for every threshold at
          once, so more is read than a threshold takes. Where they are not known, the exact product;
        - ``guarantee="pac"`` with ``method="cascade"``: intervals that hold for every weight and query;
        - everything else, and queries unlike the sample: the exact product, some rows at a time.

        ``method="auto"`` takes the exact product unless a threshold was calibrated for and measured to be faster.

        Args:
            x: queries, (..., d), of any floating-point dtype.
            threshold: any number; infinite ones are above, or below, all logits.

        Raises:
            TypeError, ValueError: when a query has a wrong shape, dtype or device, or the threshold is no number.
            RuntimeError: when ``method="cascade"``, ``guarantee="calibrated"`` and `calibrate` was not called.

        Example:
            >>> head = AdaptiveSoftmax(torch.tensor([[2.0], [-1.0], [1.0]]))
            >>> found = head.above(torch.tensor([3.0]), threshold=1.0)
            >>> found.counts.item(), found.indices.tolist(), found.logits.tolist()
            (2, [0, 2], [6.0, 3.0])
        """
        threshold = _checks.number("threshold", threshold)
        queries, engine = self._queries(x), self._engine
        if engine is None and self.method != "auto":
            raise not_calibrated(1, {}, " (or calibrate(queries, threshold=...))")
        batch = len(queries) if self.method == "auto" else None
        if engine is None or not engine.serves_above(threshold, batch, self._promise):
            engine = self._exact
        found = engine.above(queries, threshold, self._promise)
        in_range(found.logit)
        return found.ordered(x.shape[:-1])

    def _queries(self, x: Tensor) -> Tensor:
        """Checked and scaled queries, (batch, d)."""
        _checks.queries("x", x, self.weight, look=self.weight.is_cpu)
        return self._layer.scaled(x, "x" if self.weight.is_cpu else None)

    @in_own_modes
    def estimated(self, x: Tensor, dtype: torch.dtype | None = None) -> Estimated | None:
        """`logits` of queries (batch, d), as far as a cascade answers; None when the exact product is to be taken.

        For layers that answer fallbacks themselves, and that divide by beta and round to ``dtype``: there, too, no
        estimate reaches the k-th largest logit. Nothing is checked.
        """
        engine = self._choose_for_logits(len(x))
        return None if engine is self._exact else engine.logits(self._layer.scaled(x), self._promise, dtype)

    def estimates(self, batch: int = 1) -> bool:
        """Whether `logits` of so many queries at a time are estimates from a part of the weight, or all exact."""
        _checks.whole_number("batch", batch, 0, 2**63 - 1)
        return self._choose_for_logits(batch) is not self._exact

    @in_own_modes
    def sample(
        self,
        x: Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw a row for every query from ``softmax(logits / temperature)``, (...) int64.

        With ``top_k`` among the k largest, with ``top_p`` among the largest that have this much probability together,
        at least one. That is the distribution of the exact logits whenever the promise holds: with ``top_k`` that the
        top k are right, without that no logit is above its upper end, which a cascade draws from (`draw_below`). Where
        no draw is accepted soon, and with ``top_p`` alone, the exact product is drawn from. Temperature 0 draws the
        largest.

        Example:
            >>> AdaptiveSoftmax(torch.eye(3)).sample(torch.tensor([0.0, 9.0, 1.0]), top_k=1).item()
            1
        """
        _checks.generator(generator, self.weight.device)
        temperature, top_p = _check_sampling(temperature, top_k, top_p, len(self.weight))
        if temperature == 0:
            return self.topk(x, 1, generator=generator).indices[..., 0]
        if top_k is not None:
            best = self.topk(x, top_k, generator=generator)
            return best.indices.gather(-1, draw(best.logits, temperature, top_p, generator)[..., None])[..., 0]
        queries = self._queries(x)
        engine = self._choose_for_logits(len(queries)) if top_p is None or top_p == 1 else self._exact
        drawn = draw_rows(
            self._layer, queries, engine.upper_ends(queries, self._promise), temperature, top_p, generator
        )
        return drawn.reshape(x.shape[:-1])

    @in_own_modes
    def coverage(self, queries: Tensor, k: int = 1) -> Coverage:
        """How often answers to other queries, one at a time, are right, and what they read: a promise, measured.

        Args:
            queries: (N, d), other ones than those of `build` and `calibrate`.

        Example:
            >>> head = AdaptiveSoftmax(torch.eye(3), method="exact")
            >>> head.coverage(torch.randn(50, 3)).right
            1.0
        """
        _checks.whole_number("k", k, 0, len(self.weight))
        _checks.queries("queries", queries, self.weight)
        scaled = self._layer.scaled(queries, "queries")
        answer = self._answer("queries", queries.reshape(scaled.shape), k, None, batch=1)
        fine = right(answer, self._layer.logits, scaled, self.eps, rows=len(self.weight))
        read = float(answer.bytes_read.double().mean()) / self._layer.bytes
        return Coverage(len(fine), float(fine.double().mean()), read, float(answer.exact.double().mean()))


def _checked(weight: Weight, bias: Tensor | None, options: Options) -> Options:
    """Refuse arguments that do not go together.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.
    """
    beta, method, guarantee, noise, read_chosen, rotate, seed = options
    if isinstance(weight, QuantisedWeight):
        if method == "coordinates":
            raise ValueError(
                "method: expected 'auto', 'exact' or 'cascade' for a quantised weight, found 'coordinates'"
            )
    elif type(weight).__module__.startswith("torchao"):  # some of which fail in their own ways
        raise TypeError(f"weight: expected a tensor or a QuantisedWeight, found torchao's {type(weight).__name__}")
    else:
        _checks.matrix("weight", weight)
    if bias is not None:
        _checks.vector("bias", bias, weight)
    _checks.choice("method", method, METHODS)
    _checks.choice("guarantee", guarantee, GUARANTEES)
    for name, flag in {"read_chosen": read_chosen, "rotate": rotate}.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected a bool, found {type(flag).__name__}")
    _checks.whole_number("seed", seed, -(2**63), 2**63 - 1)
    if method == "cascade":
        check_cascade("method", options._replace(guarantee="calibrated"), weight)
        if not read_chosen:
            raise ValueError("read_chosen: expected True, because a cascade reads the chosen rows in full, found False")
        if guarantee == "pac" and not weight.is_cpu:
            raise ValueError(f"guarantee: expected 'calibrated' for a cascade on {weight.device}, found 'pac'")
    if noise is not None and guarantee != "pac":
        raise ValueError("noise: expected None, because a calibrated guarantee declares nothing, found a number")
    if method != "coordinates" and (noise is not None or rotate):
        name, found = ("rotate", "True") if rotate else ("noise", "a number")
        raise ValueError(f"{name}: expected method='coordinates', which alone uses it, found {found} and {method!r}")
    noise = None if noise is None else _checks.number("noise", noise, 0.0, 1e30)
    return options._replace(beta=_checks.number("beta", beta, -1e30, 1e30), noise=noise)


def _check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, rows: int
) -> tuple[float, float | None]:
    if top_k is not None:
        _checks.whole_number("top_k", top_k, 1, rows)
    if top_p is not None:
        top_p = _checks.number("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], found {top_p:g}")
    return _checks.number("temperature", temperature, 0.0, 1e30), top_p
