"""`AdaptiveSoftmax`: the largest softmax values of a linear head without reading all of its weight."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softsieve import _checks
from softsieve._progress import Report, in_silence
from softsieve.errors import InputError, first_line
from softsieve.heads import calibration, cascade, cascade_answers, cascade_calibration, coordinates
from softsieve.heads.basis import Moments
from softsieve.heads.bounds import FIRST, Bounds, Calibrated, Computed, Declared, sizes
from softsieve.heads.calibration import Calibration
from softsieve.heads.cascade import Cascade
from softsieve.heads.cascade_answers import Estimated, WeightChanged
from softsieve.heads.cascade_calibration import CascadeCalibration, Engine
from softsieve.heads.cascade_gpu import GpuCascade, reason_against
from softsieve.heads.hadamard import padded, random_signs, rotate
from softsieve.heads.modes import in_own_modes, ordinary, own_modes
from softsieve.heads.reader import Reader
from softsieve.heads.results import Coverage, LogPartition, TopK
from softsieve.heads.sampling import draw, draw_below
from softsieve.heads.watching import Sample, Watch

if TYPE_CHECKING:
    from softsieve.heads.dithered import Dithered

Known = dict[int, Calibration | CascadeCalibration]  # by k, 0 for `log_partition`
_ONCE = threading.Lock()  # of what is made when it is first needed
METHODS = ("auto", "exact", "coordinates", "cascade")
GUARANTEES = ("calibrated", "pac")


class AdaptiveSoftmax:
    """The top k softmax values of ``beta * (weight @ x + bias)`` from a part of the weight.

    Defined by the exact answer, which it gives up to ``eps`` with probability at least ``1 - delta``::

        logits = beta * (weight @ x + bias)
        probs, indices = logits.softmax(-1).topk(k)

    that is: the rows returned have the k largest logits (of tied rows any), and ``|p_hat - p| <= eps * p`` for each.

    Any number of threads may ask at once, and be answered as one after the other would be. One of them may build,
    calibrate or save meanwhile: the others are answered with what was fitted before or what is fitted then, never with
    parts of both, or told that nothing is calibrated. The weight must not change, nor `update_rows` be called, while
    others ask.

    When the weight changes later, what was fitted to it is refused (`WeightChanged`), and what needs no fitting is made
    anew; which changes are noticed is said in docs/cascade.md. Answers are the same under autocast, in inference mode
    and with any default dtype. A head can be copied and pickled.

    Args:
        weight: kept as it is, without a copy. (n, d).
        bias: (n,).
        eps, delta: what is guaranteed, both in (0, 1).
        beta: inverse temperature.
        method: ``"cascade"``, ours: short codes of all rows, longer ones of those that may matter, exact rows of the
            last; for a weight on a CPU, or on a GPU with Triton. ``"coordinates"``, the algorithm of `Adaptive Sampling
            for Efficient Softmax Approximation` (NeurIPS 2024) for any k: entries are read in a weighted random order
            until intervals decide.
            ``"exact"`` reads everything. ``"auto"`` takes what is faster in time: once calibrated the cascade, for
            batches up to the size that `calibrate` measured, else ``"exact"``.
        guarantee: what answers rest on.
            ``"pac"``: nothing fitted; intervals hold for every weight and query. Those of the cascade by the dither of
            its codes, of ``"coordinates"`` by bounds computed from both or, with ``noise``, if that is true.
            ``"calibrated"``: widths are such that answers to sample queries are right (`calibrate`, a conformal
            quantile). That holds for queries exchangeable with these, and promises nothing about others; the cascade
            notices queries that are much unlike them, and answers these exactly.
        noise: declared variance of a pull ``beta * d * weight[i, j] * x[j]`` with j uniform, for ``"pac"``: its
            distance from its mean is sub-Gaussian with this variance.
        read_chosen: whether the k rows of the answer are read in full, so that their logits are exact; otherwise they
            are estimates, and what is read need not grow with d.
        rotate: whether a randomized Hadamard rotation comes first: two copies of the weight more, filled up to a power
            of two, in which no coordinate stands out. ``noise`` is then that of the rotated pulls.
        seed: of what the index of a cascade draws, and of the signs of the rotation.

    Raises:
        TypeError, ValueError: for arguments that cannot be, naming them, what was expected and what was found.

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
        weight: Tensor,
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
            _can_cascade(weight)
            if not read_chosen:
                raise ValueError(
                    "read_chosen: expected True, because a cascade reads the chosen rows in full, found False"
                )
            if guarantee == "pac" and not weight.is_cpu:
                raise ValueError(f"guarantee: expected 'calibrated' for a cascade on {weight.device}, found 'pac'")
        if noise is not None and guarantee != "pac":
            raise ValueError("noise: expected None, because a calibrated guarantee declares nothing, found a number")
        if method != "coordinates" and (noise is not None or rotate):
            name, found = ("rotate", "True") if rotate else ("noise", "a number")
            raise ValueError(
                f"{name}: expected method='coordinates', which alone uses it, found {found} and {method!r}"
            )
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.eps, self.delta = _checks.open_unit("eps", eps), _checks.open_unit("delta", delta)
        self.beta = _checks.number("beta", beta, -1e30, 1e30)
        self.method, self.guarantee = method, guarantee
        self.noise = None if noise is None else _checks.number("noise", noise, 0.0, 1e30)
        self.read_chosen, self.rotate, self.seed = read_chosen, rotate, seed
        self.calibrations: Known = {}  # replaced, never changed: other threads may be reading it
        self._elsewhere: dict[int, CascadeCalibration] = {}  # made on a GPU, if this is none, or the other way round
        self.index: cascade.Index | None = None
        self._cascade: Engine | None = None
        self._dithered: tuple[Dithered, Sample] | None = None
        self._coordinates: _Coordinates | None = None
        self._fitted_to: Tensor | None = None  # checksums of the rows that ``"coordinates"`` was calibrated for
        self._device_type = weight.device.type
        self._watch = Watch(self.weight, self.bias)
        self._seen: tuple[int, ...] = ()  # what the watch said of the weight when it was the one that all was made of
        self._plain = Reader(self.weight)
        if rotate:
            generator = torch.Generator().manual_seed(seed)
            self._signs = random_signs(padded(weight.shape[1]), generator=generator).to(weight.device)

    def __repr__(self) -> str:
        n, d = self.weight.shape
        return (
            f"{type(self).__name__}({n} x {d}, eps={self.eps:g}, delta={self.delta:g}, method={self.method!r}, "
            f"guarantee={self.guarantee!r})"
        )

    # -- asking --------------------------------------------------------------------------------------------------------

    @in_own_modes
    def topk(self, x: Tensor, k: int = 1, *, generator: torch.Generator | None = None) -> TopK:
        """The k largest softmax values of every query.

        Args:
            x: queries, (..., d), of any floating-point dtype.
            k: how many, 1 to n.
            generator: of the random order of the coordinates; the global one unless given.

        Raises:
            TypeError, ValueError: for a query that cannot be, or a k out of range.
            RuntimeError: when ``guarantee="calibrated"`` and `calibrate` was not called.
        """
        _checks.whole_number("k", k, 1, len(self.weight))
        _checks.generator(generator, self._drawing())
        return TopK(*self._asked(x, k, generator))

    @in_own_modes
    def log_partition(self, x: Tensor, *, generator: torch.Generator | None = None) -> LogPartition:
        """The logarithm of ``sum_i exp(logits_i)``, whose sum is within ``eps`` of the true one, relatively.

        Other sums of exponentials are of this form, too. A Gaussian kernel density of bandwidth h has the logarithm
        ``logsumexp(-|x - y_i|^2 / (2 h^2))`` over its points up to a constant, and ``|x - y|^2 = |x|^2 - 2 x.y +
        |y|^2``:

        Example:
            >>> _ = torch.manual_seed(0)
            >>> points, x, h = torch.randn(1000, 300), torch.randn(300), 10.0
            >>> density = AdaptiveSoftmax(points, -points.square().sum(-1) / 2, beta=1 / h**2, eps=0.1,
            ...                           method="coordinates", guarantee="pac")
            >>> found = density.log_partition(x).log_z - x.square().sum() / (2 * h**2)
            >>> exact = (-(points - x).square().sum(-1) / (2 * h**2)).logsumexp(0)
            >>> abs(found.exp() / exact.exp() - 1).item() < 0.1
            True
        """
        _checks.generator(generator, self._drawing())
        return LogPartition(*self._asked(x, 0, generator)[3:])

    def _drawing(self) -> torch.device | None:
        """Where coordinates are drawn, if they are."""
        return self.weight.device if self.method == "coordinates" else None

    @in_own_modes
    def logits(self, x: Tensor) -> Tensor:
        """All logits, (..., n): exact for the rows that a cascade reads in full, estimates elsewhere.

        Estimates are such that the sum of exponentials is the one of `topk`. What is read in full is what the largest k
        takes that was calibrated. Other methods, and a cascade that is not calibrated with ``method="auto"``, give the
        exact ones.

        Example:
            >>> AdaptiveSoftmax(torch.eye(2)).logits(torch.tensor([3.0, 1.0]))
            tensor([3., 1.])
        """
        queries = self._queries("x", x, look=self.weight.is_cpu)
        found = self.estimated(queries)
        if found is None:
            logits = self._exact_logits(queries)
        else:
            logits = found.logits
            if found.rest:
                logits[found.rest] = self._exact_logits(queries[found.rest])
        return _held(logits).reshape(*x.shape[:-1], -1)

    @in_own_modes
    def estimated(self, queries: Tensor) -> Estimated | None:
        """`logits` of queries times beta (batch, d), as far as a cascade answers; None when none is to be asked.

        For layers that answer the rest themselves. Nothing is checked.
        """
        found = self._fitted(self._largest_k(), len(queries))
        if found is None:
            return None
        fit, engine = found
        if isinstance(engine, Cascade):
            return cascade_answers.estimate(engine, queries, fit)
        solved, logits = engine.solve(queries, fit, scale=1.0, dense=queries.dtype)
        assert logits is not None  # noqa: S101
        return cascade_answers.Estimated(logits, [], solved.bytes_read.sum(), (solved.state != 0).sum())

    def estimates(self, batch: int = 1) -> bool:
        """Whether `logits` of so many queries at a time are estimates from a part of the weight, or all exact.

        Example:
            >>> AdaptiveSoftmax(torch.eye(2)).estimates()
            False
        """
        _checks.whole_number("batch", batch, 0, 2**63 - 1)
        return self._cascading(self._largest_k(), batch) is not None

    def _largest_k(self) -> int:
        return max(self.calibrations, default=0) or 1

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
        top k are right. Without, a cascade draws from upper ends of all logits, and accepts a row by its own logit; it
        is exact if no logit is above its upper end, which `calibrate` sees to for ``1 - delta`` of the queries. Where
        no draw is accepted soon, and with ``top_p`` alone, which takes the whole partition function, the exact product
        is drawn from.

        Args:
            temperature: above 0; 0 draws the largest.

        Example:
            >>> AdaptiveSoftmax(torch.eye(3)).sample(torch.tensor([0.0, 9.0, 1.0]), top_k=1).item()
            1
        """
        _checks.generator(generator, self.weight.device)
        temperature = _checks.number("temperature", temperature, 0.0, 1e30)
        if top_k is not None:
            _checks.whole_number("top_k", top_k, 1, len(self.weight))
        if top_p is not None:
            top_p = _checks.number("top_p", top_p)
            if not 0 < top_p <= 1:
                raise ValueError(f"top_p: expected a number in (0, 1], found {top_p:g}")
        if temperature == 0:
            return self.topk(x, 1, generator=generator).indices[..., 0]
        if top_k is not None:
            best = self.topk(x, top_k, generator=generator)
            return best.indices.gather(-1, draw(best.logits, temperature, top_p, generator)[..., None])[..., 0]
        queries = self._queries("x", x, look=self.weight.is_cpu)
        found = self._fitted(self._largest_k(), len(queries)) if top_p is None or top_p == 1 else None
        if found is None or not math.isfinite(found[0].envelope):
            drawn = draw(_held(self._exact_logits(queries)), temperature, top_p, generator)
        else:
            fit, engine = found
            ends, answered = engine.upper_ends(queries, fit)
            drawn = draw_below(ends, answered, partial(self._logits_of, queries), temperature, generator=generator)
            rest = (drawn < 0).nonzero()[:, 0]
            if len(rest):
                drawn[rest] = draw(_held(self._exact_logits(queries[rest])), temperature, None, generator)
        return drawn.reshape(x.shape[:-1])

    # -- fitting -------------------------------------------------------------------------------------------------------

    def build(self, queries: Tensor | Iterable[Tensor], *, progress: Report = in_silence) -> None:
        """Make the index of the cascade for queries like these, of which only the second moment is kept.

        Calibrations that were made with another index are forgotten.

        Args:
            queries: (N, d), or some of these after each other, as many as there are.
            progress: told what is being done, and the share of the whole that just was.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> head = AdaptiveSoftmax(torch.randn(2000, 64))
            >>> head.build(torch.randn(1000, 64) for _ in range(10))
            >>> fitted = head.calibrate(torch.randn(2000, 64), k=[1, 8])
            >>> sorted(head.calibrations)
            [1, 8]
        """
        self._for_cascade("build")
        if not isinstance(queries, Iterable):
            raise TypeError(f"queries: expected a tensor (N, d) or several, found {type(queries).__name__}")
        with own_modes(self._device_type):
            moments = Moments(self.weight.shape[1], self.weight.device)
        # An iterable may run a model, which it does in the modes of the caller.
        for part in [queries] if isinstance(queries, Tensor) else queries:
            with own_modes(self._device_type):
                moments.update(self._queries("queries", part).float())
        if not moments.count:
            raise ValueError("queries: expected some, found none")
        with own_modes(self._device_type):
            _moderate(moments)
            index = cascade.build(self.weight, self.bias, moments, seed=self.seed, progress=progress)
            self.calibrations, self._elsewhere = {}, {}
            self._use(index)

    @in_own_modes
    def calibrate(
        self,
        queries: Tensor,
        k: int | Sequence[int] = 1,
        *,
        generator: torch.Generator | None = None,
        progress: Report = in_silence,
    ) -> Any:
        """Fit ``guarantee="calibrated"`` on sample queries, for `topk` with this k; ``k=0``: for `log_partition`.

        Warns when there are too few for ``delta``: then nothing can be promised from a part, and everything is read.

        Args:
            queries: (N, d), what later queries will be like. For a cascade other ones than those of `build`; if that
                was not called, a half of them, at random, is given to it.
            k: the one that will be asked for, or several. A cascade also answers smaller ones than a calibrated one.
            generator: of everything that is drawn; with ``"coordinates"`` of the device of the weight, else of the CPU.
            progress: told what is being done, and the share of the whole that just was.

        Returns:
            The `Calibration` or, for a cascade, `CascadeCalibration`; a list of them for several k.
        """
        if self.guarantee != "calibrated" or self.method == "exact":
            raise ValueError(
                "calibrate: expected guarantee='calibrated' and a method that can be calibrated, "
                f"found {self.guarantee!r} and {self.method!r}"
            )
        ks = list(k) if isinstance(k, Sequence) else [k]
        most = len(self.weight) if self.weight.is_cpu else min(len(self.weight), cascade_calibration.MOST_K)
        for one in ks:
            _checks.whole_number("k", one, 0, most if self.method != "coordinates" else len(self.weight))
        _checks.generator(generator, self._drawing() or torch.device("cpu"))
        sample = self._queries("queries", queries)
        if self.method == "coordinates":
            found = self._calibrate_coordinates(sample, ks, generator)
        else:
            found = self._calibrate_cascade(sample, ks, generator, progress)
        return found if isinstance(k, Sequence) else found[0]

    def _warn_if_few(self, count: int, fewest: int) -> None:
        if count < fewest:
            warnings.warn(
                f"queries: {count} are too few for delta {self.delta:g}, which takes {fewest}: "
                "every answer will be exact",
                stacklevel=5,  # the caller of `calibrate`, which is in its own modes
            )

    def _calibrate_coordinates(
        self, sample: Tensor, ks: list[int], generator: torch.Generator | None
    ) -> list[Calibration | CascadeCalibration]:
        self._warn_if_few(len(sample), calibration.needed(self.delta))
        try:
            reader = self._prepared().reader
        except WeightChanged:  # what was fitted to another weight is of no use
            self.calibrations, self._fitted_to = {}, None
            reader = self._prepared().reader
        self._note_fitted()
        found: list[Calibration | CascadeCalibration] = []
        for k in ks:
            found.append(calibration.calibrate(self._problem(sample, k, reader), self.delta, generator=generator))
            self.calibrations = {**self.calibrations, k: found[-1]}
        return found

    def _calibrate_cascade(
        self, sample: Tensor, ks: list[int], generator: torch.Generator | None, progress: Report
    ) -> list[Calibration | CascadeCalibration]:
        self._for_cascade("calibrate")
        shares = len(ks) + (self.index is None)

        def part(what: str, share: float) -> None:
            progress(what, share / shares)

        fewest = cascade_calibration.needed(self.delta)
        self._warn_if_few(len(sample), fewest if self.index is not None else 2 * fewest)
        if self.index is None:
            mixed = torch.randperm(len(sample), generator=generator).to(sample.device)
            moments = Moments(self.weight.shape[1], sample.device)
            moments.update(sample[mixed[: max(1, len(sample) // 2)]].float())
            _moderate(moments)
            sample = sample[mixed[len(sample) // 2 :]]
            self._use(cascade.build(self.weight, self.bias, moments, seed=self.seed, progress=part))
        engine, bias = self._built(), self._scaled_bias()
        found: list[Calibration | CascadeCalibration] = []
        for k in ks:
            fit = cascade_calibration.calibrate(
                engine,
                sample,
                cascade_calibration.truth(self._plain, sample, bias, k),
                k=k,
                eps=self.eps,
                delta=self.delta,
                generator=generator,
                progress=part,
            )
            fast = (
                partial(engine.solve, fit=fit, scale=1.0)
                if isinstance(engine, GpuCascade)
                else partial(engine.answer, fit=fit)
            )
            batch = cascade_calibration.measured_batch(fast, partial(self._solve_exactly, k=k), sample)
            fit = fit._replace(batch=batch)
            if not math.isfinite(fit.width) and len(sample) >= fewest:
                warnings.warn(
                    f"queries: no width of margins gives right answers from a part of the weight for k = {k}: "
                    "every answer will be exact",
                    stacklevel=4,  # the caller of `calibrate`, which is in its own modes
                )
            elif k == max(ks):  # the one that `sample` asks with
                fit = cascade_calibration.envelope(engine, sample, self._exact_logits, fit)
            found.append(fit)
            self.calibrations = {**self.calibrations, k: fit}
        return found

    @in_own_modes
    def coverage(self, queries: Tensor, k: int = 1) -> Coverage:
        """How often answers to other queries, one at a time, are right, and what they read: a promise, looked at.

        Args:
            queries: (N, d), other ones than those of `build` and `calibrate`.

        Example:
            >>> head = AdaptiveSoftmax(torch.eye(3), method="exact")
            >>> head.coverage(torch.randn(50, 3)).right
            1.0
        """
        _checks.whole_number("k", k, 0, len(self.weight))
        sample = self._queries("queries", queries)
        answer = self._solve(sample, k, None, sample.shape[:1], batch=1, name="queries")
        fine = calibration.right(answer, self._problem(sample, k))
        whole = self.weight.numel() * self.weight.element_size()
        return Coverage(
            len(sample),
            float(fine.double().mean()),
            float(answer.bytes_read.double().mean()) / whole,
            float(answer.exact.double().mean()),
        )

    @in_own_modes
    def update_rows(self, rows: Tensor | Sequence[int]) -> None:
        """Make the index of a cascade right for rows of the weight that have been changed in place.

        The basis and the calibrations stay what they were: for a few rows, or small changes. Otherwise `build` again.

        Raises:
            WeightChanged: when other rows have changed, too; nothing is updated then.
        """
        engine = self._built(check=False)
        try:
            chosen = torch.as_tensor(rows)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"rows: expected some whole numbers, found {rows!r}") from error
        if chosen.ndim != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool or not len(chosen):
            raise ValueError(f"rows: expected some whole numbers, found {chosen.dtype} of shape {tuple(chosen.shape)}")
        if int(chosen.min()) < 0 or int(chosen.max()) >= len(self.weight):
            raise ValueError(f"rows: expected numbers in [0, {len(self.weight) - 1}], found {rows}")
        _checks.finite("weight", self.weight[chosen])
        if self.bias is not None:
            _checks.finite("bias", self.bias[chosen])
        others, chosen = self._changed_rows(engine.index.checksums), chosen.to(self.weight.device)
        others = others[~torch.isin(others, chosen)]
        if len(others):
            raise WeightChanged(f"weight: other rows have changed, too: {_some(others)}; build the index again")
        index = cascade.Index(*(value.clone() for value in engine.index))  # other heads may have parts of this one
        cascade.update(index, self.weight, self.bias, torch.unique(chosen))
        self._use(index)

    # -- answering -----------------------------------------------------------------------------------------------------

    def _queries(self, name: str, x: Tensor, *, look: bool = True) -> Tensor:
        """Checked, times beta, (batch, d); numbers are not looked at if not asked to, which would wait for a GPU."""
        _checks.queries(name, x, self.weight, look=look)
        scaled = x.detach().reshape(-1, x.shape[-1]).to(self._plain.dtype)
        if self.beta != 1:
            scaled = scaled * self.beta
            if look:
                _checks.finite(f"{name} times beta", scaled)
        elif x.dtype != scaled.dtype and look:
            _checks.finite(name, scaled)
        return scaled

    def _turn(self, rows: Tensor) -> Tensor:
        return rotate(rows.to(self._plain.dtype), self._signs) if self.rotate else rows

    def _scaled_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.to(self._plain.dtype) * self.beta

    def _problem(self, queries: Tensor, k: int, reader: Reader | None = None) -> coordinates.Problem:
        """Queries with the weight; prefixes are read by ``reader``, of the rotated weight or the weight itself."""
        reader = self._plain if reader is None else reader
        plain, bias = self._plain if self.rotate else reader, self._scaled_bias()
        return coordinates.Problem(reader, plain, queries, self._turn(queries), bias, k, self.eps, self.read_chosen)

    def _exact_logits(self, queries: Tensor) -> Tensor:
        product, bias = self._plain.full(queries), self._scaled_bias()
        return product if bias is None else product + bias

    def _logits_of(self, queries: Tensor, query: Tensor, row: Tensor) -> Tensor:
        """Exact logits of pairs of a query, times beta, and a row."""
        found, bias = self._plain.pairs(query, row, queries), self._scaled_bias()
        return found if bias is None else found + bias[row]

    def _method(self) -> str:
        """What answers where a calibrated cascade does not."""
        if self.method == "auto" or (self.method == "cascade" and self.guarantee != "pac"):
            return "exact"
        return self.method

    def _cascading(self, k: int, batch: int, known: Known | None = None) -> CascadeCalibration | None:
        """The calibration by which a cascade answers so many queries at a time; None when it does not."""
        if self.method not in ("auto", "cascade") or self.guarantee == "pac":
            return None
        known = self.calibrations if known is None else known
        if self.method == "auto" and self._calibrated(k, known) is None:
            return None
        fit = self._fit(k, known)
        faster = self.method == "cascade" or batch <= fit.batch
        return fit if faster and math.isfinite(fit.width) else None

    def _fitted(self, k: int, batch: int) -> tuple[CascadeCalibration, Engine] | None:
        """The same with the engine that it was made with, whatever other threads build and calibrate meanwhile."""
        while True:
            known = self.calibrations  # never changed, always replaced; by none before there is another engine
            fit = self._cascading(k, batch, known)
            if fit is None:
                return None
            engine = self._built()
            if self.calibrations is known:
                return fit, engine

    @staticmethod
    def _calibrated(k: int, known: Known) -> int | None:
        """The calibrated k that serves for this one: the same or, if not 0, the least that is larger."""
        if k in known:
            return k
        return min((other for other in known if other >= k > 0), default=None)

    def _asked(self, x: Tensor, k: int, generator: torch.Generator | None) -> coordinates.Answer:
        """Answer queries (..., d) as they are."""
        if self.weight.is_cpu:
            return self._solve(self._queries("x", x), k, generator, x.shape[:-1])
        _checks.queries("x", x, self.weight, look=False)
        fitted = self._fitted(k, x.numel() // x.shape[-1])
        if fitted is not None:
            return self._solve_on_gpu(x.detach().reshape(-1, x.shape[-1]), k, x.shape[:-1], *fitted, scale=self.beta)
        exact = self._method() == "exact"
        return self._solve(self._queries("x", x, look=not exact), k, generator, x.shape[:-1])

    def _solve_on_gpu(
        self, rows: Tensor, k: int, shape: tuple[int, ...], fit: CascadeCalibration, engine: Engine, *, scale: float
    ) -> coordinates.Answer:
        """Answer queries (batch, d), to be scaled, without waiting for the device."""
        assert isinstance(engine, GpuCascade)  # noqa: S101
        found = engine.solve(rows, fit, scale=scale)[0]
        some = (found.indices[:, :k], found.probs[:, :k], found.logits[:, :k])
        answer = (*some, found.log_z, found.interval, found.coordinates, found.bytes_read, found.state != 0)
        return coordinates.Answer(*(value.reshape((*shape, *value.shape[1:])) for value in answer))

    def _solve(
        self,
        queries: Tensor,
        k: int,
        generator: torch.Generator | None,
        shape: tuple[int, ...],
        *,
        batch: int | None = None,
        name: str = "x",
    ) -> coordinates.Answer:
        """Answer all queries as if they came so many at a time, all at once unless given; fields in this shape."""
        fitted, method = self._fitted(k, len(queries) if batch is None else batch), self._method()
        if fitted is not None:
            fit, engine = fitted
            method = "cascade"
            if isinstance(engine, GpuCascade):  # of queries that are times beta already
                return self._solve_on_gpu(queries, k, shape, fit, engine, scale=1.0)
            answer = cascade_answers.solve(engine, queries, fit, self._solve_exactly, shape)
            if fit.k != k:
                answer = answer._replace(
                    indices=answer.indices[..., :k], probs=answer.probs[..., :k], logits=answer.logits[..., :k]
                )
        else:
            if method == "exact":
                answer = self._solve_exactly(queries, k)
            elif method == "coordinates":
                bounds = self._bounds_for(k)
                answer = coordinates.solve(self._problem(queries, k, bounds.reader), bounds, generator)
            else:
                answer = self._dithered_codes().solve(self._problem(queries, k), self.delta)
            answer = coordinates.Answer(*(value.reshape((*shape, *value.shape[1:])) for value in answer))
        log_z = answer.log_z
        looked_at = log_z.is_cpu or method != "exact"  # on a GPU, looking is waiting for it
        if looked_at and not (np.isfinite(log_z.numpy()) if log_z.is_cpu else log_z.isfinite()).all():
            raise ValueError(f"{name}: expected logits that {self._plain.dtype} can hold, found some beyond")
        return answer

    def _solve_exactly(self, queries: Tensor, k: int) -> coordinates.Answer:
        return coordinates.exactly(self._problem(queries, k))

    def _fit(self, k: int, known: Known) -> CascadeCalibration:
        """The calibration of the cascade that serves for k."""
        there = self._calibrated(k, known)
        if there is None:
            raise self._not_calibrated(k)
        fit = known[there]
        assert isinstance(fit, CascadeCalibration)  # noqa: S101
        if (fit.eps, fit.delta) != (self.eps, self.delta):
            raise RuntimeError(
                f"calibrated for eps {fit.eps:g} and delta {fit.delta:g}, which are now {self.eps:g} and "
                f"{self.delta:g}: call calibrate again"
            )
        return fit

    def _not_calibrated(self, k: int) -> RuntimeError:
        there = ", ".join(map(str, self.calibrations))
        found = f"found calibrations for k = {there}" if there else "found none"
        if self._elsewhere:
            found += f" on {self.weight.device.type}, only those of another kind of device"
        return RuntimeError(
            f"not calibrated for k = {k}, {found}: call calibrate(queries, k={k}) first, or ask for guarantee='pac'"
        )

    def _bounds_for(self, k: int) -> Bounds:
        fit = self.calibrations.get(k)
        if self.guarantee == "calibrated" and fit is None:
            raise self._not_calibrated(k)
        made = self._prepared()
        with _ONCE:
            found = made.bounds.get(k if fit is not None else 0)  # one for all k where nothing is fitted
            if isinstance(fit, Calibration):
                if not isinstance(found, Calibrated) or found.scale is not fit.scale:
                    found = made.bounds[k] = Calibrated(made.reader, fit.scale)
            elif found is None:
                found = made.bounds[0] = (
                    Computed(made.reader, self.delta)
                    if self.noise is None
                    else Declared(made.reader, self.noise, self.delta)
                )
            return found

    def _prepared(self) -> _Coordinates:
        """What ``"coordinates"`` reads, made when it is first needed, and anew when the weight may have changed.

        Raises:
            WeightChanged: when it has, and calibrations were fitted to what it was.
        """
        with _ONCE:
            made, now = self._coordinates, self._watch.now()
            if made is None or now != self._seen or not made.sample.unchanged():
                self._refuse_changes(self._fitted_to)
                made = _Coordinates(Reader(self._turn(self.weight)), Sample(self.weight), {})
                self._coordinates, self._seen = made, now
            return made

    def _note_fitted(self) -> None:
        """Keep what the weight is that calibrations of ``"coordinates"`` are fitted to."""
        if self._fitted_to is None:
            self._fitted_to = cascade.checksums(self.weight, self.bias)

    # -- the index -----------------------------------------------------------------------------------------------------

    def _for_cascade(self, what: str) -> None:
        if self.method not in ("auto", "cascade") or self.guarantee != "calibrated":
            raise ValueError(
                f"{what}: expected method='cascade' or 'auto' and guarantee='calibrated', "
                f"found {self.method!r} and {self.guarantee!r}"
            )
        _can_cascade(self.weight)

    def _use(self, index: cascade.Index) -> None:
        engine = Cascade if self.weight.is_cpu else GpuCascade
        self._cascade = engine(index, self.weight, self.bias, self.beta)
        self.index = self._cascade.index
        self._seen = self._watch.now()

    def _changed_rows(self, checksums: Tensor) -> Tensor:
        """Rows whose bits are not those of the checksums."""
        return (cascade.checksums(self.weight, self.bias) != checksums).nonzero()[:, 0]

    def _refuse_changes(self, checksums: Tensor | None) -> None:
        """Compare the bits of all rows with what was fitted to them, if anything was.

        Raises:
            WeightChanged: when some are others, naming them.
        """
        if checksums is None:
            return
        rows = self._changed_rows(checksums)
        if len(rows):
            advice = (
                "the calibration: call calibrate again"
                if self.method == "coordinates"
                else "the index was built: call update_rows for a few rows, build and calibrate for many"
            )
            raise WeightChanged(f"weight: rows {_some(rows)} have changed since {advice}")

    def _built(self, *, check: bool = True) -> Engine:
        """The engine, refused when the weight is not what it was built of."""
        if self._cascade is None:
            raise RuntimeError("no index yet: call build(queries) and calibrate(queries), or calibrate alone")
        if check and self._watch.now() != self._seen:
            now = self._watch.now()
            self._refuse_changes(self._cascade.index.checksums)
            self._seen = now
        return self._cascade

    def _dithered_codes(self) -> Dithered:
        with _ONCE:
            now = self._watch.now()
            if self._dithered is None or self._seen != now or not self._dithered[1].unchanged():
                from softsieve.heads.dithered import Dithered  # needs numba

                # What it takes is a pass over the weight, and nothing was fitted that a change could break.
                self._dithered = Dithered(self.weight, seed=self.seed), Sample(self.weight)
                self._seen = now
            return self._dithered[0]

    # -- files ---------------------------------------------------------------------------------------------------------

    @in_own_modes
    def to(self, device: torch.device | str) -> AdaptiveSoftmax:
        """The same head on another device, with an index that has not to be built again.

        Calibrations stay with the kind of device they were made on: a CPU and a GPU read in different steps.

        Raises:
            WeightChanged: when the weight is not the one that the index or the calibrations were made for.
            ValueError: for a device that cannot be used.

        Example:
            >>> AdaptiveSoftmax(torch.eye(2), eps=0.1).to("cpu").eps
            0.1
        """
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"device: expected one that torch can use, found {device!r}: {first_line(error)}"
            ) from error
        tensors, settings = self._content()
        return type(self)._from_content({name: value.to(device) for name, value in tensors.items()}, settings)

    @in_own_modes
    def save(self, path: str | os.PathLike[str], *, weight: bool = True) -> None:
        """Write everything to one safetensors file, all or nothing.

        Args:
            weight: whether the weight and the bias are written, too. If not, `load` has to be given them.

        Raises:
            InputError: when it cannot be written; what was there stays.
            WeightChanged: when the weight is not the one that the index or the calibrations were made for.
        """
        from softsieve.heads import index_file, left_out

        file = _file(path)
        tensors, settings = self._content()
        if not weight:
            left_out.take_out(tensors, settings)
        index_file.write(file, tensors, settings)

    def _content(self, *, check: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and settings that it can be made of again.

        Raises:
            WeightChanged: when what was fitted to the weight was fitted to another one, if that is to be checked.
        """
        tensors = {"weight": self.weight}
        if self.bias is not None:
            tensors["bias"] = self.bias.clone()  # it may be a part of the weight, which files cannot say
        settings: dict[str, Any] = {name: getattr(self, name) for name in _SETTINGS}
        settings["calibrations"] = {}
        known, index = self.calibrations, self.index
        while self.calibrations is not known:  # another thread builds or calibrates: those of one index
            known, index = self.calibrations, self.index
        if check:
            self._refuse_changes(self._fitted_to if index is None else index.checksums)
        for k, found in known.items():
            if isinstance(found, CascadeCalibration):
                settings["calibrations"][str(k)] = found._asdict()
            else:
                settings["calibrations"][str(k)] = found.queries
                tensors[f"calibrations.{k}"] = found.scale
        settings["elsewhere"] = {str(k): found._asdict() for k, found in self._elsewhere.items()}
        if index is not None:
            tensors |= {f"index.{name}": value for name, value in index._asdict().items()}
        return tensors, settings

    # Engines have memory of their threads, locks and graphs: copies make their own.

    def __getstate__(self) -> dict[str, Any]:
        tensors, settings = self._content(check=False)
        return {"tensors": tensors, "settings": settings, "fitted_to": self._fitted_to}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(self._from_state(state).__dict__)

    @classmethod
    def _from_state(cls, state: dict[str, Any]) -> AdaptiveSoftmax:
        """A head from what `__getstate__` gave. The copy of one that refuses its weight refuses it, too."""
        with own_modes(state["tensors"]["weight"].device.type):
            head = cls._from_content(ordinary(state["tensors"]), dict(state["settings"]))
        head._fitted_to = state["fitted_to"]
        head._seen = ()  # whether the weight is the one that all was fitted to is looked at when it is asked
        return head

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> AdaptiveSoftmax:
        """Read what `save` wrote. Executes nothing.

        Args:
            weight, bias: those of the head, if it was saved without. They are used where they are, not copied.

        Raises:
            InputError: for a file that cannot be read, is truncated, or is not a saved head; for a weight or bias that
                is not the one that the file was made of, is missing, or is given to a file that has its own.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> weight = torch.randn(1000, 64)
            >>> with TemporaryDirectory() as folder:
            ...     AdaptiveSoftmax(weight, eps=0.1).save(f"{folder}/head.safetensors", weight=False)
            ...     AdaptiveSoftmax.load(f"{folder}/head.safetensors", weight=weight).eps
            0.1
        """
        from softsieve.heads import index_file, left_out

        file = _file(path)
        try:
            with own_modes(weight.device.type if isinstance(weight, Tensor) else "cpu"):
                tensors, settings = index_file.read(file)
                left_out.put_back(Path(path), tensors, settings, weight, bias)
                head = cls._from_content(tensors, settings)
                if weight is None and head.index is not None:  # one that is given was compared
                    head._refuse_changes(head.index.checksums)
                return head
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{path}: broken: {first_line(error)}") from error

    @classmethod
    def _from_content(cls, tensors: dict[str, Tensor], settings: dict[str, Any]) -> AdaptiveSoftmax:
        """From what `_content` gives, which is used up."""
        head = cls(tensors.pop("weight"), tensors.pop("bias", None), **{n: settings.pop(n) for n in _SETTINGS})
        if "index.centre" in tensors:
            head._for_cascade("index")
            tensors.setdefault("index.mean", torch.zeros_like(tensors["index.centre"]))  # version 0.1 had none
            parts = (tensors.pop(f"index.{name}") for name in cascade.Index._fields)
            index = cascade.Index(*(part.to(head.weight.device) for part in parts))
            cascade.check(index, head.weight, head.bias)
            head._use(index)
        for k, found in settings.pop("calibrations").items():
            if isinstance(found, dict):
                head._restore_cascade(int(k), found)
            else:
                head._restore(int(k), tensors.pop(f"calibrations.{k}"), found)
        for k, found in settings.pop("elsewhere", {}).items():
            head._restore_cascade(int(k), found)
        if settings or tensors:
            raise ValueError(f"unexpected content {sorted({*settings, *tensors})}")
        return head

    def _restore(self, k: int, scale: Tensor, queries: int) -> None:
        count = len(sizes(padded(self.weight.shape[1]) if self.rotate else self.weight.shape[1], FIRST))
        _checks.whole_number("k", k, 0, len(self.weight))
        _checks.whole_number("queries", queries, 1, 2**63 - 1)
        if scale.shape != (count,) or not scale.is_floating_point() or bool((scale.isnan() | (scale < 0)).any()):
            raise ValueError(f"calibrations.{k}: expected {count} numbers, found shape {tuple(scale.shape)}")
        if self.guarantee != "calibrated":
            raise ValueError("calibrations: made for another guarantee")
        self.calibrations[k] = Calibration(scale, queries, self.delta)
        self._note_fitted()

    def _restore_cascade(self, k: int, found: dict[str, Any]) -> None:
        if self.index is None:
            raise ValueError(f"calibrations.{k}: expected an index with it, found none")
        previews, tiers = len(self.index.steps), len(self.index.tier_steps)
        fit = cascade_calibration.restored(found, k=k, rows=len(self.weight), previews=previews, tiers=tiers)
        if (fit.capacity > 0) == self.weight.is_cpu:
            self._elsewhere[k] = fit
        else:
            self.calibrations[k] = fit


