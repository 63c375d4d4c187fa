"""Checkpoints: there as a whole or not at all, and read with suspicion."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from softsieve.errors import InputError
from softsieve.training.checkpoint import (
    check_same,
    checkpoints,
    load_checkpoint,
    load_tensors,
    save_checkpoint,
    save_tensors,
    write_folder,
)


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def save(output: Path, step: int, *, keep: int = 2) -> Path:
    files = {"model": {"weight": torch.full((2, 3), float(step))}, "queue": {"queue": torch.empty(0)}, "best": {}}
    return save_checkpoint(output, step, {"step": step, "settings": {"seed": 1}}, files, keep=keep)


# -- write_folder ------------------------------------------------------------------------------------------------------


def content(**files: str) -> Callable[[Path], None]:
    def fill(part: Path) -> None:
        for name, text in files.items():
            (part / name).write_text(text)

    return fill


def fail_after_writing(error: BaseException) -> Callable[[Path], None]:
    def fill(part: Path) -> None:
        (part / "state.json").write_text("half")
        raise error

    return fill


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("mid-way"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("existing", [True, False])
def test_failure_leaves_everything_as_it_was(tmp_path: Path, error: BaseException, existing: bool) -> None:
    folder = tmp_path / "checkpoint-3"
    if existing:
        write_folder(folder, content(state="whole"))
    expected = InputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        write_folder(folder, fail_after_writing(error))
    if expected is InputError:
        assert str(caught.value) == f"{folder}: cannot be written: [Errno 28] No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == (["checkpoint-3"] if existing else [])
    if existing:
        assert (folder / "state").read_text() == "whole"


def test_failure_at_the_very_end_brings_the_old_folder_back(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, content(a="1"))
    with pytest.raises(InputError, match="model: cannot be written: "):
        write_folder(folder, lambda part: part.rmdir())  # nothing there to put in place of the old one
    assert (folder / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"  # its parents are made
    write_folder(folder, content(a="1", b="1"))
    write_folder(folder, content(b="2", c="2"))
    assert sorted(path.name for path in folder.iterdir()) == ["b", "c"]
    assert (folder / "b").read_text() == "2"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_folder_is_not_seen_before_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"

    def fill(part: Path) -> None:
        (part / "state.json").write_text("{}")
        assert not folder.exists()
        assert checkpoints(tmp_path) == []

    write_folder(folder, fill)
    assert checkpoints(tmp_path) == [folder]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="cannot be written"):
            save(tmp_path / "run", 1)
    finally:
        tmp_path.chmod(0o700)


def test_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match=r"run/checkpoint-1: cannot be written: ") as error:
        save(tmp_path / "run", 1)
    one_line(error)


def test_what_a_killed_process_left_behind_is_no_hindrance(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for suffix in ("", ".old"):  # by a process of the same number, as in a container that starts again
        leftover = tmp_path / f".checkpoint-2.{os.getpid()}{suffix}"
        leftover.mkdir()
        (leftover / "state.json").write_text("half")
    elsewhere = tmp_path / ".checkpoint-9.1"
    elsewhere.mkdir()
    assert checkpoints(tmp_path) == [tmp_path / "checkpoint-1"]
    save(tmp_path, 2)
    save(tmp_path, 2)
    assert checkpoints(tmp_path) == [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
    assert load_checkpoint(tmp_path / "checkpoint-2")[0]["step"] == 2
    assert sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir())[-1] == "state.json"


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    files = {
        "model": {"a": shared, "b": shared.T, "c": shared[:, :2]},  # the same memory, other strides
        "sampler": {"flags": torch.tensor([True, False]), "bytes": torch.tensor([1, 2], dtype=torch.uint8)},
        "empty": {},
    }
    state = {"step": 5, "best": {"loss": 0.1 + 0.2}, "nothing": None}
    folder = save_checkpoint(tmp_path, 5, state, files, keep=1)
    assert folder == tmp_path / "checkpoint-5"
    found, tensors = load_checkpoint(folder)
    assert found == state
    assert tensors.keys() == files.keys()
    for name, file in files.items():
        assert tensors[name].keys() == file.keys()
        for key, value in file.items():
            assert torch.equal(tensors[name][key], value)
            assert tensors[name][key].dtype == value.dtype


def test_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):  # by number, not by name
        save(tmp_path, step, keep=2)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-12.old").mkdir()
    assert checkpoints(tmp_path) == [tmp_path / "checkpoint-10", tmp_path / "checkpoint-100"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_a_run_that_went_back_keeps_its_own(tmp_path: Path) -> None:
    for step in (10, 20, 30, 15):
        save(tmp_path, step, keep=3)
    assert checkpoints(tmp_path) == [tmp_path / "checkpoint-10", tmp_path / "checkpoint-15"]
    save(tmp_path, 20, keep=1)
    assert checkpoints(tmp_path) == [tmp_path / "checkpoint-20"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "state.json: cannot be read: .*No such file"),
        ("", "state.json: cannot be read: "),
        ('{"format": 1, "st', "state.json: cannot be read: "),
        ("[1]", "state.json: expected a checkpoint of format 1"),
        ('{"format": 2}', "state.json: expected a checkpoint of format 1"),
        ("{}", "state.json: expected a checkpoint of format 1"),
        ("[" * 100_000, "state.json: cannot be read: "),
    ],
)
def test_bad_state(tmp_path: Path, content: str | None, words: str) -> None:
    folder = save(tmp_path, 1)
    (folder / "state.json").unlink()
    if content is not None:
        (folder / "state.json").write_text(content)
    with pytest.raises(InputError, match=words) as error:
        load_checkpoint(folder)
    assert one_line(error).startswith(str(folder))


def test_state_that_is_not_text(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "state.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"state.json: cannot be read"):
        load_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_tensors(tmp_path: Path, keep: int) -> None:
    folder = save(tmp_path, 1)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model.safetensors: cannot be read as safetensors: ") as error:
        load_checkpoint(folder)
    one_line(error)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.safetensors: cannot be read as safetensors: ") as error:
        load_tensors(tmp_path / "nothing.safetensors")
    one_line(error)


def test_tensors_are_written_from_where_they_are(tmp_path: Path) -> None:
    value = torch.arange(6.0, requires_grad=True)
    save_tensors(tmp_path / "x.safetensors", {"x": value * 2, "y": value.view(2, 3).T})
    found = load_tensors(tmp_path / "x.safetensors")
    assert torch.equal(found["x"], torch.arange(6.0) * 2)
    assert torch.equal(found["y"], torch.arange(6.0).view(2, 3).T)
    content = (tmp_path / "x.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header.keys() == {"__metadata__", "x", "y"}


# -- check_same --------------------------------------------------------------------------------------------------------


def test_check_same() -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.zeros(()), "c": torch.zeros(1)}
    path = Path("x/model.safetensors")
    check_same(path, "model", weights, dict(reversed(weights.items())))
    for found, words in (
        ({**weights, "a": torch.zeros(3, 2)}, r"a is \(3, 2\), expected \(2, 3\)"),
        ({k: weights[k] for k in "ab"}, r"c is missing, expected \(1,\)"),
        ({k: weights[k] for k in "ac"}, r"b is missing, expected \(\)"),
        ({**weights, "d": torch.zeros(5)}, r"d is \(5,\), expected nothing"),
        ({**weights, "d": torch.zeros(())}, r"d is \(\), expected nothing"),
    ):
        with pytest.raises(InputError, match=f"^x/model.safetensors: not a model of this model: {words}$"):
            check_same(path, "model", found, weights)
