"""Made-up heads of any shape: how time and success of the methods go with d or n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from softsieve._progress import ProgressCallback, no_progress
from softsieve.comparisons.heads import MARKS, measure, stretch_success
from softsieve.comparisons.output import new_figure
from softsieve.data.synthetic_heads import make_head
from softsieve.integrations.hidden_states import Corpus, Head

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def scaling(
    ns: Sequence[int],
    ds: Sequence[int],
    *,
    rank: int,
    calibration: int,
    test_queries: int,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
    **options: Any,
) -> list[dict[str, Any]]:
    """The results of `measure` on made-up heads of every shape, with n, d and rank."""
    rows: list[dict[str, Any]] = []
    shapes = [(n, d) for n in ns for d in ds]
    for n, d in shapes:
        progress(f"making {n} x {d}", 0)
        weight, *corpus = make_head(n, d, rank=rank, calibration=calibration, test=test_queries, seed=seed)
        head = Head(weight, None, 1.0, None, {"made up": Corpus(*corpus)})

        def part(what: str, share: float, shape: str = f"{n} x {d}") -> None:
            progress(f"{shape}: {what}", share / len(shapes))

        results = measure(
            head,
            name=f"{n} x {d}",
            calibration=calibration,
            test_queries=test_queries,
            seed=seed,
            progress=part,
            **options,
        )
        rows += [{"n": n, "d": d, "rank": rank, **result._asdict()} for result in results]
    return rows


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Time and success against d: a column an n and k, a line a method and setting."""
    places = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    kinds = list(dict.fromkeys((row["method"], row["setting"]) for row in rows))
    sizes = sorted({row["d"] for row in rows})
    figure = new_figure(4.5 * len(places) + 2, 7)
    axes = figure.subplots(2, len(places), squeeze=False)
    floor = 0.5 / max(row["queries"] for row in rows)
    for (above, below), place in zip(axes.T, places, strict=True):
        for number, kind in enumerate(kinds):
            found = [row for row in rows if (row["n"], row["k"]) == place and (row["method"], row["setting"]) == kind]
            d = [row["d"] for row in found]
            style = {"marker": MARKS[number % len(MARKS)], "color": f"C{number}", "label": " ".join(kind)}
            spans = [[row["ms"] - row["ms_p20"] for row in found], [row["ms_p80"] - row["ms"] for row in found]]
            above.errorbar(d, [row["ms"] for row in found], spans, lw=1, capsize=2, **style)
            below.plot(d, [max(1 - row["success"], floor) for row in found], lw=0.5, **style)
        above.set(
            xscale="log", yscale="log", xlabel="d", ylabel="ms, with p20 to p80", title=f"n {place[0]}, top {place[1]}"
        )
        below.set(xscale="log", xlabel="d")
        for panel in (above, below):
            panel.set_xticks(sizes, map(str, sizes))
            panel.minorticks_off()
        stretch_success(below, floor)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    return figure
