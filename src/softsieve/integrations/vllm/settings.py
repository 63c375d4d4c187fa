"""What a user tells the plug-in: ``--additional-config '{"softsieve": {...}}'``, or variables of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from softsieve.errors import InputError, listed, shown

INDEX, STRICT = "SOFTSIEVE_INDEX", "SOFTSIEVE_STRICT"  # variables of the environment
BESIDE = "softsieve"  # the folder of an index in the folder of its model


@dataclass(frozen=True)
class Settings:
    """How the plug-in is asked to work."""

    index: Path | None = None  # a folder that `softsieve head build --model` wrote, or one of several; None: beside
    strict: bool = False  # whether an index that cannot be used is an error
    enabled: bool = True
    batch: int | None = None  # the adaptive head answers steps of up to so many tokens; None: as many as it is faster


def read_settings(config: Any, environ: Mapping[str, str]) -> Settings:
    """The settings of an engine: what its configuration says, else what the environment says.

    Raises:
        InputError: for a name or value that is none of ours.

    Example:
        >>> read_settings({"softsieve": {"strict": True}}, {"SOFTSIEVE_INDEX": "indices"})
        Settings(index=PosixPath('indices'), strict=True, enabled=True, batch=None)
    """
    own = config.get("softsieve", {}) if isinstance(config, Mapping) else {}
    if not isinstance(own, Mapping):
        raise InputError(f"softsieve: expected settings by name in the additional config, found {shown(own)}")
    names = [field.name for field in fields(Settings)]
    unknown = set(own) - set(names)
    if unknown:
        raise InputError(f"softsieve: expected {', '.join(names)}, found {listed(sorted(unknown))}")
    index = own.get("index", environ.get(INDEX) or None)
    strict, enabled = own.get("strict", _flag(environ, STRICT)), own.get("enabled", True)
    for name, value in {"strict": strict, "enabled": enabled}.items():
        if not isinstance(value, bool):
            raise InputError(f"softsieve: {name}: expected true or false, found {shown(value)}")
    if not (index is None or isinstance(index, str)):
        raise InputError(f"softsieve: index: expected a path, found {shown(index)}")
    batch = own.get("batch")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 0):
        raise InputError(f"softsieve: batch: expected a whole number of at least 0, found {shown(batch)}")
    return Settings(None if index is None else Path(index), strict, enabled, batch)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise InputError(f"{name}: expected 0 or 1, found {shown(value)}")
    return value == "1"
