"""Writes a file of every kind twice, the second time with no room for it: python -m tests.rough.starve FOLDER HOW."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from softsieve import AdaptiveSoftmax
from softsieve.training.checkpoint import save_checkpoint
from tests.training.helpers import Net, points, trainer

Write = Callable[[Path, int], None]  # a file or folder, with content that a number decides


def index(place: Path, number: int) -> None:
    AdaptiveSoftmax(torch.full((400, 20), float(number))).save(place / "index.safetensors")


def head(place: Path, number: int) -> None:
    from softsieve.integrations.head_file import write_head
    from softsieve.integrations.hidden_states import Head

    write_head(place / "head.safetensors", Head(torch.full((400, 20), 1.0 + number), None, 1.0, None, {}), notes={})


def checkpoint(place: Path, number: int) -> None:
    save_checkpoint(place, 3, {"step": 3}, {"model": {"a": torch.full((9000,), float(number))}}, keep=1)


def model(place: Path, number: int) -> None:
    from softsieve.training.checkpoint import save_tensors, write_folder

    def fill(part: Path) -> None:
        (part / "task.json").write_text(json.dumps({"number": number}))
        save_tensors(part / "model.safetensors", {"a": torch.full((9000,), float(number))})

    write_folder(place / "model", fill)


def record(place: Path, number: int) -> None:
    from softsieve._records import write_record

    write_record(place / "record.json", "tests", {"number": number}, [{"file": "a" * 9000, "passed": number}])


def table(place: Path, number: int) -> None:
    from softsieve.comparisons.output import write_table

    write_table(place / "table.csv", {"number": number}, [{"a": number, "b": row} for row in range(3000)])


def report(place: Path, number: int) -> None:
    from softsieve.report import write_report

    if number == 0:
        record(place.parent, 0)
    write_report([place.parent / "record.json"], place / "report.html", title=f"number {number}")


def picture(place: Path, number: int) -> None:
    from softsieve.tasks.metrics import confusion_matrix_png

    confusion_matrix_png(place / "confusion.png", torch.tensor([0, 1]), torch.tensor([0, number]), ["a", "b"])


def figure(place: Path, number: int) -> None:
    from softsieve.comparisons.output import new_figure, save_figure

    drawn = new_figure(3, 3)
    drawn.add_subplot().plot([0, number], [0, 1])
    save_figure(place / "figure", drawn)


def answers(place: Path, number: int) -> None:
    from softsieve._files import replace_file
    from softsieve.cli.answers import write_csv

    def fill(part: Path) -> None:
        with part.open("w", encoding="utf-8", newline="") as file:
            write_csv(file, [{"text": "a", "prediction": number}] * 3000, "|")

    replace_file(place / "answers.csv", fill)


KINDS: dict[str, Write] = {
    kind.__name__: kind for kind in (index, head, checkpoint, model, record, table, report, picture, figure, answers)
}


class Filling(Net):
    """After some steps the disk is full."""

    full: Any = None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + int(self.training)
        if self.calls == 8 and self.training:
            self.full.__enter__()
        return super().forward(features)


def training(place: Path, full: Any) -> None:
    net = Filling()
    net.full = full
    try:
        trainer(points(120), model=net, output=place, save_steps=3, logging_steps=1000).fit()
    finally:
        full.__exit__(None, None, None)


# -- no room -----------------------------------------------------------------------------------------------------------


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond a kilobyte: what a quota does, and a disk that fills up in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """To the last byte, of a small disk that is ours alone."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
        try:
            yield
        finally:
            file.truncate(0)
    ballast.unlink()


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_bytes().hex() for path in folder.rglob("*") if path.is_file()}


def attempt(write: Callable[[], None]) -> dict[str, Any]:
    """What a command would say of it."""
    from softsieve.cli.errors import _words

    try:
        write()
    except Exception as error:
        return {"type": type(error).__name__, "words": _words(error), "os": isinstance(error, OSError)}
    return {"type": None, "words": "", "os": False}


def main(folder: Path, how: str) -> None:
    results: dict[str, Any] = {}
    for name, write in KINDS.items():
        place = folder / name
        place.mkdir()
        write(place, 0)
        before = content(place)
        with small_files() if how == "limit" else full_disk(folder):
            results[name] = attempt(partial(write, place, 1))
        results[name] |= {"same": content(place) == before}
        results[name]["left"] = [path.name for path in place.rglob(".*")]
        write(place, 1)
        results[name]["later"] = content(place) != before  # there is room again
    place = folder / "training"
    full = small_files() if how == "limit" else full_disk(folder)
    results["training"] = attempt(lambda: training(place, full))
    results["training"]["left"] = [path.name for path in place.rglob(".*")]
    results["training"]["checkpoints"] = sorted(path.name for path in place.glob("checkpoint-*"))
    sys.stdout.write("\n" + json.dumps(results))


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(Path(sys.argv[1]), sys.argv[2])
