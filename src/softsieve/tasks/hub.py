"""Hugging Face data sets: from the hub, or saved in a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from softsieve.errors import InputError, listed
from softsieve.extras import loaded, package
from softsieve.tasks.columns import label_column, table_examples
from softsieve.tasks.examples import PARTS, Part, Wanted
from softsieve.tasks.tables import Table, is_conll, is_table


def read_hub(source: str, wanted: Wanted) -> dict[str, Part]:
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

    return _from_datasets(source, loaded(load, f"{source}: neither a file or folder nor a data set to load"), wanted)


def is_saved(folder: Path) -> bool:
    """Whether `datasets` wrote that folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def read_saved(folder: Path, wanted: Wanted) -> dict[str, Part]:
    """What `save_to_disk` of a data set, or of its splits, wrote."""
    datasets = package("datasets", "a Hugging Face data set")
    saved = loaded(lambda: datasets.load_from_disk(str(folder)), f"{folder}: damaged Hugging Face data set")
    return _from_datasets(str(folder), saved, wanted)


def _from_datasets(source: str, found: Any, wanted: Wanted) -> dict[str, Part]:
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    parts = {}
    for part, aliases in PARTS.items():
        split = next((name for name in aliases if name in splits), None)
        if split is None:
            continue
        table = _dataset_table(f"{source}:{split}", splits[split])
        withheld = all(value is None for value in table.columns[label_column(table, wanted)])
        if part == "train" or not withheld:  # benchmarks publish tests without their labels
            parts[part] = table_examples(table, wanted)
    if "train" not in parts:
        raise InputError(f"{source}: expected a split 'train', found {listed(splits)}")
    return parts


def _dataset_table(place: str, dataset: Any) -> Table:
    """A split with its class numbers turned into names."""
    datasets = package("datasets", "a Hugging Face data set")
    if not len(dataset):
        raise InputError(f"{place}: no rows")
    columns = loaded(lambda: _columns(dataset), f"{place}: damaged Hugging Face data set")
    media, names = {}, {}
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            media[column] = "image" if isinstance(feature, datasets.Image) else "audio"
        inner = getattr(feature, "feature", feature)  # of a list
        if isinstance(inner, datasets.ClassLabel):
            if not all(isinstance(name, str) for name in inner.names):
                raise InputError(f"{place}: {column}: expected names of classes, found {listed(inner.names)}")
            names[column] = [name.strip() for name in inner.names]
            columns[column] = [_class_names(value, names[column]) for value in columns[column]]
    return Table(place, columns, [f"{place}:{row + 1}" for row in range(len(dataset))], media=media, names=names)


def _columns(dataset: Any) -> dict[str, list[Any]]:
    """All cells as they are stored: images and sounds are not decoded here."""
    arrow = dataset.with_format("arrow")[:]
    arrow.validate(full=True)  # what was read may point anywhere
    return {name: arrow.column(name).to_pylist() for name in arrow.column_names}


def _class_names(value: Any, names: list[str]) -> Any:
    """The name of a class number, None for none (-1); of a list, of each."""
    if isinstance(value, list):
        return [_class_names(one, names) for one in value]
    return names[value] if value is not None and 0 <= value < len(names) else None
