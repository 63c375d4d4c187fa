"""Reading files, folders and Hugging Face data sets, and what is refused on the way."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softsieve.errors import InputError
from softsieve.tasks.examples import Data, Examples, label_names
from softsieve.tasks.read import hold_out, line_inputs, read_data, read_inputs

ROWS = [("good film", "pos"), ("bad film", "neg"), ("fine, really", "pos"), ('"odd" one', "neg"), ("so so", "pos")]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def delimited(rows: list[tuple[str, str]], by: str, header: str = "text label") -> str:
    def cell(value: str) -> str:
        return '"' + value.replace('"', '""') + '"' if by == "," and set(value) & set(',"') else value

    return "\n".join([by.join(header.split()), *(by.join(map(cell, row)) for row in rows)]) + "\n"


def jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    writer.write_table(arrow.Table.from_pylist(rows), file)
    return file.getvalue()


def png(value: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.full((2, 3, 3), value, np.uint8)).save(file, "png")
    return file.getvalue()


def wav() -> bytes:
    file = io.BytesIO()
    pytest.importorskip("soundfile").write(file, np.tile([[0.5, 0.0]], (40, 1)), 8000, format="WAV")
    return file.getvalue()


def read(source: str | Path, **options: Any) -> Data:
    return read_data(source, validation_share=0, **options)


# Tables


@pytest.mark.parametrize(
    "name", ["a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz", "a.jsonl", "a.JSONL", "a.jsonl.gz", "a.parquet"]
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    dicts = [{"text": text, "label": label} for text, label in ROWS]
    content: str | bytes
    if ".csv" in name:
        content = delimited(ROWS, ",")
    elif ".tsv" in name:
        content = delimited(ROWS, "\t")  # the quotation marks stay
    else:
        content = parquet(dicts) if name.endswith("parquet") else jsonl(dicts)
    path = write(tmp_path / name, content)
    data = read(path)
    assert (data.name, data.kind) == ("a", "text")
    assert list(zip(data.train.inputs, data.train.labels, strict=True)) == ROWS
    assert data.train.where[0] == f"{path}:{1 if 'json' in name.lower() or 'parquet' in name else 2}"
    assert data.validation is None
    assert data.test is None
    assert label_names(data) == ["neg", "pos"]


def test_csv_of_any_shape(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends, a space in the header, a text over two lines, a blank line, a long text."""
    long = "x" * 200_000
    path = write(tmp_path / "a.csv", f'\ufeffLabel ,Text\r\n1,"two\r\nlines"\r\n\r\n 2 ,{long}\r\n')
    data = read(path)
    assert data.train == Examples(["two\r\nlines", long], ["1", "2"], [f"{path}:2", f"{path}:5"])


def test_unusual_line_separators_do_not_end_a_json_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a\u2028b", "label": 0}\n\n{"text": "c", "label": 1.0}\r\n')
    assert read(path).train == Examples(["a\u2028b", "c"], ["0", "1"], [f"{path}:1", f"{path}:3"])


@pytest.mark.parametrize(
    ("header", "options"),
    [
        ("Sentence LABEL", {}),
        ("utterance Intent", {}),
        ("headline category", {}),  # the only strings
        ("a b", {"text_column": "a", "label_column": "b"}),
        ("label text", {"text_column": "label", "label_column": "text"}),
        ("label class", {"text_column": "label"}),
    ],
)
def test_columns_are_found_or_named(tmp_path: Path, header: str, options: dict[str, str]) -> None:
    rows = [(f"{text},{i}", label) for i, (text, label) in enumerate([("one", "x"), ("two", "y")])]
    text = "\n".join(
        [",".join([*header.split(), "id"]), *(f"{a.split(',')[0]},{b},{a.split(',')[1]}" for a, b in rows)]
    )
    data = read(write(tmp_path / "a.csv", text), **options)
    assert data.train.inputs == ["one", "two"]
    assert data.train.labels == ["x", "y"]


