"""Heads of a model that drafts for another: which tokens it proposes, beside a static list of frequent tokens.

Every head is asked at states over held-out text, one at a time. A proposal is accepted where it is the token that the
target, which reads the same text, would choose greedily.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError
from softsieve.heads import DriftWarning
from softsieve.integrations.adaptive_head import AdaptiveHead, accelerate_head, restore_head
from softsieve.integrations.hidden_states import check_size, inputs_of, output_layer, tokens_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 4  # tokens that are drafted before the target looks
HELD_OUT = 4  # the held-out part of a text is what is counted, divided by this
_WINDOWS, _STATES = 8, 64  # windows that a model reads at a time, states whose logits are there at a time


class Parts(NamedTuple):
    """A text: what heads are fitted to, and windows of later text."""

    counted: Tensor  # (tokens,): the beginning, whose most frequent tokens make the list
    calibration: Tensor  # (windows, size): windows spread over it
    held_out: Tensor  # (windows, size): windows spread over what comes after it


class DraftHead(Protocol):
    """What proposes a token for a state (d,), and counts what it read and how often it fell back, from its making."""

    @property
    def estimates(self) -> bool: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def exactly(self) -> int: ...
    def __call__(self, state: Tensor) -> int: ...


class Proposals(NamedTuple):
    """What a head proposed at each state; (states,) each."""

    head: str  # exact, adaptive or list
    calibration: str | None  # the text that it was fitted to
    tokens: Tensor  # int64
    ms: Tensor  # float64
    bytes_read: Tensor  # int64
    fallback: Tensor  # bool: of the adaptive head, answered with the exact product
    estimates: bool = (
        False  # whether it is an adaptive head that reads a part; where the product is faster, it does not
    )


# -- texts and models --------------------------------------------------------------------------------------------------


def cut(tokenizer: Any, text: str, *, counted: int, calibration: int, tokens: int, size: int, place: str) -> Parts:
    """The parts of a text, in whole windows of ``size`` tokens.

    Args:
        counted: tokens of the beginning; the held-out windows are from a quarter as many after these.
        calibration, tokens: of the windows to calibrate with and of the held-out ones, at least.
        place: what to call the text in errors.

    Raises:
        InputError: when the text is too short, or there are more windows than fit into a part.
    """
    later = counted // HELD_OUT
    for name, wanted, there in (("calibration", calibration, counted), ("tokens", tokens, later)):
        if -(-wanted // size) * size > there:
            raise InputError(f"{name}: expected {there // size * size} at most, with counted {counted}, found {wanted}")
    if size < BLOCK:
        raise InputError(f"window: expected {BLOCK} tokens of text at least, found {size}")
    ids = tokens_of(tokenizer, text, count=counted + later, place=place)
    return Parts(ids[:counted], _spread(ids[:counted], calibration, size), _spread(ids[counted:], tokens, size))


def _spread(ids: Tensor, tokens: int, size: int) -> Tensor:
    """Windows (windows, size) with so many tokens, evenly over a text."""
    count = -(-tokens // size)
    return torch.stack([ids[start : start + size] for start in torch.linspace(0, len(ids) - size, count).long()])


def keep_layers(model: Any, count: int) -> None:
    """Let a model go from the output of its first layers to its last norm and its head."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(f"layers: expected a model with a list of them, found {type(model).__name__}")
    if not 1 <= count <= len(layers):
        raise InputError(f"layers: expected 1 to {len(layers)}, as many as the model has, found {count}")
    decoder.layers = layers[:count]
    model.config.get_text_config().num_hidden_layers = count


def check_vocabulary(draft: Any, target: Any, *, names: tuple[str, str]) -> None:
    """Refuse two tokenizers whose tokens have other numbers."""
    one, two = draft.get_vocab(), target.get_vocab()
    if one != two:
        apart = len(one.items() ^ two.items())
        raise InputError(
            f"target {names[1]}: expected the vocabulary of {names[0]}, {len(one)} tokens, "
            f"found {len(two)}, {apart} entries in one of them alone"
        )


