"""Raw inputs to tensors for the built-in models."""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from math import gcd
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softsieve._progress import ProgressCallback, no_progress
from softsieve.errors import InputError, first_line
from softsieve.extras import package
from softsieve.tasks.examples import Examples
from softsieve.tasks.hashing import AT_HAND, WORD, HashedTexts
from softsieve.tasks.models import (
    BUCKETS,
    SAMPLE_RATE,
    TEXT_BUCKETS,
    AudioBody,
    Body,
    ImageBody,
    PlainTextBody,
    TextBody,
    TokensBody,
)

LARGEST_IMAGE = 64
SHORTEST_SOUND, LONGEST_SOUND = SAMPLE_RATE // 4, 5 * SAMPLE_RATE  # samples
HIGHEST_RATE = 384_000  # samples a second that are believed; resampling takes memory in proportion
MOST_IDS = (512, 1536)  # hashed features of a text, up to version 0.3 and since
LONG, SHORT = 512, 128  # words of a text that the built-in model reads; words or tokens of others
FEATURES = (64, 256)  # of a text, with few and with many classes
MANY_TEXTS = 1024  # beyond which it is worth loading a compiled function that encodes them
MANY = 1000  # classes beyond which 64 features do not tell them apart
LENGTH = MappingProxyType({"max_length": (4, 2**20)})  # words or tokens; room for a tokenizer's own


class Encoded(NamedTuple):
    """Inputs of a model, as `Rows` takes them."""

    inputs: dict[str, Tensor]
    lengths: Tensor | None = None
    sequences: tuple[str, ...] = ()
    words: Tensor | None = None  # tokens: (rows, words) position of every word, -1 for one that was not read or is none
    texts: Mapping[str, HashedTexts] = MappingProxyType({})  # inputs that are made batch by batch


