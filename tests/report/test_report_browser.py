"""The page in a browser: it draws, listens, prints and asks nobody for anything."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from softsieve import as_keep_mask
from softsieve.report import write_report
from softsieve.report.colours import SCHEMES
from tests.report.conftest import JUDGED, MakeLogits, MakeRun

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
HOSTILE = '</script><img src=x onerror="window.hacked=1"><a href="javascript:window.hacked=1">x</a>'
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of this module alone: while it is open, no other test could run an event loop."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a Chromium browser on the path")
    with sync_api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"needs a Chromium browser that starts: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun, make_logits: MakeLogits) -> Path:
    """Runs of two kinds, one with few classes and one with many, and real records."""
    folder = tmp_path_factory.mktemp("report")
    make_run(folder / "a", logits=make_logits(), judged=JUDGED)
    make_run(folder / "b", seed=1, accuracy=0.8)
    labels = [f"class {i}" for i in range(40)]
    make_run(folder / "c", loss="softmax", delta=0.3, labels=labels, logits=make_logits(rows=30, classes=40, seed=1))
    cascade = ROOT / "docs" / "results" / "cascade"
    write_report([folder, cascade / "scaling.json", cascade / "smollm2.json"], folder / "page.html", title="A title")
    return folder / "page.html"


class Watched:
    """A page that notes what it says and asks for."""

    def __init__(self, browser: Browser, path: Path, **options: Any) -> None:
        self.page: Page = browser.new_page(**{"viewport": WIDE, **options})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn=all]")


@pytest.fixture(scope="module")
def opened(browser: Browser, report: Path) -> Iterator[Watched]:
    """One page for the tests that change nothing, or put back what they change."""
    watched = Watched(browser, report)
    yield watched
    watched.page.close()


def _text(page: Page) -> str:
    return page.inner_text("#explorer-says")


def _counts(page: Page) -> list[int]:
    """delta in hundredths, rows solved, rows, classes masked, rivals, rows with a gradient: as the page says them."""
    return [int(part.replace(",", "").replace(".", "")) for part in re.findall(r"[\d.,]*\d", _text(page))]


def _map(page: Page) -> dict[str, Any]:
    """What is drawn: cells that are masked, and rows marked as solved."""
    found: dict[str, Any] = page.evaluate(
        """() => {
            const [heat, solved] = document.getElementById("explorer-map").data;
            return {masked: heat.z.flat().filter((p) => p === null).length,
                    solved: solved.z.filter((row) => row[0] !== null).length,
                    cells: heat.z.flat().length,
                    frontier: document.getElementById("explorer-map").layout.shapes[0].y0};
        }"""
    )
    return found


def test_it_draws_everything_without_a_word_or_a_request(opened: Watched) -> None:
    page = opened.page
    figures = page.locator("[data-figure]").count()
    assert figures == 10
    assert page.locator("[data-figure] .main-svg").count() >= figures
    assert page.evaluate("[...document.querySelectorAll('[data-figure]')].every((f) => f.offsetHeight > 200)")
    assert opened.said == []
    assert {url.partition(":")[0] for url in opened.asked} <= {"file", "data", "blob"}
    assert len([url for url in opened.asked if url.startswith("file:")]) == 1


def test_nothing_can_leave_the_page(browser: Browser, report: Path) -> None:
    page = Watched(browser, report).page
    refused = page.evaluate(
        """async () => {
            const left = [];
            document.addEventListener("securitypolicyviolation", (event) => left.push(event.effectiveDirective));
            await fetch("https://example.org/").catch(() => left.push("fetch"));
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(script);
            const image = new Image();
            image.src = "https://example.org/a.png";
            await new Promise((done) => { image.onerror = done; });
            return [left, window.hacked ?? null];
        }"""
    )
    assert {"fetch", "connect-src", "img-src"} <= set(refused[0])
    assert refused[1] is None
    page.close()


@pytest.mark.parametrize("run", [0, 1])
def test_the_slider_masks_what_the_library_masks(opened: Watched, make_logits: MakeLogits, run: int) -> None:
    page = opened.page
    logits, target = (make_logits(), make_logits(rows=30, classes=40, seed=1))[run]
    page.select_option("#explorer-run", str(run))
    slider = page.locator("#explorer-delta")
    slider.focus()
    moves = {None: (10, 30)[run], "ArrowRight": (11, 31)[run], "Home": 0, "End": 100, "PageDown": 90}
    seen = set()
    for key, step in moves.items():
        if key:
            page.keyboard.press(key)
        page.wait_for_function(
            "(value) => document.getElementById('explorer-value').textContent === value", arg=f"{step / 100:.2f}"
        )
        keep = as_keep_mask(logits, target, delta=step / 100)
        solved, masked = int((keep.sum(1) == 1).sum()), int((~keep).sum())
        rows, classes = logits.shape
        assert _counts(page) == [step, solved, rows, masked, rows * (classes - 1), rows - solved]
        drawn = _map(page)
        assert drawn["solved"] == solved
        assert drawn["frontier"] == solved + 0.5
        if classes <= 24:
            assert (drawn["masked"], drawn["cells"]) == (masked, rows * classes)
        else:
            p = logits.softmax(-1).scatter(1, target.unsqueeze(1), 2.0)
            shown = keep.gather(1, p.topk(24).indices)
            assert (drawn["masked"], drawn["cells"]) == (int((~shown).sum()), rows * 24)
        assert slider.get_attribute("aria-valuetext") == f"delta {step / 100:.2f}"
        seen.add(_text(page))
    assert len(seen) == len(moves)
    marker = page.evaluate("document.getElementById('explorer-curves').data.slice(2).map((t) => [t.x[0], t.y[0]])")
    keep = as_keep_mask(logits, target, delta=0.9)
    shares = int((~keep).sum()) / (rows * (classes - 1)), int((keep.sum(1) == 1).sum()) / rows
    assert marker == [[0.9, pytest.approx(100 * share)] for share in shares]


def _colours(page: Page) -> tuple[str, str, str]:
    """Of the page, and of the text and the first line of a figure."""
    found: list[str] = page.evaluate(
        """() => {
            const figure = document.getElementById("explorer-curves");
            const paper = getComputedStyle(document.body).backgroundColor;
            return [paper, figure.layout.font.color, figure.data[0].line.color];
        }"""
    )
    return found[0], found[1], found[2]


def _expected(scheme: str) -> tuple[str, str, str]:
    colours = SCHEMES[scheme]
    red, green, blue = (int(colours["paper"][i : i + 2], 16) for i in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})", colours["ink"], colours["lines"][0]


def test_it_follows_the_system_and_its_own_button(browser: Browser, report: Path) -> None:
    watched = Watched(browser, report, color_scheme="dark")
    page = watched.page
    button = page.get_by_role("button", name="Dark colours")
    assert _colours(page) == _expected("dark")
    assert button.get_attribute("aria-pressed") == "true"
    page.emulate_media(color_scheme="light")
    page.wait_for_function("() => document.getElementById('scheme').getAttribute('aria-pressed') === 'false'")
    assert _colours(page) == _expected("light")
    button.focus()
    page.keyboard.press("Enter")
    assert _colours(page) == _expected("dark")
    assert button.get_attribute("aria-pressed") == "true"
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

    # On paper it is light all the same, as wide as the paper, and without what cannot be used there.
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function("() => document.getElementById('explorer-map').layout.width === 660")
    assert _colours(page)[1:] == _expected("light")[1:]
    for hidden in ("nav", "#scheme", "#explorer-delta", ".skip"):
        assert not page.locator(hidden).first.is_visible(), hidden
    for shown in ("h1", "table", "#explorer-says", "#explorer-name", "figcaption"):
        assert page.locator(shown).first.is_visible(), shown
    assert page.evaluate("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    page.emulate_media(media="screen")
    page.wait_for_function("() => document.getElementById('explorer-map').layout.width === undefined")
    assert _colours(page) == _expected("dark")
    assert len(page.pdf(format="A4")) > 50_000
    assert watched.said == []
    page.close()


def test_a_small_screen_scrolls_only_inside(browser: Browser, report: Path) -> None:
    watched = Watched(browser, report, viewport={"width": 360, "height": 700})
    page = watched.page
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    inside = page.evaluate(
        """() => [...document.querySelectorAll(".scroll, .plot-scroll.wide")].filter((e) => e.offsetWidth)
            .map((e) => [e.scrollWidth > e.clientWidth, e.tabIndex])"""
    )
    assert any(scrolls for scrolls, _ in inside)
    assert all(place == 0 for _, place in inside)
    assert page.evaluate("document.getElementById('explorer-map').offsetWidth") <= 360
    assert watched.said == []
    page.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun, make_logits: MakeLogits) -> Path:
    """The page of one run with all the metrics that a run has, and long names."""
    folder = tmp_path_factory.mktemp("trained")
    name = "a class with a rather long name that goes on and on"
    long = [{**row, "label": name} for row in JUDGED["classes"]]
    pairs = [{**row, "label": name, "prediction": name} for row in JUDGED["pairs"]]
    run = make_run(folder / "run", logits=make_logits(), judged={**JUDGED, "classes": long, "pairs": pairs})
    record = json.loads((run / "run.json").read_text())
    metrics = dict.fromkeys(
        ("accuracy", "macro_f1", "micro_f1", "p@1", "p@3", "p@5", "ndcg@5", "psp@1", "psp@3"), 0.98765
    )
    record["results"][0] |= {
        "test": {**metrics, "loss": 0.123},
        "validation": {**metrics, "loss": 0.123},
        "solved": 0.9,
    }
    record["results"][0] |= {"seconds": 12345.6, "trained": 1234567, "screened": 1234567, "steps": 123456}
    (run / "run.json").write_text(json.dumps(record))
    write_report([run], folder / "page.html")
    return folder / "page.html"


@pytest.mark.parametrize("width", [1300, 360])
def test_no_page_of_a_run_scrolls_sideways(browser: Browser, trained: Path, width: int) -> None:
    watched = Watched(browser, trained, viewport={"width": width, "height": 900})
    assert watched.page.evaluate("document.documentElement.scrollWidth") == width
    wide = watched.page.evaluate(
        """() => [...document.querySelectorAll(".scroll")].filter((e) => !e.closest("details:not([open])"))
            .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.querySelector("caption").innerText)"""
    )
    assert width < 1000 or wide == []  # on a small screen tables scroll, inside
    assert watched.said == []
    watched.page.close()


def test_classes_and_mistakes(opened: Watched) -> None:
    section = opened.page.locator("section", has=opened.page.locator("h2", has_text="Classes and mistakes"))
    tables = [table.inner_text() for table in section.locator("table").all()]
    assert len(tables) == 3
    assert re.search(
        r"c\s+50\.0\s+25\.0\s+33\.3\s+8\s+a\s+100\.0\s+90\.0\s+94\.7\s+1,042", tables[0]
    )  # the worst first
    assert re.search(r"c\s+a\s+6\s+75\.0", tables[1])
    assert "a text that goes on" in tables[2]
    assert "<img src=x onerror='window.hacked=1'>" in tables[2]  # as it is
    assert opened.page.evaluate("window.hacked ?? null") is None


def test_the_tab_key_reaches_the_controls_in_order(opened: Watched) -> None:
    page = opened.page
    page.evaluate("(document.body.tabIndex = -1, document.body.focus(), document.body.removeAttribute('tabindex'))")
    page.keyboard.press("Tab")
    reached = []
    for _ in range(200):
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )
        if reached[-1] == "explorer-delta":
            break
        page.keyboard.press("Tab")
    assert reached[0] == "skip"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert reached[1] == "scheme"
    assert reached[-2:] == ["explorer-run", "explorer-delta"]
    assert not [name for name in reached if "modebar" in name]


def test_a_screen_reader_has_names_for_everything(opened: Watched) -> None:
    page = opened.page
    assert page.get_by_role("slider", name="Margin delta").count() == 1
    assert page.get_by_role("combobox", name="Run").count() == 1
    assert page.get_by_role("navigation", name="Contents").count() == 1
    assert page.get_by_role("heading", level=1, name="A title").count() == 1
    assert page.get_by_role("region", name="Move the margin").count() == 1
    assert page.get_by_role("status").count() == 1
    for role in ("table", "figure", "img"):
        found = page.get_by_role(role)
        assert found.count() >= 5
        named = page.get_by_role(role, name=re.compile(r"\w{3}"))
        assert named.count() == found.count(), role
    assert page.get_by_role("rowheader", name="AS-Softmax, delta 0.1", exact=True).count() >= 1


def test_hostile_names_do_not_run(browser: Browser, tmp_path: Path, make_run: MakeRun, make_logits: MakeLogits) -> None:
    labels = [HOSTILE, *"bcdef"]
    for seed, loss in enumerate((HOSTILE, "<b>softmax</b>")):
        make_run(
            tmp_path / loss[-3:].strip("></"), data=HOSTILE, loss=loss, seed=seed, labels=labels, logits=make_logits()
        )
    told = json.loads((ROOT / "docs" / "results" / "cascade" / "smollm2.json").read_text())
    for result in told["results"]:
        result["corpus"] = result["setting"] = HOSTILE
    (tmp_path / "heads.json").write_text(json.dumps(told))
    write_report([tmp_path], tmp_path / "page.html", title=HOSTILE)
    watched = Watched(browser, tmp_path / "page.html")
    page = watched.page
    assert page.title() == HOSTILE
    assert page.inner_text("h1") == HOSTILE
    page.select_option("#explorer-run", "1")
    page.hover("#explorer-map .nsewdrag >> nth=0")
    assert page.evaluate("window.hacked ?? null") is None
    assert page.locator("img").count() == 0
    assert page.locator("main a").count() == 0  # not in the figures either
    assert any("img src" in text for text in page.locator("#explorer-map .xtick, .legendtext").all_text_contents())
    assert watched.said == []
    page.close()


def test_without_scripts_the_tables_are_there(browser: Browser, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("noscript p").is_visible()
    assert not page.locator("#explorer-delta").is_visible()
    assert not page.locator("#scheme").is_visible()
    page.locator("figure summary").first.click()
    assert page.locator("figure table").first.is_visible()
    context.close()
