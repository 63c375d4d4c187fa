"""What a report is made of: folders of runs and files of records, found, read and checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from softsieve._safetensors import read_tensors
from softsieve.errors import InputError

RUN, LOG, LOGITS = "run.json", "log.jsonl", "logits.safetensors"
DEPTH = 5  # folders below a given one that are searched
_LARGEST = 2**63  # of a whole number


@dataclass(frozen=True)
class Record:
    """A file of results: what was measured, how, with what and when."""

    path: Path
    name: str  # as the page shows it
    suite: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    results: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Logits:
    """Held-out rows of a run under its best weights."""

    logits: Tensor  # (rows, classes)
    target: Tensor  # (rows,)
    part: str  # of the data


@dataclass(frozen=True)
class Run:
    """A training run: its record, its log and, where it left them, logits."""

    record: Record
    log: Sequence[Mapping[str, Any]]
    logits: Logits | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """How it was trained, and what on."""
        return self.record.settings

    @property
    def result(self) -> Mapping[str, Any]:
        """What it came to."""
        return self.record.results[0]


@dataclass
class Found:
    """All that was given."""

    runs: list[Run] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def files(self) -> set[Path]:
        """Those that were read, resolved."""
        return {record.path.resolve() for record in (*self.records, *(run.record for run in self.runs))}


def read_all(paths: Sequence[Path]) -> Found:
    """Read runs and records, each once, in the order given and by name within a folder.

    Raises:
        InputError: naming the file, when one cannot be read or does not hold what it should.
    """
    if not paths:
        raise InputError("runs: expected at least one folder or file, found none")
    found = Found()
    seen: set[Path] = set()
    for given in paths:
        useful = False
        for path in _files(given):
            if path.resolve() in seen:
                useful = True
                continue
            record = _record(path, _name(path, given), strict=path == given or path.name == RUN)
            if record is None:
                continue
            useful = True
            seen.add(path.resolve())
            if record.suite == "train":
                found.runs.append(_run(record))
            else:
                found.records.append(record)
        if not useful:
            raise InputError(f"{given}: expected a run's folder, with {RUN}, or records (.json), found none")
    return found


def _files(given: Path) -> Iterator[Path]:
    """The files that may hold a record: one that was given, or those below a folder."""
    if not given.exists():
        raise InputError(f"{given}: expected a run's folder or a record, found nothing there")
    if not given.is_dir():
        if given.suffix != ".json":
            raise InputError(f"{given}: expected a run's folder or a record (.json), found another kind of file")
        yield given
        return
    for folder, below, names in os.walk(given, onerror=_refuse):
        here = Path(folder)
        if RUN in names:
            names, below[:] = [RUN], []  # the model's own files are no records
        if len(here.relative_to(given).parts) >= DEPTH:
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(".json") and not name.startswith("."):
                yield here / name


def _refuse(error: OSError) -> None:
    raise error


def _name(path: Path, given: Path) -> str:
    """A path for people: from what was given on, a run by its folder."""
    place = path.parent if path.name == RUN else path
    return str(place.relative_to(given.parent)) if place != given.parent else place.resolve().name


def _record(path: Path, name: str, *, strict: bool) -> Record | None:
    """The record of a file; None for JSON of another kind, which is refused where ``strict``."""
    found = _parse(path, _text(path))
    if not isinstance(found, dict) or "suite" not in found:
        if not strict:
            return None
        raise InputError(f"{path}: expected a record with suite, settings, provenance and results, found other JSON")
    if found.get("format", 1) != 1:
        raise InputError(
            f"{path}: expected a record of format 1, found {found['format']!r}: made by a later softsieve?"
        )
    for key, kind in {"suite": str, "settings": dict, "provenance": dict, "results": list}.items():
        if not isinstance(found.get(key), kind):
            raise InputError(f"{path}: {key}: expected {_WORDS[kind]}, found {_short(found.get(key))}")
    for number, result in enumerate(found["results"]):
        if not isinstance(result, dict):
            raise InputError(f"{path}: results[{number}]: expected an object, found {_short(result)}")
    return Record(path, name, found["suite"], found["settings"], found["provenance"], found["results"])


_WORDS: dict[type, str] = {str: "a name", dict: "an object", list: "a list"}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected text in UTF-8, found other bytes") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(path: Path, text: str, where: str = "") -> Any:
    def refuse(constant: str) -> None:
        raise InputError(f"{path}{where}: expected finite numbers, found {constant}")

    try:
        found = json.loads(text, parse_constant=refuse)
        _check_numbers(found, f"{path}{where}")
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"{path}{where}: expected a record, found JSON nested too deep") from None
    except ValueError as error:
        raise InputError(f"{path}{where}: expected JSON, found something else or a part of it: {error}") from None
    return found


def _check_numbers(value: Any, where: str) -> None:
    """Refuse what a table cannot show: 1e999 is read as infinity."""
    if abs(value) >= _LARGEST if isinstance(value, int) else isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where}: expected finite numbers, found {_short(value)}")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_numbers(part, where)


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


# -- values of a record ------------------------------------------------------------------------------------------------


def expect(record: Record, results: Sequence[Mapping[str, Any]], *, words: str = "", numbers: str = "") -> None:
    """Refuse results that lack a field, named in ``words`` (strings) or ``numbers``, that a figure is drawn from."""
    for number, result in enumerate(results):
        for name in words.split():
            if not isinstance(result.get(name), str):
                raise InputError(_complaint(record, number, name, "a string", result))
        for name in numbers.split():
            if not is_number(result.get(name)):
                raise InputError(_complaint(record, number, name, "a number", result))


def _complaint(record: Record, number: int, name: str, kind: str, result: Mapping[str, Any]) -> str:
    return f"{record.path}: results[{number}]: {name}: expected {kind}, found {_short(result.get(name))}"


def is_number(value: Any) -> TypeGuard[float]:
    """Not a flag."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- runs --------------------------------------------------------------------------------------------------------------