@dataclass(frozen=True)
class Encoder(ABC):
    """How inputs become tensors, and the model body that takes them."""

    settings: ClassVar[Mapping[str, tuple[int, int]]]  # the fields that are kept with a model, and what they may be
    newer: ClassVar[Mapping[str, int]] = MappingProxyType({})  # what those were that earlier versions did not keep

    @abstractmethod
    def encode(self, examples: Examples, *, workers: int = 0, progress: ProgressCallback = no_progress) -> Encoded:
        """The inputs of the examples; decoding uses so many threads, and names one that cannot be decoded."""

    @abstractmethod
    def body(self) -> Body:
        """A fresh model body for what `encode` gives."""

    def unpack(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a file by their names in the model."""
        return dict(weights)


@dataclass(frozen=True)
class TextEncoder(Encoder):
    """Hashed words, pairs of words and pieces of three to five characters of the first words of a text."""

    max_length: int
    features: int = FEATURES[0]
    weighted: int = 1  # by how rare features are; 0 for a model of version 0.3 or earlier
    settings = MappingProxyType({**LENGTH, "features": FEATURES, "weighted": (0, 1)})
    newer = MappingProxyType({"features": FEATURES[0], "weighted": 0})

    @classmethod
    def fit(cls, max_length: int, classes: int, *, multilabel: bool) -> TextEncoder:
        """Wide enough to tell so many classes apart; where a text may have any of them, as wide as they are many."""
        return cls(max_length, FEATURES[1] if classes > (FEATURES[0] if multilabel else MANY) else FEATURES[0])

    def encode(self, examples: Examples, *, workers: int = 0, progress: ProgressCallback = no_progress) -> Encoded:
        size = {"most": MOST_IDS[self.weighted], "buckets": TEXT_BUCKETS[self.features] if self.weighted else BUCKETS}
        if len(examples.inputs) < MANY_TEXTS:
            ids, lengths = padded([text_ids(text, self.max_length, **size) for text in examples.inputs])
            return Encoded({"ids": ids}, lengths, ("ids",))
        texts = HashedTexts(examples.inputs, self.max_length, progress=progress, **size)
        if 4 * len(texts) * texts.longest > AT_HAND:
            return Encoded({}, texts.lengths, ("ids",), texts={"ids": texts})
        return Encoded({"ids": texts.dense(progress=progress)}, texts.lengths, ("ids",))

    def body(self) -> Body:
        return (TextBody if self.weighted else PlainTextBody)(self.features)


@dataclass(frozen=True)
class TokensEncoder(Encoder):
    """Four hashed features of every word: itself, how it begins, how it ends, its capitals and digits."""

    max_length: int
    settings = LENGTH

    def encode(self, examples: Examples, *, workers: int = 0, progress: ProgressCallback = no_progress) -> Encoded:
        places, _ = padded([range(len(words)) for words in examples.inputs], fill=-1)
        read = [[word_ids(word) for word in words[: self.max_length]] for words in examples.inputs]
        ids, lengths = padded(read, shape=(4,))
        return Encoded({"ids": ids}, lengths, ("ids", "target"), torch.where(places < self.max_length, places, -1))

    def body(self) -> Body:
        return TokensBody()


@dataclass(frozen=True)
class ImageEncoder(Encoder):
    """RGB images of ``size`` x ``size``."""

    size: int
    mirror: int  # grey images are mostly writing, and a mirrored sign is another sign
    settings = MappingProxyType({"size": (8, LARGEST_IMAGE), "mirror": (0, 1)})

    @classmethod
    def fit(cls, train: Examples) -> ImageEncoder:
        """The median side of some training images, up to 64."""
        images = [_decode_image(value, where, LARGEST_IMAGE) for value, where in _sample(train)]
        side = int(np.median([side for _, sides in images for side in sides]))
        grey = all((pixels == pixels[..., :1]).all() for pixels, _ in images)
        return cls(size=min(max(side, 8), LARGEST_IMAGE), mirror=int(not grey))

    def encode(self, examples: Examples, *, workers: int = 0, progress: ProgressCallback = no_progress) -> Encoded:
        images = _decode_each(
            lambda value, where: _decode_image(value, where, self.size)[0], examples, workers, progress
        )
        return Encoded({"pixels": torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()})

    def body(self) -> Body:
        return ImageBody(self.size, bool(self.mirror))


@dataclass(frozen=True)
class AudioEncoder(Encoder):
    """Sounds at 8 kHz, mono, as loud as they can be, cut or filled up with silence to ``samples``."""

    samples: int
    settings = MappingProxyType({"samples": (SHORTEST_SOUND, LONGEST_SOUND)})

    @classmethod
    def fit(cls, train: Examples) -> AudioEncoder:
        """Long enough for 99 of 100 of some training sounds, up to 5 seconds."""
        lengths = [len(_decode_sound(value, where, LONGEST_SOUND)) for value, where in _sample(train)]
        return cls(samples=max(int(np.quantile(lengths, 0.99)), SHORTEST_SOUND))

    def encode(self, examples: Examples, *, workers: int = 0, progress: ProgressCallback = no_progress) -> Encoded:
        sounds = _decode_each(
            lambda value, where: _decode_sound(value, where, self.samples), examples, workers, progress
        )
        samples = np.zeros((len(sounds), self.samples), np.int16)
        for row, sound in zip(samples, sounds, strict=True):
            row[: len(sound)] = sound
        return Encoded({"samples": torch.from_numpy(samples)})

    def body(self) -> Body:
        return AudioBody()


BUILT_IN: dict[str, type[Encoder]] = {
    "text": TextEncoder, "multilabel": TextEncoder, "tokens": TokensEncoder, "image": ImageEncoder,
    "audio": AudioEncoder,
}  # fmt: skip


def built_in(kind: str, train: Examples, max_length: int, classes: int) -> Encoder:
    """The encoder of the built-in model for a kind of data with so many classes."""
    if kind == "tokens":
        return TokensEncoder(max_length)
    if kind in ("text", "multilabel"):
        return TextEncoder.fit(max_length, classes, multilabel=kind == "multilabel")
    return ImageEncoder.fit(train) if kind == "image" else AudioEncoder.fit(train)


def text_ids(text: str, max_length: int, *, most: int = MOST_IDS[0], buckets: int | None = None) -> list[int]:
    """Hashed features of the first words of a text: words and pairs first, so that they survive a long one.

    `HashedTexts` gives the same for many texts.
    """
    words = WORD.findall(text.lower())[:max_length]
    pairs = [hashed(f"{first} {second}", buckets) for first, second in pairwise(["<", *words, ">"])]
    pieces = [piece for word in words for piece in _hash_parts(word, buckets)]
    return [*(hashed(word, buckets) for word in words), *pairs, *pieces][:most]


@lru_cache(2**16)
def _hash_parts(word: str, buckets: int | None) -> list[int]:
    whole = f"<{word}>"
    return [hashed(f"#{whole[i : i + n]}", buckets) for n in (3, 4, 5) for i in range(len(whole) - n + 1)]


@lru_cache(2**16)
def word_ids(word: str) -> list[int]:
    """Hashed features of a word in a sentence."""
    small = word.lower()
    shape = "".join("d" if c.isdigit() else "X" if c.isupper() else "x" if c.isalpha() else c for c in word)
    shape = re.sub(r"(.)\1+", r"\1\1", shape)
    return [hashed(small), hashed(f"^{small[:3]}"), hashed(f"{small[-3:]}$"), hashed(f"@{shape}")]


def hashed(feature: str, buckets: int | None = None) -> int:
    """A bucket from 1 on, 0 being padding, of so many, None: `BUCKETS`; the same on every machine."""
    return zlib.crc32(feature.encode("utf-8", "surrogatepass")) % ((buckets or BUCKETS) - 1) + 1


def padded(lists: Sequence[Sequence[Any]], *, fill: int = 0, shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Lists of numbers, or of lists of a shape, as one int32 tensor padded at the end; and their lengths, at least 1.

    Example:
        >>> padded([[3, 4], [5]])
        (tensor([[3, 4],
                [5, 0]], dtype=torch.int32), tensor([2, 1]))
    """
    lengths = torch.tensor([len(values) for values in lists])
    values = torch.tensor([value for values in lists for value in values], dtype=torch.int32)
    longest = max([1, *map(len, lists)])
    out = torch.full((len(lists), longest, *shape), fill, dtype=torch.int32)
    out[torch.arange(longest) < lengths[:, None]] = values.view(-1, *shape)
    return out, lengths.clamp_min(1)


def _decode_each(
    decode: Callable[[Any, str], Any], examples: Examples, workers: int, progress: ProgressCallback
) -> list[Any]:
    """Every input decoded, in order."""

    def decode_one(value: Any, where: str) -> Any:
        decoded = decode(value, where)
        progress("decoding images or sounds", 1 / len(examples.inputs))
        return decoded

    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(decode_one, examples.inputs, examples.where))
    return list(map(decode_one, examples.inputs, examples.where))