def test_multilabel(tmp_path: Path) -> None:
    lists = [{"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": []}, {"text": "c", "labels": [3]}]
    found = read(write(tmp_path / "a.jsonl", jsonl(lists)))
    assert found.kind == "multilabel"
    assert found.train.labels == [["x", "y"], [], ["3"]]
    assert label_names(found) == ["3", "x", "y"]
    other = write(tmp_path / "a.csv", "text,label\nd,x|y\n")
    assert read(tmp_path / "a.jsonl", test=other).test == Examples(["d"], [["x", "y"]], [f"{other}:2"])
    one = jsonl([{"text": "a", "labels": ["x"]}, {"text": "b", "labels": []}])
    assert label_names(read(write(tmp_path / "one.jsonl", one))) == ["x"]
    asked = write(tmp_path / "a.tsv", "text\tlabel\na\tx|y\nb\t\nc\ty, z|y\n")
    assert read(asked, kind="multilabel").train.labels == [["x", "y"], [], ["y", "z"]]
    assert read(write(tmp_path / "b.tsv", "text\tlabel\na\tx|y\nb\tz\n")).train.labels == ["x|y", "z"]


def test_tokens(tmp_path: Path) -> None:
    rows = [{"tokens": ["EU", "rejects"], "ner_tags": [3, 0], "pos_tags": [1, 1]}, {"tokens": ["x"], "ner_tags": [0]}]
    data = read(write(tmp_path / "a.jsonl", jsonl(rows)))
    assert data.kind == "tokens"
    assert data.train[:2] == ([["EU", "rejects"], ["x"]], [["3", "0"], ["0"]])
    lines = "-DOCSTART- -X- O\n\nEU NNP B-ORG\r\nrejects VBZ O\n\n\n#a\tNN  O \n"
    for name in ("a.conll", "a.txt.gz"):
        path = write(tmp_path / name, lines)
        data = read(path)
        assert data.kind == "tokens"
        assert data.train == Examples([["EU", "rejects"], ["#a"]], [["B-ORG", "O"], ["O"]], [f"{path}:3", f"{path}:7"])


def test_table_of_files(tmp_path: Path) -> None:
    write(tmp_path / "in" / "1.PNG", b"")
    write(tmp_path / "in" / "2.png", b"")
    path = write(tmp_path / "a.csv", "file,class\nin/1.PNG,x\nin/2.png,y\n")
    for kind in (None, "image"):
        data = read(path, kind=kind)
        assert data.kind == "image"
        assert data.train[:2] == ([tmp_path / "in" / "1.PNG", tmp_path / "in" / "2.png"], ["x", "y"])
    with pytest.raises(InputError, match=r"a\.csv:2: column 'file': no such file .*3\.png"):
        read(write(path, "file,class\nin/3.png,x\n"))


# Parts


def test_own_validation_and_test(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.csv", delimited(rows, ","))
        for name, rows in zip("abc", (ROWS, ROWS[:2], ROWS[2:]), strict=True)
    ]
    data = read_data(paths[0], validation=paths[1], test=paths[2])
    assert len(data.train.inputs) == 5
    assert data.validation is not None
    assert data.validation.inputs == ["good film", "bad film"]
    assert data.test is not None
    assert data.test.labels == ["pos", "neg", "pos"]


@pytest.mark.parametrize("validation", ["validation", "valid", "dev", "val"])
def test_folder_of_files(tmp_path: Path, validation: str) -> None:
    write(tmp_path / "train.tsv", delimited(ROWS, "\t"))
    write(tmp_path / f"{validation}.jsonl", jsonl([{"text": "v", "label": "pos"}]))
    write(tmp_path / "test.csv.gz", "text,label\nt,neg\n")
    write(tmp_path / "training_notes.txt", "nothing to read")
    data = read(tmp_path)
    assert data.name == tmp_path.name
    assert [part.inputs for part in (data.train, data.validation, data.test) if part] == [
        [text for text, _ in ROWS],
        ["v"],
        ["t"],
    ]


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_folder_per_class(tmp_path: Path, kind: str) -> None:
    end = {"image": "jpeg", "audio": "flac"}[kind]
    for name in (f"train/cat/2.{end}", f"train/cat/1.{end}", f"train/train/1.{end}", f"test/cat/9.{end}"):
        write(tmp_path / name, b"")
    write(tmp_path / "train/cat/notes.txt", "")
    write(tmp_path / "train/cat/._1.jpeg", b"")
    write(tmp_path / ".git/x", b"")
    data = read(tmp_path)
    assert data.kind == kind
    assert data.train.inputs == [
        tmp_path / "train" / name for name in (f"cat/1.{end}", f"cat/2.{end}", f"train/1.{end}")
    ]
    assert data.train.labels == ["cat", "cat", "train"]
    assert data.validation is None
    assert data.test is not None
    assert data.test.where == [str(tmp_path / f"test/cat/9.{end}")]
    alone = read(tmp_path / "train", validation=tmp_path / "test")  # a class may be called train
    assert alone.train == data.train
    assert alone.validation == data.test


