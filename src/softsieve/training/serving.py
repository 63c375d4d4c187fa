"""A trained model served by the head it was trained with: an index beside the model, and answers by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from softsieve.heads import AdaptiveSoftmax
from softsieve.heads.cascade.calibration import needed
from softsieve.heads.cascade.crossover import BATCHES
from softsieve.heads.engines import reason_against_cascade
from softsieve.layers.linear import SieveLinear
from softsieve.tasks.encode import padded
from softsieve.tasks.labels import RANKED, TOP
from softsieve.tasks.models import Net
from softsieve.tasks.rows import IGNORED, Rows
from softsieve.tasks.task import Task, TokenRows
from softsieve.training.replica import FEW_LOGITS

INDEX = "head.safetensors"  # in the folder of a model
DELTA = 0.01  # chance that an answer of the index is not the exact one
SAMPLE = 1024  # rows that an index is made of, and as many that it is calibrated with, at most
BATCH = 128  # rows that go through the model at a time
BEST = TOP[-1]  # classes that every row is given, in order, whether they are labels or not


def served(model: nn.Module) -> SieveLinear | None:
    """The head of a model that has an index."""
    head = model.head if isinstance(model, Net) else None
    return head if isinstance(head, SieveLinear) and head.served is not None else None


def reason_against_index(task: Task, model: nn.Module, validation: Rows | None) -> str | None:
    """Why the head of a model can have no index; None when it can."""
    head, rows = getattr(model, "head", None), 0 if validation is None else len(validation)
    if not isinstance(model, Net) or not isinstance(head, nn.Linear) or task.kind == "tokens":
        return f"expected a linear head and one answer a row, found {type(head).__name__} for {task.kind}"
    if rows < needed(DELTA):
        return f"expected {needed(DELTA)} validation rows or more, found {rows}"
    return reason_against_cascade(head.weight)


def make_index(task: Task, model: nn.Module, train: Rows, validation: Rows) -> AdaptiveSoftmax:
    """Give the head of a trained model, of which no reason is against it, an index for states like those of these rows.

    Its basis comes from training rows, its promise from validation rows, which the model has not seen.
    """
    generator = torch.Generator().manual_seed(0)
    basis, sample = (states(model, part, _draw(len(part), generator)) for part in (train, validation))
    model.head = head = SieveLinear.from_linear(model.head)  # type: ignore[arg-type]
    threshold = 0.0 if task.multilabel else None
    return head.serve(
        sample, basis=basis, k=min(BEST, head.out_features), threshold=threshold, delta=DELTA, generator=generator
    )


def _draw(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(rows, generator=generator)[:SAMPLE]  # calibration asks each of them dozens of times


@torch.no_grad()
def states(model: nn.Module, rows: Rows, index: Tensor) -> Tensor:
    """What the head of a model is given for the rows ``index``, (len(index), features)."""
    model.eval()
    return torch.cat([model.body(**rows.batch(some).inputs).float() for some in torch.split(index, BATCH)])  # type: ignore[operator]


def load_index(path: Path, model: nn.Module) -> None:
    """Give a loaded model the index that was saved with it.

    Raises:
        InputError: when the file is broken, or of another weight.
    """
    model.head = SieveLinear.from_linear(model.head)  # type: ignore[arg-type]
    model.head.load_index(path)


def rank_served(head: SieveLinear, hidden: Tensor, *, least: int = 0) -> Tensor:
    """What `rank_labels` says of the logits of states (rows, features), as far as it matters: (rows, some).

    The labels, those of the largest logits first, at most `RANKED`, and at least the first `BEST` classes.
    """
    above, best = head.above(hidden), head.topk(hidden, min(BEST, head.out_features))
    ranked = []
    for row, (classes, logits) in enumerate(above.per_query()):
        known = dict(zip(best.indices[row].tolist(), best.logits[row].tolist(), strict=True))
        known.update(zip(classes[:RANKED].tolist(), logits[:RANKED].tolist(), strict=True))
        order = sorted(known, key=lambda one: (-known[one], one))
        taken = [place < least or known[number] > 0 for place, number in enumerate(order[:RANKED])]
        ranked.append([number if is_label else ~number for number, is_label in zip(order, taken, strict=False)])
    return padded(ranked, fill=~0)[0].to(hidden.device)  # behind the best classes ~0, no label, changes nothing


@torch.no_grad()
def decide(task: Task, model: nn.Module, rows: Rows, *, batch_size: int = BATCH) -> Tensor:
    """A model's answers for rows, in their order."""
    head, width = served(model), rows.target.shape[1] if task.kind == "tokens" else 0
    parts = []
    for inputs in _batches(task, rows, batch_size, head):
        if head is None:
            part = task.decide(model(**inputs))
        else:
            hidden = model.body(**inputs).float()  # type: ignore[operator]
            part = rank_served(head, hidden, least=task.least) if task.multilabel else head.topk(hidden).indices[..., 0]
        parts.append(part)
    if parts[0].ndim > 1:  # as wide as a batch was cut, or as the most labels of a row
        width = max([width, *(part.shape[1] for part in parts)])
        fill = ~0 if task.multilabel else 0
        parts = [nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in parts]
    return torch.cat(parts)


