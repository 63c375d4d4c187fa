"""Encoders of Hugging Face, by name or folder, with the weights they were given out with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from softsieve._progress import ProgressCallback, no_progress
from softsieve.errors import InputError, shown
from softsieve.extras import loaded, package
from softsieve.tasks.encode import LENGTH, Encoded, Encoder, padded
from softsieve.tasks.examples import Examples
from softsieve.tasks.models import Body

BLOCK = 4096  # texts that are lists of tokens at a time
STATES = "states"  # an input in the place of tokens: what an encoder that stays as it is makes of them
FOLDER = "pretrained"  # inside a task's folder: tokenizer and configuration, where transformers has no such classifier
HEAD, BODY = "head.", "body.model."  # how the names of a classifier's weights begin
_OWN_HEAD = MappingProxyType({**LENGTH, "own_head": (0, 1)})
_PROBE = 7919  # labels of a classifier that is only made to see which of its layers has as many outputs
_LARGEST = {  # what a configuration may ask for, so that a damaged file is an error and not a full memory
    "vocab_size": 2**22,
    "hidden_size": 2**16,
    "intermediate_size": 2**18,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**10,
    "max_position_embeddings": 2**20,
}


class PretrainedBody(Body):
    """Hidden states of a pretrained encoder; unless there is a label for every word, their mean over the text.

    Called with these means as ``states``, it takes them as they are: see `softsieve.training.frozen`.
    """

    def __init__(self, encoder: nn.Module, *, features: int, per_word: bool) -> None:
        super().__init__()
        if hasattr(encoder, "pooler"):
            # Its parameters no loss would reach, which distributed training takes for a fault.
            encoder.register_module("pooler", None)
        _keep_buckets(encoder)
        self.encoder, self.features, self.per_word = encoder, features, per_word
        self.dropout = nn.Dropout(0.1)

    def forward(self, **inputs: Tensor) -> Tensor:
        if STATES in inputs:
            return self.dropout(inputs[STATES])  # type: ignore[no-any-return]
        attended = inputs.pop("attention_mask")
        mask = _recordable(attended, self.encoder)
        hidden: Tensor = self.encoder(attention_mask=mask, **inputs).last_hidden_state  # (rows, positions, features)
        if not self.per_word:
            share = attended.unsqueeze(-1).to(hidden.dtype)
            hidden = (hidden * share).sum(1) / share.sum(1)
        return self.dropout(hidden)  # type: ignore[no-any-return]


class ClassifierBody(Body):
    """A classifier of transformers up to its last layer, ``output``: what it computes of hidden states is its own.

    With a linear head in the place of that layer it is that classifier, and is saved as one.
    """

    def __init__(self, model: nn.Module, output: str, *, per_word: bool) -> None:
        super().__init__()
        _keep_buckets(model)
        self.per_word = per_word
        self.features: int = model.get_submodule(output).in_features  # type: ignore[assignment]
        model.set_submodule(output, nn.Identity())
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        mask = _recordable(inputs.pop("attention_mask"), self.model)
        return self.model(attention_mask=mask, **inputs).logits  # type: ignore[no-any-return]


def _keep_buckets(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "relative_position_bucket") and hasattr(module, "compute_position_bias"):
            module.relative_position_bucket = KeptBuckets(module)  # type: ignore[assignment]


def _recordable(mask: Tensor, model: nn.Module) -> Tensor:
    """A mask, as numbers while a CUDA graph is recorded of attention that is not fused: it copies from the host.

    And always where layers are compiled, which another shape of the mask would compile anew in the recording.
    """
    if getattr(model.config, "_attn_implementation", "") != "eager" or not mask.is_cuda:
        return mask
    compiled = any(part._compiled_call_impl is not None for part in model.modules())
    return _as_numbers(mask) if compiled or torch.cuda.is_current_stream_capturing() else mask


def _as_numbers(attended: Tensor) -> Tensor:
    """What transformers makes of a mask (rows, positions): added to scores (rows, heads, positions, positions)."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros_like(attended, dtype=torch.float32).masked_fill_(attended == 0, lowest)[:, None, None]


class KeptBuckets:
    """In the place of MPNet's ``relative_position_bucket``: the same numbers, kept on the device.

    transformers computed them in every call, up to some version on the CPU; a CUDA graph cannot be recorded of a copy
    from there. They are made for the next power of two of the length and cut. None is ever given up: graphs know
    addresses alone.
    """

    def __init__(self, module: Any) -> None:
        self.compute: Callable[..., Tensor] = type(module).relative_position_bucket
        self.weight: nn.Embedding = module.relative_attention_bias
        self.kept: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, relative_position: Tensor, **options: int) -> Tensor:
        rows, columns = relative_position.shape  # the positions themselves are always those of a whole text
        length = 1 << (max(rows, columns) - 1).bit_length()
        key = (length, self.weight.weight.device, *options.items())
        if key not in self.kept:
            with torch.inference_mode(False):  # they serve training, too
                place = torch.arange(length, device=relative_position.device)
                self.kept[key] = self.compute(place - place[:, None], **options).to(self.weight.weight.device)
        return self.kept[key][:rows, :columns]


