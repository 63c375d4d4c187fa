"""Numbers and settings as a reader sees them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Row = Mapping[str, Any]

LONGEST = 240  # characters of a cell


class Best(str):
    """A cell that stands out: the best of its column."""


def number(value: float, digits: int = 4) -> str:
    """To so many digits, never with an exponent where people would not write one.

    Example:
        >>> [number(x) for x in (12, 1234567, 0.25, 3.14159, 12345.6, 0.00002)]
        ['12', '1,234,567', '0.25', '3.142', '12,346', '2e-05']
    """
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-3 else f"{value:.2g}"


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample, divided by n - 1; 0 for one value.

    Example:
        >>> deviation([1.0, 2.0, 3.0]), deviation([5.0])
        (1.0, 0.0)
    """
    return stdev(values) if len(values) > 1 else 0.0


def spread(values: Sequence[float], *, scale: float = 1.0, digits: int = 2) -> str:
    """Mean and standard deviation; the mean alone where there is one value.

    Example:
        >>> spread([0.96, 0.98], scale=100), spread([0.96], scale=100)
        ('97.00 ± 1.41', '96.00')
    """
    if not values:
        return ""
    middle = f"{scale * fmean(values):,.{digits}f}"
    if len(values) == 1 or (digits == 0 and deviation(values) == 0):  # counts that are all the same
        return middle
    return f"{middle} ± {scale * deviation(values):,.{digits}f}"


def cell(value: Any) -> str:
    """Whatever a record holds, short enough for a table.

    Example:
        >>> cell(None), cell(True), cell([1, 2]), cell({"train": 1500})
        ('', 'yes', '1, 2', 'train 1,500')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, dict) and not any(isinstance(part, dict | list) for part in value.values()):
        text = ", ".join(f"{name} {cell(part)}" for name, part in value.items())
    elif isinstance(value, list) and not any(isinstance(part, dict | list) for part in value):
        text = ", ".join(map(cell, value))
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return short(text)


def short(text: str, longest: int = LONGEST) -> str:
    """Without what is beyond ``longest`` characters.

    Example:
        >>> short("softsieve", 5)
        'soft…'
    """
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def spoken(name: str) -> str:
    """A field's name in words: ``macro_f1`` is macro F1.

    Example:
        >>> spoken("macro_f1"), spoken("learning_rate")
        ('macro F1', 'learning rate')
    """
    return name.replace("_", " ").replace("f1", "F1")


def sentence(text: str) -> str:
    """With a capital first letter, and the others as they are.

    Example:
        >>> sentence("test macro F1")
        'Test macro F1'
    """
    return text[:1].upper() + text[1:]


def count(n: int, one: str, more: str = "") -> str:
    """So many of a thing.

    Example:
        >>> count(1, "run"), count(2, "run"), count(2, "class", "classes")
        ('1 run', '2 runs', '2 classes')
    """
    return f"{n:,} {one if n == 1 else more or one + 's'}"


def list_of(names: Sequence[str]) -> str:
    """Names in a sentence.

    Example:
        >>> list_of(["a"]), list_of(["a", "b", "c"])
        ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def machine(provenance: Row) -> str:
    """What a measurement was made on."""
    computer = provenance.get("machine")
    parts = [provenance.get("gpu")]
    if isinstance(computer, dict):
        threads = computer.get("threads")
        parts += [computer.get("processor"), count(threads, "thread") if isinstance(threads, int) else None]
    return ", ".join(short(str(part), 60) for part in parts if part)


def commit(provenance: Row) -> str:
    """Of the source, and whether it was changed since."""
    digits = provenance.get("commit")
    return f"{str(digits)[:10]}{', modified' if provenance.get('modified') else ''}" if digits else ""


def date(provenance: Row) -> str:
    """Day and minute."""
    return str(provenance.get("date") or "").replace("T", " ")[:16]


def is_number(value: Any) -> TypeGuard[float]:
    """Not a flag."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a key, both in the order in which they come.

    Example:
        >>> grouped([3, 1, 2], lambda n: "odd" if n % 2 else "even")
        {'odd': [3, 1], 'even': [2]}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def some(size: int, most: int) -> list[int]:
    """Places in a list of that size, so many at the most, evenly from the first to the last.

    Example:
        >>> some(3, 12), some(101, 5)
        ([0, 1, 2], [0, 25, 50, 75, 100])
    """
    return sorted({round(i * (size - 1) / (most - 1)) for i in range(most)})
