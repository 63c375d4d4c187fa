"""Ctrl-C while training: a checkpoint of the step under way, and the command that goes on from there."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from softsieve.training.checkpoint import checkpoints


@contextmanager
def stopping(console: Console, output: Path) -> Iterator[Callable[[], bool]]:
    """What says whether Ctrl-C has been pressed; pressed again, it stops at once.

    A KeyboardInterrupt says how to go on, where there is a checkpoint to go on from.
    """
    asked = threading.Event()

    def ask(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        console.print("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, ask) if ours else None
    try:
        yield asked.is_set
    except KeyboardInterrupt:
        if checkpoints(output):
            raise KeyboardInterrupt(f"to go on: {resuming(output)}") from None
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def resuming(output: Path) -> str:
    """The command that goes on with the run in a folder.

    Example:
        >>> resuming(Path("my run"))
        "softsieve train --config 'my run/options.json' --out 'my run' --resume"
    """
    said = str(output / "options.json")
    return shlex.join(["softsieve", "train", "--config", said, "--out", str(output), "--resume"])
