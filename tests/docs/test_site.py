"""The site builds without a warning, is whole, and asks nobody for anything."""

from __future__ import annotations

import doctest
import importlib
import io
import json
import logging
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.docs.site_blocks import DOCS, ROOT, SITE, pages, site_module, text_of

pytest.importorskip("material", reason="needs the extra docs")
pytest.importorskip("mkdocstrings", reason="needs the extra docs")

MODULES = (
    "softsieve",
    "softsieve.heads",
    "softsieve.integrations.distributed",
    "softsieve.integrations.transformers",
    "softsieve.losses",
    "softsieve.reference",
    "softsieve.report",
    "softsieve.training",
    "as_sm",
)
BESIDES = (  # public names of modules without __all__
    "softsieve.doctor.examine",
    "softsieve.errors.InputError",
    "softsieve.integrations.lightning.DeltaCallback",
    "softsieve.integrations.lightning.SkipCallback",
    "softsieve.integrations.lightning.SpeedCallback",
    "softsieve.reference.heads.topk_softmax",
    "softsieve.training.settings.Settings",
)
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "link": "href",
    "use": "href",
}
ELSEWHERE = re.compile(r"^(?:[a-z][a-z+.-]*:)?//", re.IGNORECASE)


class Page(HTMLParser):
    """Anchors of a page, its links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") != "canonical":
            self.loaded.append(given[LOADED[tag]])


def build(config: Path, out: Path) -> list[str]:
    """Build a site, and return its warnings."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    said = io.StringIO()
    handler, logger = logging.StreamHandler(said), logging.getLogger("mkdocs")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        settings = load_config(str(config), site_dir=str(out))
        settings.plugins.on_startup(command="build", dirty=False)
        build(settings)
        settings.plugins.on_shutdown()
    finally:
        logger.removeHandler(handler)
    return said.getvalue().splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    out = tmp_path_factory.mktemp("site")
    return out, build(ROOT / "mkdocs.yml", out)


@pytest.fixture(scope="module")
def site(built: tuple[Path, list[str]]) -> dict[str, Page]:
    """All pages, by their address."""
    return {path.relative_to(built[0]).as_posix(): Page(path) for path in built[0].rglob("*.html")}


def test_no_warning(built: tuple[Path, list[str]]) -> None:
    """What ``mkdocs build --strict`` stops at."""
    assert built[1] == []


def test_warnings_are_noticed(tmp_path: Path) -> None:
    from mkdocs.utils.yaml import yaml_load

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[b](missing.md), [c](#nowhere), [d](folder)\n")
    settings = yaml_load((ROOT / "mkdocs.yml").read_text())
    few = {"site_name": "a", "validation": settings["validation"]}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(few))  # which is YAML, too
    said = "\n".join(build(tmp_path / "mkdocs.yml", tmp_path / "site"))
    assert all(word in said for word in ("missing.md", "#nowhere", "folder")), said


def test_every_page_is_there(site: dict[str, Page]) -> None:
    for page in pages():
        name = re.sub(r"README\.md$", "index.md", page)
        assert name.replace(".md", ".html") in site, page


def test_links_and_anchors_lead_somewhere(built: tuple[Path, list[str]], site: dict[str, Page]) -> None:
    """All of them, also those that mkdocs does not know: of docstrings and of what is put in."""
    out = built[0].resolve()
    for name, page in site.items():
        for link in page.links if name != "404.html" else ():  # which is shown at any address
            if ELSEWHERE.match(link) or link.startswith(("mailto:", "javascript:")):
                continue
            place, _, anchor = link.partition("#")
            target = ((out / name).parent / place).resolve() if place else out / name
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{name}: {link}"
            if anchor and target.suffix == ".html" and not anchor.startswith("__"):
                assert anchor in site[target.relative_to(out).as_posix()].ids, f"{name}: {link}"


def test_nothing_is_loaded_from_elsewhere(built: tuple[Path, list[str]], site: dict[str, Page]) -> None:
    assert sum(len(page.loaded) for page in site.values()) > len(site)
    for name, page in site.items():
        for address in page.loaded:
            assert not ELSEWHERE.match(address), f"{name}: {address}"
            there = (built[0] / name).parent / re.split(r"[?#]", address)[0]
            assert there.exists() or name == "404.html", f"{name}: {address}"
    for style in built[0].rglob("*.css"):
        for address in re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", style.read_text()):
            assert not any(map(ELSEWHERE.match, address)), f"{style.name}: {address}"


def public_names() -> Iterator[str]:
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            yield f"{module}.{name}"
    yield from BESIDES


