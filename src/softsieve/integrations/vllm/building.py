"""Making the index of a model's output layer: hidden states over a text, then a calibrated head for every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softsieve import _checks
from softsieve._files import check_writable
from softsieve._progress import ProgressCallback, no_progress
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax, Coverage
from softsieve.heads.cascade import calibration
from softsieve.integrations import hidden_states
from softsieve.integrations.distributed import shard_file
from softsieve.integrations.hidden_states import Head
from softsieve.integrations.vllm import engine_states, index_folder
from softsieve.integrations.vllm.index_folder import FILE, Description, shard_rows
from softsieve.integrations.vllm.settings import BESIDE
from softsieve.tasks.files import read_text

KS = (4, 20, 64)  # for greedy tokens and their ties in 16 bits, for log-probabilities, for draws with top_k
EPS, DELTA = 0.1, 0.01
TOKENS = 0.9  # eps of the least k, where there are others: it serves tokens whose probabilities nobody asks for
TEST = 8  # of so many states one is not calibrated with, but measured

Say = Callable[[str], object]


class Built(NamedTuple):
    """What came out."""

    folder: Path
    description: Description
    first: int | None  # the token that windows began with
    coverage: dict[int, list[Coverage]]  # by k, of every rank's rows: on states that were not calibrated with


def build_index(
    model: str,
    text: Path,
    out: Path | None = None,
    *,
    ks: Sequence[int] = KS,
    eps: float = EPS,
    delta: float = DELTA,
    ranks: int = 1,
    count: int = 4000,
    window: int = 256,
    dtype: torch.dtype | None = None,
    bos: bool | None = None,
    from_vllm: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: ProgressCallback = no_progress,
    say: Say = lambda line: None,
) -> Built:
    """Write the index of a model's output layer to a folder.

    Called again after it was stopped, it goes on: hidden states and shards that are there, and are those that this call
    would make, are kept. Until all is done the folder has no ``index.json``, and is not taken for an index.

    Args:
        model: name or folder of a causal language model of Hugging Face.
        text: a UTF-8 file like what will be served, may be .gz or .xz.
        out: a folder; None: ``softsieve`` in the folder of the model, where an engine looks for it.
        ks: so many of the largest logits will be asked for. The least of several serves tokens without probabilities.
        eps, delta: relative error of a probability, and chance of a wrong answer.
        ranks: processes that the rows will be spread over, as ``--tensor-parallel-size`` says.
        count: hidden states.
        window: tokens that the model reads at a time.
        dtype: of the engine's weight; None: the model's own if it has 16 bits, else bfloat16, as vLLM takes it.
        bos: whether windows begin with the token for that; None: as the tokenizer does, or else as the model does
            better.
        from_vllm: whether vLLM, which must be installed, goes on with pieces of the text, and the states are those of
            what it writes; else they are those of the text.
        device: where the engine will answer: calibrations are of a kind of device.
        seed: of what is drawn.
        progress: told how far it is.
        say: told what is kept from before.

    Raises:
        InputError: when the model, the text or the folder cannot be used.
    """
    for name, value, least in (*(("k", k, 1) for k in ks), ("ranks", ranks, 1), ("count", count, 2 * TEST)):
        _checks.whole_number(name, value, least, 2**31)
    _checks.whole_number("window", window, 2, 2**31)
    wanted = sorted(set(ks))
    needed = 2 * calibration.needed(_checks.open_unit("delta", delta) / ranks)
    if count - count // TEST < needed:
        raise InputError(
            f"states: expected at least {needed * TEST // (TEST - 1) + 1} for delta {delta:g} of {ranks} ranks, "
            f"found {count}"
        )
    if not wanted:
        raise InputError("k: expected some, found none")
    out = _place(model, out)
    content = read_text(text)
    tokenizer = hidden_states.load_tokenizer(model)
    tokens = hidden_states.tokens_of(tokenizer, content, count=count, place=str(text))
    dtype = dtype or _own_dtype(model)
    progress("loading the model", 0.0)
    network = hidden_states.load_model(model, dtype=dtype)
    if bos is None:
        first = hidden_states.measured_first_token(network, tokenizer, tokens)
    else:
        first = hidden_states.first_token(tokenizer, bos=bos)
    out.mkdir(parents=True, exist_ok=True)
    source = (lambda: _from_engine(model, tokens, first, window, dtype, seed)) if from_vllm else None
    head, states = _states(network, tokens, first, out, window, dtype, source, progress, say)
    del network
    if head.softcap is not None:
        raise InputError(f"model {model}: expected logits of a linear layer, found soft-capped ones")
    place = torch.device(device)
    return _shards(head, states, out, wanted, eps, delta, ranks, place, seed, first, progress, say)


def _place(model: str, out: Path | None) -> Path:
    """The folder of the index, which can be written to."""
    if out is None:
        if not Path(model).is_dir():
            raise InputError(f"out: expected a folder for the index of {model}, which is none itself, found none")
        out = Path(model, BESIDE)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: expected a folder, found a file")
    check_writable(out / FILE)
    return out


def _own_dtype(model: str) -> torch.dtype:
    """The dtype that vLLM takes a model in unless it is told another one."""
    from transformers import AutoConfig

    stored = getattr(AutoConfig.from_pretrained(model), "dtype", None)
    return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16


def _from_engine(model: str, tokens: Tensor, first: int | None, window: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Hidden states that vLLM produces."""
    if find_spec("vllm") is None:
        raise InputError("from_vllm: expected vLLM to be installed, found that it is not")
    return engine_states.collect(model, tokens, count=len(tokens), window=window, first=first, dtype=dtype, seed=seed)