@dataclass(frozen=True)
class PretrainedEncoder(Encoder):
    """A Hugging Face tokenizer, and the encoder that goes with it."""

    max_length: int
    tokenizer: Any
    config: Any
    per_word: bool
    source: str | None = None  # where the weights are; None: those of a saved task, which its checkpoint has
    own_head: int = 0  # whether the model is the architecture's classifier; else the mean of hidden states
    settings = _OWN_HEAD
    newer = MappingProxyType({"own_head": 0})

    @classmethod
    def load(
        cls, source: str | Path, *, max_length: int, per_word: bool, own_head: int | None = None
    ) -> PretrainedEncoder:
        """The encoder of a name or folder, for texts of at most so many of its tokens; of a path, what `save` wrote.

        With its own head if that is asked for; if nothing is said, where that is the same, with a label for every word.

        Raises:
            InputError: when transformers has no such classifier that ends in a layer.
        """
        saved = isinstance(source, Path)
        at_root = saved and (Path(source) / "config.json").exists()
        name = str(Path(source) / FOLDER) if saved and not at_root else str(source)
        place = name if saved else f"model {name}"
        options: dict[str, Any] = {"local_files_only": True} if saved else {}
        if saved and not Path(name).is_dir():
            raise InputError(f"{place}: no such folder, expected the tokenizer and configuration of the model")
        transformers = package("transformers", place)
        complaint = f"{place}: cannot be loaded"
        config = loaded(lambda: transformers.AutoConfig.from_pretrained(name, **options), complaint)
        _check_config(config, place)
        if per_word:
            options["add_prefix_space"] = True  # to those that take it: a word is written as one inside a text
        tokenizer = loaded(lambda: transformers.AutoTokenizer.from_pretrained(name, **options), complaint)
        if per_word and not tokenizer.is_fast:
            raise InputError(f"{place}: expected a fast tokenizer, which knows the words of its tokens")
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise InputError(f"{place}: expected a tokenizer that can pad")
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        # Where the tokenizer does not know what the model can take: the RoBERTa family numbers positions from 2.
        positions = getattr(config, "max_position_embeddings", 2**20) - 2
        longest = tokenizer.model_max_length
        if not isinstance(longest, int | float) or longest < 1:
            raise InputError(f"{place}: model_max_length: expected a number of tokens, found {shown(longest)}")
        longest = longest if longest < 2**20 else positions
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id  # by which classifiers know where a text ends
        has_head = own_head != 0 and (own_head == 1 or per_word) and output_layer(config, per_word=per_word) is not None
        if own_head == 1 and not has_head:
            raise InputError(f"{place}: pooling: expected an architecture with a classifier, found {config.model_type}")
        return cls(int(min(max_length, longest)), tokenizer, config, per_word, None if saved else name, int(has_head))

    @property
    def output(self) -> str | None:
        """The name of the layer of transformers' classifier whose place the head takes; None with a mean instead."""
        return output_layer(self.config, per_word=self.per_word) if self.own_head else None

    def save(self, folder: Path, labels: list[str], *, multilabel: bool, whole: bool) -> None:
        """Write tokenizer and configuration, so that `load` needs no hub.

        With ``whole``, to where transformers looks for those of a classifier, with the names of the labels.
        """
        place, config = folder if whole else folder / FOLDER, copy.deepcopy(self.config)
        if whole:
            config.architectures = [type(self._make_empty(config)).__name__]
            self.describe(config, labels, multilabel=multilabel)
        self.tokenizer_as_trained().save_pretrained(str(place))
        config.save_pretrained(str(place))

    def describe(self, config: Any, labels: list[str], *, multilabel: bool) -> None:
        """Put into a configuration of transformers what it should say of the labels."""
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
        if not self.per_word:
            config.problem_type = f"{'multi' if multilabel else 'single'}_label_classification"
        config.dtype = "float32"

    def tokenizer_as_trained(self) -> Any:
        """The tokenizer, by which pipelines cut texts as training did."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.model_max_length = self.max_length
        return tokenizer

    def _make_empty(self, config: Any) -> Any:
        with torch.device("meta"):
            return _classifiers(self.per_word).from_config(config)

    def pack(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a model of this body and a linear head by their names in transformers."""
        return {self._rename(name): value for name, value in weights.items()}

    def _rename(self, name: str) -> str:
        return name.removeprefix(BODY) if name.startswith(BODY) else f"{self.output}.{name.removeprefix(HEAD)}"

    def unpack(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `pack` was given; weights that were not packed stay as they are."""
        if self.output is None or f"{self.output}.weight" not in weights:
            return dict(weights)
        layer = f"{self.output}."
        return {
            HEAD + name.removeprefix(layer) if name.startswith(layer) else BODY + name: value
            for name, value in weights.items()
        }

    def encode(self, examples: Examples, *, workers: int = 0, progress: ProgressCallback = no_progress) -> Encoded:
        options = {"is_split_into_words": self.per_word, "max_length": self.max_length, "truncation": True}
        options |= {"padding": True, "return_attention_mask": True}
        complaint = f"{self.tokenizer.name_or_path}: its tokenizer fails"
        fill = {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 0}
        fill["token_type_ids"] = self.tokenizer.pad_token_type_id
        parts: dict[str, list[Tensor]] = {}
        places: list[list[int]] = []
        for first in range(0, len(examples.inputs), BLOCK):
            some = list(examples.inputs[first : first + BLOCK])
            encoded = loaded(lambda some=some: self.tokenizer(some, **options), complaint)  # type: ignore[misc]
            for name in filter(encoded.__contains__, fill):
                parts.setdefault(name, []).append(torch.tensor(encoded[name], dtype=torch.long))
            if self.per_word:
                places += [_first_tokens(encoded.word_ids(row), len(words)) for row, words in enumerate(some)]
            progress("tokenizing texts", len(some) / len(examples.inputs))
        names = list(parts)
        inputs = {name: _join(parts.pop(name), fill[name]) for name in names}
        inputs["attention_mask"][:, 0] = 1  # attention to nothing is not a number
        lengths = inputs["attention_mask"].sum(1)
        known, largest = getattr(self.config, "vocab_size", 2**31), int(inputs["input_ids"].max())
        if largest >= known:
            raise InputError(
                f"{self.tokenizer.name_or_path}: expected tokens below {known}, which the model has, found {largest}"
            )
        if not self.per_word:
            return Encoded(inputs, lengths, tuple(names))
        words, _ = padded(places, fill=-1)
        return Encoded(inputs, lengths, (*names, "target"), words)

    def body(self) -> Body:
        transformers = package("transformers", "a pretrained model")
        models = _classifiers(self.per_word) if self.own_head else transformers.AutoModel
        if self.source is None:
            config = copy.deepcopy(self.config)
            config.num_labels = 1  # the layer of labels is another
            model = models.from_config(config, dtype=torch.float32)
        else:
            complaint = f"model {self.source}: cannot be loaded"
            with no_bar(transformers.utils.logging), _no_remarks(transformers.utils.logging):
                load = models.from_pretrained
                model = loaded(lambda: load(self.source, config=self.config, dtype=torch.float32), complaint)
        if self.output is not None:
            return ClassifierBody(model, self.output, per_word=self.per_word)
        return PretrainedBody(model, features=self.config.hidden_size, per_word=self.per_word)


def _classifiers(per_word: bool) -> Any:
    """The class of transformers that makes classifiers of texts or of words."""
    transformers = package("transformers", "a pretrained model")
    return transformers.AutoModelForTokenClassification if per_word else transformers.AutoModelForSequenceClassification


def output_layer(config: Any, *, per_word: bool) -> str | None:
    """The name of the last layer of an architecture's classifier, None if it has no classifier that ends in a layer."""
    config = copy.deepcopy(config)
    config.num_labels = _PROBE
    try:
        with torch.device("meta"):
            model = _classifiers(per_word).from_config(config)
    except Exception:  # transformers raises anything for an architecture without
        return None
    found = [name for name, layer in model.named_modules() if getattr(layer, "out_features", 0) == _PROBE]
    return found[0] if len(found) == 1 else None


def _join(parts: list[Tensor], fill: int) -> Tensor:
    """Rows (some, positions) below each other, filled up to the longest."""
    width = max([1, *(part.shape[1] for part in parts)])
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in parts])


def read_hidden_size(name: str) -> int:
    """How many features an encoder has, by its configuration alone."""
    transformers = package("transformers", f"model {name}")
    config = loaded(lambda: transformers.AutoConfig.from_pretrained(name), f"model {name}: cannot be loaded")
    _check_config(config, f"model {name}")
    return int(config.hidden_size)


def _first_tokens(word_of: list[int | None], words: int) -> list[int]:
    """The position of the first token of every word, -1 for a word without: cut off, or of no character it knows."""
    first: dict[int | None, int] = {}
    for position, word in enumerate(word_of):
        first.setdefault(word, position)
    return [first.get(word, -1) for word in range(words)]


@contextmanager
def no_bar(logging: Any) -> Iterator[None]:
    """Without the library's progress bar, which a second of loading does not need."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _no_remarks(logging: Any) -> Iterator[None]:
    """Without what the library says of layers that are new, as they should be."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_config(config: Any, place: str) -> None:
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "hidden_size"):
        raise InputError(f"{place}: expected an encoder of text, found a model of type {config.model_type}")
    for field, largest in _LARGEST.items():
        value = getattr(config, field, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= largest:
            raise InputError(f"{place}: {field}: expected a whole number up to {largest}, found {value!r}")
