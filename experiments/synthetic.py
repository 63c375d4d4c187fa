"""How the coordinates that are read grow with d: the two synthetic sets of the AdaptiveSoftmax paper."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax
from softsieve.reference.answers import is_right

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISE = {"one": 0.1, "two": 1.0}  # declared variance of one pull, d A_ij x_j
CHOSEN = {"estimated": False, "read": True}  # whether the row that is chosen is read in full at the end


def instance(name: str, n: int, d: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A new weight (n, d), stored by columns as the head wants it, and a query (d,), both float32.

    Set one: the first row is 1/d and the others 0, with normal noise of deviation 1/(sqrt(10) d); the query all ones.
    Set two: normal entries of deviation 1/d; the query the signs of the first row. Rows 2 to n have logits near 0.
    """
    deviation = NOISE[name] ** 0.5 / d
    weight = torch.empty(d, n).normal_(std=deviation, generator=generator).T
    if name == "one":
        weight[0] += 1 / d
        return weight, torch.ones(d)
    return weight, torch.where(weight[0] < 0, -1.0, 1.0)


def exact_logits(weight: Tensor, x: Tensor, *, columns: int = 2**16) -> Tensor:
    """``weight @ x`` in float64, some columns at a time as a copy of all may not fit."""
    parts = zip(torch.split(weight, columns, 1), torch.split(x, columns), strict=True)
    return torch.stack([a.double() @ b.double() for a, b in parts]).sum(0)


def dimensions(steps: int, min_d: int, max_d: int) -> list[int]:
    """From ``min_d`` to ``max_d`` in equal ratios; a single step is the largest.

    Example:
        >>> dimensions(4, 1000, 10**6)
        [1000, 10000, 100000, 1000000]
    """
    if not 1 <= min_d <= max_d:
        raise InputError(f"max_d: expected at least min_d {min_d}, found {max_d}")
    ratio = min_d / max_d
    return sorted({round(max_d * ratio ** (i / max(steps - 1, 1))) for i in range(steps)})


def stream(*numbers: int) -> torch.Generator:
    """Random numbers for one trial, whatever else is tried."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


def run(
    *,
    n: int = 100,
    min_d: int = 10**3,
    max_d: int = 10**6,
    steps: int = 20,
    trials: int = 100,
    eps: float = 0.3,
    delta: float = 0.1,
    seed: int = 0,
    sets: Iterable[str] = tuple(NOISE),
    progress: ProgressCallback = no_progress,
) -> list[dict[str, Any]]:
    """A row for every set, d and way to treat the chosen row, each over ``trials`` instances with a seed each."""
    sets, sizes = list(sets), dimensions(steps, min_d, max_d)
    for name in sets:
        if name not in NOISE:
            raise InputError(f"set: expected one of {', '.join(NOISE)}, found {name!r}")
    work = len(sets) * trials * sum(sizes)
    rows = []
    for name in sets:
        for d in sizes:
            read: dict[str, list[int]] = {chosen: [] for chosen in CHOSEN}
            right: dict[str, list[bool]] = {chosen: [] for chosen in CHOSEN}
            for trial in range(trials):
                generator = stream(seed, list(NOISE).index(name), d, trial)
                weight, x = instance(name, n, d, generator=generator)
                exact = exact_logits(weight, x)
                for chosen, reads in CHOSEN.items():
                    head = AdaptiveSoftmax(
                        weight,
                        eps=eps,
                        delta=delta,
                        method="coordinates",
                        guarantee="pac",
                        noise=NOISE[name],
                        read_chosen=reads,
                    )
                    found = head.topk(x, generator=generator)
                    read[chosen].append(int(found.coordinates))
                    right[chosen].append(bool(is_right(found.indices, found.probs, exact, eps=eps)))
                    del head  # it may hold a copy of the weight
                del weight
                progress(f"set {name}, d {d:,}", d / work)
            rows += [_row(name, chosen, n, d, read[chosen], right[chosen]) for chosen in CHOSEN]
    return rows


def _row(name: str, chosen: str, n: int, d: int, read: Sequence[int], right: Sequence[bool]) -> dict[str, Any]:
    mean = statistics.mean(read)
    return {
        "set": name,
        "chosen": chosen,
        "n": n,
        "d": d,
        "trials": len(read),
        "coordinates": float(mean),
        "deviation": statistics.stdev(read) if len(read) > 1 else 0.0,
        "gain": n * d / mean,
        "success": statistics.mean(map(float, right)),
    }


def draw(rows: Sequence[dict[str, Any]], *, delta: float) -> Figure:
    """Coordinates read against d, beside all there are; and how often the answer was right."""
    figure = new_figure(11, 4.5)
    cost, quality = figure.subplots(1, 2)
    sizes = sorted({row["d"] for row in rows})
    for name in dict.fromkeys(row["set"] for row in rows):
        for chosen, style in (("estimated", "o-"), ("read", "s--")):
            found = [row for row in rows if row["set"] == name and row["chosen"] == chosen]
            d = [row["d"] for row in found]
            label = f"set {name}, chosen row {chosen}"
            bars = [row["deviation"] for row in found]
            cost.errorbar(d, [row["coordinates"] for row in found], bars, fmt=style, ms=3, capsize=2, label=label)
            quality.plot(d, [row["success"] for row in found], style, ms=3, label=label)
    cost.plot(sizes, [rows[0]["n"] * d for d in sizes], "k:", label="all, n d")
    quality.axhline(1 - delta, color="black", linestyle=":", label="promised, 1 - delta")
    cost.set(xscale="log", yscale="log", xlabel="d", ylabel="coordinates read, mean and deviation over trials")
    quality.set(xscale="log", xlabel="d", ylabel="share of right answers", ylim=(min(0.85, 0.95 - delta), 1.01))
    cost.legend()
    return figure
