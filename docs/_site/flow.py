"""Draws `docs/assets/flow.svg`, the picture of the code: `python docs/_site/flow.py` after a change here.

Colours are those of the theme, so that the picture follows light and dark; elsewhere the values behind the commas hold.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "assets" / "flow.svg"
TITLE = "From a call to its kernels, and from data to a report"
WIDTH, HEIGHT, GAP, TOP = 330, 58, 26, 44
CALL = (
    ("Your call", "as_cross_entropy(...), head.topk(x, k)", "softsieve"),
    ("Checks", "type, shape, range: errors that name the argument", "_checks.py"),
    ("Dispatch", "by device, dtype and what was measured", "losses/, heads/"),
    ("Ops that torch knows", "autograd, autocast, torch.compile", "kernels/cross_entropy.py, linear.py"),
    ("Kernels", "torch, Triton on a GPU, numba on a CPU", "kernels/*_torch.py, *_triton.py, *_numba.py"),
    ("Answer", "loss and ASStats; TopK and what was read", "NamedTuples"),
)
RUN = (
    ("Data", "files, folders, Hugging Face", "tasks/read.py"),
    ("Task", "labels, encoder, model, metrics", "tasks/task.py, models.py"),
    ("Loop", "objective, SolvedSampler, ASSpeed, schedule", "training/loop.py"),
    ("Run", "model, metrics, checkpoints, log in a folder", "training/run.py, checkpoint.py"),
    ("Comparison", "rows x seeds x data sets, paired tests", "comparisons/losses.py"),
    ("Report", "one HTML file", "report/"),
)
NOTE = "Plain versions of all ops, in reference/: tests compare with them"


def column(left: int, title: str, boxes: tuple[tuple[str, str, str], ...]) -> list[str]:
    """Boxes under each other, with arrows between."""
    middle = left + WIDTH // 2
    parts = [f'<text class="title" x="{middle}" y="24">{escape(title)}</text>']
    for number, (name, what, where) in enumerate(boxes):
        y = TOP + number * (HEIGHT + GAP)
        if number:
            parts.append(f'<path class="arrow" d="M{middle} {y - GAP + 3}v{GAP - 8}" marker-end="url(#head)"/>')
        parts.append(f'<rect x="{left}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        for step, kind, text in ((18, "name", name), (34, "what", what), (50, "where", where)):
            parts.append(f'<text class="{kind}" x="{middle}" y="{y + step}">{escape(text)}</text>')
    return parts


def picture() -> str:
    """The whole SVG, without blank lines, so that Markdown leaves it alone."""
    height = TOP + len(CALL) * (HEIGHT + GAP) + 8
    head = '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    lines = [
        f'<svg class="flow" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height}" role="img" '
        'aria-labelledby="flow-title">',
        f'<title id="flow-title">{TITLE}</title>',
        "<style>",
        ".flow text{text-anchor:middle;font-family:system-ui,sans-serif;fill:var(--md-default-fg-color,#222)}",
        ".flow .title{font-size:15px;font-weight:600}",
        ".flow .name{font-size:13px;font-weight:600}",
        ".flow .what{font-size:12px}",
        ".flow .where{font-size:11px;font-family:ui-monospace,monospace;fill:var(--md-default-fg-color--light,#666)}",
        ".flow rect{fill:var(--md-code-bg-color,#f5f5f5);stroke:var(--md-accent-fg-color,#009688)}",
        ".flow .arrow{stroke:var(--md-accent-fg-color,#009688);stroke-width:2;fill:none}",
        ".flow marker path{fill:var(--md-accent-fg-color,#009688)}",
        "</style>",
        f'<defs>{head}<path d="M0 0l8 4l-8 4z"/></marker></defs>',
        *column(10, "From a call to its kernels", CALL),
        *column(360, "From data to a report", RUN),
        f'<text class="what" x="350" y="{height - 8}">{escape(NOTE)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
