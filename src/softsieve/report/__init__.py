"""One page of what was run: tables, curves and an explorer, in a file that works anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from softsieve import _checks
from softsieve._files import replace_file
from softsieve.errors import InputError
from softsieve.report.page import render
from softsieve.report.read import read_all
from softsieve.report.sections import made, sections

__all__ = ["write_report"]

TITLE = "softsieve report"


def write_report(runs: Sequence[Path], out: Path, title: str = TITLE) -> None:
    """Make one self-contained HTML page of runs and records, all or nothing.

    Args:
        runs: folders of runs, folders of such folders and records, and files of records, in any mix.
        out: the page; a folder that is missing is made, a file that is there replaced.
        title: of the page.

    Raises:
        InputError: naming the file that cannot be read or written, before anything is; without plotly or jinja2.

    Example:
        >>> import tempfile
        >>> from softsieve._records import write_record
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record, page = Path(folder, "tests.json"), Path(folder, "report.html")
        ...     write_record(record, "tests", {}, [{"file": "test_losses", "passed": 12}])
        ...     write_report([record], page, title="All tests")
        ...     html = page.read_text(encoding="utf-8")
        >>> "<title>All tests</title>" in html, "test_losses" in html
        (True, True)
    """
    if not isinstance(runs, list | tuple):  # a path by itself would be taken apart
        raise TypeError(f"runs: expected a list of paths, found {type(runs).__name__}")
    sources, out = read_all([_checks.path("runs", run) for run in runs]), _checks.path("out", out)
    if out.is_dir():
        raise InputError(f"{out}: expected a file to write to, found a folder")
    if out.resolve() in {record.path.resolve() for record in sources.all}:
        raise InputError(f"{out}: expected another file than those that are read")
    page = render(title, sections(sources), made(sources))
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, lambda part: part.write_bytes(page.encode("utf-8", "replace")))
