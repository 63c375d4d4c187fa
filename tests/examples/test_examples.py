"""Every script in examples/ runs from top to bottom, without a network, and says what it set out to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
# What the script needs besides softsieve, and how its output ends: numbers in place of N.
SCRIPTS = {
    "swap_the_loss": ("", r"AS-Softmax +test accuracy N%, training rows solved N%"),
    "skip_solved_rows": ("", r"  N rows in all, accuracy N%"),
    "finetune_with_trainer": ("transformers", r"N optimizer steps \(a plain Trainer makes 240\), test accuracy N%"),
    "head_for_a_language_model": ("transformers", r"one token reads N% of the layer; its probability is N"),
    "million_classes": ("", r"N ms a query; the exact product takes N ms"),
    "finetune_language_model": ("transformers", r"next token right: N%, cross-entropy N"),
    "next_item": ("", r"the item that was taken is among them for N%"),
}
NUMBER = r"(\\d+(?:\\.\\d+)?)"


def test_all_scripts_are_listed_and_short() -> None:
    paths = list(FOLDER.glob("*.py"))
    assert {path.stem for path in paths} == SCRIPTS.keys()
    for path in paths:
        assert len(path.read_text().splitlines()) <= 60, path.name


@pytest.mark.subprocess
@pytest.mark.compiles
@pytest.mark.parametrize("name", SCRIPTS)
def test_runs(name: str, tmp_path: Path) -> None:
    package, end = SCRIPTS[name]
    if package:
        pytest.importorskip(package)
    quiet = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "COLUMNS": "200"}
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | quiet, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(re.sub("N", NUMBER, end), last), last
    assert not list(tmp_path.iterdir()), "it left files behind"
    check_claims(name, done.stdout)


def check_claims(name: str, output: str) -> None:
    """The figures on which a script's story rests; the others are a matter of the machine."""
    if name == "swap_the_loss":
        assert all(float(value) > 90 for value in re.findall(r"accuracy ([\d.]+)%", output))
    elif name == "skip_solved_rows":
        every, skipping = (int(value) for value in re.findall(r"(\d+) rows in all", output))
        assert skipping < every / 2
    elif name == "finetune_with_trainer":
        assert int(re.findall(r"(\d+) optimizer steps", output)[0]) < 240
    elif name == "finetune_language_model":
        assert int(re.findall(r"right: (\d+)%", output)[0]) >= 80
    elif name == "head_for_a_language_model":
        assert int(re.findall(r"reads (\d+)%", output)[0]) < 50
    elif name == "next_item":
        assert int(re.findall(r"product for (\d+)%", output)[0]) >= 85
        assert int(re.findall(r"among them for (\d+)%", output)[0]) >= 70
        assert int(re.findall(r"(\d+)% of the positions solved", output)[-1]) >= 30
    else:
        assert int(re.findall(r"(\d+) of 100 right", output)[0]) >= 80
        assert int(re.findall(r"(\d+)% of the weight", output)[0]) < 50