def _states(
    network: Any, tokens: Tensor, first: int | None, out: Path, window: int, dtype: torch.dtype,
    source: Callable[[], Tensor] | None, progress: ProgressCallback, say: Say,
) -> tuple[Head, Tensor]:  # fmt: skip
    """The output layer, and hidden states: those of the folder if they are the same, else new ones, which it keeps.

    New ones come from a ``source``, or from reading the text with the network.
    """
    weight = hidden_states.output_layer(network).weight
    digest = hashlib.sha256(tokens.numpy().tobytes())
    digest.update(f"{first} {window} {dtype}{'' if source is None else ' vllm'}".encode())
    digest.update(index_folder.fingerprint(weight.detach(), None).encode())  # type: ignore[operator]
    notes = {"made_of": digest.hexdigest(), "first": "none" if first is None else str(first)}
    try:
        states, earlier = index_folder.read_states(out)
        kept = earlier == notes
    except InputError:
        kept = False
    some = tokens if source is None and not kept else tokens[: 2 * TEST]  # these show what follows the layer

    def report(rows: int) -> None:
        progress("hidden states", 0.5 * rows / len(tokens))

    (out / FILE).unlink(missing_ok=True)
    head = hidden_states.collect(network, {"text": some}, first=first, window=window, dtype=dtype, progress=report)
    if kept:
        say(f"hidden states: {len(states)} from before")
        return head, states
    progress("hidden states", 0.0)
    states = torch.cat(list(head.corpora["text"])) if source is None else source()
    index_folder.write_states(out, states, notes)
    return head, states


def _shards(
    head: Head, states: Tensor, out: Path, ks: list[int], eps: float, delta: float, ranks: int,
    device: torch.device, seed: int, first: int | None, progress: ProgressCallback, say: Say,
) -> Built:  # fmt: skip
    """A calibrated head for the rows of every rank, and the description of all."""
    rows = len(head.weight)
    test, states = len(states) // TEST, states.to(device)
    coverage: dict[int, list[Coverage]] = {k: [] for k in ks}
    fingerprints = []
    for rank in range(ranks):
        part = shard_rows(rows, rank, ranks)
        weight = head.weight[part].to(device)
        bias = None if head.bias is None else head.bias[part].to(device)
        errors = {min(k, len(weight)): error for k, error in _errors(ks, eps).items()}
        path = shard_file(out, rank, ranks)
        shard = _kept(path, weight, bias, errors, eps, delta / ranks, head.beta)
        if shard is None:
            shard = AdaptiveSoftmax(
                weight, bias, eps=eps, delta=delta / ranks, beta=head.beta, method="cascade", seed=seed
            )  # which batches to answer is the engine's to say
            _calibrate(shard, states[:-test], errors, seed, lambda what, share: progress(what, 0.5 * share / ranks))
            shard.eps = eps
            shard.save(path, weight=False)
        else:
            say(f"rank {rank}: from before")
        fingerprints.append(index_folder.fingerprint(weight, bias))
        for k in ks:
            own_k = min(k, len(weight))
            shard.eps = errors[own_k]
            coverage[k].append(shard.coverage(states[-test:], own_k))
    dtype = str(head.weight.dtype).removeprefix("torch.")
    description = Description(rows, head.weight.shape[1], dtype, head.beta, eps, delta, ks, fingerprints)
    index_folder.write_description(out, description)
    return Built(out, description, first, coverage)


def _calibrate(
    shard: AdaptiveSoftmax, states: Tensor, errors: dict[int, float], seed: int, progress: ProgressCallback
) -> None:
    """Build the index of some rows with a quarter of the states, and calibrate every k for its error with the others.

    The more states decide, the more of them may be wrong, and the narrower margins are: the basis takes fewer.
    """
    generator = torch.Generator().manual_seed(seed)
    mixed, few = torch.randperm(len(states), generator=generator).to(states.device), len(states) // 4

    def steps(count: int) -> ProgressCallback:
        return lambda what, share: progress(what, share * count / (len(errors) + 1))

    shard.build(states[mixed[:few]], progress=steps(1))
    for error in sorted(set(errors.values())):
        shard.eps, ks = error, [k for k in errors if errors[k] == error]
        shard.calibrate(states[mixed[few:]], ks, generator=generator, progress=steps(len(ks)))


def _errors(ks: list[int], eps: float) -> dict[int, float]:
    """What is promised of probabilities, by k.

    Example:
        >>> _errors([4, 20], 0.1), _errors([20], 0.1)
        ({4: 0.9, 20: 0.1}, {20: 0.1})
    """
    return {k: max(eps, TOKENS) if k == ks[0] < ks[-1] else eps for k in ks}


def _kept(
    path: Path, weight: Tensor, bias: Tensor | None, errors: dict[int, float], eps: float, delta: float, beta: float
) -> AdaptiveSoftmax | None:
    """The shard that a file has, if it promises the same of the same rows."""
    try:
        shard = AdaptiveSoftmax.load(path, weight=weight, bias=bias)
    except InputError:
        return None
    calibrated = {k: fit.eps for k, fit in shard.calibrations.items()}
    promised = shard.eps, shard.delta, shard.beta, shard.method, calibrated
    return shard if promised == (eps, delta, beta, "cascade", errors) else None
