"""`softsieve bench linear`: a linear layer with its loss over many classes, against the dense rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softsieve.cli.errors import one_line


@one_line()
def linear(
    shape: Annotated[list[str], typer.Option(help="ROWSxSIZExCLASSES; several")] = [  # noqa: B006
        "8192x2304x256000",
        "8192x4096x128256",
    ],
    dense: Annotated[list[float], typer.Option(min=0, max=1, help="share of dense rows; several")] = [  # noqa: B006
        0.25,
        0.05,
        1.0,
    ],
    rival: Annotated[list[str] | None, typer.Option(help="several; else all that are installed")] = None,
    delta: Annotated[float, typer.Option(min=0, max=1, help="margin of AS-Softmax")] = 0.1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    repeats: Annotated[int, typer.Option(min=1, help="timed runs of each method, taken in turns")] = 15,
    check: Annotated[bool, typer.Option(help="compare gradients with float64's")] = True,
    out: Annotated[
        Path, typer.Option(help="the results with their provenance go to this JSON file", dir_okay=False)
    ] = Path("benchmarks/results/linear.json"),
) -> None:
    """Time, memory and error of forward + backward: AS cross-entropy without the logits, and dense cross-entropies."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from softsieve.bench import linear as suite
    from softsieve.bench.record import write_record
    from softsieve.errors import InputError, listed

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for name, found, known in (("--dtype", dtype, dtypes), ("--device", device, devices)):
        if found not in known:
            raise InputError(f"{name}: expected one of {listed(known)} here, found {found!r}")
    for name in rival or []:
        if name not in suite.RIVALS:
            raise InputError(f"--rival: expected one of {listed(suite.RIVALS)}, found {name!r}")
    shapes = [_shape(text) for text in shape]
    methods, missing = suite.rivals(rival)
    console = Console(soft_wrap=True, highlight=False)
    results = []
    for rows, size, classes in shapes:
        for share in dense:
            with console.status(f"{rows} x {size} x {classes}, {share:.0%} of the rows dense"):
                results += suite.measure(
                    rows, size, classes, dense=share, methods=methods, delta=delta, dtype=dtypes[dtype], device=device,
                    repeats=repeats, check=check,
                )  # fmt: skip
    table = Table(title=f"forward + backward, {dtype} on {device}, delta {delta}, median of {repeats}")
    for column in ("rows x size x classes", "dense", "method", "ms (p20-p80)", "time", "extra MB", "errors"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in results:
        table.add_row(
            f"{r.rows} x {r.size} x {r.classes}",
            f"{r.dense:.0%}",
            r.method,
            f"{r.ms:.1f} ({r.ms_p20:.1f}-{r.ms_p80:.1f})",
            f"{r.time_ratio:.2f}x",
            f"{r.extra_mb:.0f}",
            f"{r.hidden_error:.1e} {r.weight_error:.1e}",
            end_section=r.method == suite.OURS,
        )
    console.print(table)
    console.print(
        "time: to the fastest rival; extra: at the peak, above inputs and gradients; errors: of the gradients of"
    )
    console.print(
        "hidden states and weight against float64's, |difference| / |float64's|, of the loss each method is for"
    )
    for name, reason in missing.items():
        console.print(f"not here: {name} ({reason})")
    settings = {"delta": delta, "dtype": dtype, "device": device, "repeats": repeats, "missing": missing}
    write_record(out, "linear", settings, [r._asdict() for r in results])
    console.print(f"written to {out}")


def _shape(text: str) -> tuple[int, int, int]:
    from softsieve.errors import InputError

    try:
        rows, size, classes = (int(part) for part in text.split("x"))
    except ValueError:
        raise InputError(f"--shape: expected three numbers such as 8192x2304x256000, found {text!r}") from None
    if min(rows, size, classes) < 1:
        raise InputError(f"--shape: expected at least one of each, found {text!r}")
    return rows, size, classes
