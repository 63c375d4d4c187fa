"""The linear loss and the trainer answer as they did when these files were recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from softsieve.kernels import linear as kernel
from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.training import SolvedSampler
from softsieve.training.checkpoint import MAY_DIFFER, restore_run
from tests.golden import linear_and_training as golden


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_linear_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in golden.BUFFERS.items():
        monkeypatch.setattr(kernel, name, size)
    answers, recorded = golden.linear_answers(), np.load(golden.LINEAR)
    assert sorted(answers) == sorted(recorded.files)
    for name, value in answers.items():
        ours, expected = value.numpy(), recorded[name]
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), name
        close = 1e-6 * np.abs(expected.astype(np.float64)).max()
        assert np.allclose(ours.astype(np.float64), expected.astype(np.float64), rtol=1e-6, atol=close), name


def near(ours: Any, recorded: Any) -> bool:
    """Whether two things from JSON are the same, numbers to 1e-6."""
    if isinstance(recorded, dict):
        return ours.keys() == recorded.keys() and all(near(ours[key], recorded[key]) for key in recorded)
    if isinstance(recorded, list):
        return len(ours) == len(recorded) and all(map(near, ours, recorded))
    if isinstance(recorded, float):
        return bool(ours == pytest.approx(recorded, rel=1e-6, abs=1e-6))
    return bool(ours == recorded)


def test_training_with_speed_and_skipping(tmp_path: Path) -> None:
    found, recorded = golden.run(tmp_path), json.loads(golden.TRAINING.read_text())
    for name, value in recorded.items():
        assert near(found[name], value), name
    assert recorded["screened"] > 0
    assert recorded["trained"] < 0.9 * 4 * 240


def test_a_checkpoint_of_version_0_1_is_resumed(tmp_path: Path) -> None:
    """Under the policy of skipping of this version, so that its numbers are others."""
    folder = tmp_path / golden.CHECKPOINT.name
    shutil.copytree(golden.CHECKPOINT, folder)
    old, queue = (load_file(folder / f"{name}.safetensors") for name in ("sampler", "queue"))
    made = golden.make(tmp_path)
    restore_run(made, folder)
    assert isinstance(made.sampler, SolvedSampler)
    assert torch.equal(made.sampler.solved, torch.where(old["seen"] == 0, old["streak"] > 0, old["seen"] == 1))
    assert torch.equal(made.sampler.plan, old["plan"])
    assert (made.sampler.epoch, made.state.epoch, made.state.step) == (1, 1, 24)
    pending = queue["unreported"]
    assert torch.equal(made.results.margin[pending] > 0.1, queue["solved"])
    assert 0 < int(queue["solved"].sum()) < len(pending)

    found = golden.run(tmp_path, folder)
    assert [line["step"] for line in found["log"] if line["kind"] == "train"] == list(range(25, found["steps"] + 1))
    assert found["log"][-1]["progress"] == 1
    assert found["best"]["accuracy"] >= 0.95  # as in the run that was cut short
    assert found["best"]["loss"] < 0.11
    assert found["trained"] < 0.9 * 4 * 240
    assert found["screened"] > 0


def test_a_checkpoint_has_the_files_and_fields_of_this_version(tmp_path: Path) -> None:
    """Those of version 0.1 but for what the sampler knows, and the margins of rows that it was not told of."""
    golden.run(tmp_path)
    old, new = golden.CHECKPOINT, tmp_path / golden.CHECKPOINT.name
    assert sorted(path.name for path in new.iterdir()) == sorted(path.name for path in old.iterdir())
    before, state = (json.loads((folder / "state.json").read_text()) for folder in (old, new))
    assert list(state) == list(before)
    assert state["settings"].keys() == before["settings"].keys() | {"skip_after"}
    for name, value in before["settings"].items():
        assert name in MAY_DIFFER or near(state["settings"][name], value), name
    for name in ("format", "rows", "ranks", "data", "step"):
        assert state[name] == before[name], name
    assert list(state["sampler"]) == [*before["sampler"], "screens"]
    for path in sorted(new.glob("*.safetensors")):
        shapes = {name: (value.dtype, value.ndim) for name, value in load_file(path).items()}
        expected = {name: (value.dtype, value.ndim) for name, value in load_file(old / path.name).items()}
        if path.stem == "sampler":
            numbers, counts = (torch.float32, 1), (torch.float64, 2)
            expected = {"margins": numbers, "seen_in": (torch.int32, 1), "waiting": (torch.bool, 1)}
            expected |= {"passes": counts, "slips": counts, "plan": (torch.int64, 1)}
        elif path.stem == "queue":
            expected["margin"] = expected["loss"]
        assert shapes == expected, path.name
