"""A language model that writes, one token at a time: how long it takes, and how much of that its output layer.

Also what a head can be calibrated with, and how often an adaptive head says what the exact product would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softsieve._progress import ProgressCallback, no_progress
from softsieve.errors import InputError
from softsieve.heads.sampling import draw
from softsieve.integrations.adaptive_head import AdaptiveHead
from softsieve.integrations.hidden_states import check_size, collect, load_model, output_layer, tokens_of

WINDOW = 256  # tokens that the model reads, or writes, in one go for a calibration
STARTS = ("The", "In", "A", "I", "It", "When", "How", "There", "One", "If", "Once", "My", "This", "What", "For", "Dear")
_TOGETHER = 16  # texts that are written at a time


class Choice(NamedTuple):
    """How a token is chosen: the one with the largest logit at temperature 0, else as by `AdaptiveSoftmax.sample`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


GREEDY = Choice()
Stream = Callable[[int], object]  # called with every token


def ignore_token(token: int) -> None:
    """The `Stream` of who does not watch."""


class Written(NamedTuple):
    """What a model wrote, and what that took; nothing of the prompt is counted."""

    tokens: Tensor  # (new,)
    seconds: float
    head_seconds: float  # of these in the output layer
    bytes_read: int  # by the output layer
    exactly: int  # tokens that took its exact product


class Figures(NamedTuple):
    """A head over some texts: means over their tokens."""

    tokens: int
    tokens_per_second: float
    head_ms: float  # a token
    head_share: float  # of the time
    bytes_read: float  # a token, by the head
    exactly: int  # tokens that took the exact product


class Agreement(NamedTuple):
    """How often two heads have the same largest logit."""

    agreed: int
    steps: int


def load(name: str, *, dtype: torch.dtype) -> Any:
    """The causal language model of a name or folder on the CPU, its parameters in ``dtype``."""
    model = load_model(name, dtype=dtype).to("cpu")
    for parameter in model.parameters():  # and no buffers: frequencies of positions need all their digits
        parameter.data = parameter.data.to(dtype)
    return model


