"""A user's own files and folders: a file, a file per part, or a folder of images or sounds per class."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from softsieve.errors import InputError, listed
from softsieve.tasks.columns import table_examples
from softsieve.tasks.examples import MEDIA, PARTS, Examples, Part, Wanted, media_kind
from softsieve.tasks.tables import is_conll, is_table, read_conll, read_table


def read_file(path: Path, wanted: Wanted) -> Part:
    """The examples of a table or of a CoNLL-style file."""
    if is_table(path):
        return table_examples(read_table(path), wanted)
    if not is_conll(path):
        expected = ".csv, .tsv, .jsonl, .conll, .txt (or .gz of these) or .parquet"
        raise InputError(f"{path}: expected a file {expected}, found {''.join(path.suffixes[-2:]) or 'no extension'}")
    if wanted.kind not in (None, "tokens"):
        raise InputError(f"{path}: such a file holds tokens, a word and a tag a line, not {wanted.kind}")
    wanted.expect_no_columns(path)
    return Part("tokens", read_conll(path))


def read_folder(folder: Path, wanted: Wanted) -> dict[str, Part]:
    """The parts of a folder by name, "train" always: files train.csv, ..., or folders of images or sounds."""
    files = _by_part([path for path in folder.iterdir() if path.is_file() and (is_table(path) or is_conll(path))])
    if "train" in files:
        return {part: read_file(path, wanted) for part, path in files.items()}
    folders = _folders(folder)
    names = {path.name for path in folders}
    if "train" in names and names <= {alias for aliases in PARTS.values() for alias in aliases}:
        return {part: _read_classes(path, wanted) for part, path in _by_part(folders).items()}
    return {"train": _read_classes(folder, wanted)}


def _by_part(paths: list[Path]) -> dict[str, Path]:
    """The path of each part that has one, told by its name up to the first dot."""
    parts = {}
    for part, aliases in PARTS.items():
        found = sorted(path for path in paths if path.name.split(".")[0] in aliases)
        if len(found) > 1:
            names = listed(path.name for path in found)
            raise InputError(f"{found[0].parent}: expected one {part} part, found {names}")
        if found:
            parts[part] = found[0]
    return parts


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def media_files(folder: Path, kinds: Collection[str]) -> list[Path]:
    """The files of those kinds in a folder, but for hidden ones: macOS puts a ._1.png beside 1.png."""
    inside = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return [path for path in inside if media_kind(path.name) in kinds]


def _read_classes(folder: Path, wanted: Wanted) -> Part:
    """A folder that holds a folder of images or sounds per class."""
    if wanted.kind not in (None, *MEDIA):
        raise InputError(f"{folder}: expected a file train.csv (.tsv, .jsonl, ...) for {wanted.kind}, found none")
    classes = _folders(folder)
    if not classes:
        raise InputError(
            f"{folder}: expected a folder per class or a file train.csv (.tsv, .jsonl, ...), found neither"
        )
    wanted.expect_no_columns(folder)
    kinds = tuple(MEDIA) if wanted.kind is None else (wanted.kind,)
    examples = Examples([], [], [])
    found: set[str | None] = set()
    for class_folder in classes:
        files = media_files(class_folder, kinds)
        if not files:
            expected = ", ".join(extension for kind in kinds for extension in MEDIA[kind])
            raise InputError(f"{class_folder}: expected files {expected}, found none")
        examples.inputs.extend(files)
        examples.labels.extend([class_folder.name] * len(files))
        examples.where.extend(map(str, files))
        found.update(media_kind(path.name) for path in files)
    if len(found) > 1:
        raise InputError(f"{folder}: expected images or sounds, found both; say which kind to read")
    return Part(str(found.pop()), examples)