def labelled(labels: list[Any], kind: str = "text") -> Data:
    rows = list(range(len(labels)))
    return Data("", kind, Examples(list(map(str, rows)), labels, list(map(str, rows))), None, None)


def test_held_out_rows_are_stratified_and_drawn_with_the_seed(tmp_path: Path) -> None:
    labels = ["a"] * 61 + ["b"] * 29 + ["c"] * 10
    rows = [(f"t{i}", label) for i, label in enumerate(labels)]
    path = write(tmp_path / "a.csv", delimited(rows, ","))
    drawn = [read_data(path, seed=seed).validation for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    for part in drawn:
        assert part is not None
        assert Counter(part.labels) == {"a": 6, "b": 3, "c": 1}
    data = read_data(path, validation_share=0.25)
    assert data.validation is not None
    assert len(data.validation.inputs) == 25
    assert sorted([*data.train.inputs, *data.validation.inputs]) == sorted(text for text, _ in rows)
    assert [int(text[1:]) for text in data.train.inputs] == sorted(int(text[1:]) for text in data.train.inputs)


def test_no_label_disappears_from_training() -> None:
    single = labelled(["a"] * 30 + ["rare", "rarer", "twice", "twice"])
    multi = labelled([["a", "b"]] * 30 + [["a", "rare"], ["rarer"], []], "multilabel")
    tokens = labelled([["O", "O"]] * 30 + [["B-x", "B-x"], ["O", "B-y"]], "tokens")
    for data in (single, multi, tokens):
        for seed in range(20):
            train, validation = hold_out(data, 15, seed=seed)
            assert label_names(data._replace(train=train)) == label_names(data)
            assert len(validation.inputs) == 15
    lost = [hold_out(tokens, 15, seed=seed, keep_labels=False)[0] for seed in range(20)]
    assert any(label_names(tokens._replace(train=train)) != label_names(tokens) for train in lost)


def test_too_few_rows_to_hold_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,x\nb,y\n")
    with pytest.raises(InputError, match=r"too few rows \(2\) to hold any out"):
        read_data(path)
    assert read(path).validation is None


# Hugging Face


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


def test_saved_text_dataset(tmp_path: Path, datasets: Any) -> None:
    features = datasets.Features(
        {"review": datasets.Value("string"), "stars": datasets.ClassLabel(names=["bad", "good"])}
    )

    def split(labels: list[int]) -> Any:
        return datasets.Dataset.from_dict({"review": [f"r{i}" for i in labels], "stars": labels}, features=features)

    splits = datasets.DatasetDict(train=split([1, 0, 1]), dev=split([0]), test=split([-1, -1]))
    splits.save_to_disk(str(tmp_path / "some"))
    data = read(tmp_path / "some")
    where = [f"{tmp_path / 'some'}:train:{row}" for row in (1, 2, 3)]
    assert data.train == Examples(["r1", "r0", "r1"], ["good", "bad", "good"], where)
    assert data.validation is not None
    assert data.validation.labels == ["bad"]
    assert data.test is None  # its labels are withheld
    assert label_names(data) == ["bad", "good"]
    splits["train"].save_to_disk(str(tmp_path / "one"))
    assert read(tmp_path / "one").train.labels == ["good", "bad", "good"]


def test_saved_lists_of_classes(tmp_path: Path, datasets: Any) -> None:
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-x", "I-x"]))
    words = datasets.Sequence(datasets.Value("string"))
    values = {"tokens": [["a", "b"], ["c"]], "ner_tags": [[1, 0], [0]]}
    features = datasets.Features({"tokens": words, "ner_tags": tags})
    datasets.Dataset.from_dict(values, features=features).save_to_disk(str(tmp_path / "tokens"))
    data = read(tmp_path / "tokens")
    assert data.kind == "tokens"
    assert data.train[:2] == ([["a", "b"], ["c"]], [["B-x", "O"], ["O"]])
    assert label_names(data) == ["B-x", "I-x", "O"]  # as declared, though training lacks one
    features = datasets.Features({"text": datasets.Value("string"), "labels": tags})
    values = {"text": ["a", "b"], "labels": [[2, 1], []]}
    datasets.Dataset.from_dict(values, features=features).save_to_disk(str(tmp_path / "many"))
    data = read(tmp_path / "many")
    assert data.kind == "multilabel"
    assert data.train.labels == [["I-x", "B-x"], []]


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_saved_media(tmp_path: Path, datasets: Any, kind: str) -> None:
    content = [png(7), png(9)] if kind == "image" else [wav(), wav()]
    stored = {"media": [{"bytes": one, "path": None} for one in content], "label": [1, 0]}
    feature = datasets.Image() if kind == "image" else datasets.Audio()
    dataset = datasets.Dataset.from_dict(stored).cast(
        datasets.Features({"media": feature, "label": datasets.ClassLabel(names=["x", "y"])})
    )
    dataset.save_to_disk(str(tmp_path))
    data = read(tmp_path)
    assert data.kind == kind
    assert data.train.labels == ["y", "x"]
    assert data.train.inputs == content


def test_stored_media_without_bytes_are_files_beside_the_table(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": None, "path": f"{name}.png"}, "label": name} for name in ("x", "y")]
    path = write(tmp_path / "a.parquet", parquet(rows))
    files = [write(tmp_path / f"{name}.png", png(7)) for name in ("x", "y")]
    assert read(path)[1:3] == read(path, kind="image")[1:3]
    assert read(path).train.inputs == files
    files[1].unlink()
    with pytest.raises(InputError, match=r"a\.parquet:2: column 'image': no such file .*y\.png"):
        read(path, kind="image")


def test_hub_names(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    """What is asked of the library for a name, with a hub that knows one data set with one configuration."""
    asked = []
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y"])})
    dataset = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)

    def load_dataset(name: str, config: str | None = None) -> Any:
        asked.append((name, config))
        if name not in ("glue", "user/data"):
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub.\nSee ...")
        return datasets.DatasetDict(train=dataset)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("glue", "glue:sst2", "glue/sst2", "user/data", "user/data:c", "user/data/c"):
        data = read(name)
        assert (data.name, data.train.labels, data.train.where[1]) == (name, ["x", "y"], f"{name}:train:2")
    assert asked == [
        ("glue", None),
        ("glue", "sst2"),
        ("glue/sst2", None),
        ("glue", "sst2"),
        ("user/data", None),
        ("user/data", "c"),
        ("user/data", "c"),
    ]
    with pytest.raises(InputError, match=r"^no-such: neither .* \(Dataset 'no-such' doesn't exist on the Hub\.\)$"):
        read("no-such")


def test_offline(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"^no-such: neither a file or folder nor a data set to load \(.*Hub.*\)$"):
        read("no-such")


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs the package pyarrow: pip install 'softsieve\[train\]'"):
        read(path)


# Refused

REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "no rows": ("a.csv", "text,label\n", r"a\.csv: no rows"),
    "empty": ("a.jsonl", "", r"a\.jsonl: no rows"),
    "empty conll": ("a.conll", "\n\n", r"a\.conll: no sentences"),
    "extension": ("a.xlsx", "", r"a\.xlsx: expected a file \.csv.*found \.xlsx"),
    "packed parquet": ("a.parquet.gz", "", r"found \.parquet\.gz"),
    "no label column": ("a.csv", "text,mood\na,x\n", r"a\.csv: no column of labels found among 'text', 'mood'"),
    "no text column": ("a.csv", "id,label\n1,x\n", r"a\.csv: no column of texts found among 'id', 'label'"),
    "two text columns": ("a.csv", "a,b,label\nu,v,x\n", r"no column of texts found among 'a', 'b', 'label'"),
    "column twice": ("a.csv", "text,label,label\na,x,y\n", r"a\.csv:1: expected every column name once"),
    "one class": ("a.csv", "text,label\na,x\nb,x\n", r"a\.csv: expected at least 2 classes to train on, found \['x'\]"),
    "ragged": ("a.csv", "text,label\na,x\nb,x,y\n", r"a\.csv:3: expected 2 columns as in the header, found 3"),
    "ragged tsv": ("a.tsv", "text\tlabel\na b\n", r"a\.tsv:2: expected 2 columns as in the header, found 1"),
    "open quote": ("a.csv", 'text,label\na,x\n"b,y\nc,z\n', r"a\.csv:3: not a row of the table"),
    "empty text": ("a.csv", "text,label\na,x\n ,y\n", r"a\.csv:3: column 'text': empty text"),
    "empty label": ("a.csv", "text,label\na,x\nb,\n", r"a\.csv:3: column 'label': empty label"),
    "damaged UTF-8": ("a.csv", "text,label\nö,x\nn".encode() + b"\xe9,y\n", r"a\.csv:3: not UTF-8 \(byte 0xe9\)"),
    "packed, not said": ("a.csv", b"\x1f\x8b\x08\x00", r"a\.csv:1: not UTF-8"),
    "invalid json": ("a.jsonl", '{"text": "a", "label": 1}\n{"text": ', r"a\.jsonl:2: invalid JSON \(Expecting value"),
    "json list": ("a.jsonl", "[1]\n", r"a\.jsonl:1: expected a JSON object, found list"),
    "null label": ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', r"a\.jsonl:2: column 'label': empty label"),
    "float label": (
        "a.jsonl",
        '{"text": "a", "label": 0.5}\n',
        r"a\.jsonl:1: column 'label': expected a label, found 0\.5",
    ),
    "number text": ("a.jsonl", '{"text": 5, "label": 1}\n', r"a\.jsonl:1: column 'text': expected text, found 5"),
    "surrogate": (
        "a.jsonl",
        '{"text": "\\ud83d", "label": 1}\n',
        r"a\.jsonl:1: column 'text': text is not valid Unicode",
    ),
    "mixed labels": (
        "a.jsonl",
        '{"text": "a", "label": ["x"]}\n{"text": "b", "label": 3}\n',
        r"a\.jsonl:2: .*list of labels, found 3",
    ),
    "flags": (
        "a.jsonl",
        '{"text": "a", "labels": [0, 1, 0]}\n{"text": "b", "labels": [1.0, 0.0, 0.0]}\n',
        r"a\.jsonl: expected lists of the labels that apply, found no label but '0', '1', which look like flags",
    ),
    "true and false": (
        "a.jsonl",
        '{"text": "a", "labels": [false, true]}\n{"text": "b", "labels": [true, false]}\n',
        r"a\.jsonl: expected lists of the labels that apply, found no label but 'False', 'True'",
    ),
    "tag count": ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}\n', r"a\.jsonl:1: .* found 2 words and 1 labels"),
    "no words": (
        "a.jsonl",
        '{"tokens": [], "tags": []}\n',
        r"a\.jsonl:1: column 'tokens': expected a list of words, found \[\]",
    ),
    "no tag": ("a.conll", "a O\n\nb\n", r"a\.conll:3: expected a word and a tag, found only 'b'"),
    "ragged conll": ("a.txt", "a O\nb NN O\n", r"a\.txt:2: expected 2 columns as on the first line, found 3"),
    "not parquet": ("a.parquet", "text,label\n", r"a\.parquet: not a parquet file"),
}


