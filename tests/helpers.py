"""What several tests need: rows of all kinds, how far they are from being decided the other way, and a data set."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

IGNORED = -100
WORDS = {"sun": ["bright", "warm", "sky"], "rain": ["wet", "cloud", "grey"], "snow": ["white", "cold", "ice"]}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating-point tensors of this dtype where none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make(rows: int, classes: int, *, spread: float = 3.0, ignored: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """float64 logits of all kinds of rows (dense, sparse, solved) and labels, a share of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, dtype=torch.float64, generator=generator) * spread
    target = torch.randint(classes, (rows,), generator=generator)
    helped = torch.rand(rows, generator=generator) < 0.6  # without help almost no row has its target on top
    lift = torch.rand(rows, generator=generator, dtype=torch.float64) * 2 * spread
    at = (torch.arange(rows)[helped], target[helped])
    logits[at] = logits.amax(-1)[helped] + lift[helped] - spread
    target[torch.rand(rows, generator=generator) < ignored] = IGNORED
    target[0] = 0  # at least one counts
    return logits, target


def distance_to_margin(logits: Tensor, target: Tensor, delta: float) -> Tensor:
    """How far every class is from being decided the other way, (rows, classes); inf for ignored rows and targets."""
    p = logits.double().softmax(-1)
    label = target.clamp_min(0).unsqueeze(-1)
    distance = (p.gather(-1, label) - p - delta).abs()
    distance.scatter_(-1, label, float("inf"))
    return distance.masked_fill((target < 0).unsqueeze(-1), float("inf"))


def write_weather(folder: Path) -> Path:
    """Train, validation and test files of texts that are easily told apart, in a folder."""
    draw = random.Random(0)
    for split, rows in (("train", 90), ("validation", 30), ("test", 30)):
        lines = ["text,label"]
        for row in range(rows):
            label = sorted(WORDS)[row % 3]
            lines.append(f"{' '.join(draw.choices(WORDS[label], k=4))},{label}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every call from now on."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def watched(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(owner, name, watched)
    return calls
