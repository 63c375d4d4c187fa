"""A user's data, wherever it lies: files, folders, Hugging Face data sets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from softsieve import _checks
from softsieve._progress import ProgressCallback, no_progress
from softsieve.errors import InputError, listed, shown
from softsieve.extras import loaded, package
from softsieve.tasks.columns import find_label_column, read_input, table_examples, table_inputs
from softsieve.tasks.encode import find_broken
from softsieve.tasks.examples import KINDS, MEDIA, PARTS, Data, Examples, Part, Wanted, as_list, label_names, media_kind
from softsieve.tasks.files import iter_lines
from softsieve.tasks.plain import read_plain
from softsieve.tasks.reading import Reading, unseen_note
from softsieve.tasks.tables import BLOCK, Table, add_cells, is_conll, is_table, read_conll, read_table
from softsieve.tasks.texts import Column, Places, make_column

FLAGS = {"0", "1"}, {"False", "True"}  # the labels that are read of rows with a flag for each class
SUSPICIOUS = 20  # rows from which labels that hardly repeat are taken for a mistake


def read_data(
    source: str | Path, *, validation: str | Path | None = None, test: str | Path | None = None,
    kind: str | None = None, text_column: str | None = None, label_column: str | None = None,
    validation_share: float = 0.1, seed: int = 0, on_error: str = "stop", delimiter: str | None = None,
    encoding: str | None = None, workers: int = 0, progress: ProgressCallback = no_progress,
) -> Data:  # fmt: skip
    """A data set from a file, a folder, or the name of a Hugging Face data set.

    Files are .csv, .tsv (read without quoting), .jsonl, .json (a list of objects, or an object of columns), .parquet
    and, for tokens, CoNLL-style .conll; all but .parquet also as .gz. A .txt file has lines of fastText
    ("__label__name text"), lines of a label, a tab and a text, or is CoNLL-style, which its content tells.
    Folders hold one folder of images or sounds per class, or train, validation and test folders of such; or files
    train.csv, validation.csv, ...; or what `datasets.Dataset.save_to_disk` wrote.

    Args:
        source: the training data, and the validation and test data that come with it.
        validation: validation data of its own. Without any, `validation_share` of the training rows are held out.
        test: test data of its own.
        kind: one of `KINDS`; found from the data when None. Multi-label cells of a text file ("a|b" or "a,b") are only
            taken apart with ``kind="multilabel"``.
        text_column: column of the inputs (texts, words or file names), where its name does not tell.
        label_column: column of the labels, where its name does not tell.
        validation_share: share of the training rows to hold out, from 0 (none) to below 1.
        seed: of that draw.
        on_error: "stop" at the first row that cannot be used, or "skip" such rows, images and sounds; `Data.notes`
            says how many, and where the first are.
        delimiter: between the cells of .csv and .tsv files, "tab" for one. Of a .csv file None is a comma or, where
            the header has none, the semicolon, tab or bar that divides it.
        encoding: of text files. None is what the first bytes say, or UTF-8, or cp1252 where bytes are not UTF-8 and
            nothing speaks against it, which `Data.notes` says.
        workers: threads that try images and sounds where broken ones are to be skipped.
        progress: called with what is being read, and the share of it that was.

    Labels of validation and test rows that training has not seen are kept; they count as wrong, and `Data.notes` says
    how many there are.

    Raises:
        InputError: saying what cannot be used, and where.
    """
    for name, value in {"source": source, "validation": validation, "test": test}.items():
        if value is not None or name == "source":
            _checks.path(name, value)
    _check_columns(text_column, label_column)
    _checks.whole_number("seed", seed, 0, 2**63 - 1)
    _checks.number("validation_share", validation_share)
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise InputError(f"kind: expected one of {', '.join(KINDS)}, found {kind!r}")
    if not 0 <= validation_share < 1:
        raise InputError(f"validation_share: expected a number from 0 to below 1, found {validation_share}")
    how = Reading(on_error, delimiter, encoding, progress)
    wanted = Wanted(kind, text_column, label_column, how)
    parts = {name: _drop_broken(part, how, workers) for name, part in _read(source, wanted).items()}
    train = parts["train"]
    wanted = wanted._replace(kind=train.kind)  # what training is, the other parts must be
    rest: dict[str, Examples | None] = {}
    for name, own in (("validation", validation), ("test", test)):
        part = parts.get(name) if own is None else _drop_broken(_read_part(own, name, wanted), how, workers)
        if part is not None and part.kind != train.kind:
            raise InputError(f"{part.examples.where[0]}: expected {train.kind} as in training, found {part.kind}")
        rest[name] = None if part is None else part.examples
    path = Path(source)
    name = Path(path.name.removesuffix(".gz")).stem if path.is_file() else path.resolve().name
    name = name if path.exists() else str(source)
    data = Data(name, train.kind, train.examples, rest["validation"], rest["test"], train.labels)
    data = data._replace(notes=tuple(how.notes))
    return with_validation(data, str(source), validation_share, seed=seed)


def with_validation(
    data: Data, source: str, validation_share: float, *, seed: int = 0, hint: str = "give label_column"
) -> Data:
    """Data whose labels can be learnt, with a share of the training rows held out where there is no validation part.

    The ``hint`` says what to do where every row has a label of its own.

    Raises:
        InputError: naming the source, for labels that cannot be learnt, or too few rows.
    """
    _check_labels(data, source, hint)
    data = data._replace(notes=(*data.notes, *_unseen_notes(data)))
    if data.validation is None and validation_share > 0:
        kept, held_out = hold_out(data, max(1, round(validation_share * len(data.train.inputs))), seed=seed)
        data = data._replace(train=kept, validation=held_out)
    return data


def read_inputs(
    source: str | Path, kind: str, *, text_column: str | None = None, label_column: str | None = None,
    on_error: str = "stop", delimiter: str | None = None, encoding: str | None = None, workers: int = 0,
    progress: ProgressCallback = no_progress,
) -> Examples:  # fmt: skip
    """What a trained model is to answer: a source as of `read_data`, with labels or without (an empty list).

    Without labels it may also be a file of texts, one a line (.txt); of words, one a line (.txt, .conll); or a folder
    of images or sounds. Of a source with several parts it is the test. Of a table, `Examples.others` has the other
    columns.

    Args:
        source: file, folder or name of a data set.
        kind: one of `KINDS`, what the model was trained on.
        text_column, label_column: as in `read_data`; a column of labels with gaps counts as none.
        on_error, delimiter, encoding, workers, progress: as in `read_data`; `Examples.notes` says what was left out.

    Raises:
        InputError: saying what cannot be used, and where.
    """
    _checks.choice("kind", kind, KINDS)
    _check_columns(text_column, label_column)
    how = Reading(on_error, delimiter, encoding, progress)
    examples = _read_questions(_checks.path("source", source), kind, Wanted(kind, text_column, label_column, how))
    examples = _drop_broken(Part(kind, examples), how, workers).examples
    return examples._replace(notes=tuple(how.notes))


def _read_questions(path: Path, kind: str, wanted: Wanted) -> Examples:
    how = wanted.how
    if path.is_dir() and kind in MEDIA:
        files = _list_media(path, (kind,))
        if files:
            wanted.expect_no_columns(path)
            return Examples(files, [], [str(file) for file in files])
    if path.is_file() and is_conll(path):
        table = read_plain(path, how, strict=True) if kind in ("text", "multilabel") else None
        if table is not None:
            return table_inputs(table, kind, wanted)
        wanted.expect_no_columns(path)
        if kind == "tokens":
            return read_conll(path, how, tags=False)
        lines = ((f"{path}:{number}", line) for number, line in iter_lines(path, how))
        return line_inputs(lines, kind, path.parent, how)
    if path.is_file() and is_table(path):
        return table_inputs(read_table(path, how), kind, wanted)
    return _read_part(path, "test", wanted).examples


def read_lines(
    lines: Iterable[tuple[str, str]], kind: str, *, on_error: str = "stop", workers: int = 0,
    progress: ProgressCallback = no_progress,
) -> Examples:  # fmt: skip
    """What a trained model is to answer, from places and lines; the arguments are those of `read_inputs`."""
    how = Reading(on_error, progress=progress)
    examples = _drop_broken(Part(kind, line_inputs(lines, kind, how=how)), how, workers).examples
    return examples._replace(notes=tuple(how.notes))


def line_inputs(
    lines: Iterable[tuple[str, str]], kind: str, folder: Path = Path(), how: Reading | None = None
) -> Examples:  # fmt: skip
    """Examples without labels from places and lines: texts, words between spaces, or names of files in the folder."""
    how = Reading() if how is None else how
    inputs, places = list[Any](), list[str]()
    for where, line in lines:
        try:
            inputs.append(read_input(line.split() if kind == "tokens" else line, kind, where, folder))
            places.append(where)
        except InputError as error:
            how.refuse(error)
    how.say_left_out("lines", len(inputs))
    return Examples(inputs, [], places)


def _check_columns(text_column: str | None, label_column: str | None) -> None:
    for name, value in {"text_column": text_column, "label_column": label_column}.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name}: expected the name of a column, found {type(value).__name__}")


def _read(source: str | Path, wanted: Wanted) -> dict[str, Part]:
    """The parts of a source by name, "train" always; a single file is all training."""
    path = Path(source)
    if path.is_file():
        return {"train": _read_file(path, wanted)}
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():  # what `save_to_disk` wrote
        datasets = package("datasets", "a Hugging Face data set")
        saved = loaded(lambda: datasets.load_from_disk(str(path)), f"{path}: damaged Hugging Face data set")
        return _read_splits(str(path), saved, wanted)
    return _read_folder(path, wanted) if path.is_dir() else _read_hub(str(source), wanted)


def _read_part(source: str | Path, name: str, wanted: Wanted) -> Part:
    """The part of that name, or the only one, of a source the caller gave for it."""
    parts = _read(source, wanted)
    if name not in parts and len(parts) != 1:
        raise InputError(f"{source}: expected a part {name!r}, found {listed(parts)}")
    return parts.get(name, parts["train"])


def _check_labels(data: Data, source: str, hint: str) -> None:
    """Refuse a single class, labels that are no classes, and flags where the labels that apply are expected."""
    counts = Counter(label for labels in data.train.labels for label in as_list(labels))
    least = 1 if data.kind == "multilabel" else 2  # any number of labels a row: one of them may be there or not
    if len(counts) < least:
        raise InputError(f"{source}: expected at least {least} classes to train on, found {sorted(counts)}")
    if data.kind == "multilabel" and data.labels is None and set(counts) in FLAGS:
        raise InputError(
            f"{source}: expected lists of the labels that apply, found no label but {listed(sorted(counts))}, which "
            "look like flags, one for each class; labels that are called so need other names"
        )
    rows, different = len(data.train.inputs), len(counts)
    if data.kind in ("multilabel", "tokens") or data.labels is not None or rows < SUSPICIOUS:
        return
    some = ", ".join(shown(label) for label in list(counts)[:3])
    if 2 * different > rows and all(map(_is_number, counts)) and not all(map(str.isdecimal, counts)):
        found = f"{different} different numbers in {rows} rows ({some}, ...)"
        raise InputError(f"{source}: the labels look like a regression target: expected classes, found {found}")
    if different == rows:
        found = f"a label of its own in every one of {rows} rows ({some}, ...)"
        raise InputError(f"{source}: expected classes that several rows have, found {found}; {hint}")


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


def _unseen_notes(data: Data) -> Iterator[str]:
    known = set(label_names(data))
    for name, part in (("validation", data.validation), ("test", data.test)):
        note = None if part is None else unseen_note(name, part.labels, part.where, known)
        if note is not None:
            yield note


def _drop_broken(part: Part, how: Reading, workers: int) -> Part:
    """A part without the images or sounds that cannot be decoded, where bad rows are to be skipped."""
    if part.kind not in MEDIA or how.on_error == "stop":
        return part
    good = []
    for row, complaint in enumerate(find_broken(part.kind, part.examples, workers, how.progress)):
        if complaint is None:
            good.append(row)
        else:
            how.refuse(complaint)
    how.say_left_out(f"{part.kind} files", len(good))
    return part._replace(examples=part.examples.pick(good))


def _read_file(path: Path, wanted: Wanted) -> Part:
    """The examples of a table or of a CoNLL-style file."""
    if is_table(path):
        return table_examples(read_table(path, wanted.how), wanted)
    if not is_conll(path):
        expected = ".csv, .tsv, .jsonl, .json, .conll, .txt (or .gz of these) or .parquet"
        raise InputError(f"{path}: expected a file {expected}, found {''.join(path.suffixes[-2:]) or 'no extension'}")
    table = read_plain(path, wanted.how) if wanted.kind != "tokens" else None
    if table is not None:
        return table_examples(table, wanted)
    if wanted.kind not in (None, "tokens"):
        raise InputError(f"{path}: such a file holds tokens, a word and a tag a line, not {wanted.kind}")
    wanted.expect_no_columns(path)
    return Part("tokens", read_conll(path, wanted.how))


def _read_folder(folder: Path, wanted: Wanted) -> dict[str, Part]:
    """The parts of a folder by name, "train" always: files train.csv, ..., or folders of images or sounds."""
    files = _group_by_part([path for path in folder.iterdir() if path.is_file() and (is_table(path) or is_conll(path))])
    if "train" in files:
        return {part: _read_file(path, wanted) for part, path in files.items()}
    folders = _list_folders(folder)
    names = {path.name for path in folders}
    if "train" in names and names <= {alias for aliases in PARTS.values() for alias in aliases}:
        return {part: _read_classes(path, wanted) for part, path in _group_by_part(folders).items()}
    return {"train": _read_classes(folder, wanted)}


def _group_by_part(paths: list[Path]) -> dict[str, Path]:
    """The path of each part that has one, told by its name up to the first dot."""
    parts = {}
    for part, aliases in PARTS.items():
        own = sorted(path for path in paths if path.name.split(".")[0] in aliases)
        if len(own) > 1:
            names = listed(path.name for path in own)
            raise InputError(f"{own[0].parent}: expected one {part} part, found {names}")
        if own:
            parts[part] = own[0]
    return parts


def _list_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def _list_media(folder: Path, kinds: Collection[str]) -> list[Path]:
    """The files of those kinds in a folder, but for hidden ones: macOS puts a ._1.png beside 1.png."""
    inside = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return [path for path in inside if media_kind(path.name) in kinds]


def _read_classes(folder: Path, wanted: Wanted) -> Part:
    """A folder that holds a folder of images or sounds per class."""
    if wanted.kind not in (None, *MEDIA):
        raise InputError(f"{folder}: expected a file train.csv (.tsv, .jsonl, ...) for {wanted.kind}, found none")
    classes = _list_folders(folder)
    if not classes:
        raise InputError(
            f"{folder}: expected a folder per class or a file train.csv (.tsv, .jsonl, ...), found neither"
        )
    wanted.expect_no_columns(folder)
    kinds = tuple(MEDIA) if wanted.kind is None else (wanted.kind,)
    inputs: list[Path] = []
    labels: list[str] = []
    present: set[str | None] = set()
    for class_folder in classes:
        files = _list_media(class_folder, kinds)
        if not files:
            expected = ", ".join(extension for kind in kinds for extension in MEDIA[kind])
            raise InputError(f"{class_folder}: expected files {expected}, found none")
        inputs.extend(files)
        labels.extend([class_folder.name] * len(files))
        present.update(media_kind(path.name) for path in files)
    if len(present) > 1:
        raise InputError(f"{folder}: expected images or sounds, found both; say which kind to read")
    return Part(str(present.pop()), Examples(inputs, labels, list(map(str, inputs))))


def _read_hub(source: str, wanted: Wanted) -> dict[str, Part]:
    """A data set by its name: "name", "user/name", with its configuration behind ":" or "/"."""
    name, _, config = source.partition(":")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*){0,2}", name) or is_table(Path(source)) or is_conll(Path(source)):
        raise InputError(f"{source}: no such file or folder")
    datasets = package("datasets", f"{source}: no such file or folder; a Hugging Face data set")
    if name.count("/") == 2 and not config:
        name, _, config = name.rpartition("/")

    def load() -> Any:
        try:
            return datasets.load_dataset(name, config or None)
        except datasets.exceptions.DatasetNotFoundError:
            if config or "/" not in name:
                raise
            return datasets.load_dataset(*name.split("/"))  # "glue/sst2" is a configuration, not a user's

    return _read_splits(source, loaded(load, f"{source}: neither a file or folder nor a data set to load"), wanted)


def _read_splits(source: str, dataset: Any, wanted: Wanted) -> dict[str, Part]:
    splits = dict(dataset) if isinstance(dataset, dict) else {"train": dataset}
    if len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    parts = {}
    for part, aliases in PARTS.items():
        split = next((name for name in aliases if name in splits), None)
        if split is None:
            continue
        table = make_table(f"{source}:{split}", splits[split])
        withheld = all(value is None for value in table.columns[find_label_column(table, wanted)])
        if part == "train" or not withheld:  # benchmarks publish tests without their labels
            parts[part] = table_examples(table, wanted)
    if "train" not in parts:
        raise InputError(f"{source}: expected a split 'train', found {listed(splits)}")
    return parts


def make_table(place: str, dataset: Any) -> Table:
    """A split with its class numbers turned into names."""
    datasets = package("datasets", "a Hugging Face data set")
    if not len(dataset):
        raise InputError(f"{place}: no rows")
    complaint = f"{place}: damaged Hugging Face data set"
    cells = {name: Column() for name in dataset.column_names}

    def fill() -> None:
        for batch in dataset.with_format("arrow").iter(BLOCK):
            add_cells(cells, batch)

    loaded(fill, complaint)
    columns = {name: column.finish() for name, column in cells.items()}
    media, names = {}, {}
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            media[column] = "image" if isinstance(feature, datasets.Image) else "audio"
        inner = getattr(feature, "feature", feature)  # of a list
        if isinstance(inner, datasets.ClassLabel):
            if not all(isinstance(name, str) for name in inner.names):
                raise InputError(f"{place}: {column}: expected names of classes, found {listed(inner.names)}")
            names[column] = [name.strip() for name in inner.names]
            columns[column] = make_column([_name_classes(value, names[column]) for value in columns[column]])
    return Table(place, columns, Places(place, range(1, len(dataset) + 1)), media=media, names=names)


def _name_classes(value: Any, names: list[str]) -> Any:
    """The name of a class number, None for none (-1); of a list, of each."""
    if isinstance(value, list):
        return [_name_classes(one, names) for one in value]
    return names[value] if value is not None and 0 <= value < len(names) else None


def hold_out(data: Data, count: int, *, seed: int, keep_labels: bool = True) -> tuple[Examples, Examples]:
    """Training examples without `count` of them, and those, in the order of the data.

    With one label a row they come from every class alike where each has one to give and one to keep. Otherwise they are
    drawn at random, and with `keep_labels` fewer than `count` rather than that a label disappears from training.
    """
    train = data.train
    order = np.random.default_rng(seed).permutation(len(train.inputs)).tolist()
    by_class: dict[str, list[int]] = {}
    if data.kind in ("text", "image", "audio"):
        for row in order:
            by_class.setdefault(train.labels[row], []).append(row)
    if by_class and all(len(order) <= count * len(rows) <= len(order) * (len(rows) - 1) for rows in by_class.values()):
        quota = {label: divmod(count * len(rows), len(order)) for label, rows in by_class.items()}
        largest = sorted(quota, key=lambda label: (-quota[label][1], label))  # remainder
        extra = set(largest[: count - sum(whole for whole, _ in quota.values())])
        chosen = {row for label, rows in by_class.items() for row in rows[: quota[label][0] + (label in extra)]}
    else:
        chosen = _draw_rows(train, order, min(count, len(order) - 1), keep_labels)
    if not chosen:
        raise InputError(
            f"{train.where[0]}: too few rows ({len(order)}) to hold any out for validation; "
            "give validation data or validation_share=0"
        )

    kept = [row for row in range(len(order)) if row not in chosen]
    return train.pick(kept), train.pick(sorted(chosen))


def _draw_rows(train: Examples, order: list[int], count: int, keep_labels: bool) -> set[int]:
    """The first `count` rows of `order`; with `keep_labels`, of those whose labels training has elsewhere too."""
    if not keep_labels:
        return set(order[:count])
    left = Counter(label for labels in train.labels for label in as_list(labels))
    chosen: set[int] = set()
    for row in order:
        here = Counter(as_list(train.labels[row]))
        if len(chosen) < count and all(left[label] > times for label, times in here.items()):
            left.subtract(here)
            chosen.add(row)
    return chosen
