"""The page as a file: nothing in it that a record brought runs, everything has a name, colours can be told apart."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from softsieve import as_keep_mask
from softsieve.report import write_report
from softsieve.report.colours import SCHEMES
from softsieve.report.explorer import SHOWN, STEPS, kept_from, payload
from softsieve.report.page import LONGEST, Table
from softsieve.report.read import Logits, read_all
from softsieve.report.sections import sections
from tests.report.conftest import MakeLogits, MakeRun

ROOT = Path(__file__).parents[2]
HOSTILE = '</script><img src=x onerror="window.hacked=1"><!--<script>\u2028{{ 7 * 7 }}'


class Outline(HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [found for name, found in self.elements if name == tag]


@pytest.fixture(scope="module")
def real_page(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun, make_logits: MakeLogits) -> str:
    """Of real records of every kind, and two runs."""
    folder = tmp_path_factory.mktemp("real")
    runs = [make_run(folder / str(seed), seed=seed, logits=make_logits(seed=seed)) for seed in range(2)]
    results = ROOT / "docs" / "results"
    names = ("cascade", "generate", "sighan15.json")
    write_report([*runs, *(results / name for name in names), ROOT / "benchmarks" / "results"], folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def test_hostile_names_stay_text(tmp_path: Path, make_run: MakeRun, make_logits: MakeLogits) -> None:
    labels = [HOSTILE, *"bcdef"]
    make_run(tmp_path / "a", data=HOSTILE, loss=HOSTILE, labels=labels, logits=make_logits(), model=HOSTILE)
    make_run(tmp_path / "b", data=HOSTILE, metric="accuracy", seed=1, notes={HOSTILE: HOSTILE})
    hostile = {"suite": HOSTILE, "settings": {HOSTILE: HOSTILE}, "provenance": {"commit": HOSTILE, "gpu": HOSTILE}}
    (tmp_path / "record.json").write_text(json.dumps({**hostile, "results": [{HOSTILE: HOSTILE}]}))
    told = json.loads((ROOT / "docs" / "results" / "cascade" / "scaling.json").read_text())
    told["results"] = [{**result, "method": HOSTILE, "corpus": HOSTILE} for result in told["results"]]
    (tmp_path / "heads.json").write_text(json.dumps({**told, "suite": "head-bench"}))
    write_report([tmp_path], tmp_path / "page.html", title=HOSTILE)
    page = Outline((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert not page.all("img")
    assert [found.get("type") for found in page.all("script")] == ["application/json"] * 3 + [None] * 3
    assert not [name for _, found in page.elements for name in found if name.startswith("on")]
    assert all(
        "{{" not in str(value) or "7 * 7" in str(value) for _, found in page.elements for value in found.values()
    )
    figures, _, explorers = map(json.loads, page.scripts[:3])
    assert explorers[0]["labels"][0].startswith("</script><img")  # in the data as it is: the page escapes it
    names = [trace["name"] for figure in figures.values() for trace in figure["data"] if "name" in trace]
    assert any("script" in name for name in names)
    assert not [name for name in names if "<" in name]  # plotly knows some HTML


def test_json_cannot_end_its_element(tmp_path: Path, make_run: MakeRun, make_logits: MakeLogits) -> None:
    label = HOSTILE[:30] + "\u2028\u2029&'"
    make_run(tmp_path / "a", labels=[label, *"bcdef"], logits=make_logits())
    write_report([tmp_path], tmp_path / "page.html")
    figures, schemes, explorers = Outline((tmp_path / "page.html").read_text(encoding="utf-8")).scripts[:3]
    assert not set(figures + schemes + explorers) & set("<>&\u2028\u2029")
    assert json.loads(explorers)[0]["labels"][0] == label


def test_only_the_scripts_of_the_page_may_run(real_page: str) -> None:
    page = Outline(real_page)
    policy = next(found["content"] for found in page.all("meta") if found.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.split("script-src")[1].split(";")[0]
    for script in re.findall(r"<script>(.*?)</script>", real_page, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    for tag, found in page.elements:
        for name in ("src", "action", "srcset", "data"):
            assert name not in found, tag
        assert str(found.get("href", "#")).startswith("#")


def test_everything_has_a_name(real_page: str) -> None:
    page = Outline(real_page)
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    assert len(page.all("table")) == len(page.all("caption")) == len(page.all("thead")) > 40
    assert all("scope" in found for found in page.all("th"))
    assert len(page.all("figure")) == len(page.all("figcaption")) > 20
    for found in page.all("figure"):
        assert {found["aria-labelledby"], found["aria-describedby"]} <= set(ids)
    for _, found in page.elements:
        if found.get("tabindex") == "0":
            assert found["role"] == "group"
            assert found.get("aria-label") or found["aria-labelledby"] in ids
        if str(found.get("href", "")).startswith("#"):
            assert str(found["href"])[1:] in ids
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.all("html")[0]["lang"] == "en"
    assert page.all("main")
    assert page.all("nav")
    assert page.all("noscript")


def test_figures_have_words_and_bounded_data(real_page: str) -> None:
    bodies = re.findall(r"<figure .*?</figure>", real_page, re.DOTALL)
    for body in bodies:
        words = re.search(r'-words">(.*?)</span>', body, re.DOTALL)
        assert words is not None
        assert len(words[1]) > 40
        assert 1 < body.count("<tr>") <= LONGEST + 1
    long = Table("a", ["b"], [["c"]] * (LONGEST + 5))
    assert (len(long.shown), len(long.rows)) == (LONGEST, LONGEST + 5)


def _contrast(one: str, other: str) -> float:
    """Of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_colours_can_be_read(scheme: str) -> None:
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    colours = SCHEMES[scheme]
    for paper in ("paper", "card", "tint"):
        for ink in ("ink", "soft", "accent"):
            assert _contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    for colour in (*colours["lines"], colours["solved"]):
        assert _contrast(colour, colours["card"]) >= 3, colour
    assert len(set(colours["lines"])) == 8


