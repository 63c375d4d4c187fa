"""`softsieve doctor`: what is installed, what works, and whether its numbers are right."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softsieve.cli.errors import one_line
from softsieve.doctor import Finding, Report, examine

COLOURS = {"works": "green", "not here": "dim", "broken": "bold red"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="for bug reports: no names of users, machines or folders")
    ] = False,
) -> None:
    """Say what is installed here, try all of it, and check its numbers. Sends nothing anywhere.

    Exits with 1 when something that is installed does not work.
    """
    with one_line():
        with Console(stderr=True).status("looking", refresh_per_second=4) as status:
            report = examine(progress=lambda name: status.update(f"trying: {name} (the first time, kernels compile)"))
        if as_json:
            typer.echo(json.dumps(report.asdict(), indent=1))
        else:
            _show(Console(highlight=False), report)
        if not report.sound:
            raise typer.Exit(1)


def _show(console: Console, report: Report) -> None:
    _table(console, "Versions", report.versions.items())
    _table(console, "Devices", [*_machine(report.machine), *(("GPU", _gpu(gpu)) for gpu in report.gpus)])
    _table(console, "What computes", map(_cells, report.backends))
    _table(console, "Extras", map(_cells, report.extras))
    _table(console, "Numbers", map(_cells, report.numbers))
    broken = [finding for finding in report.findings if finding.state == "broken"]
    if not broken:
        console.print("All that is installed works.")
    for finding in broken:
        console.print(f"broken: {finding.name}: {finding.detail}", markup=False, style="bold")
        if finding.remedy:
            console.print(f"  try: {finding.remedy}", markup=False)


def _machine(facts: dict[str, Any]) -> list[tuple[str, str]]:
    limit = facts["onednn_max_cpu_isa"]
    uses = f"torch uses {facts['torch_uses']}" + (f", oneDNN at most {limit}" if limit else "")
    memory = "" if facts["memory_gb"] is None else f", {facts['memory_gb']} GB"
    return [
        ("system", facts["system"]),
        ("CPU", f"{facts['processor']}: {facts['processors']} processors, {facts['threads']} threads{memory}"),
        ("instruction sets", f"{', '.join(facts['instruction_sets']) or 'unknown'}; {uses}"),
    ]


def _gpu(facts: dict[str, Any]) -> str:
    return (
        f"{facts['name']}, {facts['memory_gb']} GB, capability {facts['capability']}, "
        f"driver {facts['driver'] or 'unknown'}, CUDA {facts['cuda']}"
    )


def _table(console: Console, title: str, rows: Iterable[Iterable[Any]]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console.print(table)


def _cells(finding: Finding) -> tuple[Any, ...]:
    words = f"{finding.detail}: {finding.remedy}" if finding.remedy else finding.detail
    return finding.name, Text(finding.state, COLOURS.get(finding.state, "")), words
