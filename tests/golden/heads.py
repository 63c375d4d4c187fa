"""Answers of every engine of `AdaptiveSoftmax`, recorded before the engines got one shape.

`python -m tests.golden.heads` writes the file again: only where a change of numbers is meant.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.data.synthetic_heads import SyntheticHead, make_head
from softsieve.heads import GpuCascadeCalibration
from softsieve.heads.cascade.basis import Moments
from softsieve.heads.cascade.gpu import GpuCascade
from softsieve.heads.cascade.index import build
from softsieve.heads.engine import Layer, Options

HEADS = Path(__file__).parent / "heads.npz"
CASES: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact", "beta": 1.3},
    "coordinates, computed": {"method": "coordinates", "guarantee": "pac"},
    "coordinates, declared": {"method": "coordinates", "guarantee": "pac", "noise": 30.0, "read_chosen": False},
    "coordinates, rotated": {"method": "coordinates", "guarantee": "pac", "rotate": True},
    "coordinates, calibrated": {"method": "coordinates"},
    "dithered": {"method": "cascade", "guarantee": "pac"},
    "cascade": {"method": "cascade"},
    "cascade, beta": {"method": "cascade", "beta": 0.7, "eps": 0.1, "delta": 0.05},
    "cascade, bfloat16": {"method": "cascade", "weight dtype": torch.bfloat16},
    "cascade, float64": {"method": "cascade", "weight dtype": torch.float64},
}


def head_answers() -> dict[str, Tensor]:
    """Answers of every kind to a few queries, for every engine."""
    answers: dict[str, Tensor] = {}
    long = torch.randn(300, 1024, generator=torch.Generator().manual_seed(2)) / 32  # for the paper's algorithm
    near = SyntheticHead(long, long[:150] * 12.0, long[150:158] * 12.0)
    language = make_head(3000, 96, rank=16, calibration=1800, test=8, seed=5)
    for name, chosen in CASES.items():
        torch.manual_seed(0)
        options = dict(chosen)
        made = near if "coordinates" in name else language
        dtype = options.pop("weight dtype", torch.float32)
        bias = torch.randn(len(made.weight), generator=torch.Generator().manual_seed(1)) / 2
        head = AdaptiveSoftmax(made.weight.to(dtype), bias.to(dtype), **options)
        generator = torch.Generator().manual_seed(0)
        if head.method == "coordinates" and head.guarantee == "calibrated":
            head.calibrate(made.calibration.float(), [1, 3], generator=generator)
        elif head.method == "cascade" and head.guarantee == "calibrated":
            head.calibrate(made.calibration.float(), [1, 8, 0], generator=generator)
        x = made.test.float()
        for k in (1, 3):
            answers |= {f"{name}/top {k}/{n}": v for n, v in head.topk(x, k, generator=generator)._asdict().items()}
        if "coordinates" not in name or head.guarantee == "pac":
            found = head.log_partition(x, generator=generator)
            answers |= {f"{name}/log partition/{n}": v for n, v in found._asdict().items()}
        answers[f"{name}/logits"] = head.logits(x)[:, ::7]
        answers[f"{name}/sample"] = head.sample(x, 0.8, generator=generator)
        if "coordinates" not in name or head.guarantee == "pac":
            answers[f"{name}/sample of 3"] = head.sample(x, 0.8, 3, 0.9, generator=generator)
        answers[f"{name}/coverage"] = torch.tensor(head.coverage(x, 1), dtype=torch.float64)
    return answers


def gpu_answers() -> dict[str, Tensor]:
    """What the engine of a GPU answers, in Triton's interpreter."""
    made = make_head(1500, 96, rank=16, calibration=500, test=3, seed=6)
    weight, x = made.weight.float(), made.test.float()
    bias, moments = torch.randn(1500, generator=torch.Generator().manual_seed(1)) / 2, Moments(96)
    moments.update(made.calibration.float())
    fitted = {"width": 4.0, "correction": 0.5, "doubt": 0.3, "interval": 2.0, "first": 0, "tier": -1, "capacity": 1024}
    fit = GpuCascadeCalibration(8, 0.3, 0.01, 500, right=1.0, read=0.1, low=0.0, high=100.0, batch=64, **fitted)  # type: ignore[arg-type]
    answers: dict[str, Tensor] = {}
    for beta in (1.0, 0.7):
        engine = GpuCascade(Layer(weight, bias, Options(beta)), build(weight, bias, moments))
        found, logits = engine.replay(x, fit, scale=beta, dense=torch.float32)
        ends = engine.ends(x * beta, fit._replace(envelope=6.0)).logits
        values = {"indices": found.indices, "probs": found.probs, "logits": found.logits, "log_z": found.log_z,
                  "interval": found.interval, "coordinates": found.coordinates, "bytes_read": found.bytes_read,
                  "all logits": logits, "upper ends": ends}  # fmt: skip
        answers |= {f"gpu, beta {beta}/{name}": value for name, value in values.items() if value is not None}
    return answers


def _write() -> None:
    torch.set_num_threads(1)
    answers = head_answers() | gpu_answers()
    np.savez_compressed(HEADS, **{name: value.numpy() for name, value in answers.items()})  # type: ignore[arg-type]


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    _write()
