"""Checkpoints: folders of safetensors and JSON that are either there as a whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from softsieve import _digests
from softsieve._files import remove_folder, replacing_folder, sweep
from softsieve._safetensors import read_tensors
from softsieve.errors import InputError

FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")
_DIGEST = "digest"  # of the rest of a state


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make ``folder`` with what ``fill`` writes into the path it is given, or leave everything as it was.

    Raises:
        InputError: when it cannot be written, a full disk for instance.
    """
    try:
        with replacing_folder(folder) as part:
            fill(part)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: cannot be written: {error}") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors by name in one safetensors file; those that share memory are written once each."""
    held = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    save_file(held, path, _digests.noted(held))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; refused when it has digests of them that differ."""
    tensors, metadata = read_tensors(path)
    _digests.check(path, metadata, tensors)
    return tensors


def save_checkpoint(
    output: Path, step: int, state: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]], *, keep: int
) -> Path:
    """Write ``output/checkpoint-STEP``: ``state`` as JSON, ``files`` as safetensors.

    Keeps the ``keep`` latest; later ones are of a run that this one went back on, and go like the end of its log.
    """

    def fill(part: Path) -> None:
        text = json.dumps({"format": FORMAT, **state})
        (part / "state.json").write_text(json.dumps({**json.loads(text), _DIGEST: _digest(json.loads(text))}))
        for name, tensors in files.items():
            save_tensors(part / f"{name}.safetensors", tensors)

    folder = output / f"checkpoint-{step}"
    sweep(output, _NAME.pattern)
    write_folder(folder, fill)
    found = checkpoints(output)
    after = found.index(folder) + 1
    for old in found[: max(0, after - keep)] + found[after:]:
        remove_folder(old)
    return folder


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What `save_checkpoint` wrote: the state, and the tensors by file and name."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    digest = state.pop(_DIGEST, None) if isinstance(state, dict) else None
    if digest is not None and digest != _digest(state):
        raise InputError(f"{path}: damaged: it is not what was written")
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
        raise InputError(f"{path}: expected a checkpoint of format {FORMAT}")
    return state, {file.stem: load_tensors(file) for file in sorted(folder.glob("*.safetensors"))}


def _digest(state: dict[str, Any]) -> int:
    return _digests.digest(json.dumps(state, sort_keys=True))


def checkpoints(output: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [(int(m[1]), path) for path in output.glob("checkpoint-*") if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def check_same(path: Path, name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit a model, naming the first that does not.

    Raises:
        InputError: saying which tensor of which file is missing, too many or of another shape.
    """
    for key in sorted({*found, *expected}):
        here, there = (
            str(tuple(tensors[key].shape)) if key in tensors else absent
            for tensors, absent in ((expected, "nothing"), (found, "missing"))
        )
        if here != there:
            raise InputError(f"{path}: not a {name} of this model: {key} is {there}, expected {here}")
