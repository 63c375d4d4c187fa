"""Packages that only some data or models need, imported and called with errors of our own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from softsieve.errors import InputError, first_line


def package(name: str, what: str, *, extra: str = "train") -> Any:
    """The module of an optional package, or an error that says how to get it: with which of our extras."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"{what} needs the package {error.name}: pip install 'softsieve[{extra}]'") from None


def loaded(load: Callable[[], Any], complaint: str) -> Any:
    """What a library loads, or the complaint with the library's own."""
    try:
        return load()
    except Exception as error:  # the library, its network stack and damaged files raise anything
        raise InputError(f"{complaint} ({first_line(error)})") from None
