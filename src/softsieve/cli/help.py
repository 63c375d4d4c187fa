"""The help of a command: a name a line, whole however narrow the terminal, and what it is for beside it."""

from __future__ import annotations

import inspect
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


def print_help(command: Any, ctx: Any) -> None:
    """Usage, what the command says of itself, and its options in their panels."""
    panels: dict[str, Table] = {}
    for one in command.get_params(ctx):
        if getattr(one, "hidden", False):
            continue
        usual = "Options" if one.opts[0].startswith("-") else "Arguments"
        title = getattr(one, "rich_help_panel", None) or usual
        panels.setdefault(title, Table.grid(padding=(0, 2))).add_row(Text(_name(one), "cyan", no_wrap=True), _use(one))
    said = [" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n")]
    console = Console(highlight=False)
    console.print(Padding(Text(command.get_usage(ctx), "bold"), 1))
    console.print(Padding(Group(*(Padding(Text(part), (0, 0, 1, 0)) for part in said)), (0, 1)))
    for title, table in panels.items():
        console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def _name(one: Any) -> str:
    if not one.opts[0].startswith("-"):
        return str(one.name).upper() + ("..." if one.nargs == -1 else "")
    flag = getattr(one, "is_flag", False) or one.name == "help"
    return ", ".join(f"--{name[2:].replace('-', '_')}" for name in one.opts) + ("" if flag else " VALUE")


def _use(one: Any) -> Text:
    """What it is for, whether it must be given, and what is taken if not."""
    text = Text(one.help or "")
    shown = getattr(one, "show_default", False) and not callable(one.default)
    if one.required:
        text.append(" [required]", "red")
    elif shown and one.default not in (None, False, "", [], ()):
        values = one.default if isinstance(one.default, list | tuple) else [one.default]
        text.append(f" [{'on' if one.default is True else ', '.join(map(str, values))}]", "dim")
    return text
