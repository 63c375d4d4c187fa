"""What a report is made of: folders of runs and files of records, found, read and checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from softsieve._safetensors import read_tensors
from softsieve.errors import InputError
from softsieve.report.words import Row, is_number, short

RUN, LOG, LOGITS, JUDGED = "run.json", "log.jsonl", "logits.safetensors", "judged.json"
DEPTH = 5  # folders below a given one that are searched
_LARGEST = 2**63  # of a whole number
_KINDS: dict[str, Any] = {
    "a name": str,
    "a string": str,
    "an object": dict,
    "a list": list,
    "a whole number": int,
    "a number": int | float,
}


class Record(NamedTuple):
    """A file of results: what was measured, how, with what and when."""

    path: Path
    name: str  # as the page shows it
    suite: str
    settings: Row
    provenance: Row
    results: Sequence[Row]


class Logits(NamedTuple):
    """Held-out rows of a run under its best weights."""

    logits: Tensor  # (rows, classes)
    target: Tensor  # (rows,)
    part: str  # of the data


class Run(NamedTuple):
    """A training run: its record, its log and, where it left them, logits and what is mistaken."""

    record: Record
    log: Sequence[Row]
    logits: Logits | None = None
    judged: Row | None = None  # classes, pairs and mistakes of held-out rows

    @property
    def settings(self) -> Row:
        """How it was trained, and what on."""
        return self.record.settings

    @property
    def result(self) -> Row:
        """What it came to."""
        return self.record.results[0]


class Sources(NamedTuple):
    """All that a page is made of."""

    runs: list[Run]
    records: list[Record]

    @property
    def all(self) -> list[Record]:
        """Records of runs and of measurements."""
        return [*(run.record for run in self.runs), *self.records]


def read_all(paths: Sequence[Path]) -> Sources:
    """Read runs and records, each once, in the order given and by name within a folder.

    Raises:
        InputError: naming the file, when one cannot be read or does not hold what it should.
    """
    if not paths:
        raise InputError("runs: expected at least one folder or file, found none")
    sources = Sources([], [])
    seen: set[Path] = set()
    for root in paths:
        records = [
            _record(path, _name(path, root), strict=path in (root, path.with_name(RUN))) for path in _files(root)
        ]
        if not any(records):
            raise InputError(f"{root}: expected a run's folder, with {RUN}, or records (.json), found none")
        for record in filter(None, records):
            if record.path.resolve() in seen:
                continue
            seen.add(record.path.resolve())
            if record.suite == "train":
                sources.runs.append(_run(record))
            else:
                sources.records.append(record)
    return sources


def _files(root: Path) -> Iterator[Path]:
    """The files that may hold a record: the one itself, or those below a folder."""
    if not root.exists():
        raise InputError(f"{root}: expected a run's folder or a record, found nothing there")
    if not root.is_dir():
        if root.suffix != ".json":
            raise InputError(f"{root}: expected a run's folder or a record (.json), found another kind of file")
        yield root
        return
    for folder, below, names in os.walk(root, onerror=_fail):
        here = Path(folder)
        if RUN in names:
            names, below[:] = [RUN], []  # the model's own files are no records
        if len(here.relative_to(root).parts) >= DEPTH:
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (here / name for name in sorted(names) if name.endswith(".json") and not name.startswith("."))


def _fail(error: OSError) -> None:
    raise error


def _name(path: Path, root: Path) -> str:
    """A path for people: from the root on, a run by its folder."""
    place = path.parent if path.name == RUN else path
    return str(place.relative_to(root.parent)) if place != root.parent else place.resolve().name


def _record(path: Path, name: str, *, strict: bool) -> Record | None:
    """The record of a file; None for JSON of another kind, which is refused where ``strict``."""
    content = _parse(_text(path), f"{path}")
    if not isinstance(content, dict) or "suite" not in content:
        if not strict:
            return None
        raise InputError(f"{path}: expected a record with suite, settings, provenance and results, found other JSON")
    if content.get("format", 1) != 1:
        raise InputError(
            f"{path}: expected a record of format 1, found {content['format']!r}: made by a later softsieve?"
        )
    kinds = {"suite": "a name", "settings": "an object", "provenance": "an object", "results": "a list"}
    for key, kind in kinds.items():
        _check(f"{path}", content, key, kind)
    results = {f"results[{number}]": result for number, result in enumerate(content["results"])}
    for place in results:
        _check(f"{path}", results, place, "an object")
    return Record(path, name, *(content[key] for key in kinds))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected text in UTF-8, found other bytes") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(text: str, where: str) -> Any:
    """JSON with numbers that a table can show: 1e999 would be infinity."""

    def refuse(constant: str) -> NoReturn:
        raise InputError(f"{where}: expected finite numbers, found {short(constant, 60)}")

    def real(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    def whole(digits: str) -> int:
        # Python refuses to read a number of thousands of digits.
        return int(digits) if len(digits) < 25 and abs(int(digits)) < _LARGEST else refuse(digits)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=real, parse_int=whole)
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"{where}: expected a record, found JSON nested too deep") from None
    except ValueError as error:
        raise InputError(f"{where}: expected JSON, found something else or a part of it: {error}") from None


def _short(value: Any) -> str:
    return "none" if value is None else short(f"{value:.4g}" if isinstance(value, float) else repr(value), 60)


def _check(where: str, values: Row, name: str, kind: str) -> None:
    """Refuse a field that is missing or of another kind."""
    value = values.get(name)
    if not isinstance(value, _KINDS[kind]) or (kind == "a number" and isinstance(value, bool)):
        raise InputError(f"{where}: {name}: expected {kind}, found {_short(value)}")


def expect(record: Record, results: Sequence[Row], *, words: str = "", numbers: str = "") -> None:
    """Refuse results that lack a field, named in ``words`` (strings) or ``numbers``, that a figure is drawn from."""
    for place, result in enumerate(results):
        for names, kind in ((words, "a string"), (numbers, "a number")):
            for name in names.split():
                _check(f"{record.path}: results[{place}]", result, name, kind)


# -- runs --------------------------------------------------------------------------------------------------------------


def _run(record: Record) -> Run:
    path, settings = record.path, record.settings
    if len(record.results) != 1:
        raise InputError(f"{path}: results: expected one, found {len(record.results)}")
    expect(record, record.results, numbers="steps seconds")
    for part in ("validation", "test"):
        scores = record.results[0].get(part) or {}
        if not isinstance(scores, dict) or not all(map(is_number, scores.values())):
            raise InputError(f"{path}: results[0]: {part}: expected metrics and their values, found {_short(scores)}")
    for name, kind in {"data": "a string", "loss": "a string", "metric": "a string", "seed": "a whole number"}.items():
        _check(f"{path}: settings", settings, name, kind)
    if settings.get("labels"):
        _check(f"{path}: settings", settings, "labels", "a list")
    logits = _logits(path.with_name(LOGITS), record)
    return Run(record, _log(path.with_name(LOG)), logits, _judged(path.with_name(JUDGED)))


def _log(path: Path) -> list[Row]:
    """The lines of a log, without a last one that was cut short."""
    entries: list[Row] = []
    lines = _text(path).split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            entry = _parse(line, where)
        except InputError:
            if number == len(lines) and "NaN" not in line and "Infinity" not in line:  # no line end: cut short
                break
            raise
        if not isinstance(entry, dict) or not is_number(entry.get("step")) or not isinstance(entry.get("kind"), str):
            raise InputError(f"{where}: expected an object with step and kind, found {_short(entry)}")
        for name in entry.keys() - {"kind"}:
            _check(where, entry, name, "a number")
        entries.append(entry)
    return entries


_JUDGED = {  # lists of such a file -> the kinds of fields
    "classes": {
        "label": "a string",
        "support": "a whole number",
        **dict.fromkeys(("precision", "recall", "f1"), "a number"),
    },
    "pairs": {"label": "a string", "prediction": "a string", "rows": "a whole number", "share": "a number"},
    "mistakes": {"input": "a string", "label": "a string", "prediction": "a string", "probability": "a number"},
}


def _judged(path: Path) -> Row | None:
    """What a run left about its classes and mistakes; None for one of an earlier version."""
    if not path.exists():
        return None
    content = _parse(_text(path), f"{path}")
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected classes, pairs and mistakes, found {_short(content)}")
    for name, kind in {"part": "a string", "rows": "a whole number", **dict.fromkeys(_JUDGED, "a list")}.items():
        _check(f"{path}", content, name, kind)
    for name, kinds in _JUDGED.items():
        for place, row in enumerate(content[name]):
            _check(f"{path}", {name: row}, name, "an object")
            for key, kind in kinds.items():
                _check(f"{path}: {name}[{place}]", row, key, kind)
    return content


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