def find_broken(kind: str, examples: Examples, workers: int, progress: ProgressCallback) -> list[str | None]:
    """What is wrong with every image or sound, None for nothing; they are decoded to see it."""

    def attempt(value: Any, where: str) -> str | None:
        try:
            if kind == "image":
                _decode_image(value, where, LARGEST_IMAGE)
            else:
                _decode_sound(value, where, LONGEST_SOUND)
        except InputError as error:
            return str(error)
        return None

    return _decode_each(attempt, examples, workers, progress)


def _sample(examples: Examples) -> Iterator[tuple[Any, str]]:
    """At most 200 examples and their places, evenly spread."""
    step = -(-len(examples.inputs) // 200)
    return zip(examples.inputs[::step], examples.where[::step], strict=True)


def _decode_image(value: Any, where: str, size: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], tuple[int, int]]:
    """The pixels (size, size, 3) of an image file, its bytes or an array, and its width and height before."""
    library = package("PIL.Image", "reading images")
    try:
        if isinstance(value, np.ndarray):
            if value.dtype != np.uint8:
                raise TypeError(f"expected pixels of type uint8, found {value.dtype}")
            opened = library.fromarray(value)
        else:
            opened = library.open(BytesIO(value) if isinstance(value, bytes) else value)
        with opened as image:
            sides = image.size
            image.draft(None, (2 * size, 2 * size))  # a large JPEG need not be decoded in full
            if image.mode.startswith("I"):  # 16 bits a pixel, of which the conversion would keep the lower 8
                image = library.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
            image = image.convert("RGB")
            if image.size != (size, size):
                image = image.resize((size, size), library.Resampling.BILINEAR)
            return np.asarray(image), sides
    except (OSError, ValueError, TypeError, SyntaxError, library.DecompressionBombError) as error:
        raise InputError(f"{where}: unreadable image ({first_line(error)})") from None


def _decode_sound(value: Any, where: str, longest: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """At most the first ``longest`` samples of a sound file or of (samples, rate), at 8 kHz and full volume."""
    if isinstance(value, tuple):
        sound, rate = value
    else:
        library = package("soundfile", "reading sounds")
        try:
            with library.SoundFile(BytesIO(value) if isinstance(value, bytes) else value) as file:
                rate = file.samplerate
                if not 1 <= rate <= HIGHEST_RATE:
                    raise ValueError(f"{rate} Hz")
                sound = file.read(-(-longest * rate // SAMPLE_RATE), dtype="float32", always_2d=True).mean(1)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise InputError(f"{where}: unreadable sound ({first_line(error)})") from None
    if not 1 <= rate <= HIGHEST_RATE or len(sound) == 0:
        raise InputError(f"{where}: expected a sound, found {len(sound)} samples at {rate} Hz")
    if not np.isfinite(sound).all():
        raise InputError(f"{where}: expected a sound, found samples that are not finite")
    if rate != SAMPLE_RATE:
        signal = package("scipy.signal", "resampling sounds")
        common = gcd(int(rate), SAMPLE_RATE)
        sound = signal.resample_poly(sound, SAMPLE_RATE // common, int(rate) // common)
    sound = sound[:longest]
    loudest = max(float(np.abs(sound).max()), 1e-9)
    full: np.ndarray[Any, np.dtype[np.int16]] = np.rint(sound * (32767 / loudest)).astype(np.int16)
    return full
