"""`softsieve bench`: the benchmarks of the library against its named rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from softsieve.bench import heads as head_suite
from softsieve.bench import losses as suite
from softsieve.bench.record import write_record

bench = typer.Typer(help="Benchmarks against named rivals, all in one run.", no_args_is_help=True)

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def _shape(text: str) -> tuple[int, int]:
    try:
        rows, columns = (int(part) for part in text.split("x"))
    except ValueError:
        raise typer.BadParameter(f"expected two numbers such as 4096x30522, found {text!r}") from None
    if min(rows, columns) < 1:
        raise typer.BadParameter(f"expected at least one of each, found {text!r}")
    return rows, columns


@bench.command()
def losses(
    shape: Annotated[list[str], typer.Option(help="ROWSxCLASSES; may be given several times")] = [  # noqa: B006
        "4096x30522",
        "65536x150",
        "1024x1000",
    ],
    solved: Annotated[list[float], typer.Option(min=0, max=1, help="share of rows made solved; several")] = [  # noqa: B006
        0.0,
        0.5,
        0.95,
    ],
    delta: Annotated[float, typer.Option(min=0, max=1, help="margin of AS-Softmax")] = 0.1,
    dtype: Annotated[str, typer.Option(help=f"one of {', '.join(DTYPES)}")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="timed runs of each method, taken in turns")] = 15,
    out: Annotated[
        Path | None, typer.Option(help="write the results with their provenance to this JSON file", dir_okay=False)
    ] = None,
) -> None:
    """Time and peak memory of forward + backward: softsieve, and the same in plain torch, against F.cross_entropy."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, found {dtype!r}", param_hint="--dtype")
    if device not in (devices := ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]):
        raise typer.BadParameter(f"expected {' or '.join(devices)} here, found {device!r}", param_hint="--device")
    shapes = [_shape(text) for text in shape]
    console = Console()
    results = []
    for rows, classes in shapes:
        for share in solved:
            with console.status(f"{rows} x {classes}, {share:.0%} of the rows solved"):
                results += suite.measure(
                    rows, classes, solved=share, delta=delta, dtype=DTYPES[dtype], device=device, repeats=repeats
                )
    table = Table(title=f"forward + backward, {dtype} on {device}, delta {delta}, median of {repeats}")
    for column in ("rows x classes", "solved", "method", "ms (p20-p80)", "time", "peak MB", "memory"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in results:
        table.add_row(
            f"{r.rows} x {r.classes}",
            f"{r.solved:.0%}",
            r.method,
            f"{r.ms:.1f} ({r.ms_p20:.1f}-{r.ms_p80:.1f})",
            f"{r.time_ratio:.2f}x",
            f"{r.peak_mb:.0f}",
            f"{r.memory_ratio:.2f}x",
            end_section=r.method == suite.METHODS[-1],
        )
    console.print(table)
    console.print(f"time and memory as ratios to {suite.METHODS[0]}; peak above the logits, gradient included")
    if out is not None:
        settings = {"delta": delta, "dtype": dtype, "device": device, "repeats": repeats}
        write_record(out, "losses", settings, [r._asdict() for r in results])
        console.print(f"written to {out}")


@bench.command()
def head(
    shape: Annotated[
        list[str] | None, typer.Option(help="ROWSxDIMENSIONS of the weight; several; else those of the records")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu: coordinates; cuda: the cascade")] = "cpu",
    spread: Annotated[list[float], typer.Option(help="cpu: standard deviation of the logits; several")] = [1.0, 30.0],  # noqa: B006
    rank: Annotated[int, typer.Option(min=1, help="cuda: effective rank of the made-up queries")] = 64,
    batch: Annotated[list[int], typer.Option(min=1, max=64, help="cuda: queries at a time; several")] = [1, 8, 64],  # noqa: B006
    head_file: Annotated[
        list[Path] | None, typer.Option("--head", help="cuda: a file of `softsieve head extract`; instead of shapes")
    ] = None,
    calibration: Annotated[int, typer.Option(min=2, help="cuda: queries to calibrate with")] = 3000,
    test_queries: Annotated[int, typer.Option(min=64, help="cuda: other queries to test with")] = 2000,
    eps: Annotated[float, typer.Option(help="relative error of a probability")] = 0.3,
    delta: Annotated[float, typer.Option(help="chance of a wrong answer")] = 0.01,
    k: Annotated[int, typer.Option(min=1, help="softmax values asked for")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="timed runs of each method, taken in turns")] = 30,
    out: Annotated[
        Path | None, typer.Option(help="write the results with their provenance to this JSON file", dir_okay=False)
    ] = None,
) -> None:
    """Time of the top k of a head against the exact product."""
    if device == "cuda":
        from softsieve.cli.bench_head_gpu import run

        shapes = [_shape(text) for text in shape or [] if not head_file]
        run(shapes, head_file or [], rank, batch, calibration, test_queries, eps, delta, k, repeats, out)
        return
    if device != "cpu":
        raise typer.BadParameter(f"expected cpu or cuda, found {device!r}", param_hint="--device")
    if head_file:
        raise typer.BadParameter("expected --device cuda with it; on a CPU: softsieve head bench", param_hint="--head")
    shapes = [_shape(text) for text in shape or ["50257x768"]]
    console = Console()
    results = []
    for n, d in shapes:
        for width in spread:
            with console.status(f"{n} x {d}, logits of deviation {width:g}"):
                results += head_suite.measure(n, d, spread=width, eps=eps, delta=delta, k=k, repeats=repeats)
    threads = torch.get_num_threads()
    table = Table(title=f"top {k}, fp32, batch 1, {threads} threads, eps {eps}, delta {delta}, median of {repeats}")
    for column in ("weight", "logits", "method", "ms (p20-p80)", "time", "bytes", "exact"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in results:
        table.add_row(
            f"{r.n} x {r.d}",
            f"{r.spread:g}",
            r.method,
            f"{r.ms:.2f} ({r.ms_p20:.2f}-{r.ms_p80:.2f})",
            f"{r.time_ratio:.2f}x",
            f"{r.bytes_ratio:.3f}x",
            f"{r.exact:.0%}",
            end_section=r.method == head_suite.METHODS[-1],
        )
    console.print(table)
    console.print(f"time and bytes as ratios to {head_suite.METHODS[0]}; exact: share of queries that read everything")
    if out is not None:
        settings = {"eps": eps, "delta": delta, "k": k, "repeats": repeats}
        write_record(out, "head", settings, [r._asdict() for r in results])
        console.print(f"written to {out}")
