"""Figures on the pages are those of the records, and counts those of the code."""

from __future__ import annotations

import json
import re
from statistics import mean, median, stdev
from typing import Any

import pytest

from benchmarks import text
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


# Of the columns of `python -m experiments lm-finetune` on a page: a factor, and digits after the point.
SCALES: dict[str, dict[str, tuple[float, int]]] = {
    "smollm2": {"seconds": (1, 2), "ratio": (1, 2), "mb": (1, 0), "loss": (1, 3), "solved": (100, 1),
                "perplexity": (1, 2), "accuracy": (100, 2)},
    "smollm2-h200": {"seconds": (1e3, 1), "ratio": (1, 2), "mb": (1e-3, 1), "loss": (1, 3), "apart": (1, 3),
                     "solved": (100, 1), "perplexity": (1, 2), "accuracy": (100, 2)},
    "wide-h200": {"seconds": (1e3, 1), "ratio": (1, 2), "mb": (1e-3, 1), "step_seconds": (1e3, 1), "loss": (1, 3),
                  "apart": (1, 3), "solved": (100, 1), "perplexity": (1, 1), "accuracy": (100, 2)},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_a_language_model_is_on_the_page_as_on_record(name: str) -> None:
    rows = [row for row in read_table(ROOT / f"docs/results/lm/{name}.csv")[1] if name != "wide-h200" or row["seconds"]]
    page = [line.replace("*", "").split("|")[2:-1] for line in text_of("results/README.md").splitlines()]
    shown = [[cell.strip() for cell in cells] for cells in page]
    assert len(rows) > 5
    for row in rows:
        cells = [
            f"{factor * float(row[key]):.{digits}f}" if row[key] else ""
            for key, (factor, digits) in SCALES[name].items()
        ]
        assert cells in shown, row["way"]


def test_the_guide_has_the_perplexities_on_record() -> None:
    guide = figures(text_of("guides/language-models.md"))
    for name, some in {"smollm2": {"before"}, "smollm2-h200": set()}.items():
        for row in read_table(ROOT / f"docs/results/lm/{name}.csv")[1]:
            if row["way"] in some | {"dense", "ours, delta 1", "ours, delta 0.5", "ours, delta 0.1"}:
                assert f"{float(row['perplexity']):.2f}" in guide, row["way"]


def test_how_many_architectures_are_tested() -> None:
    pytest.importorskip("transformers")
    from tests.integrations.architectures import NAMES

    with_pictures = 2
    assert f"{len(NAMES) + with_pictures} are tested" in text_of("guides/language-models.md")


def line_of_texts(results: list[dict[str, Any]]) -> str:
    """One data set of `python -m benchmarks text` as the page shows it."""
    by_method: dict[str, list[float]] = {}
    for result in results:
        by_method.setdefault(result["method"], []).append(100 * result["test"])
    ours = by_method[text.OURS]
    first = results[0]
    cells = [f"{first['rows']:,}", f"{first['classes']:,}", f"{mean(ours):.2f} ± {stdev(ours):.2f}"]
    cells += [f"{by_method[rival][0]:.2f}" if rival in by_method else "" for rival in text.RIVALS]
    seconds = [median(r["seconds"] for r in results if r["method"] == name) for name in by_method]
    cells.append(" / ".join(f"{one:.0f}" for one in seconds))
    return f"| {first['data']} | {' | '.join(cells)} |".replace("|  |", "| |")


def test_the_text_model_is_on_the_page_as_on_record() -> None:
    lines = text_of("results/README.md").splitlines()
    by_data: dict[str, list[dict[str, Any]]] = {}
    for name in ("text-cpu.json", "text-eurlex-cpu.json"):
        for result in json.loads((ROOT / "benchmarks/results" / name).read_text())["results"]:
            by_data.setdefault(result["data"], []).append(result)
    assert len(by_data) == 5
    for results in by_data.values():
        assert line_of_texts(results) in lines
    for result in json.loads((ROOT / "benchmarks/results/memory-cpu.json").read_text())["results"]:
        cells = [f"{result[name]:,.0f}" for name in ("file_mb", "rows", "classes", "peak_mb")]
        assert f"| {result['case']} | {' | '.join(cells)} |" in lines


def test_vllm_is_on_the_page_as_on_record() -> None:
    lines = text_of("results/README.md").splitlines()
    record = json.loads((ROOT / "benchmarks/results/vllm-gemma3-cpu.json").read_text())
    for row in record["results"]:
        ratio = f"{row['faster']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        speeds = [f"{row[name]:.1f}" for name in ("tokens_s", "exact_tokens_s")]
        times = [f"{row[name]:.1f}" for name in ("head_ms", "exact_head_ms", "layers_ms")]
        steps = f"{row['step_ms']:.1f}, {row['exact_step_ms']:.1f}"
        cells = [str(row["batch"]), *speeds, ratio, f"{100 * row['adaptive']:.0f} %", *times, steps]
        assert f"| {' | '.join(cells)} |" in lines
