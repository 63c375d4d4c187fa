"""The page of the commands, from the command line itself, so that it cannot say anything else."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

PAGE, MARK = "cli.md", "<!-- every command -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """What mkdocs calls for each page."""
    if page.file.src_uri != PAGE:
        return markdown
    if MARK not in markdown:
        raise ValueError(f"{PAGE}: expected the line {MARK}, where the commands go, found none")
    return markdown.replace(MARK, every_command())


def every_command() -> str:
    """All commands, as Markdown."""
    return "\n\n".join(section(path, command) for path, command in commands())


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of `softsieve` with its name, groups before what is in them."""
    from typer.main import get_command

    from softsieve.cli import app

    def below(path: str, group: Any) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if not command.hidden:
                yield f"{path} {name}", command
                yield from below(f"{path} {name}", command) if hasattr(command, "commands") else ()

    yield from below("softsieve", get_command(app))


def section(path: str, command: Any) -> str:
    """A heading, what the command says of itself, and its options."""
    group = hasattr(command, "commands")
    depth = "##" if path.count(" ") == 1 else "###"
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
    names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
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
