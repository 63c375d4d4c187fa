"""Models on their way to a hub: folders that are whole or as before, and what the hub is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from softsieve.cli import app
from softsieve.losses.objectives import make_objective
from softsieve.tasks.encode import TextEncoder
from softsieve.tasks.task import Task

hub = pytest.importorskip("huggingface_hub")
run = pytest.importorskip("softsieve.training.run")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a run, with more in it than the model."""
    objective = make_objective("as-softmax")
    task = Task("text", ["a", "b"], TextEncoder(16), objective=objective)
    torch.manual_seed(0)
    run.save_model(tmp_path / "run" / "model", task, objective, task.model(objective).state_dict(), {})
    (tmp_path / "run" / "log.jsonl").write_text("")
    return tmp_path / "run"


def push(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["push", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = push(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("softsieve: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


FILES = {"README.md", "metrics.json", "model.safetensors", "task.json"}


def test_a_folder_and_a_clone(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "shared" / "reviews"
    assert push(model, target).exit_code == 0
    assert names(target) == FILES
    (target / "old.bin").touch()
    (target / ".git").mkdir()
    (target / ".git" / "HEAD").write_text("ref")
    (target / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert push(model / "model", target).exit_code == 0
    assert names(target) == {*FILES, ".git", ".gitattributes"}
    assert (target / ".git" / "HEAD").read_text() == "ref"
    run.load_model(target)


def test_what_is_somebody_elses_stays(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    assert "expected an empty folder, a clone or an earlier model, found 'thesis.tex' in it" in refused(model, other)
    assert names(other) == {"thesis.tex"}
    assert "expected a folder, found a file" in refused(model, other / "thesis.tex")
    assert "expected another folder" in refused(model, model / "model")
    assert "expected a folder with a trained model, found none" in refused(tmp_path / "no", tmp_path / "new")
    (model / "model" / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be read as safetensors" in refused(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Api:
        def create_repo(self, name: str, **options: Any) -> None:
            asked.append((name, options))

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any:
            asked.append((repo_id, names(Path(folder_path))))
            return SimpleNamespace(commit_url="https://a.hub/someone/reviews/commit/1")

    monkeypatch.setattr(hub, "HfApi", Api)
    result = push(model, "hub:someone/reviews", "--private")
    assert result.exit_code == 0, result.output
    assert result.stdout == "https://a.hub/someone/reviews/commit/1\n"
    assert asked == [("someone/reviews", {"exist_ok": True, "private": True}), ("someone/reviews", FILES)]
    assert "expected a folder or owner/name on the hub, found 'reviews'" in refused(model, "hub:reviews")

    def fail(self: Api, name: str, **options: Any) -> None:
        raise OSError("401: no token\nand more")

    monkeypatch.setattr(Api, "create_repo", fail)
    assert "someone/reviews: cannot be pushed to (401: no token)" in refused(model, "hub:someone/reviews")
