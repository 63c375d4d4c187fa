"""A linear head whose rows are spread over processes: each answers for its own, one small gather merges the answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from softsieve import _checks
from softsieve._progress import ProgressCallback, no_progress
from softsieve.heads import Above, AdaptiveSoftmax, LogPartition, TopK
from softsieve.heads.above import RowsAbove
from softsieve.heads.modes import in_own_modes

__all__ = ["ShardedAdaptiveSoftmax"]

Result = TypeVar("Result")


class ShardedAdaptiveSoftmax:
    """`AdaptiveSoftmax` of a weight whose rows are spread over the ranks of a process group, in rank order.

    Defined by what the whole weight would answer, up to ``eps`` with probability at least ``1 - delta``, on every rank
    the same::

        weight = torch.cat(weights_of_all_ranks)
        probs, indices = (beta * (weight @ x + bias)).softmax(-1).topk(k)

    Each rank asks an `AdaptiveSoftmax` of its own rows with ``delta / ranks``, so all of them are right at once with
    probability ``1 - delta``. Then

    - the top k of the whole are among those of the shards,
    - sums of exponentials ``Z_s``, each within a relative eps of its estimate, are so in total: with
      ``a <= Z_s / Y_s <= b`` for every shard, ``a <= sum(Z_s) / sum(Y_s) <= b``. The logits of the answer are exact, so
      probabilities are as far off as the partition function.

    The 99 % confidence of a calibrated cascade, over samples of queries, is that of each rank.

    All ranks call the same methods in the same order, with the same queries and the same k. An error on one rank is
    raised there and, as a RuntimeError that names the rank, on all others; none is left waiting. Without a process
    group, or alone in one, this is an `AdaptiveSoftmax`.

    Args:
        weight: the rows of this rank, at least one, kept as they are, without a copy. (n, d), n need not be the same on
            all ranks. On a device that the group's backend can gather from.
        bias: (n,), on all ranks or on none.
        group: the process group; the default one unless given.
        eps, delta, beta, method, guarantee, noise, rotate, seed: as of `AdaptiveSoftmax`, the same on all ranks;
            ``delta`` is of the whole. Rows of the answer are always read in full.

    Attributes:
        head: the `AdaptiveSoftmax` of this rank's rows.
        rows: (start, stop) of these rows in the whole.

    Raises:
        TypeError, ValueError: when an argument has a wrong type or value, or is not the same on all ranks.
        RuntimeError: when an argument has a wrong type or value on another rank.

    Example:
        >>> weight = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
        >>> head = ShardedAdaptiveSoftmax(weight, method="exact")  # no process group, so these are all rows
        >>> head.rows, head.topk(weight[7]).indices.tolist()
        ((0, 1000), [7])
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        group: Any = None,
        eps: float = 0.3,
        delta: float = 0.01,
        beta: float = 1.0,
        method: str = "auto",
        guarantee: str = "calibrated",
        noise: float | None = None,
        rotate: bool = False,
        seed: int = 0,
    ) -> None:
        ranks = Ranks(group)

        def make() -> AdaptiveSoftmax:
            return AdaptiveSoftmax(
                weight,
                bias,
                eps=eps,
                delta=_checks.open_unit("delta", delta) / ranks.count,
                beta=beta,
                method=method,
                guarantee=guarantee,
                noise=noise,
                rotate=rotate,
                seed=seed,
            )

        self._use(ranks, make)

    def _use(self, ranks: Ranks, make: Callable[[], AdaptiveSoftmax]) -> None:
        self._ranks, self.head = ranks, ranks.together(make)
        self._device_type = self.head.weight.device.type
        self._sizes: list[int] = ranks.tell(len(self.head.weight))
        first, *others = ranks.tell(_common(self.head, ranks.count))
        for rank, other in enumerate(others, 1):
            for name, value in first.items():
                if other[name] != value:
                    raise ValueError(
                        f"{name}: expected the same on all ranks, found {value} on rank 0 and {other[name]} "
                        f"on rank {rank}"
                    )
        start = sum(self._sizes[: ranks.rank])
        self.rows = start, start + len(self.head.weight)

    @property
    def eps(self) -> float:
        """Relative error of probabilities."""
        return self.head.eps

    @property
    def delta(self) -> float:
        """Chance of a wrong answer, of the whole."""
        return self.head.delta * self._ranks.count

    def __repr__(self) -> str:
        start, stop = self.rows
        return f"{type(self).__name__}(rows {start} to {stop} of {sum(self._sizes)}, {self.head!r})"

    # -- asking --------------------------------------------------------------------------------------------------------

    @in_own_modes
    def topk(self, x: Tensor, k: int = 1, *, generator: torch.Generator | None = None) -> TopK:
        """The k largest softmax values of every query over all rows, with numbers of rows in the whole.

        ``coordinates`` and ``bytes_read`` are sums over ranks; ``exact`` says that all ranks read everything. Takes one
        gather, of messages whose size goes with k and the number of queries: where these differ between ranks, the
        backend may stop a process before it can be told so.

        Args:
            x: queries, (..., d), the same on all ranks.
            k: how many, 1 to the number of all rows; the same on all ranks.
            generator: as in `AdaptiveSoftmax.topk`, for this rank.

        Raises:
            TypeError, ValueError, RuntimeError: as `AdaptiveSoftmax.topk`, or because another rank has no answer.
        """
        _checks.whole_number("k", k, 1, sum(self._sizes))
        return self._ask(x, k, generator)

    @in_own_modes
    def log_partition(self, x: Tensor, *, generator: torch.Generator | None = None) -> LogPartition:
        """The logarithm of the sum of exponentials over all rows, as `AdaptiveSoftmax.log_partition`."""
        return LogPartition(*self._ask(x, 0, generator)[3:])

    @in_own_modes
    def above(self, x: Tensor, threshold: float = 0.0) -> Above:
        """Every class whose logit is above a threshold over all rows, as `AdaptiveSoftmax.above`, by their numbers.

        What the whole has above a threshold is what its shards have, so nothing is missing if no rank misses anything:
        with probability ``1 - delta``. ``bytes_read`` and ``exact`` are as in `topk`. Takes one gather, of what the
        ranks have found.

        Args:
            x: queries, (..., d), the same on all ranks.
            threshold: the same on all ranks.

        Raises:
            TypeError, ValueError, RuntimeError: as `AdaptiveSoftmax.above`, or because another rank has no answer.
        """
        if self._ranks.count == 1:
            return self.head.above(x, threshold)
        try:
            own = self.head.above(x, threshold)
            asked = f"threshold {threshold:g} for queries {tuple(x.shape)}"
        except Exception as error:
            self._ranks.tell(f"{type(error).__name__}: {error}")
            raise
        said = self._ranks.tell((asked, [value.cpu() for value in own]))
        for rank, one in enumerate(said):
            if isinstance(one, str):
                raise RuntimeError(f"rank {rank}: {one}")
        if len({asked for asked, _ in said}) > 1:
            found = ", ".join(asked for asked, _ in said)
            raise ValueError(f"x, threshold: expected the same on all ranks, found {found}")
        return joined([Above(*values) for _, values in said], self._sizes, x.device)

    def _ask(self, x: Tensor, k: int, generator: torch.Generator | None) -> TopK:
        if not isinstance(x, Tensor):  # alike on all ranks; whatever may not be is found below
            raise TypeError(f"x: expected a torch.Tensor, found {type(x).__name__}")
        if self._ranks.count == 1:
            return self._own(x, k, generator)
        shape, device = x.shape[:-1], self.head.weight.device
        batch = shape.numel()
        try:
            own = self._own(x, k, generator)
            message = packed(own, self.rows[0], k).flatten()
        except Exception:
            nothing = torch.zeros(batch * (2 * k + NUMBERS), dtype=torch.float64, device=device)
            self._ranks.gather(torch.cat([nothing.new_tensor([1, k, batch]), nothing]))
            raise
        parts = self._ranks.gather(torch.cat([message.new_tensor([0, k, batch]), message]))
        _agree(parts[:, :3].tolist())
        return merged(parts[:, 3:].view(len(parts), *shape, -1), self._sizes, k, own.log_z.dtype)

    def _own(self, x: Tensor, k: int, generator: torch.Generator | None) -> TopK:
        """The answer of this rank's rows, with their own numbers."""
        if k:
            return self.head.topk(x, min(k, len(self.head.weight)), generator=generator)
        partition = self.head.log_partition(x, generator=generator)
        none = partition.log_z[..., None][..., :0]
        return TopK(none.long(), none, none, *partition)

    # -- fitting -------------------------------------------------------------------------------------------------------

    def build(self, queries: Tensor | Iterable[Tensor], *, progress: ProgressCallback = no_progress) -> None:
        """Make the index of a cascade on every rank, as `AdaptiveSoftmax.build`."""
        self._ranks.together(lambda: self.head.build(queries, progress=progress))

    @in_own_modes
    def calibrate(
        self,
        queries: Tensor,
        k: int | Sequence[int] = 1,
        *,
        threshold: float | None = None,
        generator: torch.Generator | None = None,
        progress: ProgressCallback = no_progress,
    ) -> Any:
        """Fit ``guarantee="calibrated"`` on every rank, as `AdaptiveSoftmax.calibrate`.

        It takes as many sample queries as ``delta / ranks`` does.

        Args:
            queries: (N, d), the same on all ranks.
            k: up to the number of all rows. A rank that has fewer rows calibrates for all that it has.
            threshold: as in `AdaptiveSoftmax.calibrate`.
            generator, progress: the same, for this rank.

        Returns:
            What was fitted on this rank; a list for several k.
        """
        return self._ranks.together(lambda: self._calibrate(queries, k, threshold, generator, progress))

    def _calibrate(
        self,
        queries: Tensor,
        k: int | Sequence[int],
        threshold: float | None,
        generator: torch.Generator | None,
        progress: ProgressCallback,
    ) -> Any:
        wanted = list(k) if isinstance(k, Sequence) else [k]
        for one in wanted:
            _checks.whole_number("k", one, 0, sum(self._sizes))
        own_ks = [min(one, len(self.head.weight)) for one in wanted]
        different = list(dict.fromkeys(own_ks))
        fits = self.head.calibrate(queries, different, threshold=threshold, generator=generator, progress=progress)
        fit_of = dict(zip(different, fits, strict=True))
        return [fit_of[one] for one in own_ks] if isinstance(k, Sequence) else fit_of[own_ks[0]]

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], *, weight: bool = True) -> None:
        """Write the shard of every rank, with all that was fitted, to a file of its own in a folder.

        Each is one of `AdaptiveSoftmax.save`. All are there when this returns.

        Args:
            weight: whether the weight and the bias are written, too. If not, `load` needs them as arguments.

        Raises:
            InputError: when the file of this rank cannot be written.
            RuntimeError: when that of another rank cannot.
        """
        self._ranks.together(
            lambda: self.head.save(shard_file(folder, self._ranks.rank, self._ranks.count), weight=weight)
        )

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        group: Any = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> ShardedAdaptiveSoftmax:
        """Read what `save` wrote, with as many ranks as there were then. Executes nothing.

        Args:
            weight, bias: those of this rank, if they were saved without. They are used where they are, not copied.

        Raises:
            InputError: when the file of this rank is not there, is not one of `save`, or was made of another weight.
            RuntimeError: when that of another rank is not.
        """
        head, ranks = cls.__new__(cls), Ranks(group)
        head._use(
            ranks,
            lambda: AdaptiveSoftmax.load(shard_file(folder, ranks.rank, ranks.count), weight=weight, bias=bias),
        )
        return head


