"""Answers of the linear loss and of a short training, recorded before both were rewritten.

`python -m tests.golden.linear_and_training` writes the files again: only where a change of numbers is meant. The
checkpoint was written by version 0.1 and stays.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softsieve import linear_as_cross_entropy
from softsieve.kernels import linear as kernel
from softsieve.training.loop import Trainer
from tests.losses.test_linear import Case, decided, make_case, rows_of_all_kinds
from tests.training.helpers import Net, points, trainer

FOLDER = Path(__file__).parent
LINEAR, TRAINING, CHECKPOINT = FOLDER / "linear.npz", FOLDER / "training.json", FOLDER / "checkpoint-24"
BUFFERS = {"BUFFER": 1 << 14, "WORK": 1 << 14, "ROWS": 1 << 10}  # small: several chunks and several groups of rows
BACKENDS = ("reference", "torch", "triton")
RUN: dict[str, Any] = {
    "skip": "solved", "speed_steps": 3, "speed_lambda": 1.5, "merge": False, "eval_batch_size": 32, "epochs": 4,
    "save_steps": 6, "save_total_limit": 99, "delta_ratio": 0.3, "tolerance": 0.1, "recheck": 0.2, "screen_above": 0.0,
}  # fmt: skip


def _linear_cases() -> dict[str, tuple[Case, torch.dtype, dict[str, Any]]]:
    generator = torch.Generator().manual_seed(3)
    class_weight, row_weight, delta = (torch.rand(n, generator=generator) + 0.1 for n in (270, 18, 18))
    small = make_case(18, 8, 270)
    all_kinds, _ = rows_of_all_kinds()
    single, half = torch.float32, torch.float16
    rounded = make_case(18, 8, 270, dtype=half)
    weights: dict[str, Any] = {"class_weight": class_weight, "row_weight": row_weight}
    return {
        "mean": (decided(small, single), single, {}),
        "float64": (decided(small, torch.float64), torch.float64, {"reduction": "none", **weights}),
        "float16": (decided(rounded, half, least=0.1), half, {"reduction": "sum"}),
        "all kinds": (all_kinds, single, {"delta": 0.05, "reduction": "none"}),
        "softcap": (decided(small, single, 0.2, softcap=9.0), single, {"delta": 0.2, "softcap": 9.0, **weights}),
        "delta of rows": (decided(small, single, delta / 2), single, {"delta": delta / 2, "biased": False}),
        "delta 1": (small, single, {"delta": 1.0, "reduction": "sum"}),
    }  # fmt: skip


def linear_answers() -> dict[str, Tensor]:
    """Loss, gradients and statistics of every case on every backend that has the dtype."""
    answers: dict[str, Tensor] = {}
    for name, (case, dtype, chosen) in _linear_cases().items():
        for backend in BACKENDS:
            if backend == "triton" and dtype == torch.float64:
                continue
            options = dict(chosen)
            hidden, weight, bias = (x.to(dtype).requires_grad_() for x in case[:3])
            leaves = {"hidden": hidden, "weight": weight, "bias": bias}
            if not options.pop("biased", True):
                del leaves["bias"]
            loss, stats = linear_as_cross_entropy(
                hidden, weight, case.target, bias=leaves.get("bias"), backend=backend, return_stats=True, **options
            )
            grads = torch.autograd.grad(
                loss, list(leaves.values()), torch.linspace(1, 2, loss.numel()).to(loss).view_as(loss)
            )
            values = {"loss": loss.detach(), **dict(zip(leaves, grads, strict=True)), **stats._asdict()}
            answers |= {f"{name}/{backend}/{what}": value for what, value in values.items()}
    return answers


def make(output: Path | None) -> Trainer:
    rows, validation = points(240, noise=0.3), points(40, noise=0.05, seed=1)
    return trainer(rows, model=Net(dropout=0.2), validation=validation, output=output, **RUN)


def run(output: Path | None, resume: Path | None = None) -> dict[str, Any]:
    """AS-Speed with skipping: what the trainer returns, times left out, and the final weights."""
    made = make(output)
    result = made.fit(resume)
    figures = {name: value for name, value in result._asdict().items() if "seconds" not in name}
    return {**figures, "weights": {name: value.flatten().tolist() for name, value in made.weights().items()}}


def _write() -> None:
    os.environ["TRITON_INTERPRET"], os.environ["ACCELERATE_USE_CPU"] = "1", "true"
    torch.set_num_threads(1)
    for name, size in BUFFERS.items():
        setattr(kernel, name, size)
    np.savez_compressed(LINEAR, **{name: value.numpy() for name, value in linear_answers().items()})  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        TRAINING.write_text(json.dumps(run(Path(folder))) + "\n")


if __name__ == "__main__":
    _write()
