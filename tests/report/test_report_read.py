"""What is given: found, read, refused with the name of the file, and written all or nothing."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.errors import InputError
from softsieve.report import write_report
from softsieve.report.read import read_all
from softsieve.report.sections import sections
from tests.report.conftest import JUDGED, MakeLogits, MakeRun

ROOT = Path(__file__).parents[2]


def test_all_records_of_the_project_make_a_page(tmp_path: Path) -> None:
    given = [ROOT / "benchmarks" / "results", ROOT / "docs" / "results"]
    names = [path for folder in given for path in folder.rglob("*.json")]
    assert len(names) >= 20
    found = read_all(given)
    assert {record.path for record in found.records} == set(names)
    write_report(given, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for path in names:
        assert path.name in page
    for heading in ("Losses compared", "Heads: speed against success", "Heads on a GPU", "What the loss costs"):
        assert f">{heading}</h2>" in page


def test_runs_are_found_wherever_they_are_and_once(tmp_path: Path, make_run: MakeRun, record: Path) -> None:
    first = make_run(tmp_path / "runs" / "a" / "b" / "one")
    second = make_run(tmp_path / "runs" / "two", seed=1)
    (second / "model").mkdir()
    (second / "model" / "config.json").write_text('{"suite": "not ours"}')
    (tmp_path / "runs" / "other.json").write_text("[1, 2]")  # not a record: passed over in a folder
    found = read_all([tmp_path / "runs", first, second / "run.json", record])
    assert [run.record.path for run in found.runs] == [first / "run.json", second / "run.json"]
    assert [run.record.name for run in found.runs] == ["runs/a/b/one", "runs/two"]
    assert [kept.path for kept in found.records] == [record]


def test_a_log_cut_short_is_read_up_to_there(tmp_path: Path, make_run: MakeRun) -> None:
    folder = make_run(tmp_path / "run")
    whole = read_all([folder]).runs[0].log
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 40, "kind": "tra')
    assert read_all([folder]).runs[0].log == whole
    (folder / "log.jsonl").unlink()
    assert read_all([folder]).runs[0].log == []


def _change(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        record = json.loads((folder / "run.json").read_text())
        *way, last = key.split(".")
        place = record
        for part in way:
            place = place[int(part)] if part.isdigit() else place[part]
        place[last] = value
        (folder / "run.json").write_text(json.dumps(record))

    return change


def _write(name: str, text: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


def _tensors(**tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file(tensors, folder / "logits.safetensors")


TWO = torch.tensor([0, 1])
NAN = torch.tensor([[0.0, float("nan")] * 3, [0.0] * 6])


@pytest.mark.parametrize(
    ("spoil", "file", "message"),
    [
        (_write("run.json", '{"suite": "train", "sett'), "run.json", "expected JSON"),
        (_write("run.json", b"\xff\xfe"), "run.json", "UTF-8"),
        (_write("run.json", "[]"), "run.json", "expected a record"),
        (_write("run.json", "[" * 100_000), "run.json", "nested too deep"),
        (_change("format", 2), "run.json", "later softsieve"),
        (_change("results", {}), "run.json", "results: expected a list"),
        (_change("results", []), "run.json", "expected one, found 0"),
        (_change("results", [3]), "run.json", "results[0]: expected an object"),
        (_change("results.0.seconds", "3"), "run.json", "seconds: expected a number, found '3'"),
        (_change("results.0.test", {"accuracy": "high"}), "run.json", "test: expected metrics"),
        (_change("results.0.steps", float("nan")), "run.json", "found NaN"),
        (_change("settings.learning_rate", float("inf")), "run.json", "found Infinity"),
        (_change("settings.batch_size", 10**400), "run.json", "expected finite numbers"),
        (_change("settings.data", None), "run.json", "data: expected a string, found none"),
        (_change("settings.seed", "1"), "run.json", "seed: expected a whole number"),
        (_change("provenance", "mine"), "run.json", "provenance: expected an object"),
        (_write("log.jsonl", '{"step": 1, "kind": "train", "loss": NaN}\n'), "log.jsonl", "line 1: expected finite"),
        (_write("log.jsonl", '{"step": 1, "ki\n{"step": 2, "kind": "train"}\n'), "log.jsonl", "line 1: expected JSON"),
        (_write("log.jsonl", '{"step": 1, "kind": "train", "loss": "x"}\n'), "log.jsonl", "loss: expected a number"),
        (_write("log.jsonl", "[1]\n"), "log.jsonl", "expected an object with step and kind"),
        (_write("logits.safetensors", "none"), "logits.safetensors", "cannot be read"),
        (_tensors(logits=torch.zeros(2, 6)), "logits.safetensors", "expected tensors logits and target"),
        (_tensors(logits=torch.zeros(2, 6), target=TWO[:1]), "logits.safetensors", "a label for each row"),
        (_tensors(logits=NAN, target=TWO), "logits.safetensors", "found NaN"),
        (_tensors(logits=torch.zeros(2, 6), target=TWO + 9), "logits.safetensors", "labels in [0, 6), found 9 to 10"),
        (_tensors(logits=torch.zeros(2, 5), target=TWO), "logits.safetensors", "6 classes"),
    ],
)
def test_what_is_broken_is_refused_by_name(
    tmp_path: Path, make_run: MakeRun, spoil: Callable[[Path], None], file: str, message: str
) -> None:
    make_run(tmp_path / "runs" / "sound")
    spoil(make_run(tmp_path / "runs" / "spoilt", seed=1))
    out = tmp_path / "new" / "page.html"
    with pytest.raises(InputError) as caught:
        write_report([tmp_path / "runs"], out)
    assert str(tmp_path / "runs" / "spoilt" / file) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.parent.exists()


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "other.json").write_text("{}")
    for name, message in {
        "none": "found nothing there",
        "empty": "found none",
        "notes.txt": "another kind of file",
        "other.json": "found other JSON",
    }.items():
        with pytest.raises(InputError, match=f"{name}: expected .*{message}"):
            write_report([tmp_path / name], tmp_path / "page.html")
    with pytest.raises(InputError, match="expected at least one"):
        write_report([], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("suite", "missing"),
    [
        ("head-bench", "success"),
        ("head-scaling", "d"),
        ("head-gpu", "us"),
        ("losses", "peak_mb"),
        ("linear", "ms"),
        ("generate", "head"),
        ("perplexity", "ratio"),
    ],
)
def test_a_record_without_what_is_drawn_is_refused(tmp_path: Path, suite: str, missing: str) -> None:
    real = [ROOT / "benchmarks" / "results", ROOT / "docs" / "results"]
    record = next(record for record in read_all(real).records if record.suite == suite)
    told = json.loads(record.path.read_text())
    del told["results"][1][missing]
    path = tmp_path / "less.json"
    path.write_text(json.dumps(told))
    with pytest.raises(InputError, match=rf"less\.json: results\[1\]: {missing}: expected a .*, found none"):
        write_report([path], tmp_path / "page.html")


def test_a_suite_nobody_knows_is_a_table_and_an_empty_one_is_said(tmp_path: Path, record: Path) -> None:
    told = json.loads(record.read_text())
    (record.parent / "empty.json").write_text(json.dumps({**told, "suite": "losses", "results": []}))
    write_report([record.parent], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert ">Results of tests</h2>" in page
    assert '<th scope="row">test_b</th>' in page
    assert ">Results of losses</h2>" in page
    assert "0 results." in page


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_replaces_one(tmp_path: Path, record: Path) -> None:
    out = tmp_path / "deep" / "er" / "page.html"
    for title in ("First & only", "Second"):
        result = CliRunner().invoke(app, ["report", str(record), "--out", str(out), "--title", title])
        assert result.exit_code == 0, result.output
        assert str(out) in result.output.replace("\n", "")
        assert f"<title>{title.replace('&', '&amp;')}</title>" in out.read_text(encoding="utf-8")
    assert list(out.parent.iterdir()) == [out]


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path, record: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("before")
    record.write_text(record.read_text()[:-20])
    result = CliRunner().invoke(app, ["report", str(record), "--out", str(out)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"softsieve: {record}: expected JSON")
    assert len(result.stderr.strip().splitlines()) == 1
    assert out.read_text() == "before"


def test_places_that_cannot_be_written_are_refused(tmp_path: Path, record: Path) -> None:
    before = record.read_text()
    with pytest.raises(InputError, match="expected another file"):
        write_report([record], record)
    assert record.read_text() == before
    with pytest.raises(InputError, match="found a folder"):
        write_report([record], tmp_path)


def test_a_page_that_fails_half_way_leaves_the_old_one(
    tmp_path: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pages" / "page.html"
    out.parent.mkdir()
    out.write_text("before")

    def half(path: Path, data: bytes) -> int:
        path.open("wb").write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space"):
        write_report([record], out)
    assert out.read_text() == "before"
    assert list(out.parent.iterdir()) == [out]


class Without:
    """Finds nothing, and says so of one package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", ["plotly", "jinja2"])
