"""Data as they come: bad rows that are skipped and counted, delimiters and encodings, files that say what they are."""

from __future__ import annotations

import codecs
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softsieve.errors import InputError
from softsieve.tasks.examples import Data, Examples
from softsieve.tasks.read import read_data, read_inputs


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def read(source: Path, **options: Any) -> Data:
    return read_data(source, validation_share=0, **options)


def pairs(examples: Examples) -> list[tuple[Any, Any]]:
    return list(zip(examples.inputs, examples.labels, strict=True))


# Bad rows

SKIPPED = {
    "columns": ("a.csv", "text,label\na,x\nb\nc,y,z\nd,y\n", [3, 4], "expected 2 columns as in the header"),
    "quotes": ("a.csv", 'text,label\na,x\n"b"c,y\nd,y\n', [3], "not a row of the table"),
    "empty text": ("a.tsv", "text\tlabel\na\tx\n \ty\nd\ty\n", [3], "column 'text': empty text"),
    "empty label": ("a.csv", "text,label\na,x\nb, \nd,y\n", [3], "column 'label': empty label"),
    "json": ("a.jsonl", '{"text": "a", "label": "x"}\n{"te\n[1]\n{"text": "d", "label": "y"}\n', [2, 3], "invalid"),
    "types": ("a.json", '[{"text": "a", "label": "x"}, {"text": 7, "label": "x"}, {"text": "d", "label": "y"}, 3]',
              [4, 2], "expected text, found 7"),
    "fastText": ("a.txt", "__label__x a\nb b\n__label__y\n__label__y d\n", [2, 3], "empty label"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "bad", "complaint"), SKIPPED.values(), ids=SKIPPED)
def test_bad_rows_are_skipped_and_counted(
    tmp_path: Path, name: str, content: str, bad: list[int], complaint: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=f"{name}:"):
        read(path)
    data = read(path, on_error="skip")
    assert pairs(data.train) == [("a", "x"), ("d", "y")]
    said = " ".join(data.notes)
    assert complaint in said
    assert all(f"{name}:{line}: " in said for line in bad)
    assert f"left out {len(bad)} of {len(bad) + 2} rows" in said


def test_sentences_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", "a O\nb B-x\n\nc\nd O\n\ne O\n")
    data = read(path, on_error="skip")
    assert pairs(data.train) == [(["a", "b"], ["O", "B-x"]), (["e"], ["O"])]
    assert data.notes == (f"{path}: left out 1 of 3 rows: {path}:4: expected a word and a tag, found only 'c'",)


def test_the_first_bad_rows_are_named_and_all_bad_is_an_error(tmp_path: Path) -> None:
    rows = "".join(f",{i}\n" for i in range(10))
    path = write(tmp_path / "a.csv", "text,label\na,x\nb,y\n" + rows)
    (note,) = read(path, on_error="skip").notes
    assert note.startswith(f"{path}: left out 10 of 12 rows: {path}:4: ")
    assert note.count("empty text") == 3
    assert note.endswith("; ...")
    with pytest.raises(InputError, match=r"left out 10 of 10 rows: .*a\.csv:2: .*empty text"):
        read(write(path, "text,label\n" + rows), on_error="skip")


def test_a_quotation_mark_that_nothing_closes_is_never_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\na,x\n"b,y\nc,z\n')
    with pytest.raises(InputError, match=r"a\.csv:3: not a row of the table \(unexpected end of data\)"):
        read(path, on_error="skip")


def test_predicting_skips_rows_and_keeps_the_others_in_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,text\n1,a\n2,\n3,c\n")
    with pytest.raises(InputError, match=r"a\.csv:3: column 'text': empty text"):
        read_inputs(path, "text")
    found = read_inputs(path, "text", on_error="skip")
    assert list(found.inputs) == ["a", "c"]
    assert list(found.others["id"]) == ["1", "3"]
    assert list(found.where) == [f"{path}:2", f"{path}:4"]
    assert found.notes == (f"{path}: left out 1 of 3 rows: {path}:3: column 'text': empty text",)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_and_missing_files_are_skipped(tmp_path: Path, workers: int) -> None:
    from PIL import Image

    for name in ("a", "b", "c", "d"):
        image = Image.fromarray(np.full((8, 8, 3), 50, np.uint8))
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "y").mkdir(exist_ok=True)
        image.save(tmp_path / ("x" if name < "c" else "y") / f"{name}.png")
    broken = write(tmp_path / "y" / "e.png", b"\x89PNG no")
    data = read(tmp_path, on_error="skip", workers=workers)
    assert [path.name for path in data.train.inputs] == ["a.png", "b.png", "c.png", "d.png"]
    (note,) = data.notes
    assert note.startswith(f"image files: left out 1 of 5 rows: {broken}: unreadable image")
    assert read(tmp_path).notes == ()  # as now: told when it is decoded
    table = write(tmp_path / "t.csv", "file,label\nx/a.png,x\nx/none.png,x\ny/e.png,y\ny/c.png,y\n")
    found = read(table, on_error="skip")
    assert [path.name for path in found.train.inputs] == ["a.png", "c.png"]
    assert len(found.notes) == 2  # a file that is not there, and one that is broken
    assert len(read_inputs(tmp_path / "y", "image", on_error="skip").inputs) == 2


