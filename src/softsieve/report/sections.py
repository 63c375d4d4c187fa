"""The sections of a page. To give a suite one of its own: a function of its records, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from softsieve import __version__
from softsieve.report import comparisons, costs, explorer, heads, language, made_with, plain, training
from softsieve.report.page import Section
from softsieve.report.read import Found, Record
from softsieve.report.words import count, machine

SUITES: dict[str, Callable[[Sequence[Record]], Section]] = {
    "compare": comparisons.section,
    "head-bench": heads.bench,
    "head-scaling": heads.scaling,
    "head-gpu": heads.gpu,
    "losses": costs.losses,
    "linear": costs.linear,
    "generate": language.generate,
    "perplexity": language.perplexity,
}


def sections(found: Found) -> list[Section]:
    """All that there is something to say in, the one on what was run last."""
    made: list[Section] = []
    if found.runs:
        made.append(training.section(found.runs))
    if any(run.logits is not None for run in found.runs):
        made.append(explorer.section(found.runs))
    suites = dict.fromkeys(record.suite for record in found.records)
    for suite in (*(name for name in SUITES if name in suites), *(name for name in suites if name not in SUITES)):
        here = [record for record in found.records if record.suite == suite and record.results]
        empty = [record for record in found.records if record.suite == suite and not record.results]
        if here:
            made.append(SUITES[suite](here) if suite in SUITES else plain.section(suite, here))
        if empty:
            made.append(plain.section(suite, empty))
    return [*made, made_with.section(found)]


def made(found: Found) -> dict[str, str]:
    """When the page was made, and of what."""
    said = [count(len(found.runs), "training run")] if found.runs else []
    said += [count(len(found.records), "record of measurements", "records of measurements")] if found.records else []
    everything = (*(run.record for run in found.runs), *found.records)
    machines = [name for name in dict.fromkeys(machine(record.provenance) for record in everything) if name]
    return {
        "of": " and ".join(said),
        "on": "; ".join(machines[:3]) + ("; ..." if len(machines) > 3 else ""),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
    }
