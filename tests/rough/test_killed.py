"""kill -9 at any moment: what was there before is there, or what was being written, never a half; nothing piles up."""

from __future__ import annotations

import itertools
import json
import multiprocessing.process
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from softsieve import AdaptiveSoftmax
from softsieve._files import only_one
from softsieve.errors import InputError
from softsieve.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint, write_folder
from tests.rough import children
from tests.training.helpers import equal_weights, in_process


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums come out the same in every process
    yield
    torch.set_num_threads(threads)


def wait_for(there: Callable[[], object], child: multiprocessing.process.BaseProcess) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert child.is_alive(), f"ended with {child.exitcode}"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kill_often(work: Callable[[Path], None], place: Path, times: int, longest: float, look: Callable[[], None]) -> None:
    """Start a process, kill it some time after it has begun, and look; again and again."""
    random = Random(0)
    folder = place if place.is_dir() else place.parent
    for _ in range(times):
        child = in_process(work, place)
        wait_for((folder / "begun").exists, child)
        children.pause(random, longest)
        child.kill()
        child.join()
        assert child.exitcode == -9
        look()
        left = hidden(folder)
        assert len(left) <= 2, f"left-overs pile up: {left}"
        (folder / "begun").unlink()


def has_more(output: Path, found: list[Path]) -> bool:
    """Whether there is a later checkpoint, or all is done."""
    return checkpoints(output)[-1:] != found[-1:] or (output / "done").exists()


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_training_killed_twenty_times(tmp_path: Path) -> None:
    """Most of the time within a checkpoint; each life goes on from what the last one left."""
    whole = children.make_trainer(None)
    expected = whole.fit()
    random, lives = Random(0), 0
    while lives < 20 and not (tmp_path / "done").exists():
        found = checkpoints(tmp_path)
        child = in_process(children.train_slowly, tmp_path, found[-1] if found else None)
        wait_for(partial(has_more, tmp_path, found), child)
        children.pause(random, 0.1)
        child.kill()
        child.join()
        lives += 1
        for place in checkpoints(tmp_path):
            load_checkpoint(place)
        assert len(hidden(tmp_path)) <= 2
    assert lives >= 10
    made = children.make_trainer(tmp_path)
    result = made.fit(checkpoints(tmp_path)[-1])
    assert (result.steps, result.trained, result.screened) == (expected.steps, expected.trained, expected.screened)
    assert equal_weights(made.weights(), whole.weights())
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == expected.log


def test_saving_a_head_over_another(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    either = [children.head_of(seed).weight for seed in range(2)]

    def look() -> None:
        head = AdaptiveSoftmax.load(path)
        assert torch.equal(head.weight, either[head.seed])

    kill_often(children.save_heads, path, 20, 0.05, look)
    children.head_of(0).save(path)
    assert hidden(tmp_path) == []


def test_building_and_calibrating(tmp_path: Path) -> None:
    from softsieve.integrations.head_file import write_head
    from softsieve.integrations.hidden_states import Corpus, Head

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(600, 24, generator=generator)
    queries = torch.randn(900, 24, generator=generator) * 2
    corpora = {"a": Corpus(queries[:800], queries[800:].clone())}
    write_head(tmp_path / "head.safetensors", Head(weight, None, 1.0, None, corpora), notes={})
    seen = set()

    def look() -> None:
        head = AdaptiveSoftmax.load(tmp_path / "index.safetensors")
        assert head.index is not None
        seen.add(bool(head.calibrations))
        if head.calibrations:
            assert torch.equal(head.topk(queries[:1]).indices[0], (weight @ queries[0]).topk(1).indices)

    kill_often(children.build_and_calibrate, tmp_path, 8, 0.4, look)
    assert seen  # of both kinds, mostly
    AdaptiveSoftmax.load(tmp_path / "index.safetensors").save(tmp_path / "index.safetensors")
    assert hidden(tmp_path) == []


def test_writing_records_and_tables(tmp_path: Path) -> None:
    from softsieve.comparisons.output import read_table

    def look() -> None:
        record = children.read_json(tmp_path / "a.json")
        assert len(record["results"]) == 2000
        assert {row["number"] for row in record["results"]} == {record["settings"]["number"]}
        about, rows = read_table(tmp_path / "a.csv")
        assert len(rows) == 2000
        assert {row["number"] for row in rows} == {about["number"]}

    kill_often(children.write_records, tmp_path, 12, 0.1, look)


def test_writing_a_report(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from softsieve._records import write_record
    from softsieve.report import write_report

    write_record(tmp_path / "record.json", "tests", {}, [{"file": "a", "passed": 3}])

    def look() -> None:
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "<title>number " in page
        assert page.rstrip().endswith("</html>")

    kill_often(children.write_reports, tmp_path, 8, 0.2, look)
    write_report([tmp_path / "record.json"], tmp_path / "report.html")
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two moves"])
def test_replacing_a_folder_killed_before_every_move(tmp_path: Path, exchange: bool) -> None:
    folder = tmp_path / "model"
    found = []
    for number in itertools.count():
        write_folder(folder, children.fill_with("old"))
        child = in_process(children.killed_at_a_move, folder, number, exchange)
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -9
        there = folder.exists()
        assert there or not exchange
        write_folder(tmp_path / "other", children.fill_with("other"))  # takes nothing away that is not its own
        if not there:  # for want of an exchange: the next that writes there finds the old one
            with pytest.raises(RuntimeError, match="after a look"):
                write_folder(folder, lambda part: _raise_if_whole(folder))
        texts = {(folder / name).read_text() for name in "abc"}
        assert len(texts) == 1
        found.append(texts.pop())
    assert number >= 2
    assert set(found) == {"old", "new"}
    write_folder(folder, children.fill_with("old"))
    assert hidden(tmp_path) == []


def _raise_if_whole(folder: Path) -> None:
    assert (folder / "a").read_text() == "old"
    raise RuntimeError("after a look")


def test_a_checkpoint_that_was_being_removed_is_not_found(tmp_path: Path) -> None:
    for step in (10, 30):
        save_checkpoint(tmp_path, step, {"step": step}, {"model": {"a": torch.ones(2)}}, keep=9)
    child = in_process(children.removes_checkpoints, tmp_path)
    child.join()
    assert child.exitcode == -9
    for place in checkpoints(tmp_path):
        assert load_checkpoint(place)[1].keys() == {"model"}
    assert tmp_path / "checkpoint-15" in checkpoints(tmp_path)
    save_checkpoint(tmp_path, 16, {"step": 16}, {"model": {"a": torch.ones(2)}}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-16"]


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    child = in_process(children.holds, tmp_path)
    wait_for((tmp_path / "begun").exists, child)
    with pytest.raises(InputError, match="another process is training there"), only_one(tmp_path, "training"):
        pass
    child.kill()
    child.join()
    with only_one(tmp_path, "training"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]