# Delimiters and encodings


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_delimiters_are_found(tmp_path: Path, sign: str) -> None:
    content = f'text{sign}label\n"a{sign} b"{sign}x\nc; d, e{sign}y\n' if sign not in ",;" else None
    content = content or f'text{sign}label\n"a{sign} b"{sign}x\n"c; d, e"{sign}y\n'
    path = write(tmp_path / "a.csv", content)
    assert pairs(read(path).train) == [(f"a{sign} b", "x"), ("c; d, e", "y")]


def test_delimiters_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text, or title^label\na^x\nb^y\n")
    data = read(path, delimiter="^", text_column="text, or title")
    assert pairs(data.train) == [("a", "x"), ("b", "y")]
    path = write(tmp_path / "b.csv", "text,\tlabel\na\tx\nb\ty\n")
    assert list(read(path, delimiter="tab", text_column="text,").train.labels) == ["x", "y"]
    for wrong in ("", ", ", "\n", '"'):
        with pytest.raises(InputError, match="delimiter: expected one character or 'tab'"):
            read(path, delimiter=wrong)


ENCODINGS = {
    "utf-8-sig": (None, 0), "utf-16": (None, 0), "utf-32": (None, 0), "cp1252": (None, 1), "latin-1": ("latin-1", 0),
    "cp1251": ("cp1251", 0), "shift-jis": ("shift-jis", 0), "utf-16-le": ("utf-16-le", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl", "a.txt"])
@pytest.mark.parametrize(("encoding", "given", "notes"), [(k, *v) for k, v in ENCODINGS.items()], ids=ENCODINGS)
def test_encodings_are_found_or_named(tmp_path: Path, name: str, encoding: str, given: str | None, notes: int) -> None:
    letter = {"cp1251": "ж", "shift-jis": "本"}.get(encoding, "é")
    content = {
        "a.txt": f"x\tone {letter}\ny\ttwo\nx\tthree\n",
        "a.jsonl": "".join(
            json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n"
            for text, label in ((f"one {letter}", "x"), ("two", "y"), ("three", "x"))
        ),
    }.get(name, f"text,label\none {letter},x\ntwo,y\nthree,x\n")
    path = write(tmp_path / name, content.encode(encoding))
    data = read(path, encoding=given)
    assert pairs(data.train) == [(f"one {letter}", "x"), ("two", "y"), ("three", "x")]
    assert len(data.notes) == notes
    if notes:
        assert f"{path}: read as cp1252, for byte 0xe9 in line" in data.notes[0]


def test_encodings_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,x\né,y\n")
    with pytest.raises(InputError, match=r"a\.csv:3: not ascii \(byte 0xc3\)"):
        read(path, encoding="ascii")
    for wrong in ("utf-99", "hex", ""):
        with pytest.raises(InputError, match="encoding: expected a name such as"):
            read(path, encoding=wrong)
    with pytest.raises(InputError, match=r"a\.csv:1: not UTF-16"):
        read(write(path, codecs.BOM_UTF16_LE + b"a\x00b"))
    for content in (b"text,label\n\x00\xff,x\n", "text,label\nö,x\n".encode() + b"\xe9,y\n"):  # no text; damaged
        with pytest.raises(InputError, match=r"a\.csv:\d: not UTF-8"):
            read(write(path, content))


# Files that say what they are

JSON = {
    "rows": '[{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]',
    "columns": '{"text": ["a", "b"], "label": ["x", "y"]}',
    "pandas": '{"text": {"0": "a", "1": "b"}, "label": {"0": "x", "1": "y"}}',
    "lines": '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n',
}


@pytest.mark.parametrize("content", JSON.values(), ids=JSON)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_json(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path / name, content)
    assert read(path).train == Examples(["a", "b"], ["x", "y"], [f"{path}:1", f"{path}:2"])
    assert list(read_inputs(path, "text").inputs) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("7", "expected a list of objects or an object of lists, found 7"),
        ("[", "invalid JSON"),
        ("{}", "expected a list of objects"),
        ("[]", "no rows"),
        ('{"text": ["a"], "label": []}', "expected columns of equal length"),
        ("[1]", r"a\.json:1: expected a JSON object, found int"),
    ],
)
def test_json_that_is_no_table(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(write(tmp_path / "a.json", content))


PLAIN = {
    "label first": ("x\tone two\ny\tthree\nx\tfour\n", "text", [("one two", "x"), ("three", "y"), ("four", "x")]),
    "label last": ("one two\tx\nthree\ty\nfour\tx\n", "text", [("one two", "x"), ("three", "y"), ("four", "x")]),
    "fastText": ("__label__x one two\n__label__y three\n", "text", [("one two", "x"), ("three", "y")]),
    "fastText with several": (
        "__label__x __label__y one two\n__label__y three\n", "multilabel", [("one two", ["x", "y"]), ("three", ["y"])],
    ),
    "CoNLL with tabs": ("a\tO\nb\tB-x\n\nc\tO\n", "tokens", [(["a", "b"], ["O", "B-x"]), (["c"], ["O"])]),
    "CoNLL": ("one O\ntwo B-x\n", "tokens", [(["one", "two"], ["O", "B-x"])]),
}  # fmt: skip


@pytest.mark.parametrize(("content", "kind", "rows"), PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_txt_by_content(tmp_path: Path, name: str, content: str, kind: str, rows: list[Any]) -> None:
    data = read(write(tmp_path / name, content))
    assert data.kind == kind
    assert pairs(data.train) == rows


def test_txt_to_predict(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x\tone two\ny\tthree\nx\tfour\n")
    assert pairs(read_inputs(path, "text")) == [("one two", "x"), ("three", "y"), ("four", "x")]
    assert list(read_inputs(write(path, "__label__x one\n"), "text").labels) == ["x"]
    found = read_inputs(write(path, "one\ttwo three\nfour\tfive\n"), "text")  # no label comes twice: tabs of texts
    assert (list(found.inputs), found.labels) == (["one\ttwo three", "four\tfive"], [])


def test_a_line_without_a_tab_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x\tone two\ny\tthree\noops\nx\tfour\n")
    with pytest.raises(InputError, match=r"a.txt:3: expected a label, a tab and a text, found 0 tabs"):
        read(path)
    data = read(path, on_error="skip")
    assert pairs(data.train) == [("one two", "x"), ("three", "y"), ("four", "x")]
    assert data.notes[0].startswith(f"{path}: left out 1 of 4 rows: {path}:3: expected a label")


# Labels that are no classes


def test_regression_targets_and_ids_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write(path, "text,label\n" + "".join(f"text {i},{i / 7:.3f}\n" for i in range(30)))
    with pytest.raises(InputError, match=r"look like a regression target: .* 30 different numbers in 30 rows"):
        read(path)
    write(path, "text,label\n" + "".join(f"text {i},id{i}\n" for i in range(30)))
    with pytest.raises(InputError, match=r"a label of its own in every one of 30 rows \('id0', .*; give label_column"):
        read_data(path)
    for labels in (range(10), [0.5, 1.5]):  # few, though numbers
        rows = [f"text {i},{labels[i % len(labels)]}\n" for i in range(30)]
        assert len(set(read(write(path, "text,label\n" + "".join(rows))).train.labels)) == len(labels)


def test_reading_takes_no_memory_of_the_size_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from softsieve.tasks import texts

    monkeypatch.setattr(texts, "IN_MEMORY", 2**18)
    rows = "".join(f'"text {i}, {"of many words " * 30}",class {i % 7}\n' for i in range(20_000))
    path = write(tmp_path / "a.csv", "text,label\n" + rows)
    size = path.stat().st_size
    del rows
    tracemalloc.start()
    try:
        data = read_data(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data.train.inputs) == 18_000
    assert peak < 0.8 * size  # 80 to 100 bytes a row and buffers, where texts alone would be the size of the file


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from softsieve.tasks import reading

    monkeypatch.setattr(reading, "OFTEN", 10)
    path = write(tmp_path / "a.csv", "text,label\n" + "".join(f"text {i},{i % 3}\n" for i in range(2000)))
    done: list[tuple[str, float]] = []
    read(path, progress=lambda what, share: done.append((what, share)))
    assert {what for what, _ in done} == {"reading a.csv"}
    assert sum(share for _, share in done) == pytest.approx(1, abs=0.05)
