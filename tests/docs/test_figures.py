"""Figures on the pages are those of the records, and counts those of the code."""

from __future__ import annotations

import re

import pytest

from softsieve.comparisons.output import read_table
from softsieve.heads.cascade import calibration as cascade_calibration
from softsieve.heads.coordinates import calibration
from tests.docs.site_blocks import ROOT, pages, split, text_of

FIGURE = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?=x?\b)")


def figures(text: str) -> set[str]:
    """Numbers of sentences and tables.

    >>> sorted(figures("1,000 rows, 3.90x as fast (p 0.02), `as_cross_entropy`, H200"))
    ['0.02', '1,000', '3.90']
    """
    return {found.rstrip(",") for found in FIGURE.findall(split(text)[1])}


def test_a_comparison_has_no_figure_that_the_records_have_not() -> None:
    records = [text_of(page) for page in pages() if page.startswith("results/")]
    known = figures("\n".join([*records, (ROOT / "README.md").read_text()]))
    found = figures(text_of("comparison.md"))
    assert len(found) > 100
    assert found <= known, sorted(found - known)


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("guarantees.md", cascade_calibration.needed(0.01)),
        ("guarantees.md", cascade_calibration.needed(0.1)),
        ("guarantees.md", calibration.needed(0.01)),
        ("guarantees.md", calibration.needed(0.1)),
        ("guides/heads.md", 2 * cascade_calibration.needed(0.01)),
        ("guides/heads.md", 2 * cascade_calibration.needed(0.1)),
        ("guides/distributed.md", cascade_calibration.needed(0.01 / 2)),
        ("guides/distributed.md", cascade_calibration.needed(0.01 / 4)),
        ("cascade.md", 2 * cascade_calibration.needed(0.01)),
        ("cascade.md", cascade_calibration.needed(0.01 / 4)),
        ("adaptive-softmax.md", calibration.needed(0.01)),
        ("limits.md", cascade_calibration.needed(0.001)),
    ],
)
def test_counts_of_sample_queries(page: str, count: int) -> None:
    assert f"{count:,}" in figures(text_of(page))


def line_of_a_finetuning(row: dict[str, str]) -> str:
    """A row of `python -m experiments lm-finetune` as the page shows it."""
    scales = {"seconds": (1, 2), "ratio": (1, 2), "mb": (1, 0), "loss": (1, 3), "solved": (100, 1)}
    scales |= {"perplexity": (1, 2), "accuracy": (100, 2)}
    cells = [
        f" {factor * float(row[key]):.{digits}f} " if row[key] else " " for key, (factor, digits) in scales.items()
    ]
    return "|".join(["", f" {row['way']} ", *cells, ""])


def test_a_language_model_is_on_the_page_as_on_record() -> None:
    rows = read_table(ROOT / "docs/results/lm/smollm2.csv")[1]
    lines = text_of("results/README.md").splitlines()
    assert len(rows) == 6
    for row in rows:
        assert line_of_a_finetuning(row) in lines
    guide = text_of("guides/language-models.md")
    for row in rows:
        if row["perplexity"]:
            assert f"{float(row['perplexity']):.2f}" in figures(guide)


def test_how_many_architectures_are_tested() -> None:
    pytest.importorskip("transformers")
    from tests.integrations.architectures import NAMES

    with_pictures = 2
    assert f"{len(NAMES) + with_pictures} are tested" in text_of("guides/language-models.md")