def longest_text(model: Any, default: int = 1 << 30) -> int:
    """Tokens that a model can read."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or default


def prompt_tokens(
    model: Any, tokenizer: Any, prompt: str, *, tokens: int, first: int | None = None, place: str = "prompt"
) -> Tensor:
    """The tokens of a prompt after which the model can write so many more, ``first`` before them, (length,).

    Refused when it has no tokens, others than the model knows, or too many. ``place`` names it in the error.
    """
    longest = longest_text(model)
    if tokens >= longest:
        raise InputError(f"tokens: expected fewer than the {longest} that the model reads, found {tokens}")
    if not prompt.strip():
        raise InputError(f"{place}: expected text, found none")
    own = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
    if not own:
        raise InputError(f"{place}: expected text of which the tokenizer makes tokens, found {prompt!r}")
    ids = torch.tensor(own if first is None else [first, *own])
    check_size(model, {place: ids}, ids[:0], 1)
    if len(ids) + tokens > longest:
        raise InputError(
            f"{place}: expected at most {longest - tokens} tokens, because the model reads {longest} and {tokens} are "
            f"to come, found {len(ids)}"
        )
    return ids


def choose(logits: Tensor, choice: Choice, generator: torch.Generator | None = None) -> Tensor:
    """The next token of every text, from logits (..., n).

    Example:
        >>> choose(torch.tensor([[0.0, 9.0, 1.0]]), GREEDY).tolist()
        [1]
        >>> choose(torch.tensor([[0.0, 9.0, 9.0]]), Choice(1.0, top_k=1)).item() in (1, 2)
        True
    """
    if choice.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float().cpu()  # where the generator is
    if choice.top_k is None:
        return draw(logits, choice.temperature, choice.top_p, generator)
    best = logits.topk(min(choice.top_k, logits.shape[-1]))
    drawn = draw(best.values, choice.temperature, choice.top_p, generator)
    return best.indices.gather(-1, drawn[..., None])[..., 0]


@torch.no_grad()
def write(
    model: Any, prompt: Tensor, *, tokens: int, choice: Choice = GREEDY, generator: torch.Generator | None = None,
    stream: Stream = ignore_token,
) -> Written:  # fmt: skip
    """Let a model write exactly so many tokens after a prompt (length,), also beyond the end of its text.

    The model has its own or an adaptive output layer. What ``stream`` takes, which gets every token, does not count.
    """
    layer = output_layer(model)
    cache, last = _read(model, prompt[:-1]), prompt[-1:]
    before = (layer.exactly, layer.bytes_read) if isinstance(layer, AdaptiveHead) else (0, 0)
    written: list[int] = []
    seconds = head_seconds = 0.0
    with watched(layer) as calls:
        for _ in range(tokens):
            start = time.perf_counter()
            logits, cache = _step(model, last[None], cache)
            last = choose(logits, choice, generator)
            written.append(int(last))
            seconds += time.perf_counter() - start
            head_seconds += calls.pop()[-1]
            stream(written[-1])
    exactly, read = tokens, tokens * weight_bytes(layer)
    if isinstance(layer, AdaptiveHead):
        exactly, read = layer.exactly - before[0], layer.bytes_read - before[1]
    return Written(torch.tensor(written), seconds, head_seconds, read, exactly)


@torch.no_grad()
def agreement(model: Any, prompt: Tensor, text: Tensor, *, stream: Stream = ignore_token) -> Agreement:
    """How often the largest logit of a model's adaptive head is the exact product's, of equal ones any.

    The model is given a text after a prompt, token by token, so that one difference does not lead to others.
    """
    layer = _get_adaptive_head(model)
    cache, agreed = _read(model, prompt[:-1]), 0
    with watched(layer) as calls:
        for before, after in zip([int(prompt[-1]), *text[:-1].tolist()], text.tolist(), strict=True):
            _, cache = _step(model, torch.tensor([[before]]), cache)
            hidden, logits, _ = calls.pop()
            exact = layer.replaced(hidden).flatten()
            agreed += int(exact[logits.argmax()] == exact.max())
            stream(after)
    return Agreement(agreed, len(text))


@contextmanager
def exact_head(model: Any) -> Iterator[None]:
    """A model with an adaptive head has its own output layer for a while."""
    layer = _get_adaptive_head(model)
    model.set_output_embeddings(layer.replaced)
    try:
        yield
    finally:
        model.set_output_embeddings(layer)


@contextmanager
def watched(layer: nn.Module) -> Iterator[list[tuple[Tensor, Tensor, float]]]:
    """What a layer is given, what it gives and the seconds that takes, call by call."""
    started: list[float] = []
    calls: list[tuple[Tensor, Tensor, float]] = []

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        started.append(_read_clock(inputs[0]))

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((inputs[0], output, _read_clock(output) - started.pop()))

    hooks = layer.register_forward_pre_hook(before), layer.register_forward_hook(after)
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def figures(runs: Sequence[Written]) -> Figures:
    """Over all tokens of some texts.

    Example:
        >>> run = Written(torch.tensor([5, 7]), 0.5, 0.1, 3000, 1)
        >>> figures([run, run])
        Figures(tokens=4, tokens_per_second=4.0, head_ms=50.0, head_share=0.2, bytes_read=1500.0, exactly=2)
    """
    tokens = sum(len(run.tokens) for run in runs)
    seconds, head = sum(run.seconds for run in runs), sum(run.head_seconds for run in runs)
    read, exactly = sum(run.bytes_read for run in runs), sum(run.exactly for run in runs)
    return Figures(tokens, tokens / seconds, 1000 * head / tokens, head / seconds, read / tokens, exactly)


def weight_bytes(layer: Any) -> int:
    """What the exact product reads for a token."""
    parts = [layer.weight, getattr(layer, "bias", None)]
    if hasattr(layer.weight, "__tensor_flatten__"):  # made of others, as quantised ones are
        parts[:1] = [getattr(layer.weight, name) for name in layer.weight.__tensor_flatten__()[0]]
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


class Transcript:
    """The text of tokens after a prompt as they come: whole characters, and nothing from one of the ``ends`` on."""

    def __init__(self, tokenizer: Any, prompt: Tensor, ends: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids, self._ends, self._over = prompt.tolist(), set(ends), False
        self._said = len(self._text())

    def add(self, token: int) -> str:
        """What one more token adds; nothing until it is whole."""
        self._over = self._over or token in self._ends
        if self._over:
            return ""
        self._ids.append(token)
        text = self._text()
        if text.endswith("\ufffd"):  # of bytes that are no character yet
            return ""
        new, self._said = text[self._said :], max(self._said, len(text))
        return new

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)  # type: ignore[no-any-return]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Those that end a text, as the model or else its tokenizer has it."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def text_states(
    model: Any, tokenizer: Any, text: str, *, count: int, first: int | None = None, place: str = "text",
    progress: ProgressCallback = no_progress,
) -> Tensor:  # fmt: skip
    """Hidden states over the first tokens of a text, (count, d); ``place`` names it when it has fewer."""

    def advance(rows: int) -> None:
        progress("hidden states", rows / count)

    ids = tokens_of(tokenizer, text, count=count, place=place)
    head = collect(model, {place: ids}, first=first, window=min(WINDOW, longest_text(model)), progress=advance)
    return torch.cat(head.corpora[place])


@torch.no_grad()
def own_states(
    model: Any, tokenizer: Any, *, count: int, first: int | None = None, generator: torch.Generator | None = None,
    progress: ProgressCallback = no_progress,
) -> Tensor:  # fmt: skip
    """Hidden states over texts that the model writes itself, drawn at temperature 1 after short starts, (count, d)."""
    layer = output_layer(model)
    # Only the first token of each start: texts of one length need no padding.
    made = [tokenizer(start, add_special_tokens=False, verbose=False).input_ids[:1] for start in STARTS]
    starts = [token for ids in made for token in ids]
    if not starts:
        raise InputError("tokenizer: expected one that makes tokens of English words, found none: give a text instead")
    lead = [] if first is None else [first]
    length = min(WINDOW, longest_text(model) - len(lead))
    texts = torch.tensor([[*lead, starts[number % len(starts)]] for number in range(-(-count // length))])
    check_size(model, {"starts": texts}, texts[:0, 0], 1)
    parts = []
    for some in torch.split(texts, _TOGETHER):
        cache, last = _read(model, *some[:, :-1]), some[:, -1:]
        states = []
        with watched(layer) as calls:
            for _ in range(length):
                logits, cache = _step(model, last, cache)
                last = choose(logits, Choice(1.0), generator)[:, None]
                states.append(calls.pop()[0].reshape(len(some), -1).cpu())
                progress("a text to calibrate with", len(some) / (len(texts) * length))
        parts.append(torch.stack(states, 1).flatten(0, 1))  # text after text
    return torch.cat(parts)[:count]


def _read(model: Any, *texts: Tensor) -> Any:
    """Keys and values of texts of one length, without logits; None of nothing."""
    ids = torch.stack(texts)
    if not ids.numel():
        return None
    return _get_cache(model, model.base_model(input_ids=ids.to(model.device), use_cache=True))


def _step(model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Logits after one more token of each text (texts, 1), and what is kept."""
    out = model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    return out.logits[:, -1], _get_cache(model, out)


def _get_cache(model: Any, out: Any) -> Any:
    cache = getattr(out, "past_key_values", None)
    if cache is None:
        raise InputError(f"model: expected one that keeps keys and values, found {type(model).__name__}")
    return cache


def _get_adaptive_head(model: Any) -> AdaptiveHead:
    layer = output_layer(model)
    if not isinstance(layer, AdaptiveHead):
        raise InputError("model: expected an adaptive head, found the model's own output layer")
    return layer


def _read_clock(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
