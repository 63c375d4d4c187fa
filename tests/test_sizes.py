"""Nothing in the library is longer than a reader can hold: modules, classes and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULE, CLASS, FUNCTION, KERNEL = 500, 300, 80, 120  # lines, at most


def too_long(name: str, text: str) -> Iterator[str]:
    """What is longer than allowed in a module of this name."""
    lines = len(text.splitlines())
    if lines > MODULE:
        yield f"{name}: {lines} lines"
    function = KERNEL if "kernels" in name else FUNCTION
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > (CLASS if isinstance(node, ast.ClassDef) else function):
                yield f"{name}: {node.name}: {lines} lines"


def test_nothing_is_too_long() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts]
    assert len(modules) > 50
    names = {path: str(path.relative_to(SOURCE)) for path in modules}
    assert [found for path in modules for found in too_long(names[path], path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a", "\n" * 501, ["a: 501 lines"]),
        ("a", "class C:\n" + "    x = 1\n" * 300, ["a: C: 301 lines"]),
        ("a", "def f():\n" + "    x = 1\n" * 80, ["a: f: 81 lines"]),
        ("kernels/a", "def f():\n" + "    x = 1\n" * 80, []),
        ("kernels/a", "def f():\n" + "    x = 1\n" * 120, ["kernels/a: f: 121 lines"]),
        ("a", "def f():\n    x = 1\n", []),
    ],
)
def test_what_is_too_long_is_seen(name: str, text: str, expected: list[str]) -> None:
    assert list(too_long(name, text)) == expected
