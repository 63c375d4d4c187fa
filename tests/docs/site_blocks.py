"""The code blocks and commands of the pages, as they are written."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = DOCS / "_site"  # what builds it

PROGRAMS = ("softsieve ", "python -m benchmarks", "python -m experiments")
_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>[^\s`]*)")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


class Block(NamedTuple):
    """Code on a page."""

    page: str
    line: int  # of the first line of code, from 1
    language: str
    code: str


def site_module(name: str) -> ModuleType:
    """A module of those that build the site, which are no part of the package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pages() -> list[str]:
    """Names of all pages, as their addresses in docs."""
    found = (path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
    return sorted(path.as_posix() for path in found if path.parts[0] != SITE.name)


def text_of(page: str) -> str:
    """A page as it is built, with what is put in."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if page == "cli.md":
        commands = site_module("commands")
        text = text.replace(commands.MARK, commands.every_command())
        text = text.replace(commands.NAMES_MARK, commands.other_names())
    return text


def split(text: str, page: str = "") -> tuple[list[Block], str]:
    """The blocks of a text, and the text without them.

    Raises:
        ValueError: for a block that does not end.
    """
    blocks: list[Block] = []
    rest: list[str] = []
    start: re.Match[str] | None = None
    code: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if start is None:
            start = _FENCE.match(line)
            if start is None:
                rest.append(line)
            continue
        if line.strip() == start["marks"]:
            blocks.append(Block(page, number - len(code), start["language"], "".join(f"{c}\n" for c in code)))
            start, code = None, []
        else:
            code.append(line.removeprefix(start["indent"]))
    if start is not None:
        raise ValueError(f"{page}: a block that does not end")
    return blocks, "\n".join(rest)


def blocks_of(page: str) -> list[Block]:
    return split(text_of(page), page)[0]


def commands_in(block: Block) -> list[str]:
    """Commands of a block: lines after a $, which may go on after a backslash; all lines of one without a language."""
    code = block.code.replace("\\\n", " ")
    lines = [line.strip() for line in code.splitlines()]
    if block.language == "console":
        return [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if line]


def mentioned(page: str) -> list[str]:
    """Commands within the sentences of a page."""
    _, text = split(text_of(page), page)
    spans = [" ".join(span.split()) for span in _SPAN.findall(text)]
    return [span for span in spans if span.startswith(PROGRAMS)]
