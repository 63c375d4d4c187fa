"""How far estimates from some of the coordinates are off, and what they say of it themselves, by sample size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.output import new_figure
from softsieve.errors import InputError, listed
from softsieve.heads.coordinates.estimators import ESTIMATORS
from softsieve.heads.coordinates.hadamard import padded, random_signs, rotate
from softsieve.integrations.head_file import read_head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TERMS = 2**26  # products A_ij x_j held at a time


class Instance(NamedTuple):
    """What is estimated: ``queries @ weight.T``, of (rows, d) and (n, d)."""

    name: str
    weight: Tensor
    queries: Tensor


def made_up(name: str, n: int, d: int, queries: int, *, generator: torch.Generator) -> Instance:
    """Logits of deviation 1 from independent entries: "gaussian", or "heavy-tailed" as Student's t with 3 degrees."""

    def entries(rows: int) -> Tensor:
        normal = torch.randn(rows, d, generator=generator)
        if name == "gaussian":
            return normal
        squares = sum(torch.randn(rows, d, generator=generator).square() for _ in range(3))
        return normal / torch.as_tensor(squares).sqrt()  # t / sqrt(3), whose variance is 1

    return Instance(name, entries(n) / d**0.5, entries(queries))


def real(head: Path, queries: Path | None = None, corpus: str | None = None) -> Instance:
    """The weight and the test states of a text, the first unless named, from the file of a head; without its bias.

    Raises:
        InputError: for a file that is none, and a text that is not there.
    """
    found = read_head(head, queries)[0]
    if corpus is None:
        corpus = next(iter(found.corpora), None)
    if corpus is None or corpus not in found.corpora:
        asked = "some text" if corpus is None else repr(corpus)
        raise InputError(f"{queries or head}: expected {asked}, found {listed(found.corpora)}")
    return Instance(f"{head.stem} {corpus}", found.weight.float(), found.beta * found.corpora[corpus].test.float())


def instances(
    *,
    n: int,
    d: int,
    queries: int,
    seed: int = 0,
    head: Path | None = None,
    queries_file: Path | None = None,
    corpus: str | None = None,
    head_rows: int | None = None,
) -> list[Instance]:
    """The made-up ones, and with ``head`` a real one: ``head_rows`` of its rows (all) and queries, drawn at random."""
    if head is None and (queries_file or corpus):
        raise InputError("head: expected with queries of its own, found none")
    generator = torch.Generator().manual_seed(seed)
    found = [made_up(name, n, d, queries, generator=generator) for name in ("gaussian", "heavy-tailed")]
    if head is not None:
        name, weight, asked = real(head, queries_file, corpus)
        asked = asked[torch.randperm(len(asked), generator=generator)[:queries]]
        if head_rows is not None:
            weight = weight[torch.randperm(len(weight), generator=generator)[:head_rows]]
        found.append(Instance(name, weight, asked))
    return found


def errors(
    instance: Instance, name: str, size: int, *, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """One estimator from ``size`` coordinates: exact logits, errors and variance estimates, (some queries, n) each."""
    weight = instance.weight.T.contiguous().T  # by columns, which is how it is read
    truth = weight.double()
    for x in torch.split(instance.queries, max(1, MOST_TERMS // (len(weight) * size))):
        exact = x.double() @ truth.T
        value, variance = ESTIMATORS[name](weight, x, size, generator=generator)
        yield exact, value.double() - exact, variance.double()


def rotated(instance: Instance, *, generator: torch.Generator) -> Instance:
    """The same logits after the randomized Hadamard rotation of weight and queries."""
    signs = random_signs(padded(instance.weight.shape[1]), generator=generator)
    return Instance(instance.name, rotate(instance.weight, signs), rotate(instance.queries, signs))


def run(
    instances: Iterable[Instance],
    *,
    shares: int = 7,
    repeats: int = 4,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> list[dict[str, Any]]:
    """A row for every instance, estimator, with and without rotation, and size: d, d/2, d/4, ... (``shares`` of them).

    Sizes are shares of the d before the rotation, which may fill up to a power of two, so that they cost the same.
    """
    generator = torch.Generator().manual_seed(seed)
    instances = list(instances)
    rows = []
    for instance in instances:
        d = instance.weight.shape[1]
        sizes = sorted({max(1, d >> i) for i in range(shares)})
        for turned in (False, True):
            for name in ESTIMATORS:
                for size in sizes:
                    rows.append(_measure(instance, name, size, turned, repeats, generator))
                    done = 1 / (len(instances) * 2 * len(ESTIMATORS) * len(sizes))
                    progress(f"{instance.name}, {name}, {size} of {d}", done)
    return rows


def _measure(
    instance: Instance, name: str, size: int, turned: bool, repeats: int, generator: torch.Generator
) -> dict[str, Any]:
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(repeats):  # with new signs each time, as they are part of the estimate
        measured = rotated(instance, generator=generator) if turned else instance
        for exact, error, variance in errors(measured, name, size, generator=generator):
            found.append((exact.square().mean(1), error.square().mean(1), variance.mean(1)))
    power, squares, variances = (torch.cat(parts) for parts in zip(*found, strict=True))
    return {
        "data": instance.name,
        "estimator": name,
        "rotated": "yes" if turned else "no",
        "n": len(instance.weight),
        "d": instance.weight.shape[1],
        "size": size,
        "mse": float(squares.mean()),
        "mse_error": float(squares.std(correction=0)) / len(squares) ** 0.5,  # rows of a query share coordinates
        "variance": float(variances.mean()),
        "mean_square": float(power.mean()),
    }


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Error and variance estimate against the share of the coordinates; a panel an instance and rotation.

    A sample that is exact, as all coordinates without replacement are, has no place on a logarithmic axis.
    """
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure = new_figure(11, 4 * len(names))
    panels = figure.subplots(len(names), 2, sharex=True, squeeze=False)
    for line, name in zip(panels, names, strict=True):
        for panel, turned in zip(line, ("no", "yes"), strict=True):
            for number, estimator in enumerate(ESTIMATORS):
                here = {"data": name, "estimator": estimator, "rotated": turned}
                found = [row for row in rows if all(row[key] == value for key, value in here.items())]
                found = [row for row in found if row["mse"] > 1e-9 * row["mean_square"]]  # others are exact
                share = [row["size"] / row["d"] for row in found]
                error = [row["mse"] / row["mean_square"] for row in found]
                said = [row["variance"] / row["mean_square"] for row in found]
                panel.plot(share, error, "o-", ms=3, color=f"C{number}", label=f"{estimator}: error")
                panel.plot(share, said, "x:", ms=4, color=f"C{number}", label="its own estimate")
            panel.set(xscale="log", yscale="log", title=f"{name}{', rotated' if turned == 'yes' else ''}")
            panel.set(xlabel="share of the coordinates", ylabel="squared error over mean squared logit")
    panels[0, 0].legend(fontsize="small")
    return figure