def test_a_missing_package_is_named_with_the_extra(
    tmp_path: Path, make_run: MakeRun, make_logits: MakeLogits, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = make_run(tmp_path / "run", logits=make_logits())
    for loaded in list(sys.modules):
        if loaded.partition(".")[0] == name:
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Without(name), *sys.meta_path])
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 1
    assert f"needs the package {name}: pip install 'softsieve[report]'" in result.stderr
    assert not (tmp_path / "page.html").exists()


# -- odd values --------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (None, True, "x", "", -1, 0, 1e-12, 1e300, [], {}, [1, "a"], {"a": [1]}, 2**60, "<b>" * 200)


def _places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(place for key, part in inner for place in _places(part, (*way, key)))]


@pytest.mark.parametrize("seed", range(10))
def test_odd_values_are_shown_or_refused_but_never_a_crash(tmp_path: Path, make_run: MakeRun, seed: int) -> None:
    draw = random.Random(seed)
    records = [make_run(tmp_path / "run") / "run.json"]
    records += [ROOT / "docs" / "results" / name for name in ("multilabel.json", "cascade/tight.json")]
    records += [ROOT / "docs" / "results" / "generate" / "generate-gemma3.json"]
    records += [ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("losses-cpu", "head-h200-smollm2")]
    for path in records:
        told = json.loads(path.read_text())
        told["results"] = [*told["results"][:3], *told["results"][-1:]] if len(told["results"]) > 4 else told["results"]
        for _ in range(2):
            *way, last = draw.choice(_places(told)[1:])
            place = told
            for key in way:
                place = place[key]
            place[last] = draw.choice(ODD)
        (tmp_path / "odd.json").write_text(json.dumps(told))
        with suppress(InputError):
            sections(read_all([tmp_path / "odd.json"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "judged.json: expected classes, pairs and mistakes, found []"),
        ("{", "judged.json: expected JSON"),
        (json.dumps({**JUDGED, "rows": "many"}), "judged.json: rows: expected a whole number, found 'many'"),
        (json.dumps({**JUDGED, "pairs": 3}), "judged.json: pairs: expected a list, found 3"),
        (json.dumps({**JUDGED, "mistakes": [3]}), "judged.json: mistakes: expected an object, found 3"),
        (
            json.dumps({**JUDGED, "classes": [{"label": 3}]}),
            "judged.json: classes[0]: label: expected a string, found 3",
        ),
    ],
)
def test_a_spoilt_file_of_mistakes(tmp_path: Path, make_run: MakeRun, content: str, message: str) -> None:
    run = make_run(tmp_path / "run", judged=JUDGED)
    assert read_all([run]).runs[0].judged == JUDGED
    (run / "judged.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(message)):
        read_all([run])


def test_runs_of_earlier_versions_have_no_such_file(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run")
    assert read_all([run]).runs[0].judged is None
    write_report([run], tmp_path / "page.html")
    assert "Classes and mistakes" not in (tmp_path / "page.html").read_text()
