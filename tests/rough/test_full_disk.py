"""No room left: an error that names the file, the old file as it was, nothing left behind, and all is well later."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.rough.starve import KINDS

ROOT = Path(__file__).parents[2]
FILES = {
    "index": "index.safetensors",
    "head": "head.safetensors",
    "checkpoint": "checkpoint-3",
    "model": "model",
    "record": "record.json",
    "table": "table.csv",
    "report": "report.html",
    "picture": "confusion.png",
    "figure": "figure.png",
    "answers": "answers.csv",
}


@cache
def can_mount() -> bool:
    """Whether a disk of our own can be made, in a namespace that only our process sees."""
    if shutil.which("unshare") is None:
        return False
    line = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


def starve(folder: Path, how: str) -> dict[str, Any]:
    line = [sys.executable, "-m", "tests.rough.starve", str(folder), how]
    if how == "disk":
        script = f"mount -t tmpfs -o size=24m tmpfs '{folder}' && exec \"$@\""
        line = ["unshare", "-rm", "sh", "-c", script, "sh", *line]
    done = subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["limit", "disk"])
def test_no_room(how: str, tmp_path: Path) -> None:
    if how == "disk" and not can_mount():
        pytest.skip("no disk of our own can be mounted here (unshare -rm); the limit on files stands for it")
    assert FILES.keys() == KINDS.keys()
    results = starve(tmp_path, how)
    reason = "File too large" if how == "limit" else "No space left on device"
    for kind, file in FILES.items():
        found = results[kind]
        assert found["type"] is not None, f"{kind}: written without room"
        assert found["type"] == "InputError" or found["os"], f"{kind}: {found}"
        assert f"{tmp_path / kind / file}: " in found["words"], f"{kind}: {found['words']}"
        assert reason in found["words"], f"{kind}: {found['words']}"
        assert found["same"], f"{kind}: the old file is not what it was"
        assert found["left"] == [], f"{kind}: left {found['left']}"
        assert found["later"], f"{kind}: cannot be written later"
    training = results["training"]
    assert training["type"] == "InputError"
    assert training["words"].startswith(f"{tmp_path / 'training' / 'checkpoint-9'}: cannot be written: ")
    assert reason in training["words"]
    assert training["checkpoints"] == ["checkpoint-3", "checkpoint-6"]
    assert training["left"] == []
