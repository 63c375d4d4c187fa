"""Two processes at one place: one is refused in plain words, or the result is whole and that of one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from softsieve import AdaptiveSoftmax
from softsieve.cli import app
from softsieve.training.checkpoint import checkpoints
from softsieve.training.run import load_model
from tests.rough import children
from tests.training.helpers import in_process


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def both(folder: Path, one: list[str], other: list[str]) -> list[tuple[int, str]]:
    """Exit codes and words of two commands that begin at the same time."""
    processes = [
        in_process(children.run_command, words, folder, name) for name, words in zip("ab", (one, other), strict=True)
    ]
    for process in processes:
        process.join(300)
    said = [children.read_json(folder / f"said-{name}") for name in "ab"]
    for path in [*folder.glob("said-*"), *folder.glob("here-*")]:
        path.unlink()
    return [(code, " ".join(words.split())) for code, words in said]


def write_data(path: Path, rows: int = 60) -> Path:
    words = {"good": "fine great happy", "bad": "poor awful sad", "fair": "so middling usual"}
    labels = [sorted(words)[row % 3] for row in range(rows)]
    lines = [f"{words[label].split()[row % 3]} {row},{label}" for row, label in enumerate(labels)]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    return path


def test_head_build_to_one_file(tmp_path: Path) -> None:
    from softsieve.integrations.head_file import write_head
    from softsieve.integrations.hidden_states import Corpus, Head

    queries = torch.randn(600, 24)
    head, index = tmp_path / "head.safetensors", tmp_path / "index.safetensors"
    corpora = {"a": Corpus(queries[:500], queries[500:].clone())}
    write_head(head, Head(torch.randn(500, 24), None, 1.0, None, corpora), notes={})
    for _ in range(3):
        common = ["head", "build", str(head), "--queries", str(head), "--out", str(index), "--seed"]
        assert [code for code, _ in both(tmp_path, [*common, "1"], [*common, "2"])] == [0, 0]
        made = AdaptiveSoftmax.load(index)
        assert made.seed in (1, 2)
        assert hidden(tmp_path) == []


def test_train_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    data, out = write_data(tmp_path / "data.csv"), tmp_path / "run"
    common = ["train", "--data", str(data), "--output_dir", str(out), "--num_train_epochs", "3", "--save_steps", "3"]
    said = both(tmp_path, [*common, "--seed", "1"], [*common, "--seed", "2"])
    assert sorted(code for code, _ in said) == [0, 1], said
    (refused,) = [words for code, words in said if code]
    assert f"softsieve: {out}: another process is training there: wait for it to end, or choose another" in refused
    seed = 1 if said[0][0] == 0 else 2
    assert json.loads((out / "run.json").read_text())["settings"]["seed"] == seed
    assert load_model(out)[0].labels == ["bad", "fair", "good"]
    assert hidden(out) == []
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert checkpoints(out)
    again = CliRunner().invoke(app, common)
    assert again.exit_code == 1
    assert "holds a run" in " ".join(again.output.split())


def test_what_was_refused_leaves_no_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["train", "--data", str(tmp_path / "none.csv"), "--output_dir", str(tmp_path / "run")]
    )
    assert done.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_compare_into_one_folder(tmp_path: Path) -> None:
    for part in ("train", "validation", "test"):
        (tmp_path / "weather").mkdir(exist_ok=True)
        write_data(tmp_path / "weather" / f"{part}.csv", 30)
    out = tmp_path / "results" / "weather"
    words = ["compare", "--task", str(tmp_path / "weather"), "--row", "softmax", "--row", "as-softmax"]
    words += ["--seeds", "2", "--out", str(out), "--epochs", "2", "--batch-size", "8"]
    said = both(tmp_path, words, words)
    assert sorted(code for code, _ in said) == [0, 1], said
    (refused,) = [text for code, text in said if code]
    assert "weather.runs: another process is comparing there" in refused
    record = json.loads(out.with_suffix(".json").read_text())
    assert len(record["results"]) == 2 + 4
    assert hidden(out.parent) == []


def test_reports_to_one_file(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from softsieve._records import write_record

    write_record(tmp_path / "record.json", "tests", {}, [{"file": "a", "passed": 3}])
    processes = [in_process(children.report_many, tmp_path, title, 5) for title in ("one", "two")]
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ("<title>one</title>" in page) != ("<title>two</title>" in page)
    assert page.rstrip().endswith("</html>")
    assert hidden(tmp_path) == []


def test_three_save_a_head_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    processes = [in_process(children.save_many, path, seed, 15) for seed in range(3)]
    weights = [children.head_of(seed).weight for seed in range(3)]
    loads = 0
    while any(process.is_alive() for process in processes):
        if path.exists():
            head = AdaptiveSoftmax.load(path)
            assert torch.equal(head.weight, weights[head.seed])
            loads += 1
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert loads
    assert hidden(tmp_path) == []


def test_three_write_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    processes = [in_process(children.fill_many, folder, text, 60) for text in ("x", "y", "z")]
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    assert len({(folder / name).read_text() for name in "abc"}) == 1
    assert hidden(tmp_path) == []
