"""Where commands compute."""

from __future__ import annotations

import os

import torch

from softsieve import _checks
from softsieve.errors import InputError

DEVICE_HELP = "cpu, cuda or cuda:1; a GPU where there is one, if not given"


def choose_device(name: str | None) -> torch.device:
    """The device of that name, and from here on that of training, too; None: a GPU where there is one.

    Raises:
        InputError: when there is no such device.

    Example:
        >>> choose_device("cuda:64")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        softsieve.errors.InputError: device: expected one of cpu..., found 'cuda:64'
    """
    device = _checks.device(name)
    if name is None:
        return device
    if ":" in name and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(f"device: expected cpu or cuda with several processes, found {name!r}")
    os.environ["ACCELERATE_USE_CPU"] = str(name == "cpu").lower()
    if device.index is not None:
        torch.cuda.set_device(device)
    return device
