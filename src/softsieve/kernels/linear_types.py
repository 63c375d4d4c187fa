"""What the driver of the linear loss (`kernels.linear`) and its backends pass to each other.

A backend is a module with the functions of `Backend`. Tensors have one number for each row, (rows,), unless their
comment says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

MEMORY = 128 << 20  # bytes beyond inputs and gradients that a loss takes at most, unless told otherwise
FEWEST = 128  # classes at a time
# Multiplications of a product of a layer that holds its logits on a GPU: at 5 % dense, two of these take what
# `kernels.linear` waits for a host.
SMALL = 360 * 10**9
NUMBERS = 8  # of a row, where they are one tensor
SLACK = 2**-6  # of 1 and a logit, what screening leaves to the rounding of products, its own and the others'
ON_CPU = 8 << 20  # bytes of logits at a time on a CPU, forward and backward: they stay in a cache


class Options(NamedTuple):
    """What holds for all rows, as the plain values that a registered op takes."""

    ignore_index: int = -100
    cap: float = 0.0  # logits are cap * tanh(x / cap); 0 for none
    reduction: str = "mean"
    backend: str = "torch"
    group: str = ""  # name of the process group over which the weight is sharded; empty for none
    memory: int = 0  # bytes beyond inputs and gradients that it was told to take; 0 where it was not told
    screening: str = ""  # the format in which rows are screened; empty where none are


class Targets(NamedTuple):
    """What the rows should have said, and how much each counts."""

    label: Tensor  # int64; of `settle` also (rows, labels), -1 for none
    delta: Any  # margins in [0, 1], a tensor () or (rows,); of `kernels.linear_held` also a number
    class_weight: Tensor | None = None  # (classes of all shards,)
    row_weight: Tensor | None = None

    def select(self, rows: Tensor) -> Targets:
        return Targets(
            self.label[rows],
            self.delta[rows] if self.delta.ndim else self.delta,
            self.class_weight,
            None if self.row_weight is None else self.row_weight[rows],
        )


class Chunk(NamedTuple):
    """The products of hidden states and some classes' weights, from which backends make logits."""

    products: Tensor  # (rows, some classes), may be written to
    bias: Tensor | None  # of all classes
    cap: float
    start: int  # the first of these classes


