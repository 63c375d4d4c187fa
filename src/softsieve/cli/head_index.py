"""`softsieve head build | calibrate | query`: the index of an adaptive head, made and asked from files."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from softsieve.cli.errors import one_line
from softsieve.cli.head import DTYPES, check_place, quiet_hub
from softsieve.cli.head_bench import Delta
from softsieve.cli.progress import bar, error_console
from softsieve.errors import InputError

QUERIES = "hidden states: .npy (N, d), or .safetensors with NAME.calibration, NAME.test or a single matrix"
CORPUS = "of a .safetensors file: which NAME; several; all if not given"
MODEL = "The index of a language model, for vLLM"
ALL = "use every row. Otherwise rows 0, 2, 4, ... are for build and rows 1, 3, 5, ... for calibrate"


def build(
    weight: Annotated[Path | None, typer.Argument(help="the weight (n, d): .safetensors, .npy or .gguf")] = None,
    queries: Annotated[Path | None, typer.Option(help=QUERIES)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="the index to write, .safetensors; the weight is in it, too. Of --model: a folder"),
    ] = None,
    tensor: Annotated[str, typer.Option(help="of a .safetensors file: the name of the weight")] = "weight",
    bias: Annotated[
        str | None, typer.Option(help="of a .safetensors file: the name of the bias; 'bias' if there")
    ] = None,
    corpus: Annotated[list[str] | None, typer.Option(help=CORPUS)] = None,
    every: Annotated[bool, typer.Option("--all", help=ALL)] = False,
    eps: Annotated[float | None, typer.Option(help="relative error of a probability; 0.3, of --model 0.1")] = None,
    delta: Delta = 0.01,
    beta: Annotated[float, typer.Option(help="what logits are multiplied by")] = 1.0,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
    model: Annotated[str | None, typer.Option(help="name or folder of a language model", rich_help_panel=MODEL)] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="a UTF-8 file like what will be served, may be .gz or .xz", rich_help_panel=MODEL),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(min=1, help="so many of the largest logits are exact; several; 4, 20, 64", rich_help_panel=MODEL),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="processes that share the rows: tensor parallelism", rich_help_panel=MODEL)
    ] = 1,
    states: Annotated[int, typer.Option(min=16, help="hidden states, from the text", rich_help_panel=MODEL)] = 4000,
    window: Annotated[int, typer.Option(min=2, help="tokens read at a time", rich_help_panel=MODEL)] = 256,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"of the engine: {', '.join(DTYPES)}; as vLLM does if not given", rich_help_panel=MODEL),
    ] = None,
    bos: Annotated[
        bool | None,
        typer.Option(help="begin windows with the token for that; found if not given", rich_help_panel=MODEL),
    ] = None,
    from_vllm: Annotated[
        bool, typer.Option("--from-vllm", help="states of what vLLM writes after pieces of it", rich_help_panel=MODEL)
    ] = False,
    device: Annotated[
        str, typer.Option(help="where the engine will answer: cpu or cuda", rich_help_panel=MODEL)
    ] = "cpu",
) -> None:
    """Make the index of a cascade for queries like these; with --model all that vLLM needs, in one command.

    softsieve head build head.safetensors --queries head.safetensors --out index.safetensors

    softsieve head build --model FOLDER --text text.txt
    """
    with one_line():
        if (weight is None) == (model is None):
            raise InputError(f"build: expected a weight or --model, found {'neither' if model is None else 'both'}")
        if model is not None:
            if text is None or queries is not None:
                raise InputError("build: expected --model with --text, and without --queries")
            _build_for(model, text, out, k, eps, delta, ranks, states, window, dtype, bos, from_vllm, device, seed)
            return
        if weight is None or queries is None or out is None:
            raise InputError("build: expected a weight with --queries and --out")
        check_place(out)
        from softsieve.heads import AdaptiveSoftmax
        from softsieve.integrations import matrix_file

        matrix, vector = matrix_file.read_weight(weight, tensor, bias)
        made = AdaptiveSoftmax(matrix, vector, eps=0.3 if eps is None else eps, delta=delta, beta=beta, seed=seed)
        parts = matrix_file.read_queries(queries, corpus, "calibration", step=1 if every else 2)
        start = time.perf_counter()
        with bar(console := error_console(), "reading") as progress:
            made.build(parts, progress=progress)
        made.save(out)
        n, d = matrix.shape
        console.print(f"{n} x {d}: built in {time.perf_counter() - start:.1f} s, {out}")
        console.print("next: softsieve head calibrate")


def _build_for(
    model: str, text: Path, out: Path | None, ks: list[int] | None, eps: float | None, delta: float, ranks: int,
    states: int, window: int, dtype: str | None, bos: bool | None, from_vllm: bool,
    device: str, seed: int,
) -> None:  # fmt: skip
    """The index of a language model, for an engine."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    quiet_hub()
    import torch

    from softsieve.cli.devices import choose_device
    from softsieve.integrations.vllm import building

    start = time.perf_counter()
    lines: list[str] = []
    with bar(console := error_console(), "reading") as progress:
        built = building.build_index(
            model,
            text,
            out,
            ks=ks or building.KS,
            eps=building.EPS if eps is None else eps,
            delta=delta,
            ranks=ranks,
            count=states,
            window=window,
            dtype=None if dtype is None else getattr(torch, DTYPES[dtype]),
            bos=bos,
            from_vllm=from_vllm,
            device=choose_device(device),
            seed=seed,
            progress=progress,
            say=lines.append,
        )
    for line in lines:
        console.print(line)
    about = built.description
    first = "none" if built.first is None else str(built.first)
    console.print(f"{about.rows} x {about.columns}, {about.dtype}; texts begin with token: {first}")
    for k, parts in built.coverage.items():
        for rank, seen in enumerate(parts):
            where = f" on rank {rank}" if ranks > 1 else ""
            promised = 1 - about.delta / ranks
            console.print(
                f"k = {k}{where}: right {seen.right:.2%} of {seen.queries} other states, promised {promised:.2%}; "
                f"reads {seen.read:.2%}, {seen.exact:.1%} exactly"
            )
    console.print(f"built in {time.perf_counter() - start:.0f} s: {built.folder}")


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
        whole = loaded.weight.nbytes
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
