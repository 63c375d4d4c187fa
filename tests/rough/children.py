"""What processes do that a test kills, starves or starts twice. Each says it has begun by making a file."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

from softsieve import AdaptiveSoftmax
from softsieve.training import checkpoint
from softsieve.training.loop import Trainer
from tests.training.helpers import Net, points, trainer

SKIPPING: dict[str, Any] = {"skip": "solved", "eval_batch_size": 32, "epochs": 5, "save_steps": 2, "logging_steps": 2}


def make_trainer(output: Path | None) -> Trainer:
    return trainer(
        points(120, noise=0.1),
        model=Net(dropout=0.2),
        validation=points(50, noise=0.1, seed=1),
        output=output,
        **SKIPPING,
    )


def train_slowly(output: Path, resume: Path | None) -> None:
    """Every file of a checkpoint takes its time, so most of it is spent writing them."""
    save = checkpoint.save_tensors

    def slow(path: Path, tensors: Any) -> None:
        save(path, tensors)
        time.sleep(0.005)

    checkpoint.save_tensors = slow
    make_trainer(output).fit(resume)
    (output / "done").touch()


def head_of(seed: int) -> AdaptiveSoftmax:
    """One of many, and large enough that writing it takes a moment."""
    weight = torch.randn(2000, 300, generator=torch.Generator().manual_seed(seed))
    return AdaptiveSoftmax(weight, seed=seed, method="exact")


def save_heads(path: Path) -> None:
    heads = [head_of(seed) for seed in range(2)]
    for head in itertools.cycle(heads):
        head.save(path)
        (path.parent / "begun").touch()


def build_and_calibrate(folder: Path) -> None:
    """`softsieve head build` and `head calibrate` in place, again and again."""
    from typer.testing import CliRunner

    from softsieve.cli import app

    head, index = str(folder / "head.safetensors"), str(folder / "index.safetensors")
    for number in itertools.count():
        done = CliRunner().invoke(
            app, ["head", "build", head, "--queries", head, "--out", index, "--seed", str(number)]
        )
        assert done.exit_code == 0, done.output
        (folder / "begun").touch()
        done = CliRunner().invoke(app, ["head", "calibrate", index, "--queries", head, "--all"])
        assert done.exit_code == 0, done.output


def write_records(folder: Path) -> None:
    from softsieve._records import write_record
    from softsieve.comparisons.output import write_table

    for number in itertools.count():
        rows = [{"number": number, "row": row} for row in range(2000)]
        write_record(folder / "a.json", "tests", {"number": number}, rows)
        write_table(folder / "a.csv", {"number": number}, rows)
        (folder / "begun").touch()


def write_reports(folder: Path) -> None:
    from softsieve.report import write_report

    for number in itertools.count():
        write_report([folder / "record.json"], folder / "report.html", title=f"number {number}")
        (folder / "begun").touch()


def fill_with(text: str) -> Any:
    def fill(part: Path) -> None:
        for name in "abc":
            (part / name).write_text(text)

    return fill


def killed_at_a_move(folder: Path, number: int, exchange: bool) -> None:
    """Replaces a folder, and is killed before the move of that number."""
    from softsieve import _files

    moves = itertools.count()

    def stop_at(move: Any) -> Any:
        def moving(*args: Any) -> Any:
            if next(moves) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return move(*args)

        return moving

    Path.replace = stop_at(Path.replace)  # type: ignore[method-assign]
    _files._remove = stop_at(_files._remove)
    _files._exchanged = stop_at(_files._exchanged) if exchange else lambda one, other: False
    checkpoint.write_folder(folder, fill_with("new"))
    os._exit(0)


def removes_checkpoints(output: Path) -> None:
    """Is killed while it takes the old ones away."""
    import shutil

    def half(path: Any, **_: Any) -> None:
        for file in Path(path).rglob("*.safetensors"):
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = half  # type: ignore[assignment]
    checkpoint.save_checkpoint(output, 15, {"step": 15}, {"model": {"a": torch.ones(2)}}, keep=1)


def holds(folder: Path) -> None:
    """A process that works in a folder until it is killed."""
    from softsieve._files import only_one

    with only_one(folder, "training"):
        (folder / "begun").touch()
        time.sleep(600)


def pause(random: Random, longest: float) -> None:
    time.sleep(random.uniform(0, longest))


def command(*words: str) -> list[str]:
    """`softsieve` in this environment."""
    return [sys.executable, "-c", "from softsieve.cli import main; main()", *words]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


# -- at the same time --------------------------------------------------------------------------------------------------


def together(folder: Path, name: str, others: int) -> None:
    """Wait until so many have come here."""
    (folder / f"here-{name}").touch()
    deadline = time.monotonic() + 120
    while len(list(folder.glob("here-*"))) < others and time.monotonic() < deadline:
        time.sleep(0.001)


def run_command(words: list[str], folder: Path, name: str) -> None:
    """A command of the project beside another one; exit code and words go to a file."""
    from typer.testing import CliRunner

    from softsieve.cli import app

    together(folder, name, 2)
    done = CliRunner().invoke(app, words)
    said = done.output + ("" if done.exception is None else repr(done.exception))
    (folder / f"said-{name}").write_text(json.dumps([done.exit_code, said]))


def save_many(path: Path, seed: int, times: int) -> None:
    head = head_of(seed)
    together(path.parent, str(seed), 3)
    for _ in range(times):
        head.save(path)


def fill_many(folder: Path, text: str, times: int) -> None:
    together(folder.parent, text, 3)
    for _ in range(times):
        checkpoint.write_folder(folder, fill_with(text))


def report_many(folder: Path, title: str, times: int) -> None:
    from softsieve.report import write_report

    together(folder, title, 2)
    for _ in range(times):
        write_report([folder / "record.json"], folder / "report.html", title=title)
