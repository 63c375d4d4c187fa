"""The card of a model: what it is, what it was trained on, how good it is and how it is loaded, as hubs show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softsieve._records import provenance
from softsieve.losses.objectives import Objective
from softsieve.tasks.task import Task

CARD = "README.md"  # in the folder of a model
SHOWN_LABELS = 100
_TAG = {
    "text": "text-classification",
    "multilabel": "text-classification",
    "tokens": "token-classification",
    "image": "image-classification",
    "audio": "audio-classification",
}
_DECISION = {
    "multilabel": "A row has every label whose logit is above 0, a sigmoid above 0.5. The loss asks for a margin, not "
    "for calibrated probabilities.",
    "tokens": "Every word has the label of the largest logit at its first token.",
}


def write_card(
    folder: Path, task: Task, objective: Objective, metrics: Mapping[str, Mapping[str, float]],
    configuration: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write README.md into the folder of a model: a front matter of YAML as hubs read it, and the same for people.

    Args:
        folder: of the model.
        task: what it does.
        objective: what it was trained with.
        metrics: by part of the data, from 0 to 1.
        configuration: data, model, rows and settings, as in the record of the run.
    """
    reason = task.reason_against_transformers(objective)
    text = "\n".join(
        [*_front_matter(task, metrics, configuration, reason), *_body(task, metrics, configuration, reason)]
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def _front_matter(
    task: Task, metrics: Mapping[str, Mapping[str, float]], configuration: Mapping[str, Any], reason: str | None
) -> list[str]:
    """Strings as JSON writes them, which YAML reads."""
    base, tag = configuration.get("model"), _TAG[task.kind]
    lines = [
        "---",
        f"library_name: {'transformers' if reason is None else 'softsieve'}",
        f"pipeline_tag: {tag}",
        "tags: [softsieve, as-softmax]",
    ]
    if base not in (None, "built-in") and not Path(str(base)).exists():  # the name of a model on a hub
        lines.append(f"base_model: {json.dumps(base)}")
    part = "test" if metrics.get("test") else "validation"
    if metrics.get(part):
        dataset = json.dumps(_name(configuration.get("data")))
        lines += [
            "model-index:",
            f"- name: {json.dumps(_title(task))}",
            "  results:",
            f"  - task: {{type: {tag}}}",
            f"    dataset: {{name: {dataset}, type: {dataset}, split: {part}}}",
            "    metrics:",
            *(f"    - {{type: {json.dumps(name)}, value: {value:.6g}}}" for name, value in metrics[part].items()),
        ]
    return [*lines, "---", ""]


def _body(
    task: Task, metrics: Mapping[str, Mapping[str, float]], configuration: Mapping[str, Any], reason: str | None
) -> list[str]:
    rows = ", ".join(f"{count:,} {part}" for part, count in configuration.get("rows", {}).items())
    rows = f" (rows: {rows})" if rows else ""
    size = f", {configuration['parameters']:,} parameters" if "parameters" in configuration else ""
    shown = ", ".join(f"`{_cell(label)}`" for label in task.labels[:SHOWN_LABELS])
    more = f" and {len(task.labels) - SHOWN_LABELS:,} more" if len(task.labels) > SHOWN_LABELS else ""
    return [
        f"# {_title(task)}",
        "",
        f"Trained by softsieve on {_name(configuration.get('data'))}{rows}; "
        f"model: {_name(configuration.get('model', 'of its own folder'))}{size}.",
        "",
        "## Labels",
        "",
        f"{len(task.labels):,}: {shown}{more}.",
        "",
        _DECISION.get(task.kind, "A row has the label of the largest logit; softmax gives probabilities.")
        + (" A row without any has that of the largest logit." if getattr(task, "least", 0) else ""),
        "",
        "## How good it is",
        "",
        *_metrics_table(metrics),
        "",
        "## How to load it",
        "",
        *_loading(task, reason),
        "",
        *_settings(configuration),
        "## Versions",
        "",
        ", ".join(f"{name} {version}" for name, version in provenance()["versions"].items()),
        "",
    ]


def _settings(configuration: Mapping[str, Any]) -> list[str]:
    told = [f"| {name} | {_cell(value)} |" for name, value in configuration.items() if name not in _TOLD]
    return ["## Settings", "", "| setting | value |", "|---|---|", *told, ""] if told else []


_TOLD = {"data", "model", "rows", "labels", "kind", "classes", "parameters"}  # above the settings


def _metrics_table(metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    parts = {part: values for part, values in metrics.items() if values}
    if not parts:
        return ["Not measured: there were no held-out rows."]
    names = list(dict.fromkeys(name for values in parts.values() for name in values))
    cells = {name: [f"{parts[part][name]:.4f}" if name in parts[part] else "" for part in parts] for name in names}
    header = [f"| | {' | '.join(parts)} |", "|---|" + "---:|" * len(parts)]
    return [*header, *(f"| {name} | {' | '.join(values)} |" for name, values in cells.items())]


def _loading(task: Task, reason: str | None) -> list[str]:
    command = 'softsieve predict FOLDER --text "a text"'
    if task.kind in ("image", "audio"):
        command = "softsieve predict FOLDER --data FILES"
    lines = ["```console", f"$ {command}", "$ softsieve serve FOLDER", "```", ""]
    if reason is not None:
        export = (
            " `softsieve export FOLDER --to transformers --out OTHER` writes one with the code."
            if "mean" in reason
            else ""
        )
        return [*lines, f"transformers has no class for it: {reason}.{export}"]
    example = '"a text"' if task.kind != "tokens" else '"some words"'
    return [
        *lines,
        "Or with transformers alone:",
        "",
        "```python",
        "from transformers import pipeline",
        "",
        f'classify = pipeline("{_TAG[task.kind]}", "FOLDER")',
        f"classify({example}{', truncation=True, top_k=None' if task.multilabel else ''})",
        "```",
    ]


def _title(task: Task) -> str:
    what = {"tokens": "words", "image": "images", "audio": "sounds"}.get(task.kind, "texts")
    return f"A classifier of {what} with {len(task.labels):,} labels"


def _name(value: object) -> str:
    """The name of data or of a model; of a path the last part, for folders are nobody's business."""
    text = str(value or "data that were not named")
    return Path(text).name if Path(text).is_absolute() else text


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")
