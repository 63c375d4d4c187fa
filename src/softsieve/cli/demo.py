"""`softsieve demo`: both halves of the library at work, in under three minutes and with nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softsieve.cli.errors import one_line
from softsieve.extras import package


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="trainings of each kind")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training rows in each")] = 15,
    out: Annotated[Path, typer.Option(help="folder for the runs and the page about them")] = Path("softsieve-demo"),
) -> None:
    """Train with softmax and AS-Softmax, ask an adaptive head, and write a page about both."""
    with one_line():
        for name, what in (("accelerate", "training"), ("PIL", "images"), ("sklearn", "measuring F1")):
            package(name, what)
        package("plotly", "the report")
        from softsieve.cli.demo_parts import show_demo  # needs the extra train

        show_demo(out, seeds=seeds, epochs=epochs)
