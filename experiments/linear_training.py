"""A small language model trained through the loss without logits, the same loss with them, and the dense one."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError, listed
from softsieve.losses import LinearASCrossEntropyLoss


class Way(NamedTuple):
    """How a training takes its loss."""

    backend: str | None  # None: dense cross-entropy, compiled by `torch.compile`
    seed: int = 0
    memory: int | None = None


DENSE = "dense cross-entropy, torch.compile"
RUNS = {
    "with logits": Way("reference"),
    "without": Way("auto"),
    "without, 512 MB": Way("auto", memory=512 * 10**6),
    "with logits, another seed": Way("reference", seed=1),
    DENSE: Way(None),
}
STYLES = ("-", "--", "-.", ":", "-")
SMOOTH = 20  # steps that a curve is the mean of


class Run(NamedTuple):
    """One training."""

    name: str
    losses: list[float]  # of every step
    solved: list[float]  # share of the rows; empty where the loss does not say
    dense: list[float]  # the same
    ms: float  # of a step, the median
    seconds: float  # of all steps but the first, in which kernels are compiled
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
    way: Way,
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
    torch.manual_seed(way.seed)
    model = Model(words, size, layers, length).to(device)
    criterion = _make_loss(way, size, words, delta).to(device)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-3)
    draw = torch.Generator().manual_seed(way.seed)
    losses, solved, dense, taken = [], [], [], []
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
        if stats is not None:
            solved.append(float(stats.solved.float().mean()))
            dense.append(float(stats.dense.float().mean()))
        progress(name, 1 / (steps * len(RUNS)))
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None
    return Run(name, losses, solved, dense, statistics.median(taken[steps // 10 :]), sum(taken[1:]) / 1e3, peak)


class _Dense(nn.Module):
    """Dense cross-entropy of a linear layer, in one compiled graph; in place of statistics None."""

    def __init__(self, size: int, words: int) -> None:
        super().__init__()
        self.weight = nn.Linear(size, words, bias=False).weight
        self.compiled = torch.compile(lambda states, weight, target: F.cross_entropy(F.linear(states, weight), target))

    def forward(self, states: Tensor, target: Tensor) -> tuple[Tensor, None]:
        return self.compiled(states.flatten(0, -2), self.weight, target.flatten()), None


def _make_loss(way: Way, size: int, words: int, delta: float) -> nn.Module:
    if way.backend is None:
        return _Dense(size, words)
    return LinearASCrossEntropyLoss(size, words, delta, backend=way.backend, memory=way.memory, return_stats=True)


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
        train(numbers, words, way=way, progress=progress, name=name, **options) for name, way in RUNS.items()
    ], words


def smooth(losses: list[float]) -> list[float]:
    """Means over some steps."""
    return [statistics.fmean(losses[i : i + SMOOTH]) for i in range(0, len(losses) - SMOOTH + 1, SMOOTH)]


def dense_steps(run: Run) -> int:
    """How many steps there are before half of the rows are not dense."""
    return next((step for step, share in enumerate(run.dense) if share < 0.5), len(run.dense))


def apart(one: Run, other: Run) -> tuple[float, float]:
    """The mean and the largest difference of two smoothed curves."""
    differences = [abs(a - b) for a, b in zip(smooth(one.losses), smooth(other.losses), strict=True)]
    return statistics.fmean(differences), max(differences)


def draw(runs: list[Run]) -> Any:
    """Curves of loss and of the solved share."""
    figure = new_figure(9, 3.5)
    for panel, field in zip(figure.subplots(1, 2), ("losses", "solved"), strict=True):
        for run, style in zip(runs, STYLES, strict=True):
            curve = smooth(getattr(run, field))
            panel.plot([SMOOTH * (i + 1) for i in range(len(curve))], curve, style, label=run.name)
        panel.set(xlabel="step", ylabel="loss" if field == "losses" else "solved share")
    panel.legend(fontsize="small")
    return figure
