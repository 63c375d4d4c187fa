"""Folders of runs, as `softsieve train` leaves them, from logits that are made up but the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

PROVENANCE = {
    "date": "2026-11-16T02:00:00+00:00",
    "commit": "0123456789abcdef",
    "modified": False,
    "versions": {"python": "3.11.7", "torch": "2.13.0", "softsieve": "0.1.0"},
    "machine": {"processor": "a processor", "threads": 2},
    "gpu": None,
}


class MakeRun(Protocol):
    def __call__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        accuracy: float = 0.9,
        logits: tuple[Tensor, Tensor] | None = None,
        log: list[dict[str, Any]] | None = None,
        judged: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Path: ...


class MakeLogits(Protocol):
    def __call__(self, rows: int = 50, classes: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]: ...


@pytest.fixture(scope="session")
def make_logits() -> MakeLogits:
    def make(rows: int = 50, classes: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(classes, (rows,), generator=generator)
        logits = torch.randn(rows, classes, generator=generator)
        logits[torch.arange(rows), target] += 4 * torch.rand(rows, generator=generator)
        return logits, target

    return make


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    def make(
        folder: Path,
        *,
        seed: int = 0,
        accuracy: float = 0.9,
        logits: tuple[Tensor, Tensor] | None = None,
        log: list[dict[str, Any]] | None = None,
        judged: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Path:
        folder.mkdir(parents=True)
        told: dict[str, Any] = {
            "data": "letters",
            "kind": "image",
            "model": "built-in",
            "parameters": 1234,
            "classes": 6,
        }
        told |= {"rows": {"train": 100, "test": 50}, "labels": list("abcdef"), "loss": "as-softmax", "delta": 0.1}
        told |= {"skip": "no", "speed_steps": 1, "metric": "accuracy", "seed": seed} | settings
        result: dict[str, Any] = {
            "validation": {"accuracy": accuracy, "loss": 0.5},
            "test": {"accuracy": accuracy, "loss": 0.4},
        }
        result |= {"steps": 30, "best_step": 20, "trained": 90, "screened": 10, "seconds": 2.0}
        record = {"suite": "train", "settings": told, "provenance": PROVENANCE, "results": [result]}
        (folder / "run.json").write_text(json.dumps(record))
        if log is None:
            steps = range(10, 40, 10)
            log = [{"step": s, "kind": "train", "loss": 1 / s, "progress": s / 30, "solved": s / 40} for s in steps]
            log += [{"step": s, "kind": "validation", "accuracy": 0.5 + s / 100, "progress": s / 30} for s in steps]
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
        if logits is not None:
            tensors = {"logits": logits[0], "target": logits[1]}
            save_file(tensors, folder / "logits.safetensors", metadata={"part": "validation", "delta": "0.1"})
        if judged is not None:
            (folder / "judged.json").write_text(json.dumps(judged))
        return folder

    return make


JUDGED: dict[str, Any] = {
    "part": "test",
    "rows": 50,
    "classes": [
        {"label": "c", "precision": 0.5, "recall": 0.25, "f1": 0.3333, "support": 8},
        {"label": "a", "precision": 1.0, "recall": 0.9, "f1": 0.9474, "support": 1042},
    ],
    "pairs": [{"label": "c", "prediction": "a", "rows": 6, "share": 0.75}],
    "mistakes": [
        {"input": "a text that goes on " * 14, "label": "c", "prediction": "a", "probability": 0.987},
        {"input": "<img src=x onerror='window.hacked=1'>", "label": "c", "prediction": "a", "probability": 0.9},
    ],
}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A record of a suite that has no section of its own."""
    path = tmp_path / "given" / "record.json"
    path.parent.mkdir()
    results = [{"file": "test_a", "passed": 3}, {"file": "test_b", "passed": 4, "skipped": 1}]
    path.write_text(json.dumps({"suite": "tests", "settings": {}, "provenance": PROVENANCE, "results": results}))
    return path