@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read(write(tmp_path / name, content))
    assert "\n" not in str(error.value)


def test_refused_by_what_was_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", delimited(ROWS, ","))
    with pytest.raises(InputError, match=r"kind: expected one of text, multilabel, .* found 'words'"):
        read(path, kind="words")
    with pytest.raises(InputError, match="validation_share: expected a number from 0 to below 1, found 1"):
        read_data(path, validation_share=1)
    with pytest.raises(InputError, match=r"a\.csv: no column 'review', there are 'text', 'label'"):
        read(path, text_column="review")
    tagged, pictures = write(tmp_path / "a.conll", "EU B\n\nat O\n"), tmp_path / "pictures"
    for name in ("x", "y"):
        write(pictures / name / "a.png", "")
    for source, kind in ((tagged, "tokens"), (pictures, "image"), (pictures / "x", "image")):
        with pytest.raises(InputError, match=f"label_column: expected with a table, found with .*{source.name}"):
            read_inputs(source, kind, label_column="tag")
    for source in (tagged, pictures):
        with pytest.raises(InputError, match=f"text_column: expected with a table, found with .*{source.name}"):
            read(source, text_column="word")
    with pytest.raises(InputError, match="column 'label' cannot be both"):
        read(path, text_column="label", label_column="Label")
    with pytest.raises(InputError, match=r"a\.csv: no column of words found"):
        read(path, kind="tokens")
    with pytest.raises(InputError, match=r"a\.txt: such a file holds tokens.* not text"):
        read(write(tmp_path / "a.txt", "a O\n"), kind="text")
    for missing in ("b.csv", "sub/b.jsonl.gz", "./nowhere", "/no/where", "a b"):
        with pytest.raises(InputError, match=f"^{missing}: no such file or folder$"):
            read(missing)
    packed = tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(b"text,label\na,x\n")[:-9])
    with pytest.raises(InputError, match=r"b\.csv\.gz: damaged \.gz file"):
        read(packed)


