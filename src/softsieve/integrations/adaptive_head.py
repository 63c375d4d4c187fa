"""Language models of Hugging Face whose output layer reads a part of its weight for each new token.

`accelerate_head` puts an `AdaptiveHead` in the place of a model's output embeddings, `restore_head` takes it away.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import _checks
from softsieve._progress import ProgressCallback, no_progress
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax, QuantisedWeight, WeightChanged
from softsieve.heads.quantised import Weight
from softsieve.integrations.hidden_states import (
    after_layer,
    check_size,
    first_token,
    inputs_of,
    output_layer,
    tokens_of,
    windows,
)
from softsieve.integrations.plain_layer import check_linear
from softsieve.integrations.quantised_layer import check_same, readable_layer
from softsieve.tasks.files import read_text

INDEX = "adaptive_head.safetensors"  # in the folder of a model
EPS, DELTA, K = 0.3, 0.01, 1  # unless given
_PROBED = 16  # tokens with which the layer is checked


class AdaptiveHead(nn.Linear):
    """An output layer with the parameters of another: exact for prompts and with gradients, adaptive for new tokens.

    For a new token of a few sequences the logits are those of `AdaptiveSoftmax.logits`: exact for the rows that could
    be among the largest, estimated elsewhere. Names of parameters stay what they were, so tied weights stay tied and
    what is saved can be loaded by anyone. Logits have the dtype that the replaced layer would give them, also under
    autocast; estimates are made in the head's own dtypes, and exact products follow autocast. However coarse that
    dtype is, no estimate becomes equal to one of the k largest logits when it is rounded.

    Where what answers has a quantised weight, a new token's exact product is with its rows; prompts and gradients take
    the layer's own product.

    It counts for one thread: a model that several threads call at once counts wrongly, and answers rightly.

    Attributes:
        head: what answers.
        answered, exactly: new tokens so far, and those of them that were answered with the exact product.
        bytes_read: of index and weight for them; an exact product reads all of the weight, once for a batch.
        prompted: whether the model has begun to read several tokens of each sequence, of which it may ask for the last.
    """

    def __init__(self, layer: Any, head: AdaptiveSoftmax) -> None:
        nn.Module.__init__(self)
        self.weight = layer.weight
        self.bias = getattr(layer, "bias", None)  # type: ignore[assignment]
        self.out_features, self.in_features = self.weight.shape
        self.head = head
        self.answered = 0
        self.prompted = False
        self._exactly: int | Tensor = 0  # tensors on a GPU, which nobody waits for until they are asked for
        self._bytes_read: int | Tensor = 0
        self._layer: tuple[nn.Module] = (layer,)  # in a tuple, it is no part of the model
        self._place = _place(self.weight)

    @property
    def replaced(self) -> nn.Module:
        """The layer that this one stands for."""
        return self._layer[0]

    @property
    def exactly(self) -> int:
        return int(self._exactly)

    @property
    def bytes_read(self) -> int:
        return int(self._bytes_read)

    def forward(self, hidden: Tensor) -> Tensor:
        new = hidden.ndim > 1 and hidden.shape[-2] == 1  # one token of each sequence
        prompted, self.prompted = self.prompted, False
        if self.training or torch.is_grad_enabled() or not new or prompted:
            return F.linear(hidden, self.weight, self.bias)
        self._check()
        # Right after the rest of the model nothing here is in a cache: every operation that can be left out counts.
        rows, beta, dtype = hidden.reshape(-1, hidden.shape[-1]), self.head.beta, _dtype_of_product(hidden)
        estimated = self.head.estimated(rows, dtype)
        self.answered += len(rows)
        if estimated is None:
            return self._exact(hidden, len(rows))
        self._bytes_read, self._exactly = self._bytes_read + estimated.bytes_read, self._exactly + estimated.exactly
        logits, fallbacks = estimated.logits if beta == 1 else estimated.logits.div_(beta), estimated.fallbacks
        if dtype != logits.dtype:
            logits = logits.to(dtype)
        if fallbacks:
            logits[fallbacks] = self._exact(rows[fallbacks], len(fallbacks))
        return logits.view(*hidden.shape[:-1], -1)

    def _exact(self, hidden: Tensor, tokens: int) -> Tensor:
        if isinstance(self.head.weight, QuantisedWeight):
            self._bytes_read, self._exactly = self._bytes_read + self.head.weight.nbytes, self._exactly + tokens
            return self.head.exact_logits(hidden).div_(self.head.beta).to(_dtype_of_product(hidden))
        parts = (value for value in (self.weight, self.bias) if value is not None)
        whole = sum(value.numel() * value.element_size() for value in parts)
        self._bytes_read, self._exactly = self._bytes_read + whole, self._exactly + tokens
        return F.linear(hidden, self.weight, self.bias)

    def _check(self) -> None:
        """Refuse a parameter that has been given other memory, as ``model.to`` and ``model.half`` do."""
        if _place(self._parameters["weight"]) != self._place:
            raise WeightChanged(
                "weight: not where it was when the index was built, as after model.to or model.half: "
                "call restore_head, and accelerate_head again"
            )

    def save_index(self, folder: str | os.PathLike[str]) -> None:
        """Write everything but the weight to ``adaptive_head.safetensors``; with a warning, not if the weight changed.

        Raises:
            InputError: when it cannot be written; what was there stays.
        """
        try:
            self._check()
            self.head.save(Path(folder, INDEX), weight=False)
        except WeightChanged:
            warnings.warn("adaptive head: its index is not saved, for the weight has changed since", stacklevel=3)

    # The weight and the bias of what answers are the parameters, of a copy its own.

    def __getstate__(self) -> dict[str, Any]:
        kept = self.head.__getstate__()
        for name in ("weight", "bias"):  # a quantised weight is no parameter, and has other names
            kept["tensors"].pop(name, None)
        return {**self.__dict__, "head": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state["head"]
        super().__setstate__({name: value for name, value in state.items() if name != "head"})  # type: ignore[no-untyped-call]
        quantised = any(name.startswith("weight.") for name in kept["tensors"])
        own = {"bias": self.bias} if quantised else {"weight": self.weight, "bias": self.bias}
        tensors = {name: value.detach() for name, value in own.items() if value is not None}
        self.head = AdaptiveSoftmax.from_copy({**kept, "tensors": kept["tensors"] | tensors})
        self._place = _place(self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.head!r}"


def _place(weight: Any) -> tuple[int, ...]:
    """Where the numbers of a parameter are, or those of the tensors that it is made of."""
    if type(weight) in (Tensor, nn.Parameter):
        return (weight.data_ptr(),)
    return tuple(getattr(weight, name).data_ptr() for name in weight.__tensor_flatten__()[0])


def _dtype_of_product(hidden: Tensor) -> torch.dtype:
    """That of ``F.linear(hidden, ...)``, which autocast may change."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


