"""Text files without named columns: lines of fastText, and lines of a label, a tab and a text."""

from __future__ import annotations

from array import array
from pathlib import Path

from softsieve.tasks.files import iter_lines
from softsieve.tasks.reading import Reading
from softsieve.tasks.tables import Table
from softsieve.tasks.texts import Column, Places

MARK = "__label__"  # before a label, with fastText
MANY = 1000  # lines after which a file is known


def read_plain(path: Path, how: Reading, *, strict: bool = False) -> Table | None:
    """Labels and texts of a .txt file whose content tells which is which; None when it does not.

    Lines of fastText begin with "__label__name". Otherwise most lines must have one tab, one side of which holds texts
    (some with a space): the labels are on the side that has fewer different ones, the left if both have as many.
    Lines with another number of tabs are bad ones. Words and tags of CoNLL files have no spaces. With ``strict`` every
    line must have a tab and a label must come twice: texts may have tabs.
    """
    lines, odd, spaces = 0, 0, 0
    sides: tuple[set[str], set[str]] = set(), set()
    for _, line in iter_lines(path, Reading(encoding=how.encoding)):
        lines += 1
        if lines == 1 and line.startswith(MARK):
            return _read_fasttext(path, how)
        if line.count("\t") != 1:
            odd += 1
            if strict or (lines > MANY and 2 * odd > lines):
                return None
            continue
        left, right = line.split("\t")
        spaces += " " in left.strip() or " " in right.strip()
        sides[0].add(left)
        sides[1].add(right)
    label = int(len(sides[1]) < len(sides[0]))
    if not spaces or 2 * odd >= lines or (strict and len(sides[label]) == lines):
        return None
    texts, labels, numbers = Column(), Column(), array("q")
    for number, line in iter_lines(path, how):
        fields = line.split("\t")
        if len(fields) != 2:
            how.refuse(f"{path}:{number}: expected a label, a tab and a text, found {len(fields) - 1} tabs")
            continue
        labels.append(fields[label])
        texts.append(fields[1 - label])
        numbers.append(number)
    how.say_left_out(path, len(numbers))
    return Table(str(path), {"label": labels.finish(), "text": texts.finish()}, Places(str(path), numbers), path.parent)


def _read_fasttext(path: Path, how: Reading) -> Table:
    """Labels and texts; where any line has several labels, all are lists."""
    texts, found, numbers = Column(), list[list[str]](), array("q")
    for number, line in iter_lines(path, how):
        words, labels = line.split(), list[str]()
        while len(labels) < len(words) and words[len(labels)].startswith(MARK):
            labels.append(words[len(labels)].removeprefix(MARK))
        rest = line.split(None, len(labels))
        texts.append(rest[-1] if len(rest) > len(labels) else "")
        found.append(labels)
        numbers.append(number)
    several = any(len(labels) > 1 for labels in found)
    column = Column()
    for labels in found:
        column.append(labels or None if several else labels[0] if labels else None)
    cells = {"label": column.finish(), "text": texts.finish()}
    return Table(str(path), cells, Places(str(path), numbers), path.parent)
