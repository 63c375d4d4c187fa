"""The measuring itself: a benchmark is worth what its instruments are."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.measure import peak_bytes, times
from softsieve import _records as record
from softsieve._records import provenance, write_record


def test_times_tells_slow_from_fast_and_takes_turns() -> None:
    calls: list[str] = []

    def slow() -> None:
        calls.append("slow")
        time.sleep(0.01)

    (_, fast_median, _), (low, median, high) = times([lambda: calls.append("fast"), slow], repeats=3)
    assert fast_median < 5 < 10 <= low <= median <= high
    assert calls == ["fast", "slow"] * 4  # one turn to warm up


def test_peak_bytes_counts_what_is_held_at_once() -> None:
    megabyte = 1 << 20

    def freed_between() -> None:
        for _ in range(5):
            torch.ones(megabyte // 4)

    assert megabyte <= peak_bytes(freed_between) < 1.01 * megabyte
    assert 3 * megabyte <= peak_bytes(lambda: [torch.ones(megabyte // 4) for _ in range(3)]) < 3.01 * megabyte


def test_peak_bytes_lets_errors_through_and_survives_them() -> None:
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 / 0)
    assert peak_bytes(lambda: torch.ones(256)) >= 1024


def test_the_commit_of_a_copy_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTSIEVE_COMMIT", "abc")
    monkeypatch.setattr(record, "_git", lambda *arguments: None)
    assert provenance()["commit"] == "abc"


def test_a_record_that_fails_leaves_the_last_one_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, "suite", {"a": 1}, [{"b": 2}])
    before = path.read_text()
    assert json.loads(before)["results"] == [{"b": 2}]
    with pytest.raises(TypeError):
        write_record(path, "suite", {}, [{"b": object()}])
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