class _Saving:
    """``save_pretrained`` of a model with an adaptive head: its index goes to the same folder.

    An object, not a function, so that a copy of the model saves the copy.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.before = model, model.__dict__.get("save_pretrained")

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        model, layer = self.model, self.model.get_output_embeddings()
        save = self.before or type(model).save_pretrained.__get__(model)
        call = inspect.signature(save).bind(save_directory, *args, **options)
        call.apply_defaults()
        main = call.arguments.get("is_main_process", True)
        if not isinstance(layer, AdaptiveHead) or not model.should_save_on_this_rank(main):
            return save(save_directory, *args, **options)
        if not call.arguments.get("push_to_hub", False):
            result = save(save_directory, *args, **options)
            layer.save_index(save_directory)
            return result

        def upload(folder: Any, *args: Any, **options: Any) -> Any:
            layer.save_index(folder)
            return type(model)._upload_modified_files(model, folder, *args, **options)

        model._upload_modified_files = upload  # what is there by then is uploaded
        try:
            return save(save_directory, *args, **options)
        finally:
            del model._upload_modified_files


def collect_queries(
    model: Any,
    tokenizer: Any,
    text: str | os.PathLike[str],
    *,
    count: int = 4000,
    window: int = 256,
    batch_size: int = 8,
) -> Tensor:
    """What the output layer of a model is given at the first tokens of a text, (count, d).

    Args:
        model, tokenizer: of Hugging Face.
        text: the text itself or, as a `Path`, a UTF-8 file of it, which may be a .gz or .xz.
        count: tokens.
        window: tokens that the model reads at a time, knowing nothing of those before.
        batch_size: windows that it reads at a time.

    Raises:
        InputError: when the text has fewer tokens, or the model cannot read it; for a file without text in UTF-8.
    """
    place = "text"
    if isinstance(text, os.PathLike):
        place = str(text)
        text = read_text(Path(text))
    for name, value in {"count": count, "window": window, "batch_size": batch_size}.items():
        _checks.whole_number(name, value, 1, 2**31)
    if not callable(tokenizer) or not hasattr(tokenizer, "bos_token_id"):
        raise InputError(f"tokenizer: expected one of Hugging Face, found {type(tokenizer).__name__}")
    lead = first_token(tokenizer)
    start = torch.tensor([] if lead is None else [lead], dtype=torch.long)
    layer, parts = output_layer(model), []
    ids = tokens_of(tokenizer, text, count=count, place=place)
    check_size(model, {place: ids}, start, window)
    with torch.no_grad():
        for some in windows(ids, start, window, batch_size):
            parts.append(inputs_of(layer, model, some)[:, len(start) :].flatten(0, 1).cpu())
    return torch.cat(parts)


def accelerate_head(
    model: Any,
    queries: Tensor | None = None,
    *,
    eps: float | None = None,
    delta: float | None = None,
    k: int | Sequence[int] | None = None,
    index: str | os.PathLike[str] | None = None,
    weight: QuantisedWeight | None = None,
    generator: torch.Generator | None = None,
    progress: ProgressCallback = no_progress,
) -> AdaptiveHead:
    """Let a model read a part of its output layer's weight for each new token that it generates.

    ``model.generate`` works as before, with any way of choosing tokens. With probability ``1 - delta`` the k largest
    logits of a token are the exact ones, for states like those in ``queries``.

    From now on ``model.save_pretrained`` also writes the index, to ``adaptive_head.safetensors``. A model that is
    loaded from such a folder needs no queries any more: ``accelerate_head(model)``.

    The weight may be quantised by torchao to 8 or 4 bits, on a CPU: then the exact logits are those of its rows. A
    model that was loaded from a GGUF file has a weight in floating point; ``weight`` brings the rows of the file.

    Args:
        model: a Hugging Face causal language model, on a CPU or a GPU.
        queries: hidden states that its output layer gets, (N, d); `collect_queries` makes them from a text. None: the
            index is read.
        eps: relative error of the largest probabilities; 0.3 unless given.
        delta: chance of a wrong answer; 0.01 unless given.
        k: how many of the largest logits are to be exact; several: the largest; 1 unless given.
        index: where the index is, a file or a folder; None: the folder that the model came from.
        weight: a quantised weight that the model's own was made of, as `read_gguf_weight` reads it: its rows are read.
        generator: of what is drawn in the calibration.
        progress: told how far it is.

    Returns:
        The layer that the model has now. The model is left as it was if anything goes wrong.

    Raises:
        InputError: for a model without output embeddings that can be read row by row, or one that has such a head; for
            a weight that the model was not made of; when there are neither queries nor an index, or the index is
            another model's or made for another eps, delta or k.
        TypeError, ValueError: as `AdaptiveSoftmax` and its ``calibrate`` do.
    """
    layer, rows = readable_layer(model)
    if isinstance(layer, AdaptiveHead):
        raise InputError(
            "model: expected one with its own output layer, found an adaptive head: call restore_head first"
        )
    if queries is not None and index is not None:
        raise InputError("index: expected none with queries, which make a new one, found both")
    path = _find_index(model, index) if queries is None else None
    probe = torch.arange(min(_PROBED, len(model.get_input_embeddings().weight)))
    check_linear(model, layer, probe)
    with torch.no_grad():
        beta, _ = after_layer(model, layer, probe)
    bias = getattr(layer, "bias", None)
    if weight is not None:
        check_same(weight, layer.weight.detach())
        rows = weight
    own = rows, None if bias is None else bias.detach()
    if path is not None:
        head = _read(path, *own, beta, eps, delta, k)
    else:
        head = AdaptiveSoftmax(
            *own, eps=EPS if eps is None else eps, delta=DELTA if delta is None else delta, beta=beta
        )
        sample: Any = queries.to(own[0].device) if isinstance(queries, Tensor) else queries
        head.calibrate(sample, K if k is None else k, generator=generator, progress=progress)
    module = AdaptiveHead(layer, head).train(layer.training)
    model.set_output_embeddings(module)
    model.save_pretrained = _Saving(model)
    model.register_forward_pre_hook(_note_prompt, with_kwargs=True)
    return module


def _note_prompt(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Tell the output layer whether this is a prompt: several tokens of each sequence, with none before."""
    layer, inputs = model.get_output_embeddings(), [*args[:1], options.get("input_ids"), options.get("inputs_embeds")]
    if isinstance(layer, AdaptiveHead):
        several = any(isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] > 1 for value in inputs)
        cache = options.get("past_key_values")
        layer.prompted = several and (cache is None or not getattr(cache, "get_seq_length", int)())


