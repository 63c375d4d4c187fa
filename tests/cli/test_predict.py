"""`softsieve predict`: what comes in, what comes out."""

from __future__ import annotations

import csv
import errno
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.tasks.examples import Examples
from softsieve.tasks.rows import Rows
from softsieve.tasks.task import Task


def predict(model: Path, *arguments: object, given: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, ["predict", str(model), *map(str, arguments)], input=given)


def answered(model: Path, *arguments: object, given: str | bytes | None = None) -> Any:
    result = predict(model, *arguments, given=given)
    assert result.exit_code == 0, result.output
    return result


def refused(model: Path, *arguments: object, given: str | bytes | None = None) -> str:
    result = predict(model, *arguments, given=given)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("softsieve: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    return str(result.stderr)


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tells good from bad."""
    folder = tmp_path_factory.mktemp("model")
    rows = [f"a {('good', 'bad')[i % 2]} film,{('pos', 'neg')[i % 2]}\n" for i in range(40)]
    (folder / "train.csv").write_text("".join(["text,label\n", *rows]))
    command = ["train", "--data", str(folder / "train.csv"), "--out", str(folder / "run"), "--quiet"]
    result = CliRunner().invoke(app, [*command, "--epochs", "10"])
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tagger")
    (folder / "train.conll").write_text("in O\nRome B-LOC\n\nat O\nOslo B-LOC\n\n" * 20)
    command = ["train", "--data", str(folder / "train.conll"), "--out", str(folder / "run"), "--quiet"]
    result = CliRunner().invoke(app, [*command, "--epochs", "10"])
    assert result.exit_code == 0, result.output
    return folder / "run"


def test_texts(model: Path) -> None:
    result = answered(model, "--text", "good, good film", "--text", "bad")
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [row["text"] for row in rows] == ["good, good film", "bad"]
    assert [row["prediction"] for row in rows] == ["pos", "neg"]
    assert all(0.5 < float(row["probability"]) <= 1 for row in rows)
    assert result.stderr == ""


def test_the_folder_of_the_model_itself_and_lines_of_standard_input(model: Path) -> None:
    result = answered(model / "model", "--data", "-", given="good\r\n\nbad\n")
    assert [row.split(",")[:2] for row in result.stdout.splitlines()[1:]] == [["good", "pos"], ["bad", "neg"]]


@pytest.mark.parametrize("name", ["out.csv", "deep/out.tsv", "out.jsonl"])
def test_files(model: Path, name: str) -> None:
    data = write("in.csv", 'text,label\n"good\tfilm, ""new""",pos\nbad,pos\n')
    result = answered(model, "--data", data, "--out", name)
    text = Path(name).read_text()
    if name.endswith("jsonl"):
        rows = list(map(json.loads, text.splitlines()))
        assert rows[0]["text"] == 'good\tfilm, "new"'
    elif name.endswith("csv"):
        rows = list(csv.DictReader(text.splitlines()))
        assert rows[0]["text"] == 'good\tfilm, "new"'
    else:
        rows = [dict(zip(text.split("\n")[0].split("\t"), line.split("\t"), strict=True)) for line in
                text.splitlines()[1:]]  # fmt: skip
        assert rows[0]["text"] == 'good film, "new"'
    assert [(row["label"], row["prediction"]) for row in rows] == [("pos", "pos"), ("pos", "neg")]
    assert "accuracy" in result.stdout
    assert "50.00" in result.stdout
    assert name in result.stdout
    assert not [path for path in Path(name).parent.iterdir() if path.name.startswith(".")]


def test_metrics_beside_a_table_on_the_screen(model: Path) -> None:
    result = answered(model, "--data", write("in.csv", "text,label\ngood,pos\nbad,neg\n"))
    assert len(result.stdout.splitlines()) == 3
    assert "100.00" in result.stderr


@pytest.mark.parametrize("content", ["text\ngood\n", "text,label\ngood,\n", "sentence,id\ngood,1\n"])
def test_no_labels(model: Path, content: str) -> None:
    result = answered(model, "--data", write("in.csv", content))
    assert result.stdout.splitlines()[1].startswith("good,pos,")
    assert result.stderr == ""


def test_labels_that_the_model_does_not_know(model: Path) -> None:
    result = answered(model, "--data", write("in.csv", "text,label\ngood,pos\nfair,[odd]\n"))
    assert len(result.stdout.splitlines()) == 3
    said = "labels: 1 of 2 rows have labels that training has not seen and count as wrong: '[odd]' (in.csv:3)"
    assert result.stderr.startswith(f"{said}\n")
    assert "accuracy % │ 50.00" in re.sub(" +", " ", result.stderr)


def test_bad_rows_are_skipped(model: Path) -> None:
    data = write("in.csv", "id;text\n1;good\n2; \n3;bad\n")
    result = CliRunner().invoke(app, ["predict", str(model), "--data", str(data)])
    assert result.exit_code == 1
    assert "in.csv:3: column 'text': empty text" in result.stderr
    result = answered(model, "--data", data, "--on_error", "skip")
    assert len(result.stdout.splitlines()) == 3
    assert result.stderr == "in.csv: left out 1 of 3 rows: in.csv:3: column 'text': empty text\n"
    Path("b.csv").write_bytes("text\ngood\n".encode("utf-16-le"))
    result = answered(model, "--data", Path("b.csv"), "--encoding", "utf-16-le")
    assert len(result.stdout.splitlines()) == 2


def test_named_columns(model: Path) -> None:
    data = write("in.csv", "title,body,text_id,mark\nx,good,1,pos\ny,bad,2,pos\n")
    result = answered(model, "--data", data, "--text_column", "body", "--label-column", "mark")
    assert [row.split(",")[:3] for row in result.stdout.splitlines()[1:]] == [
        ["good", "pos", "pos"],
        ["bad", "pos", "neg"],
    ]


def test_words(tagger: Path) -> None:
    result = answered(tagger, "--text", "in Oslo", "--text", "at Rome at")
    assert result.stdout == "words,prediction\nin Oslo,O B-LOC\nat Rome at,O B-LOC O\n"
    result = answered(tagger, "--data", write("in.txt", "in\nRome\n\nat\n"), "--out", "out.jsonl")
    rows = list(map(json.loads, Path("out.jsonl").read_text().splitlines()))
    assert rows == [
        {"words": ["in", "Rome"], "prediction": ["O", "B-LOC"]},
        {"words": ["at"], "prediction": ["O"]},
    ]


def test_a_folder_of_images_without_labels() -> None:
    library = pytest.importorskip("PIL.Image")
    for i in range(40):
        pixels = np.zeros((8, 8, 3), np.uint8)
        pixels[:, :, i % 2] = 200 + i
        for path in (Path("train", ("red", "green")[i % 2], f"{i}.png"), Path("new", f"{i:02}.png")):
            path.parent.mkdir(parents=True, exist_ok=True)
            library.fromarray(pixels).save(path)
    result = CliRunner().invoke(app, ["train", "--data", "train", "--quiet", "--epochs", "10"])
    assert result.exit_code == 0, result.output
    found = answered(Path("softsieve-run"), "--data", "new", "--workers", "2").stdout.splitlines()
    assert [row.split(",")[:2] for row in found[1:3]] == [["new/00.png", "red"], ["new/01.png", "green"]]
    found = answered(Path("softsieve-run"), "--data", "-", given="new/01.png\n").stdout.splitlines()
    assert found[1].startswith("new/01.png,green,")
    found = answered(Path("softsieve-run"), "--data", "new/01.png", "--top_k", "2").stdout.splitlines()
    assert found[0] == "file,prediction,probability,label_1,probability_1,label_2,probability_2"
    assert found[1].startswith("new/01.png,green,")
    assert "new/none.png: no such file" in refused(Path("softsieve-run"), "--data", "new/none.png")
    assert "with a model of image, found --text" in refused(Path("softsieve-run"), "--text", "red")


def test_other_columns_stay(model: Path) -> None:
    data = write("in.csv", 'id,text,label,prediction,note\n7,good,pos,old,"a, b"\n8,bad,pos,,\n')
    rows = list(csv.DictReader(answered(model, "--data", data).stdout.splitlines()))
    assert [(row["id"], row["prediction"], row["prediction_given"], row["note"]) for row in rows] == [
        ("7", "pos", "old", "a, b"),
        ("8", "neg", "", ""),
    ]
    data = write("in.jsonl", '{"text": "good", "id": 7, "seen": ["x", "y"], "more": {"a": null}}\n')
    answered(model, "--data", data, "--out", "out.jsonl")
    row = json.loads(Path("out.jsonl").read_text())
    assert (row["id"], row["seen"], row["more"], row["prediction"]) == (7, ["x", "y"], {"a": None}, "pos")
    row = next(csv.DictReader(answered(model, "--data", data).stdout.splitlines()))
    assert (row["seen"], row["more"]) == ("x|y", '{"a": null}')


def test_the_most_probable_classes(model: Path) -> None:
    row = next(csv.DictReader(answered(model, "--text", "good", "--top_k", "2").stdout.splitlines()))
    assert (row["label_1"], row["label_2"], row["prediction"]) == ("pos", "neg", "pos")
    assert float(row["probability_1"]) == float(row["probability"])
    assert float(row["probability_1"]) + float(row["probability_2"]) == pytest.approx(1, abs=2e-6)
    answered(model, "--text", "bad", "--top_k", "1", "--out", "out.jsonl")
    row = json.loads(Path("out.jsonl").read_text())
    assert row["top"] == [{"label": "neg", "probability": row["probability"]}]
    assert "top_k: expected at most 2" in refused(model, "--text", "x", "--top_k", "3")


def test_labels_with_their_probabilities(tmp_path: Path) -> None:
    words = ("red", "blue", "green")
    rows = [[word for bit, word in enumerate(words) if number >> bit & 1] for number in range(8)] * 10
    lines = [json.dumps({"text": f"{' '.join(labels)} thing", "labels": labels}) + "\n" for labels in rows]
    data = write("in.jsonl", "".join(lines))
    result = CliRunner().invoke(app, ["train", "--data", data, "--quiet", "--epochs", "30", "--validation_share", "0"])
    assert result.exit_code == 0, result.output
    answered(Path("softsieve-run"), "--data", data, "--top_k", "2", "--out", "out.jsonl")
    for line, labels in zip(Path("out.jsonl").read_text().splitlines(), rows, strict=True):
        row = json.loads(line)
        assert sorted(row["prediction"]) == sorted(labels)
        assert len(row["probability"]) == len(labels)
        assert all(p > 0.5 for p in row["probability"])
        assert [one["probability"] for one in row["top"]] == sorted(
            (o["probability"] for o in row["top"]), reverse=True
        )
        assert {one["label"] for one in row["top"] if one["probability"] > 0.5} <= set(labels)
    found = next(csv.DictReader(answered(Path("softsieve-run"), "--text", "red blue thing").stdout.splitlines()))
    assert found["prediction"] == "blue|red"
    assert len(found["probability"].split("|")) == 2


def test_words_have_no_most_probable_classes(tagger: Path) -> None:
    assert "top_k: expected with one answer a row" in refused(tagger, "--text", "in Oslo", "--top_k", "2")


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_rows_are_answered_some_at_a_time(
    model: Path, tagger: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, data = model, write("in.csv", "text,label\n" + "good,pos\nbad,pos\na film,neg\n" * 5)
    if kind == "tokens":
        one, data = tagger, write("in.conll", "in O\nRome B-LOC\n\nat O\n\nin O\nOslo O\nat O\n\n" * 5)
    whole = answered(one, "--data", data)
    most: list[int] = []
    original = Task.rows
    monkeypatch.setattr(sys.modules["softsieve.cli.predict"], "AT_ONCE", 4)

    def rows(self: Task, examples: Examples, **more: Any) -> Rows:
        most.append(len(examples.inputs))
        return original(self, examples, **more)

    monkeypatch.setattr(Task, "rows", rows)
    parts = answered(one, "--data", data)
    assert (parts.stdout, parts.stderr) == (whole.stdout, whole.stderr)
    assert most == [4, 4, 4, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --data or --text, found neither"),
        (["--data", "in.csv", "--text", "x"], "expected --data or --text, found both"),
        (["--data", "missing.csv"], "missing.csv: no such file or folder"),
        (["--data", "empty.csv"], "empty.csv: no rows"),
        (["--data", "in.csv", "--text_column", "body"], "in.csv: no column 'body'"),
        (["--data", "in.csv", "--label_column", "mark"], "in.csv: no column 'mark'"),
        (["--text", " "], "text 1: empty text"),
        (["--text", "x", "--text_column", "text"], "text_column: expected with a table of --data"),
        (["--text", "x", "--out", "out.xls"], "out.xls: expected a file .csv, .tsv, .jsonl"),
        (["--text", "x", "--out", "in.csv/out.csv"], "in.csv"),
        (["--text", "x", "--out", "folder.csv"], "folder.csv: expected a file, found a folder"),
        (["--data", "-"], "standard input: no lines"),
    ],
)
def test_refused(model: Path, arguments: list[str], message: str) -> None:
    write("in.csv", "text,label\ngood,pos\n")
    write("empty.csv", "")
    Path("folder.csv").mkdir()
    assert message in refused(model, *arguments)


def test_who_reads_may_stop(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``| head`` does; Typer then ends the command without a word."""

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(csv, "writer", closed)
    result = CliRunner().invoke(app, ["predict", str(model), "--text", "good"])
    assert (result.exit_code, result.stderr) == (1, "")


def test_bytes_that_are_no_text(model: Path) -> None:
    assert "standard input: not UTF-8" in refused(model, "--data", "-", given=b"\xff\n")


def test_models_that_are_none(tmp_path: Path, model: Path) -> None:
    assert "expected a folder with a trained model" in refused(tmp_path / "none", "--text", "x")
    assert "task.json: no such file" in refused(tmp_path, "--text", "x")
    for name in ("task.json", "model.safetensors"):
        broken = tmp_path / name / "model"
        broken.mkdir(parents=True)
        for file in (model / "model").iterdir():
            content = file.read_bytes()
            (broken / file.name).write_bytes(content[: len(content) // 2] if file.name == name else content)
        assert f"{name}/model/{name}: " in refused(broken.parent, "--text", "x")


def test_columns_with_names_of_answers_keep_their_values(model: Path) -> None:
    data = write("in.csv", "text,label_1,top\ngood film,mine,yes\n")
    [row] = csv.DictReader(answered(model, "--data", data, "--top_k", "2").stdout.splitlines())
    assert (row["label_1"], row["label_1_given"], row["top_given"]) == ("pos", "mine", "yes")
    data = write("in.jsonl", '{"text": "good film", "top": ["a", "b"]}\n')
    [row] = csv.DictReader(answered(model, "--data", data).stdout.splitlines())
    assert row["top"] == "a|b"


def test_bad_lines_are_skipped(model: Path) -> None:
    said = "lines: left out 1 of 2 rows: text 2: empty text"
    result = answered(model, "--text", "good", "--text", " ", "--on_error", "skip")
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == f"{said}\n"
    assert "text 2: empty text" in refused(model, "--text", "good", "--text", " ")


def test_labels_with_gaps_only_in_rows_that_are_skipped(model: Path) -> None:
    data = write("in.csv", "text,label\ngood,pos\n ,\nbad,neg\n")
    result = answered(model, "--data", data, "--on_error", "skip")
    assert result.stdout.splitlines()[0] == "text,label,prediction,probability"
    assert "accuracy % │ 100.00" in re.sub(" +", " ", result.stderr)
    assert result.stderr.count("left out 1 of 3 rows") == 1
    data = write("in.csv", "text,label\ngood,pos\nfine,\nbad,neg\n")
    result = answered(model, "--data", data, "--on_error", "skip")
    assert result.stdout.splitlines()[0] == "text,prediction,probability,label"


def test_a_file_of_options_leaves_the_model_to_the_command_line(model: Path) -> None:
    Path("a.json").write_text('{"model": "other", "text": ["good"]}')
    assert len(answered(model, "--config", "a.json").stdout.splitlines()) == 2
    result = CliRunner().invoke(app, ["predict", "--config", "a.json"])
    assert "other: expected a folder with a trained model" in result.stderr
