"""The parts a page is made of, and the page: one HTML file that asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from softsieve.extras import package
from softsieve.report.colours import SCHEMES
from softsieve.report.read import Record, expect
from softsieve.report.words import Best, Row, cell, is_number, number, short

LONGEST = 400  # rows of a table
_SCRIPTS = ("page.js", "explorer.js")
# A number, maybe with a unit or another number; not a date, nor a version or a commit that begins like one.
_FIGURE = re.compile(r"$|-?\d[\d,]*(\.\d+)?(e-?\d+)?x?($|[ /])")


Column = Callable[[Any], str]  # what it shows of a row, whatever that is


def numbers(name: str, form: str | int = "{:.2f}", scale: float = 1) -> Column:
    """A field's numbers in a format, or to so many digits; nothing where a row has none.

    Example:
        >>> show = numbers("success", "{:.1f}", 100)
        >>> show({"success": 0.5}), show({}), numbers("ms", 3)({"ms": 1.2345})
        ('50.0', '', '1.23')
    """

    def show(row: Row) -> str:
        value = row.get(name)
        if not is_number(value):
            return ""
        return number(scale * value, form) if isinstance(form, int) else form.format(scale * value)

    return show


def texts(name: str, longest: int = 60) -> Column:
    """A field as it is, not too long."""
    return lambda row: short(cell(row.get(name)), longest)


def sizes(*names: str) -> Column:
    """Whole numbers as a shape: 50,257 x 768."""
    return lambda row: " x ".join(f"{row[name]:,}" for name in names)


class Table(NamedTuple):
    """Cells of text; the first of a row names it."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: str = "table"

    @classmethod
    def of(cls, caption: str, rows: Iterable[Any], columns: Mapping[str, Column]) -> Table:
        """A line for each row, of what each column shows of it."""
        return cls(caption, list(columns), [[show(row) for show in columns.values()] for row in rows])

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        """Rows that fit a page."""
        return self.rows[:LONGEST]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers and are set flush right."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.head)
        return [place > 0 and all(map(_FIGURE.match, column)) for place, column in enumerate(columns)]


class Figure(NamedTuple):
    """A plot, what is to be seen in it in words, and its data."""

    title: str
    caption: str
    plot: dict[str, Any]  # data and layout as plotly.js takes them
    data: Table
    key: str = ""  # of a figure that a script redraws
    kind: str = "figure"


class Words(NamedTuple):
    """A paragraph."""

    text: str
    kind: str = "words"


class Folded(NamedTuple):
    """Blocks that a reader opens."""

    title: str
    blocks: Sequence[Table | Words]
    kind: str = "folded"


class Explorer(NamedTuple):
    """The slider over real logits."""

    runs: Sequence[dict[str, Any]]
    plots: Sequence[Figure]
    kind: str = "explorer"


Block = Table | Figure | Words | Folded | Explorer


class Part(NamedTuple):
    """A heading in a section, and what is below it."""

    title: str
    blocks: Sequence[Block]
    how: str = ""


class Section(NamedTuple):
    """A heading, how to read what follows, and that; ``glance`` says the gist of it."""

    title: str
    how: str
    blocks: Sequence[Block] = ()
    parts: Sequence[Part] = ()
    glance: Sequence[str] = ()


@dataclass(frozen=True)
class Suite:
    """Makes a section of the records of one suite, a part for each; ``words`` and ``numbers`` are fields it needs."""

    title: str
    how: str
    blocks: Callable[[Record], Iterable[Block]]
    words: str = ""
    numbers: str = ""
    name: Callable[[Record], str] = lambda record: short(record.name, 60)
    about: Callable[[Record], str] = lambda record: ""
    gist: Callable[[Record], Iterable[str]] = lambda record: ()

    def __call__(self, records: Sequence[Record]) -> Section:
        """Refuses records that lack a field."""
        for record in records:
            expect(record, record.results, words=self.words, numbers=self.numbers)
        parts = [Part(self.name(record), list(self.blocks(record)), self.about(record)) for record in records]
        glance = [gist for record in records for gist in self.gist(record)]
        return Section(self.title, self.how, parts=parts, glance=glance)


def render(title: str, sections: Sequence[Section], made: dict[str, str]) -> str:
    """The page as HTML.

    Raises:
        InputError: without jinja2 or plotly.
    """
    jinja2 = package("jinja2", "a report")
    plotly = package("plotly.offline", "a report")
    here = files("softsieve.report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.tests["best"] = lambda text: isinstance(text, Best)
    environment.filters["runs"] = _runs
    safe = package("markupsafe", "a report").Markup
    scripts = [plotly.get_plotlyjs(), *((here / name).read_text(encoding="utf-8") for name in _SCRIPTS)]
    # As the browser sees them, for the page's policy: no other scripts run.
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()) for script in scripts]
    counts = Counter[str]()

    def next_key(kind: str) -> str:
        """The next key of an element; none is made of what a record says."""
        counts[kind] += 1
        return f"{kind}-{counts[kind]}"

    blocks = list(_blocks(sections))
    keys = {id(block): block.key or next_key("figure") for block in blocks if isinstance(block, Figure)}
    data = {
        "figures": {keys[id(block)]: block.plot for block in blocks if isinstance(block, Figure)},
        "schemes": SCHEMES,
        "explorers": [run for block in blocks if isinstance(block, Explorer) for run in block.runs],
    }
    return str(
        environment.from_string((here / "page.html.j2").read_text(encoding="utf-8")).render(
            title=title,
            sections=sections,
            glance=[words for section in sections for words in section.glance],
            made=made,
            number=next_key,
            key=lambda block: keys[id(block)],
            css=safe((here / "page.css").read_text(encoding="utf-8")),
            schemes=SCHEMES,
            scripts=[safe(script) for script in scripts],
            policy=" ".join(f"'sha256-{digest.decode()}'" for digest in digests),
            data=data,
        )
    )


def _blocks(sections: Sequence[Section]) -> Iterator[Block]:
    for section in sections:
        for blocks in (section.blocks, *(part.blocks for part in section.parts)):
            for block in blocks:
                yield block
                if isinstance(block, Explorer):
                    yield from block.plots


def _runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks in their order, with small figures that follow each other in pairs: these stand side by side."""
    together: list[list[Block]] = []
    for block in blocks:
        if together and len(together[-1]) == 1 and _is_small(block) and _is_small(together[-1][0]):
            together[-1].append(block)
        else:
            together.append([block])
    return together


def _is_small(block: Block) -> bool:
    return isinstance(block, Figure) and not block.plot["layout"]["meta"]["broad"]