def restore_head(model: Any) -> None:
    """Give a model its own output layer back.

    Raises:
        InputError: when it has it.
    """
    layer = output_layer(model)
    if not isinstance(layer, AdaptiveHead):
        raise InputError("model: expected an adaptive head, found the model's own output layer")
    model.set_output_embeddings(layer.replaced)
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _note_prompt:
            del model._forward_pre_hooks[number], model._forward_pre_hooks_with_kwargs[number]
    saving = model.__dict__.get("save_pretrained")
    if isinstance(saving, _Saving):
        del model.save_pretrained
        if saving.before is not None:
            model.save_pretrained = saving.before


def _find_index(model: Any, index: str | os.PathLike[str] | None) -> Path:
    """The file of an index, at a place that is given or where the model came from."""
    if index is not None:
        path = Path(index)
        path = path / INDEX if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"index: expected a file, or a folder with {INDEX}, found none at {index}")
        return path
    folder: str = getattr(model.config, "name_or_path", None) or ""
    path = Path(folder, INDEX)
    if not folder or not path.is_file():
        where = f"no {INDEX} in {folder}" if folder else "no folder that the model came from"
        raise InputError(
            f"queries: expected hidden states to make an index of, or an index, found neither ({where}): "
            "give queries=collect_queries(model, tokenizer, text), or index=PATH"
        )
    return path


def _read(
    path: Path,
    weight: Weight,
    bias: Tensor | None,
    beta: float,
    eps: float | None,
    delta: float | None,
    k: int | Sequence[int] | None,
) -> AdaptiveSoftmax:
    """The head of an index, if it is one for this weight that promises what is asked for.

    Raises:
        InputError: if not.
    """
    head = AdaptiveSoftmax.load(path, weight=weight, bias=bias)
    if not head.calibrations or head.index is None:
        raise InputError(f"{path}: expected a calibrated index, found none: calibrate the head before it is saved")
    if not math.isclose(head.beta, beta, rel_tol=1e-3):
        raise InputError(f"{path}: expected logits that the model multiplies with {beta:g}, found {head.beta:g}")
    most = None if k is None else max(k) if isinstance(k, Sequence) else k
    asked = {"eps": (eps, head.eps), "delta": (delta, head.delta), "k": (most, max(head.calibrations) or 1)}
    for name, (wanted, calibrated) in asked.items():
        if wanted is not None and wanted != calibrated:
            raise InputError(
                f"{name}: expected {calibrated}, which {path} was calibrated for, or none, found {wanted}: "
                "give queries to calibrate anew"
            )
    return head
