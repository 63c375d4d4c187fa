"""Perplexity of a text from the logits of an adaptive head, beside that from the exact product."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.heads import exact_logits
from softsieve.comparisons.output import new_figure
from softsieve.heads import AdaptiveSoftmax, DriftWarning
from softsieve.integrations.hidden_states import Head, collect, tokens_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KS = (1, 8, 64)
_TEXT = "text"
_AT_A_TIME = 16  # states whose exact logits are there at a time


class Reading(NamedTuple):
    """A text as the output layer of a model sees it."""

    head: Head  # with the states of one text: those to calibrate with, and later ones to measure
    following: Tensor  # (measured,): the token after each state that is measured


class Losses(NamedTuple):
    """What a head makes of the tokens that are measured; (measured,) each."""

    k: int | None  # of an adaptive head: so many of its largest logits are exact
    loss: Tensor  # float64: negative log-likelihood in nats
    bytes_read: Tensor  # int64
    exactly: Tensor  # bool: answered with the exact product


def read(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    calibration: int = 4000,
    tokens: int = 2000,
    first: int | None = None,
    window: int = 256,
    place: str = _TEXT,
    progress: ProgressCallback = no_progress,
) -> Reading:
    """Hidden states over a text, in windows that know nothing of each other.

    The state at the end of a window is measured with the token that the next window begins with.

    Args:
        model, tokenizer: of Hugging Face.
        calibration, tokens: states to calibrate with, and the tokens after them to measure.
        first: the token to begin every window with.
        place: what to call the text in errors.

    Raises:
        InputError: when the text is too short, or the model cannot read it.
    """
    count = calibration + tokens
    ids = tokens_of(tokenizer, text, count=count + 1, place=place)
    head = collect(
        model,
        {_TEXT: ids[:-1]},
        first=first,
        test_share=tokens / count,
        window=window,
        progress=lambda rows: progress("hidden states", rows / count),
    )
    return Reading(head, ids[calibration + 1 :])


def measure(
    reading: Reading,
    *,
    ks: Sequence[int] = KS,
    eps: float = 0.3,
    delta: float = 0.01,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> list[Losses]:
    """What the exact head makes of the text, and for every k a cascade that is asked one state at a time.

    Of the states to calibrate with, every other one is for the index. The larger k, the more logits are exact.
    """
    head, ks = reading.head, sorted(set(ks))
    calibrating = head.corpora[_TEXT].calibration
    share = 1 / (1 + 2 * len(ks))

    def part(what: str, done: float) -> None:
        progress(what, share * done)

    found = [_exact(reading)]
    sieve = AdaptiveSoftmax(head.weight, head.bias, eps=eps, delta=delta, beta=head.beta, method="cascade", seed=seed)
    sieve.build(calibrating[::2], progress=part)
    for k in ks:  # rising: `logits` goes by the largest k that was calibrated
        sieve.calibrate(calibrating[1::2], k, generator=torch.Generator().manual_seed(seed), progress=part)
        found.append(_asked(sieve, k, reading, progress=part))
    return found


def _exact(reading: Reading) -> Losses:
    head, states = reading.head, reading.head.corpora[_TEXT].test
    parts = zip(torch.split(states, _AT_A_TIME), torch.split(reading.following, _AT_A_TIME), strict=True)
    loss = [losses(exact_logits(head.weight, head.bias, x, beta=head.beta), t, head.softcap) for x, t in parts]
    read = torch.full((len(states),), head.weight.numel() * head.weight.element_size())
    return Losses(None, torch.cat(loss), read, torch.ones(len(states), dtype=torch.bool))


def _asked(sieve: AdaptiveSoftmax, k: int, reading: Reading, *, progress: ProgressCallback) -> Losses:
    states, softcap = reading.head.corpora[_TEXT].test, reading.head.softcap
    loss, read, exactly = [], [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)  # those states are counted
        for state, token in zip(states, reading.following, strict=True):
            loss.append(losses(sieve.logits(state), token, softcap))
            answer = sieve.topk(state, k)  # reads the same
            read.append(answer.bytes_read)
            exactly.append(answer.exact)
            progress(f"perplexity, k = {k}", 1 / len(states))
    return Losses(k, torch.stack(loss), torch.stack(read), torch.stack(exactly))


def losses(logits: Tensor, tokens: Tensor, softcap: float | None) -> Tensor:
    """Negative log-likelihood of tokens (...) from logits (..., n), in float64.

    Example:
        >>> losses(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), None)
        tensor([0.6931, 0.3133], dtype=torch.float64)
    """
    logits = logits.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return -logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def summary(found: Sequence[Losses]) -> list[dict[str, Any]]:
    """A row for each head, the exact one first.

    ``ratio`` is that of its perplexity to the exact one, ``ratio_error`` the standard error of that over the tokens.

    Example:
        >>> read, yes = torch.tensor([80, 80]), torch.tensor([True, True])
        >>> exact = Losses(None, torch.tensor([0.0, 1.0], dtype=torch.float64), read, yes)
        >>> rows = summary([exact, Losses(1, exact.loss + 0.1, read // 8, ~yes)])
        >>> [(row["head"], round(row["ratio"], 4), row["exact_share"], row["bytes_ratio"]) for row in rows]
        [('exact', 1.0, 1.0, 1.0), ('adaptive', 1.1052, 0.0, 8.0)]
    """
    exact, rows = found[0], []
    for one in found:
        apart, loss = one.loss - exact.loss, float(one.loss.mean())
        ratio = math.exp(float(apart.mean()))
        read = float(one.bytes_read.double().mean())
        rows.append(
            {
                "head": "exact" if one.k is None else "adaptive",
                "k": one.k,
                "tokens": len(one.loss),
                "loss": loss,
                "perplexity": math.exp(loss),
                "ratio": ratio,
                "ratio_error": ratio * float(apart.std(correction=0)) / len(apart) ** 0.5,
                "exact_share": float(one.exactly.double().mean()),
                "bytes_read": read,
                "bytes_ratio": float(exact.bytes_read.double().mean()) / read,
            }
        )
    return rows


def draw(found: Sequence[Losses]) -> Figure:
    """How far losses are from the exact ones, for every k."""
    exact, heads = found[0], found[1:]
    figure = new_figure(5 * len(heads), 4)
    panels = figure.subplots(1, len(heads), squeeze=False, sharey=True)[0]
    for panel, one, row in zip(panels, heads, summary(found)[1:], strict=True):
        panel.axhline(0, color="grey", lw=0.5)
        panel.plot(exact.loss, one.loss - exact.loss, ".", ms=3)
        title = f"k = {one.k}: perplexity {row['ratio']:.4f} of the exact one, bytes 1/{row['bytes_ratio']:.1f}"
        panel.set_title(title, fontsize="medium")
        panel.set_xlabel("loss of a token with the exact head, nats")
    panels[0].set_ylabel("adaptive - exact, nats")
    return figure
