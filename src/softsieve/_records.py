"""Results of record: a JSON file that says what was measured, with what, on what and when."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from softsieve import __version__
from softsieve._files import replace_file

# What a measurement may have used besides.
_PACKAGES = (
    "numpy", "numba", "triton", "transformers", "faiss-cpu", "entmax", "liger-kernel", "cut-cross-entropy",
    "quack-kernels", "nvidia-cutlass-dsl",
)  # fmt: skip


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of the source, None where that is no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu_info(name: str) -> str:
    """What Linux says of the processor, such as its ``model name``; nothing elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def installed(*names: str) -> dict[str, str]:
    """Versions of those packages that there are."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def provenance() -> dict[str, Any]:
    """Commit, versions and machine of a measurement made now.

    Where the source is a copy of a checkout, SOFTSIEVE_COMMIT says of which commit.

    Example:
        >>> sorted(provenance())
        ['commit', 'date', 'gpu', 'machine', 'modified', 'versions']
    """
    # Installed into an environment that lies in somebody's checkout, this is in the checkout and no part of it.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    commit = _git("rev-parse", "--verify", "HEAD") if tracked else None
    status = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    processor = cpu_info("model name") or platform.processor() or platform.machine()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("SOFTSIEVE_COMMIT", commit),
        "modified": None if status is None or "SOFTSIEVE_COMMIT" in os.environ else bool(status),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "softsieve": __version__,
            **installed(*_PACKAGES),
        },
        "machine": {"processor": processor, "threads": torch.get_num_threads()},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_text(path: Path, text: str) -> None:
    """Write a file, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda part: part.write_text(text))


def write_record(path: Path, suite: str, settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Write the results of a suite with their provenance, all or nothing."""
    record = {"suite": suite, "settings": dict(settings), "provenance": provenance(), "results": list(results)}
    write_text(path, json.dumps(_without_nan(record), indent=1) + "\n")


def _without_nan(value: Any) -> Any:
    """The same with null for what was not measured: JSON has no NaN, and readers refuse it."""
    if isinstance(value, Mapping):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and value != value else value