class _Coordinates(NamedTuple):
    """What ``"coordinates"`` has made of a weight."""

    reader: Reader  # of the weight, rotated or not, with its copy by columns
    sample: Sample  # rows that every question compares
    bounds: dict[int, Bounds]  # by k


_SETTINGS = ("eps", "delta", "beta", "method", "guarantee", "noise", "read_chosen", "rotate", "seed")


def _file(path: str | os.PathLike[str]) -> Path:
    found = _checks.path("path", path)
    if not found.name:
        raise InputError(f"path: expected the one of a file, found {str(path)!r}")
    return found


def _held(logits: Tensor) -> Tensor:
    """The same, refused when there are some beyond their dtype; on a GPU that is not looked at."""
    if logits.is_cpu and not math.isfinite(float(logits.sum(dtype=torch.float64))):  # NaN and infinities stay in it
        raise ValueError(f"x: expected logits that {logits.dtype} can hold, found some beyond")
    return logits


def _moderate(moments: Moments) -> None:
    """Refuse queries whose squares are beyond float32."""
    if not bool(moments.mean.isfinite().all()):
        raise ValueError("queries: expected numbers whose squares float32 can hold, found some beyond")


def _can_cascade(weight: Tensor) -> None:
    reason = None if weight.is_cpu else reason_against(weight)
    if reason is not None:
        raise ValueError(f"method: no cascade here: {reason}")


def _some(rows: Tensor) -> str:
    """Row numbers for a message."""
    first = ", ".join(map(str, rows[:5].tolist()))
    return first if len(rows) <= 5 else f"{first} and {len(rows) - 5} more"