def found_at(name: str) -> Any:
    """What a dotted name names, None if nothing."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last, None)
    except ImportError:  # a member of a class
        return getattr(found_at(module), last, None) if module else None


def test_every_public_name_is_in_the_api_pages(site: dict[str, Page]) -> None:
    anchors = {anchor for name, page in site.items() if name.startswith("api/") for anchor in page.ids}
    names = {anchor for anchor in anchors if anchor.startswith(("softsieve.", "as_sm."))}
    things = [found_at(name) for name in names]
    for name in public_names():
        assert any(found_at(name) is thing for thing in things), f"{name} is on no API page"
    assert "softsieve.AdaptiveSoftmax.topk" in names
    assert not [name for name in names if "._" in name and "__call__" not in name], "private names are documented"


def test_docstrings_are_shown_as_they_are_meant(built: tuple[Path, list[str]]) -> None:
    heads = (built[0] / "api" / "heads.html").read_text()
    assert "where it is with the stated probability" in heads  # the comment of a field
    text = re.sub(r"<[^>]+>", "", heads)
    assert "::\n" not in text
    for page in (built[0] / "api").glob("*.html"):
        shown = page.read_text()
        assert "<blockquote>" not in shown, f"{page.name}: an example that is not shown as code"
        assert 'class="admonition example"' not in shown, f"{page.name}: an example that is not shown as code"


def test_every_command_and_option_is_on_the_page(site: dict[str, Page]) -> None:
    from typer.main import get_command

    from softsieve.cli import app
    from softsieve.cli.script import NAMES

    text = text_of("cli.md")
    assert set(get_command(app).commands) >= {  # type: ignore[attr-defined]
        "train", "predict", "compare", "head", "generate", "report", "demo", "doctor"
    }  # fmt: skip
    page = site_module("commands")
    commands = [command for program in (page.PROGRAM, *page.CHECKOUT) for command in page.commands(program)]
    assert len(commands) > 20
    for path, command in commands:
        heading = re.search(rf"^#+ `{path}`\n(.*?)(?=^#+ `|\Z)", text, re.MULTILINE | re.DOTALL)
        assert heading, path
        assert re.sub("[ -]+", "-", path) in site["cli.html"].ids, path
        if hasattr(command, "commands"):
            continue
        for one in command.params:
            if one.name != "help" and not getattr(one, "hidden", False):
                assert all(page.written(name) in heading[1] for name in one.opts), f"{path}: {one.opts}"
    for name, ones in NAMES.items():
        assert f"| {', '.join(map(page.written, ones))} | {page.written(name)} |" in text


def test_the_page_of_commands_needs_its_mark() -> None:
    class File:
        src_uri = "cli.md"

    class Given:
        file = File()

    hook: Any = site_module("commands")
    assert "`softsieve train`" in hook.on_page_markdown(f"a\n{hook.MARK}\n{hook.NAMES_MARK}\n", page=Given())
    with pytest.raises(ValueError, match=r"cli\.md"):
        hook.on_page_markdown("a\n", page=Given())


def test_records_come_along(built: tuple[Path, list[str]]) -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert (built[0] / "benchmarks" / "results" / path.name).read_bytes() == path.read_bytes()
    for folder in (path for path in (DOCS / "results").iterdir() if path.is_dir()):
        page = (built[0] / "results" / folder.name / "index.html").read_text()
        for record in folder.iterdir():
            assert f'href="{record.name}"' in page
            assert (built[0] / "results" / folder.name / record.name).exists()


def test_the_picture_is_what_its_script_draws() -> None:
    flow = site_module("flow")
    assert flow.PICTURE.read_text() == flow.picture(), "run python docs/_site/flow.py"


def test_the_picture_is_in_the_page_with_its_words(built: tuple[Path, list[str]]) -> None:
    page = (built[0] / "code.html").read_text()
    assert '<svg class="flow"' in page
    flow = site_module("flow")
    for name, *_ in (*flow.CALL, *flow.RUN):
        assert f">{name}</text>" in page
    source = ROOT / "src" / "softsieve"
    for _, _, places in (*flow.CALL, *flow.RUN):
        folder = ""
        for place in places.split(", "):  # a folder is said once
            folder = place.rpartition("/")[0] if "/" in place else folder
            if "/" in place or "." in place:
                assert list((source / folder).glob(place.rpartition("/")[2] or "*.py")), place


def test_every_folder_of_the_code_is_in_its_table() -> None:
    text = text_of("code.md")
    folders = [path.parent for path in (ROOT / "src" / "softsieve").glob("*/__init__.py")]
    assert len(folders) > 8
    for folder in folders:
        assert f"`{folder.relative_to(ROOT).as_posix()}/`" in text, folder


@pytest.mark.parametrize("name", [path.stem for path in SITE.glob("*.py")])
def test_examples_of_what_builds_the_site(name: str) -> None:
    assert doctest.testmod(site_module(name)).failed == 0


def test_search_works_from_a_folder(built: tuple[Path, list[str]]) -> None:
    """In a browser, without a server and without a request to anyone."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("needs chromium")
    asked: list[str] = []
    wrong: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto((built[0] / "index.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("DriftWarning")
        page.wait_for_selector("article.md-search-result__article", state="attached", timeout=20_000)
        found = page.text_content("ol.md-search-result__list")
        browser.close()
    assert found is not None
    assert "DriftWarning" in found
    assert wrong == []
    assert all(address.startswith(("file://", "data:", "about:")) for address in asked), asked
