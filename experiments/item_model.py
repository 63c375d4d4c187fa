"""A small transformer over items that says what a user takes next, its losses, and how good its answers are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.item_sequences import Questions, pad
from softsieve import linear_as_cross_entropy
from softsieve.errors import InputError, shown

LOGITS = "logits"  # the loss that holds them: F.cross_entropy over all items
AT_A_TIME = 64  # users whose scores of all items exist at a time: on a CPU they stay in a cache


class ItemModel(nn.Module):
    """Items to states, by a transformer that does not look ahead (SASRec); the output layer is the embedding of items.

    Example:
        >>> model = ItemModel(100, size=8, layers=1, heads=2, length=5, dropout=0.0)
        >>> model(torch.tensor([[1, 2, 3]])).shape, model.weight.shape
        (torch.Size([1, 3, 8]), torch.Size([100, 8]))
    """

    def __init__(self, items: int, *, size: int, layers: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, size), nn.Embedding(length, size)
        for embedding in (self.items, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.scale, self.dropout = size**0.5, nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(size), enable_nested_tensor=False)

    @property
    def weight(self) -> Tensor:
        """Of the output layer, (items, size)."""
        return self.items.weight

    def forward(self, items: Tensor) -> Tensor:
        """States, (users, length, size), of items, (users, length)."""
        length = items.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=items.device)
        x = self.dropout(self.scale * (self.items(items) + self.places.weight[:length]))
        states: Tensor = self.layers(x, mask=mask, is_causal=True)
        return states

    @property
    def length(self) -> int:
        """Items that it reads, at most."""
        return self.places.num_embeddings


class Losses(NamedTuple):
    """Of a batch, and the shares of its rows that are solved and that are dense, if the loss knows them."""

    loss: Tensor
    solved: float | None = None
    dense: float | None = None


def check_loss(name: str) -> None:
    """Refuse what is neither ``"logits"`` nor a delta.

    Raises:
        InputError: saying so.
    """
    try:
        good = name == LOGITS or 0 <= float(name) <= 1
    except ValueError:
        good = False
    if not good:
        raise InputError(f"loss: expected {LOGITS!r} or a delta in [0, 1], found {shown(name)}")


def batch_loss(model: ItemModel, users: Sequence[Tensor], loss: str) -> Losses:
    """Of all positions of some users: cross-entropy of the logits, or without them with this delta; 1 is the same."""
    window, counts = pad(users, model.length + 1)
    device = model.weight.device
    at = torch.arange(window.shape[1] - 1) < counts[:, None] - 1  # positions with an item behind them
    target = window[:, 1:][at].to(device)
    states = model(window[:, :-1].to(device))[at.to(device)]  # (rows, size)
    if loss == LOGITS:
        return Losses(F.cross_entropy(F.linear(states, model.weight), target))
    value, stats = linear_as_cross_entropy(states, model.weight, target, delta=float(loss), return_stats=True)
    return Losses(value, float(stats.solved.float().mean()), float(stats.dense.float().mean()))


@torch.no_grad()
def last_states(model: ItemModel, histories: Sequence[Tensor]) -> Tensor:
    """What the output layer is asked with when users come back, (users, size)."""
    states = []
    was, device = model.training, model.weight.device
    model.eval()
    for some in _blocks(len(histories)):
        items, counts = pad(histories[some], model.length)
        every = model(items.to(device))
        states.append(every[torch.arange(len(counts)), counts - 1].float())
    model.train(was)
    return torch.cat(states)


@torch.no_grad()
def ranks(model: ItemModel, questions: Questions, *, exclude_seen: bool = False) -> Tensor:
    """How many items score at least as much as the right one, besides itself, (users,), over all items.

    Some users at a time, so that users x items never exists.

    Args:
        exclude_seen: leave out the items of a user's history, but for the right one.
    """
    states, weight = last_states(model, questions.histories), model.weight.float()
    # Made once: small results that are kept between blocks of scores would leave holes that no later block fits in.
    found, buffer = torch.empty(len(states), dtype=torch.long), states.new_empty(AT_A_TIME, len(weight))
    for some in _blocks(len(states)):
        answers = questions.answers[some, None].to(states.device)
        scores = torch.mm(states[some], weight.T, out=buffer[: len(answers)])
        own = scores.gather(1, answers)
        if exclude_seen:
            seen = questions.histories[some]
            rows = torch.repeat_interleave(torch.tensor([len(items) for items in seen]))
            scores[rows.to(states.device), torch.cat(seen).to(states.device)] = -torch.inf
            scores.scatter_(1, answers, own)
        found[some] = (scores >= own).sum(1).cpu() - 1
    return found


def metrics(found: Tensor, k: int = 10) -> dict[str, float]:
    """Hit rate and NDCG at k of ranks that count from 0.

    Example:
        >>> metrics(torch.tensor([0, 2, 10]))
        {'hr@10': 0.6666666666666666, 'ndcg@10': 0.5}
    """
    hit, gain = (found < k).double(), 1 / torch.log2(found.double() + 2)
    return {f"hr@{k}": float(hit.mean()), f"ndcg@{k}": float((hit * gain).mean())}


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, AT_A_TIME):
        yield slice(start, start + AT_A_TIME)
