"""`AdaptiveSoftmax`: the largest softmax values of a linear head without reading all of its weight."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.errors import InputError
from softsieve.heads import calibration, coordinates
from softsieve.heads.bounds import Bounds, Calibrated, Computed, Declared
from softsieve.heads.calibration import Calibration
from softsieve.heads.hadamard import padded, random_signs, rotate
from softsieve.heads.reader import Reader
from softsieve.heads.results import LogPartition, TopK

METHODS = ("auto", "exact", "coordinates")
GUARANTEES = ("calibrated", "pac")


class AdaptiveSoftmax:
    """The top k softmax values of ``beta * (weight @ x + bias)`` from a part of the weight.

    Defined by the exact answer, which it gives up to ``eps`` with probability at least ``1 - delta``::

        logits = beta * (weight @ x + bias)
        probs, indices = logits.softmax(-1).topk(k)

    that is: the rows returned have the k largest logits (of tied rows any), and ``|p_hat - p| <= eps * p`` for each.

    Args:
        weight: kept as it is, without a copy. (n, d).
        bias: (n,).
        eps, delta: what is guaranteed, both in (0, 1).
        beta: inverse temperature.
        method: ``"coordinates"``, the algorithm of `Adaptive Sampling for Efficient Softmax Approximation` (NeurIPS
            2024) for any k: entries are read in a weighted random order until intervals decide. ``"exact"`` reads
            everything. ``"auto"`` takes what is faster in time, which is ``"exact"``.
        guarantee: what the intervals of ``"coordinates"`` rest on.
            ``"pac"``: nothing fitted. With ``noise`` sub-Gaussian intervals that hold if ``noise`` is true; without,
            Bernstein intervals from bounds computed from weight and query, which hold for every weight and query.
            ``"calibrated"``: widths are such that answers to sample queries are right (`calibrate`, a conformal
            quantile). That holds for queries exchangeable with these, on average over sample and query, and promises
            nothing about others.
        noise: declared variance of a pull ``beta * d * weight[i, j] * x[j]`` with j uniform, for ``"pac"``: its
            distance from its mean is sub-Gaussian with this variance.
        read_chosen: whether the k rows of the answer are read in full, so that their logits are exact; otherwise they
            are estimates, and what is read need not grow with d.
        rotate: whether a randomized Hadamard rotation comes first: two copies of the weight more, filled up to a power
            of two, in which no coordinate stands out. ``noise`` is then that of the rotated pulls.
        seed: of the signs of the rotation.

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
        self.calibrations: dict[int, Calibration] = {}  # by k, 0 for `log_partition`
        self._plain = self._reader = Reader(self.weight)
        self._bounds: dict[int, Bounds] = {}
        if rotate:
            generator = torch.Generator().manual_seed(seed)
            self._signs = random_signs(padded(weight.shape[1]), generator=generator).to(weight.device)
            self._reader = Reader(self._turn(self.weight))

    def __repr__(self) -> str:
        n, d = self.weight.shape
        return (
            f"{type(self).__name__}({n} x {d}, eps={self.eps:g}, delta={self.delta:g}, method={self.method!r}, "
            f"guarantee={self.guarantee!r})"
        )

    # -- asking --------------------------------------------------------------------------------------------------------

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
        queries = self._queries("x", x)
        _checks.whole_number("k", k, 1, len(self.weight))
        return TopK(*_shaped(self._solve(queries, k, generator), x.shape[:-1]))

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
        queries = self._queries("x", x)
        answer = self._solve(queries, 0, generator)
        return LogPartition(*_shaped(answer[3:], x.shape[:-1]))

    def calibrate(self, queries: Tensor, k: int = 1, *, generator: torch.Generator | None = None) -> Calibration:
        """Fit ``guarantee="calibrated"`` on sample queries, for `topk` with this k; ``k=0``: for `log_partition`.

        Warns when there are too few for ``delta``: then nothing can be promised from a part, and everything is read.

        Args:
            queries: (N, d), what later queries will be like.
            k: the one that will be asked for; others need a calibration of their own.
            generator: of everything that is drawn.
        """
        if self.guarantee != "calibrated" or self.method != "coordinates":
            raise ValueError(
                "calibrate: expected method='coordinates' and guarantee='calibrated', "
                f"found {self.method!r} and {self.guarantee!r}"
            )
        _checks.whole_number("k", k, 0, len(self.weight))
        sample = self._queries("queries", queries)
        fewest = calibration.needed(self.delta)
        if len(sample) < fewest:
            warnings.warn(
                f"queries: {len(sample)} are too few for delta {self.delta:g}, which takes {fewest}: "
                "every answer will be exact",
                stacklevel=2,
            )
        found = calibration.calibrate(self._problem(sample, k), self.delta, generator=generator)
        self.calibrations[k], self._bounds[k] = found, Calibrated(self._reader, found.scale)
        return found

    # -- answering -----------------------------------------------------------------------------------------------------

    def _queries(self, name: str, x: Tensor) -> Tensor:
        """Checked, times beta, (batch, d)."""
        _checks.queries(name, x, self.weight)
        scaled = x.detach().reshape(-1, x.shape[-1]).to(self._plain.dtype) * self.beta
        _checks.finite(f"{name} times beta", scaled)
        return scaled

    def _turn(self, rows: Tensor) -> Tensor:
        return rotate(rows.to(self._plain.dtype), self._signs) if self.rotate else rows

    def _problem(self, queries: Tensor, k: int) -> coordinates.Problem:
        bias = None if self.bias is None else self.bias.to(queries.dtype) * self.beta
        return coordinates.Problem(
            self._reader, self._plain, queries, self._turn(queries), bias, k, self.eps, self.read_chosen
        )

    def _solve(self, queries: Tensor, k: int, generator: torch.Generator | None) -> coordinates.Answer:
        bounds = self._bounds_for(k) if self.method == "coordinates" else coordinates.NoRounds()
        answer = coordinates.solve(self._problem(queries, k), bounds, generator)
        if not bool(answer.log_z.isfinite().all()):
            raise ValueError(f"x: expected logits that {self._plain.dtype} can hold, found some beyond")
        return answer

    def _bounds_for(self, k: int) -> Bounds:
        if self.guarantee == "calibrated":
            if k not in self._bounds:
                found = (
                    f"found calibrations for k = {', '.join(map(str, self._bounds))}" if self._bounds else "found none"
                )
                raise RuntimeError(
                    f"not calibrated for k = {k}, {found}: call calibrate(queries, k={k}) first, "
                    "or ask for guarantee='pac'"
                )
            return self._bounds[k]
        if 0 not in self._bounds:  # one for all k
            self._bounds[0] = (
                Computed(self._reader, self.delta)
                if self.noise is None
                else Declared(self._reader, self.noise, self.delta)
            )
        return self._bounds[0]

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file, all or nothing.

        Raises:
            InputError: when it cannot be written; what was there stays.
        """
        from softsieve.heads import index_file

        tensors = {"weight": self.weight}
        if self.bias is not None:
            tensors["bias"] = self.bias.clone()  # it may be a part of the weight, which files cannot say
        settings: dict[str, Any] = {name: getattr(self, name) for name in _SETTINGS}
        settings["calibrations"] = {str(k): found.queries for k, found in self.calibrations.items()}
        tensors |= {f"calibrations.{k}": found.scale for k, found in self.calibrations.items()}
        index_file.write(Path(path), tensors, settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AdaptiveSoftmax:
        """Read what `save` wrote. Executes nothing.

        Raises:
            InputError: for a file that cannot be read, is truncated, or is not a saved head.
        """
        from softsieve.heads import index_file

        tensors, settings = index_file.read(Path(path))
        try:
            head = cls(tensors.pop("weight"), tensors.pop("bias", None), **{n: settings.pop(n) for n in _SETTINGS})
            for k, queries in settings.pop("calibrations").items():
                head._restore(int(k), tensors.pop(f"calibrations.{k}"), queries)
            if settings or tensors:
                raise ValueError(f"unexpected content {sorted({*settings, *tensors})}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: broken: {error}") from error
        return head

    def _restore(self, k: int, scale: Tensor, queries: int) -> None:
        bounds = Calibrated(self._reader, scale)
        _checks.whole_number("k", k, 0, len(self.weight))
        _checks.whole_number("queries", queries, 1, 2**63 - 1)
        if scale.shape != (bounds.count,) or not scale.is_floating_point() or bool((scale.isnan() | (scale < 0)).any()):
            raise ValueError(f"calibrations.{k}: expected {bounds.count} numbers, found shape {tuple(scale.shape)}")
        if self.guarantee != "calibrated":
            raise ValueError("calibrations: made for another guarantee")
        self.calibrations[k], self._bounds[k] = Calibration(scale, queries, self.delta), bounds


_SETTINGS = ("eps", "delta", "beta", "method", "guarantee", "noise", "read_chosen", "rotate", "seed")


def _shaped(found: tuple[Tensor, ...], leading: tuple[int, ...]) -> list[Tensor]:
    """Fields of a batch in the shape of the queries."""
    return [value.reshape((*leading, *value.shape[1:])) for value in found]