@pytest.mark.parametrize("part", ["validation", "test"])
def test_label_that_training_lacks(tmp_path: Path, part: str) -> None:
    train = write(tmp_path / "a.csv", delimited(ROWS, ","))
    other = write(tmp_path / "b.csv", "text,label\nc,pos\nd,mixed\ne,odd\n")
    data = read_data(train, **{part: other})  # type: ignore[arg-type]
    assert list(getattr(data, part).labels) == ["pos", "mixed", "odd"]
    assert data.notes == (
        f"{part}: 2 of 3 rows have labels that training has not seen and count as wrong: 'mixed' ({other}:3), "
        f"'odd' ({other}:4)",
    )
    tokens = write(tmp_path / "a.conll", "a O\nb B-x\n")
    other = write(tmp_path / "b.conll", "a O\n\nc O\nd B-y\n")
    (note,) = read(tokens, **{part: other}).notes
    assert note.startswith(f"{part}: 1 of 2 rows")
    assert note.endswith(f"'B-y' ({other}:3)")


def test_parts_of_two_kinds(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", delimited(ROWS, ","))
    write(tmp_path / "test.conll", "a pos\n")
    with pytest.raises(InputError, match=r"test\.conll:1: expected text as in training, found tokens"):
        read(tmp_path)


def test_refused_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder per class or a file train\.csv"):
        read(tmp_path)
    write(tmp_path / "two/train.csv", "")
    write(tmp_path / "two/train.jsonl", "")
    with pytest.raises(InputError, match=r"two: expected one train part, found 'train\.csv', 'train\.jsonl'"):
        read(tmp_path / "two")
    write(tmp_path / "media/cat/1.png", b"")
    (tmp_path / "media/dog").mkdir()
    with pytest.raises(InputError, match=r"dog: expected files \.png.*\.mp3, found none"):
        read(tmp_path / "media")
    write(tmp_path / "media/dog/1.wav", b"")
    with pytest.raises(InputError, match="media: expected images or sounds, found both"):
        read(tmp_path / "media")
    with pytest.raises(InputError, match=r"dog: expected files \.png.*\.webp, found none"):
        read(tmp_path / "media", kind="image")
    with pytest.raises(InputError, match=r"media: expected a file train\.csv .* for text, found none"):
        read(tmp_path / "media", kind="text")
    write(tmp_path / "saved/state.json", "{}")
    with pytest.raises(InputError, match="saved: damaged Hugging Face data set"):
        read(tmp_path / "saved")


# Inputs to predict


@pytest.mark.parametrize(
    ("name", "content", "kind", "inputs", "labels"),
    [
        ("a.csv", "text,label\ngood,pos\nbad,neg\n", "text", ["good", "bad"], ["pos", "neg"]),
        ("a.csv", "text,label\ngood,pos\nbad,\n", "text", ["good", "bad"], []),
        ("a.csv", "review,id\ngood,1\nbad,2\n", "text", ["good", "bad"], []),
        ("a.txt", "good\n\nbad one\n", "text", ["good", "bad one"], []),
        ("a.csv", "text,labels\ngood,a|b\nbad,\n", "multilabel", ["good", "bad"], [["a", "b"], []]),
        ("a.csv", "text,labels\ngood,\nbad,\n", "multilabel", ["good", "bad"], []),
        ("a.jsonl", '{"text": "x", "labels": []}\n{"text": "y"}\n', "multilabel", ["x", "y"], []),
        ("a.txt", "EU B\n\nat O\n", "tokens", [["EU"], ["at"]], [["B"], ["O"]]),
        ("a.conll", "EU\nat\n\nx\n", "tokens", [["EU", "at"], ["x"]], []),
        ("a.jsonl", '{"tokens": ["a", "b"]}\n', "tokens", [["a", "b"]], []),
    ],
)
def test_inputs(tmp_path: Path, name: str, content: str, kind: str, inputs: list[Any], labels: list[Any]) -> None:
    found = read_inputs(write(tmp_path / name, content), kind)
    assert (found.inputs, found.labels) == (inputs, labels)
    assert len(found.where) == len(inputs)


def test_inputs_keep_the_other_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,text,label,price\n7,one,x,2\n8,two,y,3.5\n")
    found = read_inputs(path, "text")
    assert {name: list(cells) for name, cells in found.others.items()} == {"id": ["7", "8"], "price": ["2", "3.5"]}
    path = write(tmp_path / "b.csv", "id,text,label\n7,one,x\n8,two,\n")  # a column of labels with gaps is no label
    found = read_inputs(path, "text")
    assert {name: list(cells) for name, cells in found.others.items()} == {"id": ["7", "8"], "label": ["x", ""]}
    assert read_inputs(write(tmp_path / "c.txt", "one\ntwo\n"), "text").others == {}


def test_inputs_of_folders(tmp_path: Path) -> None:
    write(tmp_path / "a.png", png(1))
    write(tmp_path / "notes.txt", "not an image")
    write(tmp_path / "._a.png", "what macOS puts beside it")
    found = read_inputs(tmp_path, "image")
    assert (found.inputs, found.labels) == ([tmp_path / "a.png"], [])
    for part in ("train", "test"):
        write(tmp_path / "split" / f"{part}.csv", f"text,label\nof {part},x\n")
    assert read_inputs(tmp_path / "split", "text").inputs == ["of test"]
    with pytest.raises(InputError, match="expected a folder per class or a file"):
        read_inputs(write(tmp_path / "none" / "a.bin", "").parent, "image")


def test_lines_as_inputs(tmp_path: Path) -> None:
    lines = [("here:1", "one two"), ("here:2", "three")]
    assert line_inputs(lines, "text") == Examples(["one two", "three"], [], ["here:1", "here:2"])
    assert line_inputs(lines, "tokens").inputs == [["one", "two"], ["three"]]
    path = write(tmp_path / "a.png", png(1))
    assert line_inputs([("here:1", "a.png")], "image", tmp_path).inputs == [path]
    with pytest.raises(InputError, match="here:1: no such file"):
        line_inputs(lines[:1], "image", tmp_path)
