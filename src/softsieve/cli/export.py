"""`softsieve export`: a trained model in a format of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softsieve import _checks
from softsieve.cli.errors import one_line
from softsieve.cli.progress import plain_console, quiet_hugging_face

FORMATS = ("onnx", "transformers")


def export(
    model: Annotated[Path, typer.Argument(help="folder of a trained model, or of the run that made it")],
    to: Annotated[str, typer.Option(help="the format: onnx or transformers")],
    out: Annotated[Path, typer.Option(help="a file .onnx; for transformers a folder")],
) -> None:
    """Write a trained model as ONNX, checked with onnxruntime, or as a folder that transformers loads.

    softsieve export softsieve-run --to onnx --out model.onnx
    """
    with one_line():
        quiet_hugging_face()
        _checks.choice("to", to, FORMATS)
        if to == "onnx":
            from softsieve.integrations.onnx_file import TOLERANCE, export_onnx

            error = export_onnx(model, out)
            found = f"onnxruntime says what torch says, {error:.0e} off where {TOLERANCE:.0e} is let pass"
            plain_console().print(f"{out}: {found}; how to call it: {out.with_name(f'{out.name}.md')}")
        else:
            from softsieve.integrations.transformers_folder import export_transformers

            plain_console().print(f"loads by {export_transformers(model, out)}")
