"""Truncated, flipped, patched and hostile files of every format: refused in one line, or as good as the whole ones.

``SOFTSIEVE_MUTATIONS=10000``, as in ``make test-all``, makes that many of each.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from softsieve import AdaptiveSoftmax
from softsieve.errors import InputError
from softsieve.tasks import files
from softsieve.tasks.files import read_bytes
from tests.rough.formats import FORMATS

MUTATIONS = int(os.environ.get("SOFTSIEVE_MUTATIONS", "500"))
GROUPS = {
    "heads": ("head index", "weight and queries", "weight and queries, .npy", "index for vLLM"),
    "training": (
        "checkpoint",
        "model",
        "model with a tokenizer",
        "folder of transformers",
        "state of ASTrainer",
        "log.jsonl",
    ),
    "records": ("table of an experiment", "runs of a comparison", "trials of a search", "run of a report"),
    "texts": ("CSV", "CSV, .gz", "TSV", "JSONL", "CoNLL", "Parquet"),
    "plain texts": ("JSON table", "fastText", "labels and texts"),
    "others": ("saved Hugging Face data set", "images", "sounds", "files of known data sets", "sequences of items"),
}


def test_no_format_is_forgotten() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(FORMATS)


@pytest.mark.parametrize("group", GROUPS)
def test_spoilt_files(group: str, tmp_path: Path) -> None:
    counts = dict.fromkeys(GROUPS[group], MUTATIONS)
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
        print(f"{name}: {found}, {results[name].get('milliseconds')} ms each")  # noqa: T201
        wrong += [f"{name}: {said}" for said in results[name]["wrong"]]
        assert wrong or sum(found.values()) == count
        if name != "log.jsonl":  # what is damaged there is left out
            assert wrong or found["refused"] > 0, f"{name}: nothing was refused"
    assert not wrong, f"{len(wrong)} in all\n" + "\n".join(wrong[:20])


def test_an_index_from_before_there_were_digests(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    AdaptiveSoftmax(torch.eye(3), eps=0.2).save(path)
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    del metadata["digests"]
    save_file(tensors, path, metadata)
    with pytest.raises(InputError, match=r"head.safetensors: damaged: its digests are missing"):
        AdaptiveSoftmax.load(path)
    save_file(tensors, path, {**metadata, "version": "2"})
    assert AdaptiveSoftmax.load(path).eps == 0.2


def test_every_bit_of_an_index_counts(tmp_path: Path) -> None:
    """Of the weight, which would else be taken for another weight."""
    path = tmp_path / "head.safetensors"
    AdaptiveSoftmax(torch.eye(3)).save(path)
    whole = path.read_bytes()
    for byte in range(len(whole) - 36, len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[byte] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(InputError, match=r"head.safetensors: damaged: 'weight' is not what was written"):
                AdaptiveSoftmax.load(path)


@pytest.mark.parametrize(("end", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_bomb_is_not_unpacked(tmp_path: Path, end: str, pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.csv{end}"
    content = pack(bytes(2**22))
    path.write_bytes(content)
    assert len(read_bytes(path)) == 2**22
    monkeypatch.setattr(files, "MOST", 2**20)
    with pytest.raises(InputError, match=rf"a.csv{end}: expected data, found {len(content)} bytes that unpack to more"):
        read_bytes(path)