@torch.no_grad()
def read_states(model: Any, windows: Tensor, *, first: int | None = None) -> Tensor:
    """What the output layer is given at every token of windows (windows, size), (windows * size, d)."""
    layer = output_layer(model)
    lead = torch.tensor([] if first is None else [first], dtype=torch.long)
    check_size(model, {"text": windows}, lead, windows.shape[1] + len(lead))
    parts = []
    for some in torch.split(windows, _WINDOWS):
        ids = torch.cat([lead.expand(len(some), -1), some], 1)
        parts.append(inputs_of(layer, model, ids)[:, len(lead) :].flatten(0, 1))
    return torch.cat(parts)


@torch.no_grad()
def greedy_tokens(model: Any, windows: Tensor, *, first: int | None = None) -> Tensor:
    """The token that a model would choose after every token of windows, (windows * size,)."""
    layer, states = output_layer(model), read_states(model, windows, first=first)
    return torch.cat([layer(some).argmax(-1) for some in torch.split(states, _STATES)]).cpu()


# -- heads -------------------------------------------------------------------------------------------------------------


def frequent_tokens(tokens: Tensor, count: int, vocabulary: int) -> Tensor:
    """The ``count`` most frequent tokens of a text, by their number; of ties, and of those unseen, the first ones.

    Example:
        >>> frequent_tokens(torch.tensor([5, 3, 5, 4]), 4, 6)
        tensor([0, 3, 4, 5])
    """
    if not 1 <= count <= vocabulary:
        raise InputError(f"list: expected 1 to {vocabulary} tokens, as many as the vocabulary has, found {count}")
    seen = torch.bincount(tokens, minlength=vocabulary)
    return seen.argsort(descending=True, stable=True)[:count].sort().values


class ExactRows:
    """The exact product with all rows of a layer, or with those of a list of tokens."""

    exactly, estimates = 0, False

    def __init__(self, layer: Any, tokens: Tensor | None = None) -> None:
        bias = getattr(layer, "bias", None)
        rows = slice(None) if tokens is None else tokens
        self.weight, self.bias = layer.weight.detach()[rows], None if bias is None else bias.detach()[rows]
        self.tokens, self.bytes_read = tokens, 0
        parts = (part for part in (self.weight, self.bias) if part is not None)
        self._bytes = sum(part.numel() * part.element_size() for part in parts)

    def __call__(self, state: Tensor) -> int:
        self.bytes_read += self._bytes
        best = F.linear(state[None, None], self.weight, self.bias).argmax(-1)
        return int(best if self.tokens is None else self.tokens[best])


class AdaptiveRows:
    """The head that `accelerate_head` gives a model."""

    def __init__(self, layer: AdaptiveHead) -> None:
        self.layer, self.estimates = layer, layer.head.estimates(1)

    @property
    def bytes_read(self) -> int:
        return self.layer.bytes_read

    @property
    def exactly(self) -> int:
        return self.layer.exactly

    def __call__(self, state: Tensor) -> int:
        return int(self.layer(state[None, None]).argmax(-1))


Named = tuple[str, str | None, DraftHead]  # the head, the text that it was fitted to, and what proposes