def _run(record: Record) -> Run:
    path = record.path
    if len(record.results) != 1:
        raise InputError(f"{path}: results: expected one, found {len(record.results)}")
    expect(record, record.results, numbers="steps seconds")
    for part in ("validation", "test"):
        scores = record.results[0].get(part) or {}
        if not isinstance(scores, dict) or not all(map(is_number, scores.values())):
            raise InputError(f"{path}: results[0]: {part}: expected metrics and their values, found {_short(scores)}")
    for name in ("data", "loss", "metric"):
        if not isinstance(record.settings.get(name), str):
            raise InputError(f"{path}: settings: {name}: expected a string, found {_short(record.settings.get(name))}")
    seed = record.settings.get("seed")
    if not isinstance(seed, int):
        raise InputError(f"{path}: settings: seed: expected a whole number, found {_short(seed)}")
    labels = record.settings.get("labels") or []
    if not isinstance(labels, list):
        raise InputError(f"{path}: settings: labels: expected a list, found {_short(labels)}")
    return Run(record, _log(path.with_name(LOG)), _logits(path.with_name(LOGITS), record))


def _log(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a log, without a last one that was cut short."""
    if not path.exists():
        return []
    found: list[Mapping[str, Any]] = []
    lines = _text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = _parse(path, line, f", line {number}")
        except InputError:
            if number == len(lines) and "NaN" not in line and "Infinity" not in line:  # no line end: cut short
                break
            raise
        if not isinstance(entry, dict) or not is_number(entry.get("step")) or not isinstance(entry.get("kind"), str):
            raise InputError(f"{path}, line {number}: expected an object with step and kind, found {_short(entry)}")
        for name, value in entry.items():
            if name != "kind" and not is_number(value):
                raise InputError(f"{path}, line {number}: {name}: expected a number, found {_short(value)}")
        found.append(entry)
    return found


def _logits(path: Path, record: Record) -> Logits | None:
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    logits, target = tensors.get("logits"), tensors.get("target")
    if logits is None or target is None:
        raise InputError(f"{path}: expected tensors logits and target, found {sorted(tensors)}")
    if logits.dim() != 2 or min(logits.shape) < 1 or target.shape != logits.shape[:1] or target.is_floating_point():
        raise InputError(
            f"{path}: expected logits (rows, classes) and a label for each row, "
            f"found {tuple(logits.shape)} and {tuple(target.shape)} of {target.dtype}"
        )
    logits, target = logits.float(), target.long()
    if logits.softmax(-1).isnan().any():
        raise InputError(f"{path}: expected logits that are numbers, found NaN or infinity")
    low, high = int(target.min()), int(target.max())
    if low < 0 or high >= logits.shape[1]:
        raise InputError(f"{path}: target: expected labels in [0, {logits.shape[1]}), found {low} to {high}")
    labels = record.settings.get("labels")
    if labels and len(labels) != logits.shape[1]:
        raise InputError(f"{path}: expected logits of {len(labels)} classes, as {RUN} says, found {logits.shape[1]}")
    return Logits(logits, target, about.get("part", "held-out"))
