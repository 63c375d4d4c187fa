"""The file of a head: safetensors with weight, bias if any, and NAME.calibration and NAME.test of every text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from softsieve import __version__, _digests
from softsieve._files import replacing
from softsieve._safetensors import read_tensors, write_aligned
from softsieve.errors import InputError, first_line, listed
from softsieve.integrations.gguf_file import SUFFIX, read_gguf_weight
from softsieve.integrations.hidden_states import Corpus, Head

FORMAT = "2"  # 2: digests, which 1, still read, has not


def write_head(path: Path, head: Head, *, notes: Mapping[str, str]) -> None:
    """Write a head, all or nothing, with ``notes`` on where it comes from.

    Raises:
        InputError: when it cannot be written; an older file is then as it was.
    """
    tensors = {"weight": head.weight, **({} if head.bias is None else {"bias": head.bias})}
    for name, corpus in head.corpora.items():
        tensors |= {f"{name}.{part}": rows.contiguous() for part, rows in corpus._asdict().items()}
    facts = {"format_version": FORMAT, "softsieve": __version__, "beta": repr(head.beta), **notes}
    if head.softcap is not None:
        facts["softcap"] = repr(head.softcap)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            write_aligned(part, tensors, {**facts, **_digests.noted({**tensors, **_named(facts)})})
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({first_line(error)})") from error


def read_head(path: Path, queries: Path | None = None) -> tuple[Head, dict[str, str]]:
    """A head and the notes on it; its hidden states may be in a file of their own. Nothing in a file is executed.

    Raises:
        InputError: when a file is missing, damaged, of another kind or of a later format.
    """
    tensors, notes = ({}, {}) if path.suffix == SUFFIX else _read(path)
    states = tensors
    if queries is not None:
        states, other = _read(queries)
        notes = notes or other  # a GGUF file says nothing of what comes after the layer
    weight: Any = read_gguf_weight(path) if path.suffix == SUFFIX else tensors.get("weight")
    bias = tensors.get("bias")
    if weight is None or (isinstance(weight, Tensor) and (weight.ndim != 2 or not weight.is_floating_point())):
        raise InputError(f"{path}: expected a matrix 'weight', found {listed(tensors)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"{path}: bias: expected {weight.shape[0]} numbers, found {tuple(bias.shape)}")
    place = queries or path
    corpora = {}
    for name in sorted(key.removesuffix(".test") for key in states if key.endswith(".test")):
        if f"{name}.calibration" not in states:
            raise InputError(f"{place}: expected {name}.calibration with {name}.test, found {listed(states)}")
        corpora[name] = Corpus(states[f"{name}.calibration"], states[f"{name}.test"])
        for rows in corpora[name]:
            if rows.ndim != 2 or rows.shape[1] != weight.shape[1]:
                raise InputError(f"{place}: {name}: expected rows of {weight.shape[1]}, found {tuple(rows.shape)}")
    try:
        softcap = float(notes["softcap"]) if "softcap" in notes else None
        beta = float(notes.get("beta", "1"))
        if not math.isfinite(beta) or not (softcap is None or 0 < softcap < math.inf):
            raise ValueError(f"beta {beta}, softcap {softcap}")
        return Head(weight, bias, beta, softcap, corpora), notes
    except ValueError as error:
        raise InputError(f"{path}: damaged metadata ({first_line(error)})") from None


def _named(notes: Mapping[str, str]) -> dict[str, str]:
    """Notes by names that no tensor has."""
    return {f"note {name}": text for name, text in notes.items()}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    tensors, notes = read_tensors(path)
    digests = {name: notes.pop(name) for name in (_digests.KEY,) if name in notes}
    _digests.check(path, digests, {**tensors, **_named(notes)})
    version = notes.get("format_version")
    if ("softsieve" in notes or version == FORMAT) and version != "1" and not digests:
        raise InputError(f"{path}: damaged: its digests are missing")
    if version not in (None, "1", FORMAT):
        raise InputError(f"{path}: expected format version {FORMAT}, found {version[:40]!r}")
    return tensors, notes