def make_heads(
    model: Any,
    texts: Mapping[str, Parts],
    *,
    size: int,
    first: int | None = None,
    eps: float = 0.3,
    delta: float = 0.01,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> list[Named]:
    """The exact head and, for every text, the adaptive head (k = 1) and the list of its ``size`` frequent tokens."""
    layer: Any = output_layer(model)
    lists = {name: frequent_tokens(parts.counted, size, len(layer.weight)) for name, parts in texts.items()}
    heads: list[Named] = [("exact", None, ExactRows(layer))]
    for name, parts in texts.items():
        progress(f"{name}: calibrating", 0)
        queries = read_states(model, parts.calibration, first=first)
        generator = torch.Generator().manual_seed(seed)
        adaptive = accelerate_head(model, queries, eps=eps, delta=delta, k=1, generator=generator)
        restore_head(model)
        heads.append(("adaptive", name, AdaptiveRows(adaptive.eval())))
        heads.append(("list", name, ExactRows(layer, lists[name])))
    return heads


@torch.no_grad()
def propose(
    heads: Sequence[Named], states: Tensor, *, seed: int = 0, progress: ProgressCallback = no_progress
) -> list[Proposals]:
    """What every head proposes at states (rows, d): each state goes to all heads, in random order.

    So no cache is warm when a head is asked, as it is not after the rest of a model, and slow spells are shared.
    """
    records: list[list[tuple[int, float, int, int]]] = [[] for _ in heads]
    turns = [(head, record) for (*_, head), record in zip(heads, records, strict=True)]
    order = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)  # those states are counted
        for head, _ in turns:
            head(states[0])  # warm-up
        for state in states:
            order.shuffle(turns)
            for head, record in turns:
                read, exactly = head.bytes_read, head.exactly
                start = time.perf_counter()
                token = head(state)
                ms = 1e3 * (time.perf_counter() - start)
                record.append((token, ms, head.bytes_read - read, head.exactly - exactly))
            progress("drafting", 1 / len(states))
    found = []
    for (name, calibration, head), record in zip(heads, records, strict=True):
        tokens, times, read_by_state, fallbacks = (torch.tensor(column) for column in zip(*record, strict=True))
        measured = tokens, times.double(), read_by_state, fallbacks.bool()
        found.append(Proposals(name, calibration, *measured, head.estimates))
    return found


# -- figures -----------------------------------------------------------------------------------------------------------


def accepted_length(accepted: Tensor) -> float:
    """Mean number of tokens before the first that is refused, in blocks of `BLOCK` within windows (windows, size).

    Example:
        >>> accepted_length(torch.tensor([[True, True, False, True, True, True, True, True, False]]))
        3.0
    """
    blocks = accepted[:, : accepted.shape[1] // BLOCK * BLOCK].reshape(-1, BLOCK)
    return float(blocks.long().cumprod(1).sum(1).double().mean())


def summary(use: str, found: Sequence[Proposals], target: Tensor | None = None, *, window: int) -> list[dict[str, Any]]:
    """A row for each head over the held-out text ``use``, the exact one first, to which ratios are.

    Args:
        target: the target's tokens; None: those of the exact head, which is then accepted always.
        window: consecutive states.
    """
    from scipy.stats import binomtest

    exact, rows = found[0], []
    expected = exact.tokens if target is None else target
    for one in found:
        accepted = one.tokens == expected
        interval = binomtest(int(accepted.sum()), len(accepted)).proportion_ci()
        read = float(one.bytes_read.double().mean())
        rows.append(
            {
                "calibration": one.calibration,
                "use": use,
                "head": one.head,
                "states": len(accepted),
                "acceptance": float(accepted.double().mean()),
                "low": float(interval.low),
                "high": float(interval.high),
                "accepted_length": accepted_length(accepted.view(-1, window)),
                "as_exact": float((one.tokens == exact.tokens).double().mean()),
                "ms": float(one.ms.median()),
                "ms_mean": float(one.ms.mean()),
                "ms_p99": float(one.ms.quantile(0.99)),
                "time_ratio": float(exact.ms.median() / one.ms.median()),
                "mean_ratio": float(exact.ms.mean() / one.ms.mean()),
                "bytes_read": read,
                "bytes_ratio": float(exact.bytes_read.double().mean()) / read,
                "fallback_share": float(one.fallback.double().mean()) if one.estimates else None,
            }
        )
    return rows


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Acceptance with its interval, a panel for each text that is drafted."""
    uses = list(dict.fromkeys(row["use"] for row in rows))
    figure = new_figure(5 * len(uses), 4)
    panels = figure.subplots(1, len(uses), squeeze=False, sharey=True)[0]
    for panel, use in zip(panels, uses, strict=True):
        some = [row for row in rows if row["use"] == use]
        names = [row["head"] if row["calibration"] is None else f"{row['head']}\n{row['calibration']}" for row in some]
        low, high = ([abs(row[end] - row["acceptance"]) for row in some] for end in ("low", "high"))
        panel.errorbar(range(len(some)), [row["acceptance"] for row in some], [low, high], fmt="o", capsize=3)
        panel.set_xticks(range(len(some)), names)
        panel.set_title(f"drafting {use}", fontsize="medium")
    panels[0].set_ylabel("accepted")
    return figure
