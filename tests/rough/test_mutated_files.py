"""Truncated, flipped, patched and hostile files of every format: refused in one line, or as good as the whole ones.

``SOFTSIEVE_MUTATIONS=10000`` makes that many of each; by default there are fewer where reading takes long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rough.formats import FORMATS, SLOW

MUTATIONS = 10_000
GROUPS = {
    "heads": ("head index", "weight and queries", "weight and queries, .npy"),
    "training": ("checkpoint", "model", "model with a tokenizer", "state of ASTrainer", "log.jsonl"),
    "records": ("table of an experiment", "runs of a comparison", "run of a report"),
    "texts": ("CSV", "CSV, .gz", "TSV", "JSONL", "CoNLL", "Parquet"),
    "others": ("saved Hugging Face data set", "images", "sounds", "files of known data sets"),
}


def test_no_format_is_forgotten() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(FORMATS)


@pytest.mark.parametrize("group", GROUPS)
def test_spoilt_files(group: str, tmp_path: Path) -> None:
    asked = os.environ.get("SOFTSIEVE_MUTATIONS")
    counts = {name: int(asked) if asked else MUTATIONS // SLOW[name] for name in GROUPS[group]}
    alone = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.rough.judge", str(tmp_path), json.dumps(counts)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    wrong = []
    for name, count in counts.items():
        found = results[name]["found"]
        print(f"{name}: {found}, {results[name]['seconds']} s")
        wrong += [f"{name}: {said}" for said in results[name]["wrong"]]
        assert wrong or sum(found.values()) == count
        if name != "log.jsonl":  # what is damaged there is left out
            assert wrong or found["refused"] > 0, f"{name}: nothing was refused"
    assert not wrong, f"{len(wrong)} in all\n" + "\n".join(wrong[:20])
