"""Language models with an adaptive head: what they write, how fast, and their perplexity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from softsieve.report.page import Block, Folded, Part, Section, Table
from softsieve.report.read import Record, expect, is_number
from softsieve.report.words import cell, number, short


def generate(records: Sequence[Record]) -> Section:
    """Of `softsieve generate`."""
    parts: list[Part] = []
    glance: list[str] = []
    for record in records:
        expect(record, record.results, words="head", numbers="tokens tokens_per_second head_ms bytes_read")
        parts.append(Part(title=_title(record), how=_about(record), blocks=list(_texts(record))))
        glance += _gist(record)
    return Section(
        title="Text from a language model",
        how="The same model writes with its exact head and with an adaptive one. Agreed: tokens that are those of the "
        "exact head; read in full: tokens for which the adaptive head fell back on the whole weight.",
        parts=parts,
        glance=glance,
    )


def _title(record: Record) -> str:
    model = record.settings.get("model")
    return f"{short(cell(model), 60)} ({short(record.name, 60)})" if model else short(record.name, 60)


def _about(record: Record) -> str:
    s = record.settings
    if not is_number(s.get("n")) or not is_number(s.get("d")):
        return ""
    calibrated = f", calibrated with {cell(s['calibration'])}" if s.get("calibration") else ""
    return f"{s['n']:,} classes of {s['d']:,} dimensions{calibrated}."


def _texts(record: Record) -> Iterator[Block]:
    body = []
    for r in sorted(record.results, key=lambda result: bool(result.get("prompt"))):  # all prompts together first
        agreed = (
            f"{r['agreed']:,} of {r['steps']:,}" if is_number(r.get("agreed")) and is_number(r.get("steps")) else ""
        )
        body.append(
            [
                short(str(r.get("prompt") or "all prompts"), 60),
                r["head"],
                cell(r["tokens"]),
                f"{r['tokens_per_second']:.1f}",
                number(r["head_ms"], 3),
                f"{100 * r['head_share']:.1f}" if is_number(r.get("head_share")) else "",
                f"{r['bytes_read'] / 1e6:,.1f}",
                cell(r.get("exactly")),
                agreed,
            ]
        )
    head = ["prompt", "head", "tokens", "tokens/s", "ms in the head", "time in the head %", "MB read a token"]
    yield Table(
        f"{short(record.name, 60)}: with the exact and the adaptive head", [*head, "read in full", "agreed"], body
    )
    written = [
        [short(str(r.get("prompt") or ""), 80), r["head"], short(r["text"], 600)]
        for r in record.results
        if isinstance(r.get("text"), str)
    ]
    if written:
        yield Folded(
            "What was written", [Table(f"{short(record.name, 60)}: texts", ["prompt", "head", "text"], written)]
        )


def _gist(record: Record) -> Iterator[str]:
    whole = {r["head"]: r for r in record.results if not r.get("prompt")}
    exact, ours = whole.get("exact"), whole.get("adaptive")
    if exact is None or ours is None or not is_number(ours.get("agreed")):
        return
    yield (
        f"{_title(record)}: {ours['tokens_per_second']:.1f} tokens a second with the adaptive head, "
        f"{exact['tokens_per_second']:.1f} with the exact one; {ours['agreed']:,} of {cell(ours.get('steps'))} tokens "
        "agree."
    )


def perplexity(records: Sequence[Record]) -> Section:
    """Of `python -m experiments perplexity`."""
    parts = []
    for record in records:
        expect(record, record.results, words="head", numbers="perplexity ratio bytes_ratio")
        body = [
            [
                r["head"],
                cell(r.get("k")) or "all",
                cell(r.get("tokens")),
                f"{r['perplexity']:.3f}",
                f"{r['ratio']:.4f}" + (f" ± {r['ratio_error']:.4f}" if is_number(r.get("ratio_error")) else ""),
                f"{100 * r['exact_share']:.1f}" if is_number(r.get("exact_share")) else "",
                f"{r['bytes_ratio']:.2f}x",
            ]
            for r in record.results
        ]
        head = ["head", "k", "tokens", "perplexity", "over the exact one", "read in full %", "fewer bytes"]
        parts.append(Part(title=_title(record), blocks=[Table(f"{short(record.name, 60)}: perplexity", head, body)]))
    return Section(
        title="Perplexity with an adaptive head",
        how="How surprised the model is by a text: lower is better, and a ratio of 1 means that the adaptive head, "
        "which fills in estimates beyond its k best classes, judges the text as the exact one does.",
        parts=parts,
    )
