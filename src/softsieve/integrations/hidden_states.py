"""What the output layer of a Hugging Face causal language model gets to see, collected over a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.extras import loaded, package
from softsieve.integrations.gguf_file import SUFFIX
from softsieve.tasks.hf import no_bar

_PIECE = 1 << 16  # characters given to the tokenizer at a time
_TRIED, _LOST = 128, 1.0  # tokens with which a first token is tried, and what it has to be worth
_CHECKED = 16  # tokens over which the model's own logits are compared


class Corpus(NamedTuple):
    """Hidden states of a text in reading order, the test states from later in it than those to calibrate with."""

    calibration: Tensor  # (rows, d)
    test: Tensor


class Head(NamedTuple):
    """An output layer and the hidden states it was given: ``logits = beta * (x @ weight.T + bias)``.

    Where ``softcap`` is not None the model goes on to ``softcap * tanh(logits / softcap)``: its largest logits are
    those of the linear layer, in the same order, its probabilities are not.
    """

    weight: Tensor  # (n, d)
    bias: Tensor | None  # (n,)
    beta: float
    softcap: float | None
    corpora: dict[str, Corpus]  # by the name of the text


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a name, folder or GGUF file."""
    transformers = package("transformers", f"model {name}")
    complaint = f"model {name}: the tokenizer cannot be loaded"
    place, options = _where(name)
    return loaded(lambda: transformers.AutoTokenizer.from_pretrained(place, **options), complaint)


def _where(name: str) -> tuple[str, dict[str, str]]:
    """What transformers calls a model: its name or folder; of a GGUF file the folder, and the file in it."""
    path = Path(name)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == SUFFIX else (name, {})


def label_of(name: str) -> str:
    """What records call a model: of a path the last part, which says nothing of a machine; else the name on the hub.

    Example:
        >>> label_of("HuggingFaceTB/SmolLM2-135M"), label_of(str(Path.cwd())) == Path.cwd().name
        ('HuggingFaceTB/SmolLM2-135M', True)
    """
    return Path(name).name if Path(name).exists() else name


