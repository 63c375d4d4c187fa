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

from softsieve.kernels import linear as kernel
from softsieve.kernels.cross_entropy import HAS_TRITON
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
    assert recorded["trained"] < 4 * 240


def test_a_checkpoint_of_version_0_1_is_resumed(tmp_path: Path) -> None:
    shutil.copytree(golden.CHECKPOINT, tmp_path / golden.CHECKPOINT.name)
    found, recorded = golden.run(tmp_path, tmp_path / golden.CHECKPOINT.name), json.loads(golden.TRAINING.read_text())
    lines = recorded.pop("log")
    assert near(found.pop("log"), [line for line in lines if line["step"] > 24])  # the earlier ones were not copied
    for name, value in recorded.items():
        assert near(found[name], value), name


def test_a_checkpoint_has_the_files_and_fields_of_version_0_1(tmp_path: Path) -> None:
    golden.run(tmp_path)
    old, new = golden.CHECKPOINT, tmp_path / golden.CHECKPOINT.name
    assert sorted(path.name for path in new.iterdir()) == sorted(path.name for path in old.iterdir())
    states = [json.loads((folder / "state.json").read_text()) for folder in (old, new)]
    assert list(states[0]) == list(states[1])
    for name in states[0]:
        if name not in ("digest", "seconds", "evaluation_seconds"):
            assert near(states[1][name], states[0][name]), name
