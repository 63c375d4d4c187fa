"""Encoders of Hugging Face, by name or folder, with the weights they were given out with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softsieve.errors import InputError, shown
from softsieve.extras import loaded, package
from softsieve.tasks.encode import LENGTH, Encoded, Encoder, padded
from softsieve.tasks.examples import Examples
from softsieve.tasks.models import Body

FOLDER = "pretrained"  # inside a task's folder: tokenizer and configuration
_LARGEST = {  # what a configuration may ask for, so that a damaged file is an error and not a full memory
    "vocab_size": 2**22,
    "hidden_size": 2**16,
    "intermediate_size": 2**18,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**10,
    "max_position_embeddings": 2**20,
}


class PretrainedBody(Body):
    """Hidden states of a pretrained encoder; unless there is a label for every word, their mean over the text."""

    def __init__(self, encoder: nn.Module, *, features: int, per_word: bool) -> None:
        super().__init__()
        if hasattr(encoder, "pooler"):
            # Its parameters no loss would reach, which distributed training takes for a fault.
            encoder.register_module("pooler", None)
        for module in encoder.modules():
            if hasattr(module, "relative_position_bucket") and hasattr(module, "compute_position_bias"):
                module.relative_position_bucket = KeptBuckets(module)  # type: ignore[assignment]
        self.encoder, self.features, self.per_word = encoder, features, per_word
        self.dropout = nn.Dropout(0.1)

    def forward(self, **inputs: Tensor) -> Tensor:
        attended = inputs.pop("attention_mask")
        mask = _as_numbers(attended) if self._needs_numbers(attended) else attended
        hidden: Tensor = self.encoder(attention_mask=mask, **inputs).last_hidden_state  # (rows, positions, features)
        if not self.per_word:
            share = attended.unsqueeze(-1).to(hidden.dtype)
            hidden = (hidden * share).sum(1) / share.sum(1)
        return self.dropout(hidden)  # type: ignore[no-any-return]

    def _needs_numbers(self, mask: Tensor) -> bool:
        """Whether a CUDA graph is being recorded of attention that is not fused, whose masks copy from the host."""
        fused: bool = getattr(self.encoder.config, "_attn_implementation", "") != "eager"
        return not fused and mask.is_cuda and torch.cuda.is_current_stream_capturing()


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
    settings = LENGTH

    @classmethod
    def load(cls, source: str | Path, *, max_length: int, per_word: bool) -> PretrainedEncoder:
        """The encoder of a name or folder, for texts of at most so many of its tokens; of a path, what `save` wrote."""
        saved = isinstance(source, Path)
        name = str(Path(source) / FOLDER) if saved else str(source)
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
        return cls(int(min(max_length, longest)), tokenizer, config, per_word, None if saved else name)

    def save(self, folder: Path) -> None:
        """Write tokenizer and configuration, so that `load` needs no hub."""
        self.tokenizer.save_pretrained(str(folder / FOLDER))
        self.config.save_pretrained(str(folder / FOLDER))

    def encode(self, examples: Examples, *, workers: int = 0) -> Encoded:
        options = {"is_split_into_words": self.per_word, "max_length": self.max_length, "truncation": True}
        options |= {"padding": True, "return_attention_mask": True}
        complaint = f"{self.tokenizer.name_or_path}: its tokenizer fails"
        encoded = loaded(lambda: self.tokenizer(examples.inputs, **options), complaint)
        names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded]
        inputs = {name: torch.tensor(encoded[name]) for name in names}
        inputs["attention_mask"][:, 0] = 1  # attention to nothing is not a number
        lengths = inputs["attention_mask"].sum(1)
        known, largest = getattr(self.config, "vocab_size", 2**31), int(inputs["input_ids"].max())
        if largest >= known:
            raise InputError(
                f"{self.tokenizer.name_or_path}: expected tokens below {known}, which the model has, found {largest}"
            )
        if not self.per_word:
            return Encoded(inputs, lengths, tuple(names))
        places = [_first_tokens(encoded.word_ids(row), len(words)) for row, words in enumerate(examples.inputs)]
        words, _ = padded(places, fill=-1)
        return Encoded(inputs, lengths, (*names, "target"), words)

    def body(self) -> Body:
        transformers = package("transformers", "a pretrained model")
        if self.source is None:
            encoder = transformers.AutoModel.from_config(self.config, dtype=torch.float32)
        else:
            load = transformers.AutoModel.from_pretrained
            complaint = f"model {self.source}: cannot be loaded"
            with no_bar(transformers.utils.logging):
                encoder = loaded(lambda: load(self.source, dtype=torch.float32), complaint)
        return PretrainedBody(encoder, features=self.config.hidden_size, per_word=self.per_word)


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


def _check_config(config: Any, place: str) -> None:
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "hidden_size"):
        raise InputError(f"{place}: expected an encoder of text, found a model of type {config.model_type}")
    for field, largest in _LARGEST.items():
        value = getattr(config, field, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= largest:
            raise InputError(f"{place}: {field}: expected a whole number up to {largest}, found {value!r}")