class Layer(NamedTuple):
    """What makes logits."""

    hidden: Tensor  # (rows, size)
    weight: Tensor  # (classes, size)
    bias: Tensor | None  # (classes,)
    cap: float

    def select(self, rows: Tensor | slice) -> Layer:
        return self._replace(hidden=self.hidden[rows])

    def chunks(self, budget: int, beside: int = 0) -> Iterator[Chunk]:
        """The products, some classes at a time, all in one buffer of about ``budget`` bytes.

        These are also for ``beside`` bytes a class that the caller holds while it has a chunk.
        """
        rows, classes = len(self.hidden), len(self.weight)
        if self.hidden.is_cpu:
            budget = min(budget, ON_CPU)
        each = rows * self.weight.element_size() + beside
        step = min(classes, classes_at_a_time(rows, budget // each, self.hidden.device))
        buffer = self.hidden.new_empty(rows * step)
        for start in range(0, classes, step):
            part = self.weight[start : start + step]
            products = buffer[: rows * len(part)].view(rows, len(part))
            yield Chunk(torch.mm(self.hidden, part.t(), out=products), self.bias, self.cap, start)


def classes_at_a_time(rows: int, most: int, device: torch.device) -> int:
    """As many as ``most`` allows. On a GPU, blocks of 256 x 128 logits are to be a multiple of its processors."""
    step = max(FEWEST, most - most % FEWEST)
    if device.type == "cuda":
        blocks, processors = -(-rows // 256), torch.cuda.get_device_properties(device).multi_processor_count
        if waves := step // 128 * blocks // processors:
            step = 128 * max(1, waves * processors // blocks)
    return step


class Scan(NamedTuple):
    """What a pass over all logits shows of every row."""

    top: Tensor  # largest logit
    total: Tensor  # sum of exponentials, over e^top
    own: Tensor  # logit of the label; -inf if it is not in this shard
    rival: Tensor  # largest logit of another class


class Settled(NamedTuple):
    """What the threshold says of every row."""

    threshold: Tensor  # classes whose logit reaches it are kept; -inf in a dense row
    rivals: Tensor  # how many classes are kept besides the label
    odds: Tensor  # sum of their exponentials over that of the label: the loss is log1p(odds)
    listed: Tensor  # bool: whether `classes` and `logits` hold all of them
    classes: Tensor  # (rows, LISTED), -1 for none
    logits: Tensor  # (rows, LISTED)
    counts: Tensor  # (3,): rows that are not listed, those of them that are not dense, listed classes with the labels


class Saved(NamedTuple):
    """What forward leaves for backward and for statistics; 0 in a row that is ignored. Others are as in `Settled`."""

    threshold: Tensor
    kept: Tensor  # how many classes are kept, the label among them
    lse: Tensor  # log-sum-exp of all logits
    norm: Tensor  # exp((logit - lse) - norm) is the softmax over the kept classes
    share: Tensor  # weight of the row in the loss
    own: Tensor  # logit of the label; -inf if it is not in this shard
    margin: Tensor  # probability of the label minus the largest of another class
    right: Tensor  # bool: whether no class has a larger logit than the label
    listed: Tensor
    classes: Tensor
    logits: Tensor
    counts: Tensor  # (2,) on the CPU: rows that are not listed, and listed classes with the labels


class SavedSides(NamedTuple):
    """What the forward pass of several labels leaves for backward, of the negatives and then of the positives."""

    threshold: Tensor
    kept: Tensor  # how many negatives are kept, and 1 for the threshold
    lse: Tensor  # log-sum-exp of 0 and all negatives
    norm: Tensor  # exp((logit - lse) - norm) is the softmax over the threshold and the kept negatives
    listed: Tensor
    classes: Tensor
    logits: Tensor
    unlisted: Tensor  # () on the CPU: rows that are not listed
    positives: Tensor  # (rows, labels): the gradient of their logits


class Entries(NamedTuple):
    """The gradient of the logits that are listed, the labels' among them."""

    coefficients: Tensor  # (rows, so many)
    keys: Tensor  # (rows, so many): classes, or ``none``
    none: int

    def in_order(self, count: int) -> SortedEntries:
        """The ``count`` entries that there are, class by class."""
        keys, order = self.keys.flatten().sort(stable=True)
        return SortedEntries(self.coefficients, keys[:count], order[:count])


class SortedEntries(NamedTuple):
    """Entries in the order of their classes, so that each class is added up by itself."""

    coefficients: Tensor  # (rows, so many), as they were
    keys: Tensor  # (entries,): the row of the gradient that each is added to
    order: Tensor  # (entries,): where it is among the coefficients, counted row by row

    def part(self, begin: int, end: int, keys: Tensor) -> SortedEntries:
        """The entries from ``begin`` to ``end``, with other keys."""
        return SortedEntries(self.coefficients, keys, self.order[begin:end])


class Stepper(Protocol):
    """What takes the gradient of the weight, some classes at a time, instead of a tensor of all of it."""

    everywhere: bool  # whether a step changes classes without a gradient, too

    def begin(self) -> None:
        """Called once, before the gradients of a step."""

    def step(self, layer: Layer, classes: slice | Tensor, grad: Tensor, grad_bias: Tensor | None) -> None:
        """Change weight and bias of these classes by their gradients; each class is there at most once in a step."""

    def multiplies(self, layer: Layer, rows: int) -> bool:
        """Whether it takes `step_product` of so many rows, and then `step` for the same classes: if steps add up."""

    def step_product(
        self, layer: Layer, classes: slice, gradient: Tensor, hidden: Tensor, grad_bias: Tensor | None
    ) -> None:
        """`step` with ``gradient.T @ hidden`` for the gradient, which is never there; (rows, classes), (rows, size)."""


class Backend(Protocol):
    """What is done with logits while they are there. Labels count from the first class of this shard."""

    LISTED: int  # the most classes of a row that are listed

    def make_marks(self, layer: Layer, state: Scan) -> Tensor:
        """Where `scan` is to note what `settle` must know of this shard's logits besides the label's."""

    def scan(self, chunk: Chunk, label: Tensor, state: Scan, marks: Tensor) -> None:
        """Bring ``state`` and ``marks`` up to date with a chunk of logits."""

    def settle(
        self, layer: Layer, targets: Targets, state: Scan, marks: Tensor, allowance: Tensor | None = None
    ) -> Settled:
        """Thresholds, and the kept classes of rows whose kept classes are few enough to be listed.

        An ``allowance`` is by how much the logits of a row may be above those that were scanned.
        """

    def sum_kept(self, chunk: Chunk, rows: Tensor, label: Tensor, own: Tensor, settled: Settled) -> None:
        """Add to ``rivals`` and ``odds`` the kept classes of a chunk that has the products of ``rows`` alone."""

    def finish(
        self, targets: Targets, state: Scan, settled: Settled, first: int, classes: int, reduction: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The reduced loss, kept, lse, norm, share, margin and right; this shard begins at ``first`` of ``classes``."""

    def differentiate(
        self, chunk: Chunk, rows: Tensor, label: Tensor, factor: Tensor, saved: Saved | SavedSides
    ) -> None:
        """Put the gradient, times ``factor``, in the place of a chunk that has the products of ``rows`` alone."""

    def make_entries(self, layer: Layer, label: Tensor, factor: Tensor, saved: Saved) -> Entries:
        """The gradient of listed logits, times ``factor``."""

    def combine(self, entries: Entries, listed: Tensor, weight: Tensor, grad: Tensor) -> None:
        """Write the gradient of the hidden states of listed rows; what others have is undefined until it is written."""

    def spread(self, entries: SortedEntries, hidden: Tensor, grad: Tensor | None, grad_bias: Tensor | None) -> None:
        """Add the entries to the gradients of weight and bias, one class after the other: no atomics."""
