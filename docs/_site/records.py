"""Records in the site: folders of results get a page that lists them, and `benchmarks/results` comes along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

OUTSIDE = "benchmarks/results"  # beside docs; in the site at the same address as if docs were the root
RESULTS = "results/README.md"


def on_files(files: Files, *, config: Any) -> Files:
    """What mkdocs calls once it knows the files."""
    docs = Path(config["docs_dir"])
    for path in sorted((docs.parent / OUTSIDE).glob("*.json")):
        files.append(File.generated(config, f"{OUTSIDE}/{path.name}", abs_src_path=str(path)))
    for folder in folders(docs):
        page = File.generated(config, f"results/{folder.name}/index.md", content=listing(folder))
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """What mkdocs calls for each page: links of the results as they are in the site."""
    if page.file.src_uri != RESULTS:
        return markdown
    return in_the_site(markdown, [folder.name for folder in folders(Path(config["docs_dir"]))])


def folders(docs: Path) -> list[Path]:
    """Those of records."""
    return sorted(path for path in (docs / "results").iterdir() if path.is_dir())


def in_the_site(markdown: str, names: list[str]) -> str:
    """Links to folders go to their pages, those out of docs to what is brought along.

    >>> in_the_site("[a](cascade), [b](../../benchmarks/results/a.json), [c](cascade/a.csv)", ["cascade"])
    '[a](cascade/index.md), [b](../benchmarks/results/a.json), [c](cascade/a.csv)'
    """
    markdown = markdown.replace(f"](../../{OUTSIDE}/", f"](../{OUTSIDE}/")
    return re.sub(rf"\]\(({'|'.join(map(re.escape, names))})/?\)", r"](\1/index.md)", markdown)


def listing(folder: Path) -> str:
    """A page with the records of a folder and their pictures."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    lines = [f"# Records: {folder.name}", "", "How they were made and what they show: [results](../README.md).", ""]
    lines += [f"- [{name}]({name})" for name in names]
    for name in names:
        if name.endswith(".png"):
            lines += [
                "",
                f"## {name.removesuffix('.png')}",
                "",
                f"![The picture of {name.removesuffix('.png')}]({name})",
            ]
    return "\n".join(lines) + "\n"
