"""Multinomial logistic regression on some 25,000 features of images: what AdaptiveSoftmax reads of its weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax
from softsieve.reference.answers import is_right
from softsieve.tasks.encode import ImageEncoder
from softsieve.tasks.examples import Data
from softsieve.tasks.presets import load_preset
from softsieve.tasks.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 64
CHANNELS = 128  # of the last layer, which is 14 x 14: 25,088 features
PAPER = {("eurosat", 0.1): 5.18}  # published gains, as far as they are known
GUARANTEES = ("calibrated", "pac")
CHOSEN = {"read": True, "estimated": False}


class Regression(NamedTuple):
    """A trained softmax regression and queries it was not trained with."""

    weight: Tensor  # (classes, features)
    bias: Tensor  # (classes,)
    calibration: Tensor  # (queries, features)
    test: Tensor
    accuracy: float  # of the network on all test images


class Recipe(NamedTuple):
    """How the network of a data set is trained."""

    side: int  # of its images
    epochs: int
    turn: bool  # whether they mean the same mirrored and turned, and training shows them so


RECIPES = {"mnist": Recipe(28, 2, turn=False), "eurosat": Recipe(56, 8, turn=True)}


class Network(nn.Module):
    """Three convolutions, whose non-negative output is the features, and the softmax regression on them."""

    def __init__(self, side: int, classes: int) -> None:
        super().__init__()
        strides = (1 if side <= 28 else 2), 2, 1
        widths = (3, 32, 64, CHANNELS)
        layers: list[nn.Module] = []
        for before, after, stride in zip(widths, widths[1:], strides, strict=False):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            side = -(-side // stride)
        self.body = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(CHANNELS * side**2, classes)

    def features(self, pixels: Tensor) -> Tensor:
        """Of images, uint8 (rows, 3, side, side)."""
        found: Tensor = self.body(pixels.float() / 127.5 - 1)
        return found

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(pixels))
        return logits


def turned(pixels: Tensor, *, generator: torch.Generator) -> Tensor:
    """Square images (rows, channels, side, side), each in one of its eight positions at random."""
    across, down, over = torch.rand(3, len(pixels), 1, 1, 1, generator=generator) < 0.5
    pixels = torch.where(across, pixels.flip(3), pixels)
    pixels = torch.where(down, pixels.flip(2), pixels)
    return torch.where(over, pixels.transpose(2, 3), pixels)


def fit(
    data: Data,
    recipe: Recipe,
    *,
    train_rows: int,
    calibration: int,
    queries: int,
    seed: int,
    progress: ProgressCallback = no_progress,
) -> Regression:
    """Train the network on at most ``train_rows`` images; its queries are test images, drawn at random.

    Raises:
        InputError: when there are fewer test images than queries.
    """
    if data.test is None or len(data.test.inputs) < calibration + queries:
        found = 0 if data.test is None else len(data.test.inputs)
        raise InputError(f"{data.name}: expected {calibration + queries} test images, found {found}")
    side, epochs, turn = recipe
    task = Task("image", sorted(set(data.train.labels)), ImageEncoder(side, mirror=0))
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(len(data.train.inputs), generator=generator)[:train_rows].tolist()
    train = task.rows(data.train.pick(some))
    test = task.rows(data.test)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Network(side, len(task.labels))
    optimizer = torch.optim.AdamW(network.parameters())
    steps = epochs * -(-len(train) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for epoch in range(epochs):
        for batch in torch.split(torch.randperm(len(train), generator=generator), BATCH):
            pixels = train.inputs["pixels"][batch]
            logits = network(turned(pixels, generator=generator) if turn else pixels)
            optimizer.zero_grad()
            F.cross_entropy(logits, train.target[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            progress(f"{data.name}, training, epoch {epoch + 1}", len(batch) / len(train) / epochs)
    network.eval()
    asked = torch.randperm(len(test), generator=generator)[: calibration + queries]
    with torch.no_grad():
        features = torch.cat([network.features(pixels) for pixels in torch.split(test.inputs["pixels"], 256)])
        accuracy = float((network.head(features).argmax(1) == test.target).double().mean())
    head, features = network.head, features[asked]
    return Regression(
        head.weight.detach(), head.bias.detach(), features[:calibration], features[calibration:], accuracy
    )


def measure(
    regression: Regression, *, guarantee: str, chosen: str, eps: float, delta: float, seed: int
) -> dict[str, Any]:
    """What the head reads for the test queries, and how often it is right."""
    weight, bias, calibration, test, accuracy = regression
    generator = torch.Generator().manual_seed(seed)
    head = AdaptiveSoftmax(
        weight, bias, eps=eps, delta=delta, method="coordinates", guarantee=guarantee, read_chosen=CHOSEN[chosen]
    )
    if guarantee == "calibrated":
        head.calibrate(calibration, generator=generator)
    read, right, exact = [], [], []
    for x in torch.split(test, 100):
        found = head.topk(x, generator=generator)
        logits = x.double() @ weight.double().T + bias.double()
        right.append(is_right(found.indices, found.probs, logits, eps=eps))
        read.append(found.coordinates.double())
        exact.append(found.exact.double())
    success = float(torch.cat(right).double().mean())
    return {
        "guarantee": guarantee,
        "chosen": chosen,
        "delta": delta,
        "gain": weight.numel() / float(torch.cat(read).mean()),
        "success": success,
        "success_error": (success * (1 - success) / len(test)) ** 0.5,
        "exact": float(torch.cat(exact).mean()),
        "nonzero": float((test != 0).double().mean()),  # what a product that knows of zeros would read
        "accuracy": accuracy,
        "n": len(weight),
        "d": weight.shape[1],
        "queries": len(test),
    }


def run(
    names: Sequence[str],
    data_dir: Path,
    *,
    deltas: Sequence[float] = (0.1, 0.05, 0.01),
    eps: float = 0.3,
    epochs: int | None = None,
    train_rows: int = 10_000,
    calibration: int = 200,
    queries: int = 800,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> list[dict[str, Any]]:
    """A row for every data set, guarantee, way to treat the chosen row and delta.

    Training takes the epochs of the recipe unless told. ``calibration`` queries fit what the calibrated guarantee
    needs, ``queries`` others are counted.
    """
    for name in names:
        if name not in RECIPES:
            raise InputError(f"data: expected one of {', '.join(RECIPES)}, found {name!r}")
    rows = []
    part = 1 / len(names) / 2  # half of the time for the training, half for the queries
    for name in names:
        recipe = RECIPES[name]
        regression = fit(
            load_preset(name, data_dir),
            recipe if epochs is None else recipe._replace(epochs=epochs),
            train_rows=train_rows,
            calibration=calibration,
            queries=queries,
            seed=seed,
            progress=lambda what, share: progress(what, part * share),
        )
        for guarantee in GUARANTEES:
            for chosen in CHOSEN:
                for delta in deltas:
                    found = measure(regression, guarantee=guarantee, chosen=chosen, eps=eps, delta=delta, seed=seed)
                    paper = PAPER.get((name, delta)) if guarantee == "calibrated" else None
                    rows.append({"data": name, **found, "paper_gain": paper})
                    progress(
                        f"{name}, {guarantee}, delta {delta:g}", part / len(GUARANTEES) / len(CHOSEN) / len(deltas)
                    )
    return rows


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Gain and success for every delta; a panel each for every data set."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure = new_figure(5.5 * len(names), 7)
    panels = figure.subplots(2, len(names), squeeze=False)
    for (cost, quality), name in zip(panels.T, names, strict=True):
        deltas = sorted({row["delta"] for row in rows})
        for guarantee in GUARANTEES:
            for chosen, style in (("read", "s--"), ("estimated", "o-")):
                here = {"data": name, "guarantee": guarantee, "chosen": chosen}
                found = [row for row in rows if all(row[key] == value for key, value in here.items())]
                label = f"{guarantee}, chosen row {chosen}"
                at = [row["delta"] for row in found]
                bars = [row["success_error"] for row in found]
                cost.plot(at, [row["gain"] for row in found], style, ms=4, label=label)
                quality.errorbar(at, [row["success"] for row in found], bars, fmt=style, ms=4, capsize=2, label=label)
        published = {row["delta"]: row["paper_gain"] for row in rows if row["data"] == name and row["paper_gain"]}
        if published:
            cost.plot(list(published), list(published.values()), "k*", ms=9, label="published")
        quality.plot(deltas, [1 - delta for delta in deltas], "k:", label="promised, 1 - delta")
        cost.set(xscale="log", ylim=(0, None), ylabel="entries of the weight over those read", title=name)
        quality.set(xscale="log", xlabel="delta", ylabel="share of right answers")
        cost.legend(fontsize="small")
        quality.legend(fontsize="small", loc="lower left")
    return figure
