"""A small language model trained through the loss without logits and through the same loss with them."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError, listed
from softsieve.losses import LinearASCrossEntropyLoss

RUNS = {"with logits": ("reference", 0), "without": ("auto", 0), "with logits, another seed": ("reference", 1)}
SMOOTH = 20  # steps that a curve is the mean of


class Run(NamedTuple):
    """One training."""

    name: str
    losses: list[float]  # of every step
    solved: list[float]  # share of the rows
    ms: float  # of a step, the median
    peak_mb: float | None  # of all that is on the GPU


class Model(nn.Module):
    """Words to states: a transformer that does not look ahead."""

    def __init__(self, words: int, size: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, size), nn.Embedding(length, size)
        layer = nn.TransformerEncoderLayer(size, 4, 4 * size, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(size), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        states: Tensor = self.layers(self.words(words) + self.places(places), mask=self.mask, is_causal=True)
        return states


def numbered(text: str) -> tuple[Tensor, int]:
    """Words and signs of a text as numbers, the most frequent first, and how many different ones there are."""
    words = re.findall(r"\w+|[^\w\s]", text)
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    number = {word: i for i, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    return torch.tensor([number[word] for word in words]), len(number)


def train(
    text: Tensor,
    words: int,
    *,
    backend: str,
    seed: int,
    steps: int,
    batch: int,
    length: int,
    size: int,
    layers: int,
    delta: float,
    device: str,
    progress: ProgressCallback = no_progress,
    name: str = "",
) -> Run:
    """Train on windows of the text, drawn at random; in bfloat16 by autocast on a GPU."""
    torch.manual_seed(seed)
    model = Model(words, size, layers, length).to(device)
    criterion = LinearASCrossEntropyLoss(size, words, delta, backend=backend, return_stats=True).to(device)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-3)
    draw = torch.Generator().manual_seed(seed)
    losses, solved, taken = [], [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1), generator=draw)
        window = text[starts + torch.arange(length + 1)].to(device)
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, stats = criterion(model(window[:, :-1]), window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        taken.append((time.perf_counter() - start) * 1e3)
        solved.append(float(stats.solved.float().mean()))
        progress(name, 1 / (steps * len(RUNS)))
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None
    return Run(name, losses, solved, statistics.median(taken[steps // 10 :]), peak)


def measure(text: str, *, progress: ProgressCallback = no_progress, **options: Any) -> tuple[list[Run], int]:
    """All runs, and the number of words.

    Raises:
        InputError: for a text that is too short, or a device that is not there.
    """
    if options["device"] not in (known := ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]):
        raise InputError(f"device: expected one of {listed(known)} here, found {options['device']!r}")
    numbers, words = numbered(text)
    if len(numbers) < 2 * options["length"]:
        raise InputError(f"text: expected {2 * options['length']} words at least, found {len(numbers)}")
    return [
        train(numbers, words, backend=backend, seed=seed, progress=progress, name=name, **options)
        for name, (backend, seed) in RUNS.items()
    ], words


def smooth(losses: list[float]) -> list[float]:
    """Means over some steps."""
    return [statistics.fmean(losses[i : i + SMOOTH]) for i in range(0, len(losses) - SMOOTH + 1, SMOOTH)]


def apart(one: Run, other: Run) -> tuple[float, float]:
    """The mean and the largest difference of two smoothed curves."""
    differences = [abs(a - b) for a, b in zip(smooth(one.losses), smooth(other.losses), strict=True)]
    return statistics.fmean(differences), max(differences)


def draw(runs: list[Run]) -> Any:
    """Curves of loss and of the solved share."""
    figure = new_figure(9, 3.5)
    for panel, field in zip(figure.subplots(1, 2), ("losses", "solved"), strict=True):
        for run, style in zip(runs, ("-", "--", ":"), strict=True):
            curve = smooth(getattr(run, field))
            panel.plot([SMOOTH * (i + 1) for i in range(len(curve))], curve, style, label=run.name)
        panel.set(xlabel="step", ylabel="loss" if field == "losses" else "solved share")
    panel.legend(fontsize="small")
    return figure
