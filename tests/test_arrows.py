"""Who may import whom: arrows go one way, from what a user types down to the kernels."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "softsieve"

# What everybody may use; these use each other alone.
SHARED = {
    *("_checks", "_digests", "_files", "_graphs", "_progress", "_records", "_safetensors", "_threads"),
    *("__version__", "data", "errors", "extras"),
}
# The parts of the library, from the bottom up: what each uses besides itself and what is shared.
MAY_USE = {
    "kernels": set[str](),
    "reference": set[str](),
    "losses": {"kernels", "reference"},
    "heads": {"kernels"},
    "layers": {"heads", "kernels", "losses"},
    "training": {"heads", "layers", "losses", "tasks"},
    "tasks": {"kernels", "losses"},
    "integrations": {"heads", "layers", "losses", "tasks", "training"},
    "report": {"losses"},
    "comparisons": {"heads", "integrations", "layers", "losses", "reference", "tasks", "training"},
    "_probes": {"heads", "integrations", "layers", "losses", "reference", "training"},
    "doctor": {"_probes"},
    "cli": {"comparisons", "doctor", "heads", "integrations", "layers", "losses", "report", "tasks", "training"},
    "__init__": {"heads", "layers", "losses", "training"},
    "as_sm": {"losses"},
}
ONLY_TORCH = ("kernels", "reference")  # and what compiles kernels
COMPILERS = {"llvmlite", "numba", "numpy", "triton"}
BESIDE = ("benchmarks", "experiments", "tests")  # not in the wheel


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted names that code imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def part_of(path: Path) -> str:
    """The part of the library that a file belongs to."""
    inside = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else SOURCE.parent)
    return inside.parts[0].removesuffix(".py")


def wrong(part: str, tree: ast.AST) -> list[str]:
    """The imports of a part that go against an arrow."""
    known = {path.name.removesuffix(".py") for path in SOURCE.iterdir()} | {"__version__"}
    allowed = SHARED if part in SHARED else {part, *SHARED, *MAY_USE[part]}
    against = []
    for name in imported(tree):
        package, _, rest = name.partition(".")
        first = rest.partition(".")[0]
        if package in BESIDE:
            against.append(name)
        elif package == "softsieve" and first in known:
            against += [] if first in allowed else [name]
        elif package == "softsieve":  # a public name
            against += [] if MAY_USE["__init__"] <= allowed else [name]
        elif part in ONLY_TORCH:
            fine = package == "torch" or package in sys.stdlib_module_names
            against += [] if fine or (part == "kernels" and package in COMPILERS) else [name]
    return against


FILES = [path for path in SOURCE.parent.rglob("*.py") if "__pycache__" not in path.parts]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE.parent).as_posix())
def test_imports_follow_the_arrows(path: Path) -> None:
    part = part_of(path)
    assert part in SHARED or part in MAY_USE, f"{part}: say in this file what it may use"
    assert wrong(part, ast.parse(path.read_text(encoding="utf-8"))) == []


def test_every_part_is_there() -> None:
    assert {*SHARED, *MAY_USE} - {"__version__"} == {part_of(path) for path in FILES}


def test_no_two_parts_use_each_other() -> None:
    pairs = {frozenset((one, two)) for one, used in MAY_USE.items() for two in used if one in MAY_USE.get(two, ())}
    assert pairs == set()


@pytest.mark.parametrize(
    ("part", "code", "fails"),
    [
        ("heads", "from softsieve.kernels import cascade_numba", False),
        ("kernels", "from softsieve.heads import AdaptiveSoftmax", True),
        ("kernels", "def f():\n    import softsieve.heads.cascade", True),
        ("heads", "from softsieve import losses", True),
        ("heads", "from softsieve import __version__", False),
        ("heads", "from softsieve import AdaptiveSoftmax", True),
        ("comparisons", "from softsieve import AdaptiveSoftmax", False),
        ("cli", "from benchmarks import measure", True),
        ("cli", "import experiments.synthetic", True),
        ("errors", "from softsieve.tasks.files import read_text", True),
        ("reference", "import numpy", True),
        ("reference", "import math, torch.nn", False),
        ("kernels", "import numba", False),
    ],
)
def test_an_import_against_an_arrow_is_noticed(part: str, code: str, fails: bool) -> None:
    assert bool(wrong(part, ast.parse(code))) == fails
