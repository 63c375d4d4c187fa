"""What comparisons and experiments write: tables and pictures that say how they were made."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softsieve._files import check_writable, replace_file
from softsieve._records import provenance, write_text
from softsieve.errors import InputError
from softsieve.extras import package
from softsieve.tasks.files import read_text

if TYPE_CHECKING:  # a picture is drawn at the end, if at all
    from matplotlib.figure import Figure

SUFFIXES = (".csv", ".png", ".svg")
_OURS = (*SUFFIXES, ".json", ".md", ".runs")  # of all results that are written under one name


# Files


def beside(out: Path, suffix: str) -> Path:
    """``out`` with a suffix, which may have one of ours already."""
    plain = out.with_suffix("") if out.suffix in _OURS else out
    return plain.with_name(plain.name + suffix)


def expect_place(out: Path) -> None:
    """Refuse what results cannot be written to, before hours are spent on them; also a lack of matplotlib."""
    package("matplotlib", "drawing")
    check_writable(out)
    for path in (beside(out, suffix) for suffix in SUFFIXES):
        if path.is_dir():
            raise InputError(f"{path}: expected a file, found a folder")


def write_results(
    out: Path, experiment: str, configuration: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], figure: Figure
) -> None:
    """``out``.csv with its provenance, and the picture as ``out``.png and ``out``.svg; each all or nothing."""
    write_table(beside(out, ".csv"), {"experiment": experiment, **configuration}, rows)
    save_figure(out, figure)


def write_table(path: Path, configuration: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file with a line ``# key: value`` for everything that made it what it is."""
    made = provenance()
    parts = {**made.pop("versions"), **made.pop("machine")}
    text = io.StringIO()
    for name, value in {**configuration, **made, **parts}.items():
        text.write(f"# {name}: {_cell(value) or 'none'}\n")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    write_text(path, text.getvalue())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def read_table(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """What `write_table` wrote: how it was made, and the rows.

    Raises:
        InputError: when a line is of another kind, saying which.
    """
    lines = read_text(path).splitlines()
    about = {}
    for number, line in enumerate(lines, 1):
        name, colon, value = line[2:].partition(": ")
        if line.startswith("# ") and not colon:
            raise InputError(f"{path}:{number}: expected '# name: value', found {line[:60]!r}")
        if line.startswith("# "):
            about[name] = value
    try:
        rows = list(csv.DictReader((line for line in lines if not line.startswith("# ")), strict=True))
    except csv.Error as error:
        raise InputError(f"{path}: not a table ({error})") from None
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise InputError(f"{path}: row {number}: expected as many cells as the header has, found others")
    return about, rows


# Pictures


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(out: Path, figure: Figure) -> None:
    """``out``.png and ``out``.svg; the same figure gives the same files."""
    from matplotlib import rc_context

    png, svg = beside(out, ".png"), beside(out, ".svg")
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # found once, the layout is that of both
    with rc_context({"svg.hashsalt": "softsieve"}):
        replace_file(png, lambda part: figure.savefig(part, format="png", dpi=120))
        replace_file(svg, lambda part: figure.savefig(part, format="svg", metadata={"Date": None}))
