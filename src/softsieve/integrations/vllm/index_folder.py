"""The folder of an index: a weightless head file for every rank, hidden states, and ``index.json``, written last.

The index of a model belongs to the bits of its output layer and to the way its rows are spread over ranks. Both are in
``index.json`` as fingerprints, one a rank, by which an engine finds its index among several.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from softsieve import __version__, _checks
from softsieve._files import replacing
from softsieve._safetensors import read_tensors
from softsieve.errors import InputError, first_line, shown
from softsieve.heads.watching import checksums

FILE, STATES = "index.json", "states.safetensors"
FORMAT = "softsieve index of an output layer"
VERSION = 1
PADDING = 64  # vLLM fills up vocabularies to a multiple of this before it spreads them over ranks


@dataclass(frozen=True)
class Description:
    """What ``index.json`` says.

    Attributes:
        rows, columns, dtype: of the whole output layer.
        beta: what the model multiplies its logits with.
        eps, delta: what is promised of the whole.
        ks: so many of the largest logits can be asked for, rising.
        fingerprints: of the rows of each rank.
    """

    rows: int
    columns: int
    dtype: str
    beta: float
    eps: float
    delta: float
    ks: list[int]
    fingerprints: list[str]
    format: str = FORMAT
    version: int = VERSION
    softsieve: str = __version__


def fingerprint(weight: Tensor, bias: Tensor | None) -> str:
    """A name for the bits of some rows.

    Example:
        >>> fingerprint(torch.eye(3), None) == fingerprint(torch.eye(3), torch.zeros(3))
        False
    """
    kind = f"{tuple(weight.shape)} {weight.dtype} {None if bias is None else bias.dtype}"
    digest = hashlib.sha256(kind.encode())
    digest.update(checksums(weight.detach(), None if bias is None else bias.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def shard_rows(rows: int, rank: int, ranks: int) -> slice:
    """The rows of a vocabulary that vLLM gives to a rank.

    Example:
        >>> [shard_rows(1000, rank, 2) for rank in range(2)]
        [slice(0, 512, None), slice(512, 1000, None)]

    Raises:
        InputError: when the vocabulary cannot be spread evenly, or leaves a rank without rows.
    """
    padded = -(-rows // PADDING) * PADDING
    if padded % ranks or (ranks - 1) * (padded // ranks) >= rows:
        raise InputError(f"ranks: expected a number that {padded} rows can be spread over evenly, found {ranks}")
    each = padded // ranks
    return slice(min(rows, rank * each), min(rows, (rank + 1) * each))


def write_description(folder: Path, description: Description) -> None:
    """Write ``index.json``, which makes an index complete."""
    with replacing(folder / FILE) as part:
        part.write_text(json.dumps(asdict(description), indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path) -> Description:
    """Read ``index.json``.

    Raises:
        InputError: when there is none, or it is not one of ours.
    """
    path = folder / FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise InputError(f"{path}: expected the description of an index, found another file")
        if fields.get("version") != VERSION:
            raise InputError(f"{path}: expected format version {VERSION}, found {shown(fields.get('version'))}")
        description = Description(**fields)
        for name in ("rows", "columns"):
            _checks.whole_number(name, getattr(description, name), 1, 2**62)
        for k in description.ks:
            _checks.whole_number("ks", k, 1, description.rows)
        if not description.ks or not description.fingerprints:
            raise ValueError("ks, fingerprints: expected some, found none")
        if not isinstance(description.fingerprints, list):
            raise ValueError(f"fingerprints: expected a list, found {shown(description.fingerprints)}")
        if list(description.ks) != sorted(set(description.ks)):
            raise ValueError(f"ks: expected rising numbers, found {shown(description.ks)}")
        return description
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{folder}: expected {FILE}, found none: not an index, or one that is not finished") from None
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {first_line(error)}") from error


def write_states(folder: Path, states: Tensor, notes: dict[str, str]) -> None:
    """Keep hidden states, and notes on what they were made of."""
    try:
        with replacing(folder / STATES) as part:
            save_file({"states": states.contiguous()}, part, metadata=notes)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / STATES}: cannot be written: {first_line(error)}") from error


def read_states(folder: Path) -> tuple[Tensor, dict[str, str]]:
    """The hidden states of an index, and the notes on them.

    Raises:
        InputError: when there are none.
    """
    path = folder / STATES
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    tensors, notes = read_tensors(path)
    states = tensors.get("states")
    if states is None or states.ndim != 2 or not states.is_floating_point():
        raise InputError(f"{path}: expected a matrix 'states', found {', '.join(tensors) or 'nothing'}")
    return states, notes


def find_index(place: Path, weight: Tensor, fingerprints: list[str]) -> Path:
    """The folder of the index of this output layer: ``place`` itself, or a folder in it.

    Args:
        weight: the rows of this rank.
        fingerprints: of the rows of each rank, so that all ranks find the same folder.

    Raises:
        InputError: when there is none, saying what there is instead.
    """
    folders = [place] if (place / FILE).is_file() else sorted(path.parent for path in place.glob(f"*/{FILE}"))
    if not folders:
        raise InputError(f"{place}: expected an index, found none: softsieve head build --model writes one")
    instead = []
    for folder in folders:
        try:
            description = read_description(folder)
        except InputError as error:  # of one that is damaged, beside others
            instead.append(first_line(error))
            continue
        if description.fingerprints == fingerprints:
            return folder
        instead.append(f"{folder}: {_instead(description, weight, len(fingerprints))}")
    raise InputError("; ".join(instead))


def _instead(description: Description, weight: Tensor, ranks: int) -> str:
    """What an index is for, where it is not for these rows."""
    if len(description.fingerprints) != ranks:
        return f"expected an index for {ranks} ranks, found one for {len(description.fingerprints)}"
    dtype = str(weight.dtype).removeprefix("torch.")
    if (description.columns, description.dtype) != (weight.shape[1], dtype):
        return (
            f"expected an index for {dtype} of {weight.shape[1]} columns, found one for {description.dtype} "
            f"of {description.columns}"
        )
    return "expected the index of this output layer, found that of another: another model, revision or vocabulary"


def sample(states: Tensor, count: int) -> Tensor:
    """Some of the states, spread over all."""
    picked: Sequence[int] = torch.linspace(0, len(states) - 1, min(count, len(states))).round().long().tolist()
    return states[picked]