class Answers(NamedTuple):
    """What a model says to rows.

    Attributes:
        decided: as of `decide`.
        classes: (rows, some), the most probable first; none for tokens.
        probabilities: (rows, some): the softmax of the logits; of any number of labels a row, their sigmoid.
    """

    decided: Tensor
    classes: Tensor
    probabilities: Tensor


@torch.no_grad()
def answer(task: Task, model: nn.Module, rows: Rows, *, k: int = 1) -> Answers:
    """A model's answers for rows, with the ``k`` most probable classes of each; of multi-label rows, all its labels."""
    if task.kind == "tokens":
        none = torch.empty(len(rows), 0)
        return Answers(decide(task, model, rows), none.long(), none)
    head = served(model) if k <= BEST else None  # which an index is not calibrated for
    parts = [(_rank if task.multilabel else _most_probable)(task, model, head, inputs, k)
             for inputs in _batches(task, rows, BATCH, head)]  # fmt: skip
    width = max(part.classes.shape[1] for part in parts)  # of multi-label rows, as the most labels of a row
    fill = ~0 if task.multilabel else 0

    def together(parts: Iterable[Tensor], fill: int) -> Tensor:
        return torch.cat(
            [p if p.ndim == 1 else nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in parts]
        )

    decided, classes, found = zip(*parts, strict=True)
    return Answers(together(decided, fill), together(classes, 0), together(found, 0))


def _most_probable(
    task: Task, model: nn.Module, head: SieveLinear | None, inputs: dict[str, Tensor], k: int
) -> Answers:
    """Of a batch, where a row has one class."""
    if head is None:
        best = model(**inputs).float().softmax(-1).topk(k)
        return Answers(best.indices[:, 0], best.indices, best.values)
    answer = head.topk(model.body(**inputs).float(), k)  # type: ignore[operator]
    return Answers(answer.indices[..., 0], answer.indices, answer.probs)


def _rank(task: Task, model: nn.Module, head: SieveLinear | None, inputs: dict[str, Tensor], k: int) -> Answers:
    """Of a batch, where a row has any number of labels."""
    if head is None:
        logits = model(**inputs).float()
        decided = task.decide(logits)
        classes = torch.where(decided < 0, ~decided, decided).long()
        return Answers(decided, classes, logits.gather(1, classes).sigmoid())
    hidden = model.body(**inputs).float()  # type: ignore[operator]
    decided = rank_served(head, hidden, least=task.least)
    classes = torch.where(decided < 0, ~decided, decided).long()
    logits = torch.einsum("rd,rkd->rk", hidden, head.weight[classes].float())
    return Answers(decided, classes, (logits if head.bias is None else logits + head.bias[classes]).sigmoid())


@torch.no_grad()
def probabilities(task: Task, model: nn.Module, rows: Rows) -> list[Tensor]:
    """Of every row the probabilities of all classes, on the CPU: (classes,), or (words, classes) for tokens.

    By the softmax of the logits; of any number of labels a row by their sigmoid, which is above one half where `decide`
    gives a label. A word that the model does not read is of the class that `decide` gives it.
    """
    parts = [model(**inputs).float().cpu() for inputs in _batches(task, rows, BATCH, None)]
    if task.multilabel:
        return [row for part in parts for row in part.sigmoid()]
    each = [row for part in parts for row in part.softmax(-1)]
    if not isinstance(rows, TokenRows):
        return each
    unread = nn.functional.one_hot(torch.tensor(task.filler), len(task.labels)).float()
    found = []
    for row, words, labels in zip(each, rows.words, rows.labels, strict=True):
        places = words[labels != IGNORED]
        found.append(torch.where((places >= 0)[:, None], row[places.clamp_min(0)], unread))
    return found


def _batches(task: Task, rows: Rows, size: int, head: SieveLinear | None) -> Iterator[dict[str, Tensor]]:
    """The inputs of rows, in their order; for an index at most as many at a time as it was measured with."""
    size = max(1, min(size, FEW_LOGITS // len(task.labels), size if head is None else BATCHES[-1]))
    return (rows.batch(index).inputs for index in torch.split(torch.arange(len(rows)), size))
