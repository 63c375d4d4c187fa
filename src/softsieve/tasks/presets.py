"""Public data sets by name, from a folder with one sub-folder each, in the files their authors give out."""

from __future__ import annotations

import io
import tarfile
import wave
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softsieve.errors import InputError, first_line
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.files import parse_json, read_bytes, read_lines, read_text
from softsieve.tasks.read import hold_out, read_data
from softsieve.tasks.reading import Reading
from softsieve.tasks.tables import read_conll, read_table

_Rows = Iterable[tuple[Any, Any, str]]  # input, label, place


class Preset(NamedTuple):
    """A data set we know: its kind, the sub-folder it lies in, and how its files become `Data`."""

    kind: str
    folder: str
    load: Callable[[Path], Data]


def load_preset(name: str, data_dir: str | Path) -> Data:
    """The data set `name` of `PRESETS`, from its sub-folder of `data_dir`. What has no validation part gets one."""
    if name not in PRESETS:
        raise InputError(f"preset: expected one of {', '.join(PRESETS)}, found {name!r}")
    folder = Path(data_dir) / PRESETS[name].folder
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder, expected there for {name}")
    try:
        return PRESETS[name].load(folder)._replace(name=name)
    except InputError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: files not as expected for {name} ({type(error).__name__}: {error})") from None


def _make_data(kind: str, train: _Rows, validation: _Rows | None, test: _Rows, labels: list[str] | None = None) -> Data:
    held_out = None if validation is None else _make_examples(validation)
    return Data("", kind, _make_examples(train), held_out, _make_examples(test), labels)


def _make_examples(rows: _Rows) -> Examples:
    inputs, labels, where = zip(*rows, strict=True)
    return Examples(list(inputs), list(labels), list(where))