# -- the explorer ------------------------------------------------------------------------------------------------------


def test_the_explorer_masks_what_the_library_masks(make_logits: MakeLogits) -> None:
    logits, target = make_logits(rows=80, classes=30)
    logits[:6] = torch.tensor([0.0, 0.0, 1.0, -30.0, 30.0, 2.0]).repeat(5)  # ties, and probabilities of 0 and 1
    first = kept_from(logits, target)
    shown = payload("run", Logits(logits, target, "test"), [str(i) for i in range(30)], 0.1)
    for step in range(STEPS + 1):
        keep = as_keep_mask(logits, target, delta=step / STEPS)
        assert torch.equal(first <= step, keep)
        assert shown["masked"][step] == int((~keep).sum())
        assert shown["solved"][step] == int((keep.sum(1) == 1).sum())
        assert sum(until > step for until in shown["until"]) == shown["solved"][step]
    assert (shown["rows"], shown["rivals"], shown["delta"]) == (80, 80 * 29, 10)


def test_many_classes_are_shown_by_rank(make_logits: MakeLogits) -> None:
    logits, target = make_logits(rows=9, classes=40)
    shown = payload("run", Logits(logits, target, "test"), [str(i) for i in range(40)], 0.25)
    p = logits.softmax(-1)
    assert shown["ranked"]
    for place, label in enumerate(shown["target"]):
        classes, values = shown["classes"][place], shown["p"][place]
        assert len(classes) == len(set(classes)) == SHOWN
        assert classes[0] == label
        assert values[1:] == sorted(values[1:], reverse=True)
        row = next(r for r in range(9) if int(target[r]) == label and abs(float(p[r, label]) - values[0]) < 1e-4)
        rivals = sorted((float(p[row, j]) for j in range(40) if j != label), reverse=True)
        assert values[1:] == pytest.approx(rivals[: SHOWN - 1], abs=1e-4)
    few = payload("run", Logits(logits[:, :5], target % 5, "test"), list("abcde"), 0.25)
    assert few["classes"] is None
    assert [len(row) for row in few["p"]] == [5] * 9


def test_one_class_has_no_rivals() -> None:
    shown = payload("run", Logits(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), "test"), ["a"], 0.1)
    assert (shown["rivals"], shown["masked"][10], shown["solved"][10]) == (0, 0, 3)


def test_no_more_runs_than_a_list_can_hold(
    tmp_path: Path, make_run: MakeRun, make_logits: MakeLogits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softsieve.report.explorer.MOST", 2)
    for seed in range(4):
        make_run(tmp_path / str(seed), seed=seed, logits=make_logits(rows=2))
    section = sections(read_all([tmp_path]))[1]
    assert len(section.blocks[0].runs) == 2  # type: ignore[union-attr]
    assert "The first 2 of 4 runs" in section.how


def test_rows_stand_by_margin(make_logits: MakeLogits) -> None:
    shown = payload("run", Logits(*make_logits(rows=60), "test"), list("abcdef"), 0.1)
    assert shown["until"] == sorted(shown["until"], reverse=True)
    margins = []
    for row, label in zip(shown["p"], shown["target"], strict=True):
        margins.append(row[label] - max(value for j, value in enumerate(row) if j != label))
    assert all(after <= before + 2e-4 for before, after in pairwise(margins))


def test_numbers_stand_flush_right_and_words_do_not() -> None:
    rows = [
        [
            "a",
            "1,234",
            "94.11 ± 2.04",
            "3 of 4",
            "1.00x",
            "2026-11-16 02:00",
            "2.13.0+cpu",
            "0123456789"[:4] + "ab",
            "",
        ],
        ["b", "-0.5", "9.87 (9.6 to 10)", "", "2e-05", "2026-11-17 02:00", "2.11.0", "77fe", "no"],
    ]
    assert Table("t", list("abcdefghi"), rows).numeric == [False, True, True, True, True, False, False, False, False]
