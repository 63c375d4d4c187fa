"""Weightless head files: an index saved without its weight, which is recognised when the head is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from softsieve.errors import InputError
from softsieve.heads.quantised import QuantisedWeight, Weight, describe, from_tensors, to_tensors
from softsieve.heads.watching import checksums

NOTE = "left out"  # the name in the settings, as files have it
CHECKSUMS = "checksums"  # among the tensors, when there is no index that has them


def remove_weight(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Take the weight and the bias out of what a head saves."""
    weight, bias = from_tensors(tensors), tensors.pop("bias", None)
    settings[NOTE] = {"weight": _describe(weight), "bias": _describe(bias)}
    if "index.checksums" not in tensors:
        tensors[CHECKSUMS] = checksums(weight, bias)


def add_weight(
    path: Path, tensors: dict[str, Tensor], settings: dict[str, Any], weight: Weight | None, bias: Tensor | None
) -> None:
    """Give what was read from a file the weight and the bias that it was saved without.

    Raises:
        InputError: when they are missing, or not the ones that the file was made of; when the file has its own.
        KeyError, TypeError, ValueError: when the file is broken.
    """
    parameters: dict[str, Any] = {"weight": weight, "bias": bias}
    if NOTE not in settings:
        for name, value in parameters.items():
            if value is not None:
                raise InputError(f"{name}: expected none, because {path} has its own, found one")
        return
    noted = settings.pop(NOTE)
    if weight is None:
        raise InputError(f"{path}: has no weight: give the one that it was made of, weight=")
    for name, value in parameters.items():
        if _describe(value) != noted[name]:
            raise InputError(f"{name}: expected {noted[name]}, which {path} was made of, found {_describe(value)}")
    recorded = tensors.pop(CHECKSUMS) if CHECKSUMS in tensors else tensors["index.checksums"]
    if recorded.shape != (len(weight),):
        raise ValueError(f"checksums: expected one a row, found shape {tuple(recorded.shape)}")
    own = None if bias is None else bias.detach()
    different = int((checksums(weight.detach(), own).cpu() != recorded).sum())
    if different:
        raise InputError(
            f"weight: expected the one that {path} was made of, found another: {different} of {len(weight)} rows differ"
        )
    tensors |= to_tensors(weight) | ({} if bias is None else {"bias": bias})


def _describe(value: object) -> str:
    if isinstance(value, Tensor | QuantisedWeight):
        return describe(value)
    return "none" if value is None else type(value).__name__
