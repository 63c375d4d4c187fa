"""What a run says while it goes: a progress bar or, without a terminal, a line now and then; a log and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from softsieve.errors import InputError

LEAST_SHARE, LEAST_SECONDS = 0.01, 10.0  # of training, and of time, between two lines of progress


class Journal:
    """Collects the figures of a run; only the main process has one with an ``output`` folder to write to.

    ``after`` has the step and the number of log lines of the checkpoint that a resumed run goes on from: what was
    logged later is about to be logged again, and dropped.
    """

    def __init__(
        self, output: Path | None, *, show: bool = True, console: Console | None = None,
        after: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.file = None
        self.board: Any = None
        self.lines: list[dict[str, Any]] = []
        if output is not None:
            try:
                output.mkdir(parents=True, exist_ok=True)
                path = output / "log.jsonl"
                if after is not None and path.exists():
                    self.lines = _whole_lines(path)[: after[1]]
                part = path.with_name(".log.jsonl.part")
                part.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
                part.replace(path)
                self.file = path.open("a", buffering=1)
            except OSError as error:
                raise InputError(f"{output}: cannot be written: {error}") from error
            self.board = _tensorboard(output, None if after is None else after[0] + 1)
        self.console = (console or get_console()) if show else None
        terminal = self.console is not None and self.console.is_terminal
        columns = "{task.description}", BarColumn(bar_width=20), "{task.percentage:3.0f}%"
        left = TimeRemainingColumn(compact=True)
        self.bar = Progress(*columns, left, console=console, disable=not terminal, transient=True)
        self.task = self.bar.add_task("starting", total=1.0)
        self.shown: dict[str, str] = {}
        self.bar.start()
        self.since, self.samples = time.perf_counter(), 0
        self.told = (0.0, self.since)  # progress and time of the latest line, where there is no terminal for a bar

    def write(self, step: int, kind: str, **figures: float) -> None:
        """One line of the log: what ``kind`` of figures, at which step."""
        line = {"step": step, "kind": kind, **figures}
        self.lines.append(line)
        if self.file is None:
            return
        place = self.file.name
        try:
            self.file.write(json.dumps(line) + "\n")
            if self.board is not None:
                place = self.board.log_dir
                for name, value in figures.items():
                    self.board.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:
            raise InputError(f"{place}: cannot be written: {error}") from error

    def advance(self, progress: float, samples: int, **shown: str) -> None:
        """Move the bar to ``progress`` in [0, 1], with ``samples`` more done and whatever there is to show."""
        self.samples += samples
        self.shown |= shown
        rate = self.samples / max(time.perf_counter() - self.since, 1e-9)
        words = "  ".join(f"{name} {value}" for name, value in self.shown.items())
        self.bar.update(self.task, completed=progress, description=f"{words}  {rate:.0f} samples/s")
        if self.console is not None and not self.console.is_terminal:
            now = time.perf_counter()
            if progress >= self.told[0] + LEAST_SHARE and now >= self.told[1] + LEAST_SECONDS:
                self.told = progress, now
                self.console.print(f"{progress:4.0%}  {words}  {rate:.0f} samples/s, {now - self.since:.0f} s")

    def close(self) -> None:
        """Take the bar away and close the files."""
        self.bar.stop()
        for opened in (self.file, self.board):
            if opened is not None:
                with contextlib.suppress(OSError):  # what could not be written has been said
                    opened.close()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without a last one cut short by a crash."""
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
            valid = all(isinstance(value, str if name == "kind" else (int, float)) for name, value in entry.items())
        except (AttributeError, ValueError, RecursionError):
            break
        if not valid:
            break
        lines.append(entry)
    return lines


def _tensorboard(output: Path, purge_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the package tensorboard is an extra
        return None
    # Its thread may sleep so long when Ctrl-C came while it was being told of a line: two minutes unless said.
    return SummaryWriter(str(output / "tensorboard"), purge_step=purge_step, flush_secs=10)
