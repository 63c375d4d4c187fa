"""The sections of a page. To give a suite one of its own: a `Suite`, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from softsieve import __version__
from softsieve.report import comparisons, costs, explorer, heads, language, made_with, plain, training
from softsieve.report.page import Section
from softsieve.report.read import Record, Sources
from softsieve.report.words import count, grouped, machine

SUITES: dict[str, Callable[[Sequence[Record]], Section]] = {
    "compare": comparisons.section,
    "head-bench": heads.BENCH,
    "head-scaling": heads.SCALING,
    "head-gpu": heads.GPU,
    "losses": costs.LOSSES,
    "linear": costs.LINEAR,
    "generate": language.GENERATE,
    "perplexity": language.PERPLEXITY,
}


def sections(sources: Sources) -> list[Section]:
    """All that there is something to say in, the one on what was run last."""
    pages: list[Section] = []
    if sources.runs:
        pages.append(training.section(sources.runs))
    if any(run.logits is not None for run in sources.runs):
        pages.append(explorer.section(sources.runs))
    suites = grouped(sources.records, lambda record: record.suite)
    for suite in sorted(suites, key=lambda name: list(SUITES).index(name) if name in SUITES else len(SUITES)):
        full = [record for record in suites[suite] if record.results]
        empty = [record for record in suites[suite] if not record.results]
        if full:
            pages.append(SUITES.get(suite, plain.suite(suite))(full))
        if empty:
            pages.append(plain.suite(suite)(empty))
    return [*pages, made_with.section(sources)]


def made(sources: Sources) -> dict[str, str]:
    """When the page was made, and of what."""
    kinds = [count(len(sources.runs), "training run")] if sources.runs else []
    if sources.records:
        kinds.append(count(len(sources.records), "record of measurements", "records of measurements"))
    machines = [name for name in dict.fromkeys(machine(record.provenance) for record in sources.all) if name]
    return {
        "of": " and ".join(kinds),
        "on": "; ".join(machines[:3]) + ("; ..." if len(machines) > 3 else ""),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
    }
