"""The page of the commands, from the command line itself, so that it cannot say anything else."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE, MARK, NAMES_MARK = "cli.md", "<!-- every command -->", "<!-- other names -->"
PROGRAM = "softsieve"
CHECKOUT = {"python -m benchmarks": "benchmarks.commands", "python -m experiments": "experiments.commands"}
HEADING = """## From a checkout

What the figures of this site are made with: suites against rivals, and the papers' tables and figures. Start them in
the folder of the source, with the package installed from there.
"""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """What mkdocs calls for each page."""
    if page.file.src_uri != PAGE:
        return markdown
    for mark, text in {MARK: every_command(), NAMES_MARK: other_names()}.items():
        if mark not in markdown:
            raise ValueError(f"{PAGE}: expected the line {mark}, which commands or names replace, found none")
        markdown = markdown.replace(mark, text)
    return markdown


def other_names() -> str:
    """A table of the names that do as well."""
    from softsieve.cli.script import NAMES

    lines = [f"| {', '.join(map(written, ones))} | {written(name)} |" for name, ones in NAMES.items()]
    return "\n".join(["| the option | does as well |", "|---|---|", *lines])


def written(name: str) -> str:
    """A name as it is read, with underscores.

    >>> written("--batch-size")
    '`--batch_size`'
    """
    return f"`--{name[2:].replace('-', '_')}`" if name.startswith("--") else f"`{name}`"


def every_command() -> str:
    """All commands, as Markdown."""
    installed = [section(path, command) for path, command in commands(PROGRAM)]
    besides = [section(path, command) for program in CHECKOUT for path, command in commands(program)]
    return "\n\n".join([*installed, HEADING, *besides])


def commands(program: str = PROGRAM) -> Iterator[tuple[str, Any]]:
    """Every command of a program with its name, groups before what is in them."""
    from typer.main import get_command

    if (root := str(Path(__file__).parents[2])) not in sys.path:  # mkdocs does not start in the source's folder
        sys.path.insert(0, root)
    app = import_module(CHECKOUT.get(program, "softsieve.cli")).app

    def below(path: str, group: Any) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if not command.hidden:
                yield f"{path} {name}", command
                yield from below(f"{path} {name}", command) if hasattr(command, "commands") else ()

    yield from below(program, get_command(app))


def section(path: str, command: Any) -> str:
    """A heading, what the command says of itself, and its options."""
    group = hasattr(command, "commands")
    depth = "##" if path.startswith(PROGRAM) and path.count(" ") == 1 else "###"
    parts = [f"{depth} `{path}`", *map(paragraph, inspect.cleandoc(command.help or "").split("\n\n"))]
    if not group:
        parts += tables(command)
    return "\n\n".join(parts)


def paragraph(text: str) -> str:
    """As it is, a command as a block.

    >>> print(paragraph("softsieve demo"))
    ```console
    $ softsieve demo
    ```
    """
    return f"```console\n$ {text}\n```" if text.startswith("softsieve ") else text


def tables(command: Any) -> Iterator[str]:
    """Arguments and options, a table for each group of them."""
    panels: dict[str, list[Any]] = {}
    for one in command.params:
        usual = "Options" if one.opts[0].startswith("-") else "Arguments"
        if not one.hidden and one.name != "help":
            panels.setdefault(getattr(one, "rich_help_panel", None) or usual, []).append(one)
    for title, params in sorted(panels.items(), key=lambda panel: panel[0] != "Arguments"):
        lines = [f"| {title} | | |", "|---|---|---|", *map(row, params)]
        yield "\n".join(lines)


def row(one: Any) -> str:
    """A line of a table: names, what for, what holds if it is not given."""
    names = ", ".join(map(written, (*one.opts, *one.secondary_opts)))
    return f"| {names} | {cell(one.help or '')} | {usual(one)} |"


def usual(one: Any) -> str:
    """Whether it must be given, or what is taken if not."""
    if one.required:
        return "required"
    default = one.default
    if callable(default) or default in (None, False, "", [], ()) or not getattr(one, "show_default", True):
        return ""
    if default is True:
        return "on"
    values = default if isinstance(default, list | tuple) else [default]
    return ", ".join(f"`{cell(str(value))}`" for value in values)


def cell(text: str) -> str:
    """Text that cannot end a cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
