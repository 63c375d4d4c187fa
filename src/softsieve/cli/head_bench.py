"""`softsieve head bench`: bytes and time of a head against how often it is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softsieve.cli.progress import watched

if TYPE_CHECKING:  # what takes long to import is imported when the command runs
    from matplotlib.figure import Figure

Methods = Annotated[
    list[str] | None, typer.Option(help='"cascade", "faiss HNSW" and so on; several; else all that are installed')
]
Ks = Annotated[list[int], typer.Option(min=1, help="how many of the largest; several")]
Eps = Annotated[float, typer.Option(help="relative error of a probability")]
Delta = Annotated[float, typer.Option(help="chance of a wrong answer")]
Deltas = Annotated[list[float], typer.Option(help="chance of a wrong answer; several: the first for all methods")]
Seed = Annotated[int, typer.Option(min=0, help="of everything that is drawn")]
Out = Annotated[Path, typer.Option(help="results: this name with .csv, .json, .png and .svg; may be a folder")]
Stretch = Annotated[int, typer.Option(min=1, help="queries of a method before the next has its turn; 1: cold caches")]
Cold = Annotated[int, typer.Option(min=0, help="queries asked once more with other things in the caches; 0: none")]
Threads = Annotated[int | None, typer.Option(min=1, help="that compute; else as many as torch takes")]


def head_bench(
    head: Annotated[Path, typer.Argument(help="file with the weight: `softsieve head extract` makes one, or .gguf")],
    queries: Annotated[Path | None, typer.Option(help="file with the hidden states; else that of the head")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="a text whose states are in the file; several; all")] = None,
    method: Methods = None,
    k: Ks = [1, 8],  # noqa: B006
    eps: Eps = 0.3,
    delta: Deltas = [0.01, 0.1, 0.03],  # noqa: B006
    calibration: Annotated[int, typer.Option(min=1, help="states of each text to calibrate with, at most")] = 2000,
    test_queries: Annotated[int, typer.Option(min=1, help="states of each text to test with, at most")] = 500,
    pooled: Annotated[bool, typer.Option("--pooled", help="calibrate with the states of all texts together")] = False,
    stretch: Stretch = 25,
    cold: Cold = 25,
    threads: Threads = None,
    seed: Seed = 0,
    out: Out = Path("head-bench"),
) -> None:
    """Bytes read and time against success for AdaptiveSoftmax and its rivals, one query at a time."""
    out = stem(out, "head-bench")
    with watched(out) as progress:
        from softsieve.comparisons import head_methods
        from softsieve.comparisons import heads as suite
        from softsieve.integrations.head_file import read_head

        check_promise(eps, delta)
        layer, notes = read_head(head, queries)
        chosen: dict[str, Any] = {
            "methods": method or head_methods.available(),
            "ks": k,
            "eps": eps,
            "deltas": delta,
            "calibration": calibration,
            "test_queries": test_queries,
            "pooled": pooled,
            "stretch": stretch,
            "cold": cold,
            "seed": seed,
        }
        set_threads(threads)
        name = notes.get("model") or head.name
        results = suite.measure(layer, name=name, corpora=corpus or [], **chosen, progress=progress)
        rows = [result._asdict() for result in results]
        n, d = layer.weight.shape
        about = {"head": head.name, "model": notes.get("model"), "n": n, "d": d, **chosen, "note": head_methods.NOTE}
        write(out, "head-bench", about, rows, suite.draw(results))
    say(out, rows, "corpus", chosen["methods"])


def check_promise(eps: float, deltas: Sequence[float]) -> None:
    """What the heads would refuse, before others have been built for minutes."""
    from softsieve import _checks

    for name, value in [("eps", eps), *(("delta", delta) for delta in deltas)]:
        _checks.open_unit(name, value)


def set_threads(threads: int | None) -> None:
    """Let torch compute with so many threads, if any number was asked for, and numba with as many."""
    import torch

    from softsieve._threads import follow_torch

    if threads is not None:
        torch.set_num_threads(threads)
    follow_torch()


def stem(out: Path, name: str) -> Path:
    """Of the files: in a folder they get a name."""
    if out.is_dir():
        return out / name
    return out.with_suffix("") if out.suffix == ".json" else out


def write(out: Path, suite: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], figure: Figure) -> None:
    """Write the rows as a table, pictures and a record."""
    from softsieve._records import write_record
    from softsieve.comparisons.output import beside, write_results

    write_results(out, suite, about, rows, figure)
    write_record(beside(out, ".json"), suite, about, rows)


def say(out: Path, rows: Sequence[Mapping[str, Any]], first: str, methods: Sequence[str]) -> None:
    """The rows as a table, what is to know about them, and where they are."""
    from rich.console import Console
    from rich.table import Table

    from softsieve.comparisons import head_methods
    from softsieve.comparisons.output import SUFFIXES, beside
    from softsieve.extras import install

    console = Console(soft_wrap=True, markup=False, highlight=False)
    table = Table()
    timed = ("ms (p20-p80)", "mean", "p99", "cold", "time", "in the mean")
    for name in (first, "k", "method", "setting", "success", "top k right", "bytes", *timed, "exact"):
        table.add_column(name, justify="left" if name in (first, "method", "setting") else "right")
    for number, row in enumerate(rows):
        following = rows[number + 1] if number + 1 < len(rows) else row
        table.add_row(
            row[first],
            str(row["k"]),
            row["method"],
            row["setting"],
            f"{row['success']:.1%}",
            f"{row['topk_right']:.1%}",
            f"{row['bytes_ratio']:.2f}x",
            f"{row['ms']:.2f} ({row['ms_p20']:.2f}-{row['ms_p80']:.2f})",
            f"{row['ms_mean']:.2f}",
            f"{row['ms_p99']:.2f}",
            "" if row["ms_cold"] is None else f"{row['ms_cold']:.2f}",
            f"{row['time_ratio']:.2f}x",
            f"{row['mean_ratio']:.2f}x",
            f"{row['exact_share']:.0%}",
            end_section=(row[first], row["k"]) != (following[first], following["k"]),
        )
    console.print(table)
    console.print(
        "bytes: weight in bfloat16 / bytes read; time: faster exact product / time, of medians and of means; "
        "cold: median with other things in the caches; exact: read everything"
    )
    if any(method.startswith("faiss") for method in methods):
        console.print(head_methods.NOTE)
    absent = set(head_methods.METHODS) - set(head_methods.available()) - set(methods)
    for word, extra in {"faiss": "rivals", "torchao": "quantised"}.items():
        if names := sorted(name for name in absent if word in name):
            console.print(f"not installed: {', '.join(names)} ({install(extra)})")
    console.print(f"written: {', '.join(str(beside(out, suffix)) for suffix in (*SUFFIXES, '.json'))}")
