"""What `softsieve train` takes of the memory for a large file, and for very many classes, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from softsieve.errors import InputError

WORDS = 50_000  # different ones, the frequent ones as frequent as in a language
CODE = """
import resource, sys
from softsieve.cli import app
sys.argv = ["softsieve", *sys.argv[1:]]
try:
    app()
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


class Result(NamedTuple):
    """One training: its file, what it took at the most, resident and shared pages together, and how long."""

    case: str
    file_mb: float
    rows: int
    classes: int
    peak_mb: float
    seconds: float


def write_texts(path: Path, *, rows: int, classes: int, words: int, seed: int = 0) -> None:
    """A CSV of so many made-up texts of about so many words; a word in the middle of a text tells its label."""
    generator = np.random.default_rng(seed)
    names = np.array([f"w{number:x}" for number in range(WORDS)])
    with path.open("w") as file:
        file.write("text,label\n")
        for start in range(0, rows, 10_000):
            count = min(10_000, rows - start)
            drawn = generator.zipf(1.2, (count, words)) % WORDS
            labels = (start + np.arange(count)) % classes
            for text, label in zip(names[drawn], labels, strict=True):
                middle = len(text) // 2
                file.write(f"{' '.join(text[:middle])} class{label} {' '.join(text[middle:])},c{label}\n")


def measure(case: str, folder: Path, *, rows: int, classes: int, words: int, epochs: int) -> Result:
    """Write the file, train on it in another process, and take both away."""
    path, out = folder / f"{case}.csv", folder / f"{case}-run"
    write_texts(path, rows=rows, classes=classes, words=words)
    size = path.stat().st_size / 1e6
    command = [sys.executable, "-c", CODE, "train", "--data", str(path), "--out", str(out), "--epochs", str(epochs)]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    seconds = time.perf_counter() - started
    path.unlink()
    peaks = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("peak ")]
    if done.returncode or not peaks:
        raise InputError(f"{case}: training failed: {done.stderr.strip()[-500:]}")
    return Result(case, size, rows, classes, int(peaks[0]) * 1024 / 1e6, seconds)
