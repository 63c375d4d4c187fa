"""`softsieve head build | calibrate | query`: the index of an adaptive head, made and asked from files."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from softsieve.cli.errors import one_line
from softsieve.cli.head import check_place
from softsieve.cli.head_bench import Delta, Eps
from softsieve.cli.progress import bar, error_console
from softsieve.errors import InputError

QUERIES = "hidden states: .npy (N, d), or .safetensors with NAME.calibration, NAME.test or a single matrix"
CORPUS = "of a .safetensors file: which NAME; several; all if not given"
ALL = "use every row. Otherwise rows 0, 2, 4, ... are for build and rows 1, 3, 5, ... for calibrate"


def build(
    weight: Annotated[Path, typer.Argument(help="the weight (n, d): .safetensors or .npy")],
    queries: Annotated[Path, typer.Option(help=QUERIES)],
    out: Annotated[Path, typer.Option(help="the index to write, .safetensors; the weight is in it, too")],
    tensor: Annotated[str, typer.Option(help="of a .safetensors file: the name of the weight")] = "weight",
    bias: Annotated[
        str | None, typer.Option(help="of a .safetensors file: the name of the bias; 'bias' if there")
    ] = None,
    corpus: Annotated[list[str] | None, typer.Option(help=CORPUS)] = None,
    every: Annotated[bool, typer.Option("--all", help=ALL)] = False,
    eps: Eps = 0.3,
    delta: Delta = 0.01,
    beta: Annotated[float, typer.Option(help="what logits are multiplied by")] = 1.0,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
) -> None:
    """Make the index of a cascade for queries like these.

    softsieve head build head.safetensors --queries head.safetensors --out index.safetensors
    """
    with one_line():
        check_place(out)
        from softsieve.heads import AdaptiveSoftmax
        from softsieve.integrations import matrix_file

        matrix, vector = matrix_file.read_weight(weight, tensor, bias)
        made = AdaptiveSoftmax(matrix, vector, eps=eps, delta=delta, beta=beta, seed=seed)
        parts = matrix_file.read_queries(queries, corpus, "calibration", step=1 if every else 2)
        start = time.perf_counter()
        with bar(console := error_console(), "reading") as progress:
            made.build(parts, progress=progress)
        made.save(out)
        n, d = matrix.shape
        console.print(f"{n} x {d}: built in {time.perf_counter() - start:.1f} s, {out}")
        console.print("next: softsieve head calibrate")


def calibrate(
    index: Annotated[Path, typer.Argument(help="what `softsieve head build` wrote")],
    queries: Annotated[Path, typer.Option(help=QUERIES)],
    k: Annotated[list[int], typer.Option(min=0, help="softmax values that will be asked for; 0: log Z; several")] = [1],  # noqa: B006
    corpus: Annotated[list[str] | None, typer.Option(help=CORPUS)] = None,
    every: Annotated[bool, typer.Option("--all", help=ALL)] = False,
    out: Annotated[Path | None, typer.Option(help="where to write; if not given, to the same file")] = None,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
) -> None:
    """Fit an index on sample queries, and measure how often it is right on others, if the file has NAME.test.

    softsieve head calibrate index.safetensors --queries head.safetensors --k 1 --k 8
    """
    with one_line():
        check_place(place := out or index)
        import torch

        from softsieve import _checks as checks
        from softsieve.heads import AdaptiveSoftmax
        from softsieve.integrations import matrix_file

        loaded = AdaptiveSoftmax.load(index)
        if loaded.index is None:
            raise InputError(
                f"{index}: expected what `softsieve head build` writes, found a head with method {loaded.method}"
            )
        parts = list(matrix_file.read_queries(queries, corpus, "calibration", step=1 if every else -2))
        test = list(matrix_file.read_queries(queries, corpus, "test", step=1, missing=True))
        for part in (*parts, *test):
            checks.queries("queries", part, loaded.weight)
        if not parts:
            raise InputError(f"{queries}: queries: expected some, found none")
        sample = torch.cat(parts)
        with bar(console := error_console(), "reading") as progress:
            fitted = loaded.calibrate(sample, k, generator=torch.Generator().manual_seed(seed), progress=progress)
        loaded.save(place)
        for one in fitted:
            known = (
                f"reads {one.read:.2%} of the weight"
                if one.width < math.inf
                else "no margin suffices, reads everything"
            )
            console.print(f"k = {one.k}: {one.queries} queries, {known}; faster up to {one.batch} at a time")
            if test:
                seen = loaded.coverage(torch.cat(test), one.k)
                console.print(
                    f"  on {seen.queries} others: right {seen.right:.2%}, promised {1 - loaded.delta:.2%}; "
                    f"reads {seen.read:.2%}, {seen.exact:.1%} exactly"
                )
        console.print(f"written to {place}")


def query(
    index: Annotated[Path, typer.Argument(help="what `softsieve head calibrate` wrote")],
    queries: Annotated[Path, typer.Option(help=QUERIES)],
    k: Annotated[int, typer.Option(min=1, help="softmax values")] = 1,
    corpus: Annotated[list[str] | None, typer.Option(help=CORPUS)] = None,
    count: Annotated[int, typer.Option(min=1, help="queries, from the first")] = 10,
) -> None:
    """The largest softmax values of some queries, one at a time.

    softsieve head query index.safetensors --queries head.safetensors --k 3
    """
    with one_line():
        from rich.console import Console
        from rich.table import Table

        from softsieve.heads import AdaptiveSoftmax
        from softsieve.integrations import matrix_file

        loaded = AdaptiveSoftmax.load(index)
        states = next(matrix_file.read_queries(queries, corpus, "test", step=1), None)
        if states is None:
            raise InputError(f"{queries}: queries: expected some, found none")
        states = states[:count]
        whole = loaded.weight.numel() * loaded.weight.element_size()
        table = Table(title=f"top {k} with eps {loaded.eps:g}, delta {loaded.delta:g}")
        for column in ("query", "rows", "probabilities", "log Z", "bytes", "ms"):
            table.add_column(column, justify="right")
        loaded.topk(states[:1], k)  # compiles
        for number, x in enumerate(states):
            start = time.perf_counter()
            answer = loaded.topk(x, k)
            taken = time.perf_counter() - start
            table.add_row(
                str(number),
                " ".join(map(str, answer.indices.tolist())),
                " ".join(f"{p:.3f}" for p in answer.probs.tolist()),
                f"{float(answer.log_z):.3f}",
                "all" if answer.exact else f"{int(answer.bytes_read) / whole:.2%}",
                f"{1000 * taken:.2f}",
            )
        Console().print(table)
