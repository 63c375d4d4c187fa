"""A weight that is not in the file of its head: noted when the head is saved, recognised when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from softsieve.errors import InputError
from softsieve.heads import cascade

NOTE = "left out"  # among the settings
CHECKSUMS = "checksums"  # among the tensors, when there is no index that has them


def take_out(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Leave the weight and the bias out of what a head saves."""
    weight, bias = tensors.pop("weight"), tensors.pop("bias", None)
    settings[NOTE] = {"weight": _described(weight), "bias": _described(bias)}
    if "index.checksums" not in tensors:
        tensors[CHECKSUMS] = cascade.checksums(weight, bias)


def put_back(
    path: Path, tensors: dict[str, Tensor], settings: dict[str, Any], weight: Tensor | None, bias: Tensor | None
) -> None:
    """Give what was read from a file the weight and the bias that it was saved without.

    Raises:
        InputError: when they are not there, or not the ones that the file was made of; when the file has its own.
        KeyError, TypeError, ValueError: for a broken file.
    """
    given: dict[str, Any] = {"weight": weight, "bias": bias}
    if NOTE not in settings:
        found = [name for name, value in given.items() if value is not None]
        if found:
            raise InputError(f"{found[0]}: expected none, because {path} has its own, found one")
        return
    noted = settings.pop(NOTE)
    if weight is None:
        raise InputError(f"{path}: has no weight: give the one that it was made of, weight=")
    for name, value in given.items():
        if _described(value) != noted[name]:
            raise InputError(f"{name}: expected {noted[name]}, which {path} was made of, found {_described(value)}")
    checksums = tensors.pop(CHECKSUMS) if CHECKSUMS in tensors else tensors["index.checksums"]
    if checksums.shape != (len(weight),):
        raise ValueError(f"checksums: expected one a row, found shape {tuple(checksums.shape)}")
    own = None if bias is None else bias.detach()
    different = int((cascade.checksums(weight.detach(), own).cpu() != checksums).sum())
    if different:
        raise InputError(
            f"weight: expected the one that {path} was made of, found another: {different} of {len(weight)} rows differ"
        )
    tensors |= {name: value for name, value in given.items() if value is not None}


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return "none" if value is None else type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