def _add_validation(data: Data, *, one_in: int = 10, keep_labels: bool = True) -> Data:
    """With one in so many of the training rows held out, always the same ones."""
    train, validation = hold_out(data, max(1, len(data.train.inputs) // one_in), seed=0, keep_labels=keep_labels)
    return data._replace(train=train, validation=validation)


def _sst5(folder: Path) -> Data:
    return read_data(folder / "train.tsv", validation=folder / "dev.tsv", test=folder / "test.tsv", kind="text")


def _clinc150(folder: Path) -> Data:
    """The 150 intents and, as one more, what is out of scope ("oos")."""
    path = folder / "data_full.json.gz"
    splits = parse_json(read_text(path), path)

    def rows(part: str) -> _Rows:
        both = (part, f"oos_{part}")
        return [(*row, f"{path}:{name}:{i + 1}") for name in both for i, row in enumerate(splits[name])]

    return _make_data("text", rows("train"), rows("val"), rows("test"))


def _goemotions(folder: Path) -> Data:
    names = [line for _, line in read_lines(folder / "labels.txt")]

    def rows(part: str) -> _Rows:
        fields = [(where, line.split("\t")) for where, line in read_lines(folder / f"{part}.tsv.gz")]
        return [(text, [names[int(i)] for i in ids.split(",")], where) for where, (text, ids, _) in fields]

    return _make_data("multilabel", rows("train"), rows("dev"), rows("test"), names)


def _reuters(folder: Path) -> Data:
    """The documents with one of the 90 topics that both parts have ("R90"), of those topics."""
    topics = [line for _, line in read_lines(folder / "topics90.txt")]

    def rows(part: str) -> _Rows:
        table = read_table(folder / f"{part}.jsonl.gz", Reading())
        columns = [table.columns[name] for name in ("title", "text", "topics")]
        for where, title, text, has in zip(table.where, *columns, strict=True):
            if kept := [topic for topic in has if topic in topics]:
                yield f"{title}\n{text}".strip(), kept, where

    return _add_validation(_make_data("multilabel", rows("train"), None, rows("test"), topics))


def _eurlex57k(folder: Path) -> Data:
    """The label set is that of all parts, as some EuroVoc concepts occur in the validation or test part only."""

    def rows(part: str) -> list[tuple[Any, Any, str]]:
        table = read_table(folder / f"{part}.jsonl.gz", Reading())
        return list(zip(table.columns["text"], table.columns["labels"], table.where, strict=True))

    train, validation, test = (rows(part) for part in ("train", "dev", "test"))
    concepts = {concept for _, has, _ in train + validation + test for concept in has}
    return _make_data("multilabel", train, validation, test, sorted(concepts))


def _conll2003(folder: Path) -> Data:
    def part(name: str) -> Examples:
        examples = read_conll(folder / f"{name}.txt.gz", Reading())
        return examples._replace(labels=[_mark_beginnings(tags) for tags in examples.labels])

    return Data("", "tokens", part("train"), part("valid"), part("test"))


def _mark_beginnings(tags: list[str]) -> list[str]:
    """IOB1 tags, where only an entity that touches one of its own type begins with B-, with every beginning marked."""
    before = ["O", *tags]
    begins = [tag[:2] == "I-" and last[1:] != tag[1:] for last, tag in zip(before, tags, strict=False)]
    return [f"B{tag[1:]}" if begin else tag for begin, tag in zip(begins, tags, strict=True)]


def _sighan15(folder: Path) -> Data:
    """Spelling correction: the characters as written, each labelled with the character it should be.

    The label set is all characters of the corpus, as many occur in the test only.
    """
    folder = folder / "simplified"

    def rows(*names: str) -> list[tuple[list[str], list[str], str]]:
        tables = [read_table(folder / f"{name}.tsv.gz", Reading()) for name in names]
        pairs = [zip(t.columns["error"], t.columns["correct"], t.where, strict=True) for t in tables]
        return [(list(error), list(correct), where) for pair in pairs for error, correct, where in pair]

    train, test = rows("train13", "train14", "train15"), rows("test15")
    for error, correct, where in train + test:
        if len(error) != len(correct):
            raise InputError(f"{where}: expected two texts of one length, found {len(error)} and {len(correct)}")
    every_row = train + test + rows("test13", "test14")
    characters = {character for error, correct, _ in every_row for character in (*error, *correct)}
    return _add_validation(_make_data("tokens", train, None, test, sorted(characters)), keep_labels=False)


def _mnist(folder: Path) -> Data:
    def rows(part: str) -> _Rows:
        images, labels = (folder / f"{part}-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1"))
        pixels, digits = _read_idx(images, 3), _read_idx(labels, 1)
        if len(pixels) != len(digits):
            raise InputError(f"{labels}: expected {len(pixels)} labels, one an image, found {len(digits)}")
        places = [f"{images}:{i + 1}" for i in range(len(pixels))]
        return zip(pixels, map(str, digits), places, strict=True)

    return _add_validation(_make_data("image", rows("train"), None, rows("t10k")), one_in=12)


def _read_idx(path: Path, dimensions: int) -> Any:
    """The bytes of an IDX file, an array of that many dimensions."""
    content = read_bytes(path)
    header = np.frombuffer(content[: 4 + 4 * dimensions], ">i4")
    short = len(header) <= dimensions
    if short or header[0] != 0x800 + dimensions or len(content) != header.nbytes + header[1:].prod():
        raise InputError(f"{path}: not an IDX file of bytes in {dimensions} dimensions")
    return np.frombuffer(content, np.uint8, offset=header.nbytes).reshape(header[1:]).copy()


def _eurosat(folder: Path) -> Data:
    files = _read_archive(folder / "images.tar.xz")
    table = read_table(folder / "splits.tsv", Reading())
    columns = [table.columns[name] for name in ("file", "class", "split")]
    splits: dict[str, list[tuple[Any, str, str]]] = {"train": [], "validation": [], "test": []}
    for where, name, label, split in zip(table.where, *columns, strict=True):
        if name not in files:
            raise InputError(f"{where}: no file {name} in {folder / 'images.tar.xz'}")
        splits[split].append((files[name], label, f"{folder / 'images.tar.xz'}:{name}"))
    return _make_data("image", splits["train"], splits["validation"], splits["test"])


def _cifar10(folder: Path) -> Data:
    def rows(part: str) -> _Rows:
        archive = folder / f"{part}.tar.xz"
        return [(content, name.split("/")[1], f"{archive}:{name}") for name, content in _read_archive(archive).items()]

    return _add_validation(_make_data("image", rows("train"), None, rows("test")))


def _fsdd(folder: Path) -> Data:
    """The recordings 0 to 4 of every speaker and digit are the test."""
    train: list[tuple[Any, str, str]] = []
    test: list[tuple[Any, str, str]] = []
    archive = folder / "recordings.tar.xz"
    for name, content in _read_archive(archive).items():
        digit, _, index = Path(name).stem.split("_")
        where = f"{archive}:{name}"
        (test if int(index) < 5 else train).append((_read_wave(content, where), digit, where))
    return _add_validation(_make_data("audio", train, None, test))


def _read_wave(content: bytes, where: str) -> tuple[Any, int]:
    try:
        with wave.open(io.BytesIO(content)) as file:
            if file.getsampwidth() != 2 or file.getnchannels() != 1:
                raise InputError(f"{where}: expected a mono sound of 16 bits")
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            return samples.astype(np.float32) / 32768, file.getframerate()
    except (wave.Error, EOFError, RuntimeError) as error:
        raise InputError(f"{where}: not a .wav file ({first_line(error)})") from None


def _read_archive(path: Path) -> dict[str, bytes]:
    """Every file of a tar archive, by name and in the order of names."""
    content = io.BytesIO(read_bytes(path))
    try:
        with tarfile.open(fileobj=content) as archive:
            files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
            return {name: file.read() for name, file in sorted(files.items()) if file is not None}
    except tarfile.TarError as error:
        raise InputError(f"{path}: not a tar archive ({first_line(error)})") from None


PRESETS: dict[str, Preset] = {
    "sst5": Preset("text", "sst5", _sst5),
    "clinc150": Preset("text", "clinc150", _clinc150),
    "goemotions": Preset("multilabel", "goemotions", _goemotions),
    "reuters": Preset("multilabel", "reuters21578", _reuters),
    "eurlex57k": Preset("multilabel", "eurlex57k", _eurlex57k),
    "conll2003": Preset("tokens", "conll2003", _conll2003),
    "sighan15": Preset("tokens", "sighan_csc", _sighan15),
    "mnist": Preset("image", "mnist", _mnist),
    "eurosat": Preset("image", "eurosat_rgb_small", _eurosat),
    "cifar10": Preset("image", "cifar10_jpg", _cifar10),
    "fsdd": Preset("audio", "fsdd", _fsdd),
}
