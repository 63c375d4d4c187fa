"""How the entries of a head and of its queries are spread, and how much the estimated logits move the normaliser.

With estimates ``mu + e`` of the logits ``mu`` and ``p = softmax(mu)``, the estimated normaliser over the true one is
``sum_i p_i exp(e_i) = 1 + sum_i p_i e_i + sum_i p_i e_i^2 / 2 + ...``: the first-order term is 0 on average, and the
second-order term, never negative, is the bias that the variance of the estimates leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.variance import Instance, errors
from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ESTIMATOR = "importance-without"  # Horvitz-Thompson
WHAT = {
    "A": "entries of A",
    "x": "entries of x",
    "first order": "sum of p e",
    "second order": "sum of p e^2 / 2",
}
SMALLEST = 1e-12  # what is drawn on a logarithmic axis is at least this


def order_terms(
    instance: Instance, size: int, *, generator: torch.Generator, progress: ProgressCallback = no_progress
) -> tuple[Tensor, Tensor]:
    """The first- and second-order terms of every query, (queries,) each."""
    first, second = [], []
    for exact, error, _ in errors(instance, ESTIMATOR, size, generator=generator):
        p = exact.softmax(-1)
        first.append((p * error).sum(-1))
        second.append((p * error.square()).sum(-1) / 2)
        progress(instance.name, len(exact) / len(instance.queries))
    return torch.cat(first), torch.cat(second)


def histogram(values: Tensor, bins: int, *, logarithmic: bool = False) -> list[tuple[float, float, int]]:
    """Lower end, upper end and count of bins from the least to the greatest value.

    Example:
        >>> histogram(torch.tensor([0.0, 1.0, 1.5, 2.0]), 2)
        [(0.0, 1.0, 1), (1.0, 2.0, 3)]
    """
    values = values.flatten()
    if logarithmic:
        values = values.clamp_min(SMALLEST).log10()
    low, high = (float(end) for end in values.aminmax())
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(values, bins, low, high)
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    if logarithmic:
        edges = 10**edges
    ends = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    return [(start, end, int(count)) for start, end, count in ends]


def run(
    instances: Iterable[Instance],
    *,
    share: float = 0.25,
    bins: int = 60,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> list[dict[str, Any]]:
    """A row for every bin of every histogram; estimates read ``share`` of the coordinates."""
    if not 0 < share <= 1:
        raise InputError(f"share: expected a number above 0, at most 1, found {share:g}")
    generator = torch.Generator().manual_seed(seed)
    instances = list(instances)
    rows = []
    for instance in instances:
        size = max(1, round(share * instance.weight.shape[1]))
        first, second = order_terms(
            instance, size, generator=generator, progress=lambda what, share: progress(what, share / len(instances))
        )
        found = {"A": instance.weight, "x": instance.queries, "first order": first, "second order": second}
        for what, values in found.items():
            for low, high, count in histogram(values, bins, logarithmic=what == "second order"):
                rows.append(
                    {"data": instance.name, "size": size, "what": what, "low": low, "high": high, "count": count}
                )
    return rows


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """A line of four histograms for every instance."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure = new_figure(15, 3.4 * len(names))
    for line, name in zip(figure.subplots(len(names), 4, squeeze=False), names, strict=True):
        for panel, (what, label) in zip(line, WHAT.items(), strict=True):
            found = [row for row in rows if row["data"] == name and row["what"] == what]
            edges = [row["low"] for row in found] + [found[-1]["high"]]
            panel.stairs([row["count"] for row in found], edges, fill=True)
            entries = what in ("A", "x")
            note = name if entries else f"{name}, {found[0]['size']} coordinates"
            panel.set(xlabel=label, ylabel="entries" if entries else "queries", title=note)
            if entries:
                panel.set_yscale("log")  # the tails are what matters
            if what == "second order":
                panel.set_xscale("log")
                panel.tick_params(axis="x", which="minor", labelrotation=45, labelsize="small")
    return figure