def load_model(name: str, *, dtype: torch.dtype) -> Any:
    """The causal language model of a name, folder or GGUF file, ready to run: on a GPU in ``dtype``, on a CPU in fp32.

    Refused when it comes without an output layer of its own, whose weights would be made up.
    """
    transformers = package("transformers", f"model {name}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place, source = _where(name)
    options = {**source, "dtype": dtype if device == "cuda" else torch.float32, "output_loading_info": True}
    load = transformers.AutoModelForCausalLM.from_pretrained
    complaint = f"model {name}: cannot be loaded as a causal language model"
    with no_bar(transformers.utils.logging):
        model, info = loaded(lambda: load(place, **options), complaint)
    weight = output_layer(model).weight
    parameters = dict(model.named_parameters(remove_duplicate=False))
    made_up = [key for key in info["missing_keys"] if parameters.get(key) is weight]
    if made_up:
        raise InputError(f"model {name}: expected a language model, found no output embeddings ({made_up[0]})")
    return model.to(device).eval()


def layer_of(model: Any) -> Any:
    """The output layer of a model, whatever it is; refused when there is none."""
    try:
        layer = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        layer = None
    if layer is None:
        raise InputError(f"model: expected one with output embeddings, found {type(model).__name__}")
    return layer


def output_layer(model: Any) -> nn.Module:
    """The linear layer that makes the logits; refused when its weight is no matrix of floating-point numbers."""
    layer = layer_of(model)
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise InputError(f"model: expected output embeddings with a matrix, found {type(layer).__name__}")
    return layer  # type: ignore[no-any-return]


def first_token(tokenizer: Any, *, bos: bool | None = None) -> int | None:
    """The token that a text begins with, None for none: with ``bos`` None as the tokenizer has it, else as asked."""
    token: int | None = tokenizer.bos_token_id
    if bos and token is None:
        raise InputError("bos: expected a tokenizer with a token for the beginning of a text, found none")
    if bos is None:
        bos = token is not None and tokenizer("").input_ids[:1] == [token]
    return token if bos else None


@torch.no_grad()
def measured_first_token(model: Any, tokenizer: Any, ids: Tensor) -> int | None:
    """The token that a model wants texts to begin with, None for none, also where its tokenizer does not say.

    As the tokenizer has it. Where that begins texts with nothing, but knows a token for it, both are tried over some
    tokens of a text: a model that cannot do without loses more than `_LOST` nats a token.
    """
    first, token = first_token(tokenizer), tokenizer.bos_token_id
    if first is not None or token is None:
        return first
    ids = ids[:_TRIED].to(model.device)
    losses = []
    for lead in ([], [token]):
        tokens = torch.cat([ids.new_tensor(lead), ids])[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(lead) : -1]
        losses.append(float(nn.functional.cross_entropy(logits.float(), ids[1:])))
    return int(token) if losses[0] - losses[1] > _LOST else None


def tokens_of(tokenizer: Any, text: str, *, count: int, place: str = "text") -> Tensor:
    """The first ``count`` tokens of a text, read some lines at a time, without special tokens.

    ``place`` names the text when it has fewer.
    """
    if not text.strip():
        raise InputError(f"{place}: expected text, found none")
    tokens: list[int] = []
    start = 0
    while start < len(text) and len(tokens) < count:
        end = start + _PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        tokens += tokenizer(text[start:end], add_special_tokens=False, verbose=False).input_ids
        start = end
    if len(tokens) < count:
        raise InputError(f"{place}: expected at least {count} tokens, one for each query, found {len(tokens)}")
    return torch.tensor(tokens[:count])


@torch.no_grad()
def collect(
    model: Any, tokens: Mapping[str, Tensor], *, first: int | None = None, test_share: float = 0.5, window: int = 256,
    batch_size: int = 8, dtype: torch.dtype | None = None, progress: Callable[[int], object] = lambda rows: None,
) -> Head:  # fmt: skip
    """The output layer of a causal language model, and what it is given at every token of some texts.

    Each text is read in windows of ``window`` tokens that know nothing of each other, in order. No logits are computed
    but those of a few tokens, which show what the model does with them after the layer.

    Args:
        model: a Hugging Face model.
        tokens: of each text, by its name.
        first: the token to begin every window with; its own state, the same each time, is not collected.
        test_share: share of the states of a text, its last ones, that are for tests.
        window: tokens that the model reads at a time, ``first`` included.
        batch_size: windows that the model reads at a time.
        dtype: of what is returned; None leaves it as it is in the model.
        progress: called with the number of states that were added.

    An `InputError` says that the model cannot read this, that it does not treat its logits as `Head` says, or that a
    state is not finite in ``dtype``.
    """
    layer = output_layer(model)
    lead = torch.tensor([] if first is None else [first], dtype=torch.long)
    check_size(model, tokens, lead, window)
    probe = torch.cat([lead, next(iter(tokens.values()))])[: min(_CHECKED, window)]
    beta, softcap = after_layer(model, layer, probe)
    corpora = {}
    for name, ids in tokens.items():
        test = round(len(ids) * test_share)
        if not 0 < test < len(ids):
            raise InputError(f"{name}: expected queries to calibrate and to test, found {len(ids) - test} and {test}")
        parts = []
        for some in windows(ids, lead, window, batch_size):
            states = inputs_of(layer, model, some)[:, len(lead) :].flatten(0, 1)
            parts.append(_stored(states, dtype, name))
            progress(len(states))
        rows = torch.cat(parts)
        corpora[name] = Corpus(rows[:-test], rows[-test:])
    bias = getattr(layer, "bias", None)
    weight = _stored(layer.weight, dtype, "weight")  # type: ignore[arg-type]
    return Head(weight, None if bias is None else _stored(bias, dtype, "bias"), beta, softcap, corpora)


def check_size(model: Any, tokens: Mapping[str, Tensor], lead: Tensor, window: int) -> None:
    """Refuse windows longer than the model reads, and tokens that it does not know."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or window
    if not len(lead) < window <= longest:
        raise InputError(f"window: expected {len(lead) + 1} to {longest} tokens, found {window}")
    known = model.get_input_embeddings().weight.shape[0]
    largest = max(int(ids.max()) for ids in tokens.values())
    if largest >= known:
        raise InputError(f"tokenizer: expected tokens below {known}, which the model knows, found {largest}")


def windows(ids: Tensor, lead: Tensor, window: int, batch_size: int) -> list[Tensor]:
    """Windows of one length, so that there is nothing to pad; what is left over is a batch of one."""
    size = window - len(lead)
    whole = len(ids) // size * size
    batches = list(torch.split(ids[:whole].view(-1, size), batch_size)) if whole else []
    if whole < len(ids):
        batches.append(ids[None, whole:])
    return [torch.cat([lead.expand(len(rows), -1), rows], 1) for rows in batches]


class _Reached(Exception):  # noqa: N818
    """Carries the states out of a model that has no more to do."""


def inputs_of(layer: nn.Module, model: Any, ids: Tensor) -> Tensor:
    """What the model gives to its output layer; there it ends, before the logits."""

    def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _Reached(inputs[0])

    hook = layer.register_forward_pre_hook(stop)
    try:
        model(input_ids=ids.to(model.device), use_cache=False)
    except _Reached as reached:
        states: Tensor = reached.args[0]
        return states.reshape(*ids.shape, -1)
    finally:
        hook.remove()
    raise InputError(f"model: expected one that uses its output embeddings, found {type(model).__name__}")


def after_layer(model: Any, layer: nn.Module, ids: Tensor) -> tuple[float, float | None]:
    """``beta`` and ``softcap`` of `Head`, confirmed on the model's own logits."""
    plain = layer(inputs_of(layer, model, ids[None])).double()
    logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits.double()
    softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    expected = plain if softcap is None else softcap * torch.tanh(plain / softcap)
    beta = float((logits * expected).sum() / expected.square().sum())
    rounding = 4 * torch.finfo(layer.weight.dtype).eps * float(expected.abs().max())  # type: ignore[arg-type]
    if torch.allclose(logits, expected, rtol=0, atol=rounding):
        return 1.0, softcap
    if softcap is None and torch.allclose(logits, beta * expected, rtol=0, atol=abs(beta) * rounding):
        return beta, None
    raise InputError("model: expected logits that are a linear layer's, scaled or soft-capped, found others")


def _stored(values: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    stored = values.detach().to("cpu", dtype or values.dtype)
    if not stored.isfinite().all():
        raise InputError(f"{name}: expected numbers that {stored.dtype} can hold, found others")
    return stored
