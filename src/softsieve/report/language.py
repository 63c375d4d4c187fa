"""Language models with an adaptive head: what they write, how fast, and their perplexity."""

from __future__ import annotations

from collections.abc import Iterator

from softsieve.report.page import Block, Column, Folded, Suite, Table, numbers, texts
from softsieve.report.read import Record
from softsieve.report.words import Row, cell, is_number, short


def _name(record: Record) -> str:
    model = record.settings.get("model")
    return f"{short(cell(model), 60)} ({short(record.name, 60)})" if model else short(record.name, 60)


def _about(record: Record) -> str:
    s = record.settings
    if not is_number(s.get("n")) or not is_number(s.get("d")):
        return ""
    calibrated = f", calibrated with {cell(s['calibration'])}" if s.get("calibration") else ""
    return f"{s['n']:,} classes of {s['d']:,} dimensions{calibrated}."


def _agreed(row: Row) -> str:
    both = is_number(row.get("agreed")) and is_number(row.get("steps"))
    return f"{row['agreed']:,} of {row['steps']:,}" if both else ""


_WRITTEN: dict[str, Column] = {
    "prompt": lambda row: short(str(row.get("prompt") or "all prompts"), 60),
    "head": lambda row: str(row["head"]),
    "tokens": texts("tokens"),
    "tokens/s": numbers("tokens_per_second", "{:.1f}"),
    "ms in the head": numbers("head_ms", 3),
    "time in the head %": numbers("head_share", "{:.1f}", 100),
    "MB read a token": numbers("bytes_read", "{:,.1f}", 1e-6),
    "read in full": texts("exactly"),
    "agreed": _agreed,
}
_TEXTS: dict[str, Column] = {
    "prompt": lambda row: short(str(row.get("prompt") or ""), 80),
    "head": lambda row: str(row["head"]),
    "text": lambda row: short(row["text"], 600),
}
_PERPLEXITY: dict[str, Column] = {
    "head": lambda row: str(row["head"]),
    "k": lambda row: cell(row.get("k")) or "all",
    "tokens": texts("tokens"),
    "perplexity": numbers("perplexity", "{:.3f}"),
    "over the exact one": lambda row: f"{row['ratio']:.4f}" + numbers("ratio_error", " ± {:.4f}")(row),
    "read in full %": numbers("exact_share", "{:.1f}", 100),
    "fewer bytes": numbers("bytes_ratio", "{:.2f}x"),
}


def _tables(record: Record) -> Iterator[Block]:
    name = short(record.name, 60)
    rows = sorted(record.results, key=lambda row: bool(row.get("prompt")))  # all prompts together first
    yield Table.of(f"{name}: with the exact and the adaptive head", rows, _WRITTEN)
    written = [row for row in record.results if isinstance(row.get("text"), str)]
    if written:
        yield Folded("What was written", [Table.of(f"{name}: texts", written, _TEXTS)])


def _gist(record: Record) -> Iterator[str]:
    whole = {row["head"]: row for row in record.results if not row.get("prompt")}
    exact, ours = whole.get("exact"), whole.get("adaptive")
    if exact is None or ours is None or not is_number(ours.get("agreed")):
        return
    yield (
        f"{_name(record)}: {ours['tokens_per_second']:.1f} tokens a second with the adaptive head, "
        f"{exact['tokens_per_second']:.1f} with the exact one; {ours['agreed']:,} of {cell(ours.get('steps'))} tokens "
        "agree."
    )


GENERATE = Suite(
    title="Text from a language model",
    how="The same model writes with its exact head and with an adaptive one. Agreed: tokens that are those of the "
    "exact head; read in full: tokens for which the adaptive head fell back on the whole weight.",
    words="head",
    numbers="tokens tokens_per_second head_ms bytes_read",
    name=_name,
    about=_about,
    blocks=_tables,
    gist=_gist,
)
PERPLEXITY = Suite(
    title="Perplexity with an adaptive head",
    how="How surprised the model is by a text: lower is better, and a ratio of 1 means that the adaptive head, "
    "which fills in estimates beyond its k best classes, judges the text as the exact one does.",
    words="head",
    numbers="perplexity ratio bytes_ratio",
    name=_name,
    blocks=lambda record: [Table.of(f"{short(record.name, 60)}: perplexity", record.results, _PERPLEXITY)],
)