# -- what ranks tell each other ----------------------------------------------------------------------------------------


class Ranks:
    """The processes that share a head; this one alone where there is no process group."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.count = group, 0, 1
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: expected one that this process is in, found another")

    def tell(self, what: Any) -> list[Any]:
        """What every rank tells, in order."""
        said = [what] * self.count
        if self.count > 1:
            dist.all_gather_object(said, what, group=self.group)
        return said

    def together(self, work: Callable[[], Result]) -> Result:
        """What the work gives here, when it is done on all ranks; an error when it fails on any."""
        try:
            result = work()
        except Exception as error:
            self.tell(f"{type(error).__name__}: {error}")
            raise
        for rank, failure in enumerate(self.tell(None)):
            if failure is not None:
                raise RuntimeError(f"rank {rank}: {failure}")
        return result

    def gather(self, message: Tensor) -> Tensor:
        """The messages of all ranks, in order, each of the same size. (ranks, size)"""
        messages = message.new_empty(self.count, len(message))
        dist.all_gather(list(messages), message, group=self.group)
        return messages


def _common(head: AdaptiveSoftmax, ranks: int) -> dict[str, object]:
    """What must be the same on all ranks, by name."""
    settings = {name: getattr(head, name) for name in ("eps", "beta", "method", "guarantee", "noise", "rotate", "seed")}
    return {
        "weight.shape[1]": head.weight.shape[1],
        "weight.dtype": str(head.weight.dtype),
        "weight.device": head.weight.device.type,
        "bias": "none" if head.bias is None else str(head.bias.dtype),
        "delta": head.delta * ranks,
        **settings,
    }


def _agree(heads: list[list[float]]) -> None:
    """Refuse messages of ranks that failed (the first number), or were asked other things (k and the batch)."""
    failed = [str(rank) for rank, (flag, *_) in enumerate(heads) if flag]
    if failed:
        raise RuntimeError(f"no answer, because of an error on rank {', '.join(failed)}")
    asked = ["k = {:.0f} for {:.0f} queries".format(*head[1:]) for head in heads]
    if len(set(asked)) > 1:
        raise ValueError(f"x, k: expected the same on all ranks, found {', '.join(asked)}")


def shard_file(folder: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """Where the shard of a rank is saved."""
    return Path(folder) / f"rank-{rank}-of-{ranks}.safetensors"


NUMBERS = 6  # of a query, besides its top k


def packed(answer: TopK, first: int, k: int) -> Tensor:
    """What a shard says, whose first row is ``first``: logits, rows, and numbers of the whole, (..., 2 k + NUMBERS).

    In float64, which holds whole numbers up to 2^53. A shard with fewer than k rows fills up with zeros.
    """
    missing = 0, k - answer.indices.shape[-1]
    logits, rows = (F.pad(values.double(), missing) for values in (answer.logits, answer.indices + first))
    numbers = (answer.log_z, *answer.log_z_interval.unbind(-1), answer.coordinates, answer.bytes_read, answer.exact)
    return torch.cat([logits, rows, torch.stack([value.double() for value in numbers], -1)], -1)


def joined(parts: Sequence[Above], sizes: Sequence[int], device: torch.device) -> Above:
    """What the whole has above a threshold from what its shards have, with so many rows each."""
    shape, starts = parts[0].counts.shape, [sum(sizes[:rank]) for rank in range(len(sizes))]
    number = torch.arange(shape.numel())
    found = RowsAbove(
        torch.cat([number.repeat_interleave(part.counts.flatten()) for part in parts]),
        torch.cat([part.indices + start for part, start in zip(parts, starts, strict=True)]),
        torch.cat([part.logits for part in parts]),
        torch.stack([part.bytes_read for part in parts]).sum(0).flatten(),
        torch.stack([part.exact for part in parts]).all(0).flatten(),
    )
    return Above(*(value.to(device) for value in found.ordered(shape)))


def merged(parts: Tensor, sizes: Sequence[int], k: int, dtype: torch.dtype) -> TopK:
    """The answer of the whole from what its shards say, (ranks, ..., 2 k + NUMBERS), with so many rows each."""
    logits, rows = (
        torch.cat([part[..., at : at + min(k, size)] for part, size in zip(parts, sizes, strict=True)], -1)
        for at in (0, k)
    )
    logits, order = logits.sort(stable=True, descending=True)  # of tied rows the same on all ranks
    logits, rows = logits[..., :k], rows.gather(-1, order[..., :k])
    numbers = parts[..., 2 * k :]
    sums, read = numbers[..., :3].logsumexp(0), numbers[..., 3:5].sum(0).long()
    return TopK(
        rows.long(),
        (logits - sums[..., :1]).exp().to(dtype),
        logits.to(dtype),
        sums[..., 0].to(dtype),
        sums[..., 1:].to(dtype),
        read[..., 0],
        read[..., 1],
        numbers[..., 5].amin(0) > 0,
    )
