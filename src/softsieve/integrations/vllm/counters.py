"""Counters of the plug-in: written by the worker, shown by vLLM's ``/metrics``, which is another process.

Each head of a worker keeps its numbers in a file of a folder that the first process of a server makes, and the others
find by a variable of the environment. When ``/metrics`` is asked, the numbers of all files are added up.
"""

from __future__ import annotations

import atexit
import itertools
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from softsieve.integrations.vllm.requests import Reason

FOLDER = "SOFTSIEVE_COUNTERS"  # the variable of the environment
_NUMBERS = itertools.count()  # of the files of this process: an engine with a draft model has two heads
_REASONS = tuple(Reason)
_FIELDS = 2 + len(_REASONS)  # answers, bytes, and tokens that took the exact head, by reason


class Counters:
    """What one worker counts. Without a folder, in its own memory.

    Example:
        >>> counters = Counters(None)
        >>> counters.add(answers=3, bytes_read=100)
        >>> counters.add_exact(Reason.PROMPT, 2)
        >>> counters.values()[:2], counters.exact()
        ((3, 100), {'prompt': 2})
    """

    def __init__(self, folder: str | None) -> None:
        size = 8 * _FIELDS
        if folder is None or not Path(folder).is_dir():
            self._memory: Any = bytearray(size)
            return
        with Path(folder, f"{os.getpid()}-{next(_NUMBERS)}.counters").open("w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)

    def _add(self, field: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * field, struct.unpack_from("q", self._memory, 8 * field)[0] + value)

    def add(self, *, answers: int, bytes_read: int) -> None:
        """Count tokens that the adaptive head answered, and what it read for them."""
        self._add(0, answers)
        self._add(1, bytes_read)

    def add_exact(self, reason: Reason, tokens: int) -> None:
        """Count tokens that took the exact head."""
        self._add(2 + _REASONS.index(reason), tokens)

    def values(self) -> tuple[int, ...]:
        """Answers, bytes, and tokens of the exact head by reason."""
        return struct.unpack_from(f"{_FIELDS}q", self._memory)

    def exact(self) -> dict[str, int]:
        """Tokens that took the exact head, by reason, where there were some."""
        return {reason.value: count for reason, count in zip(_REASONS, self.values()[2:], strict=True) if count}


def total(folder: str) -> tuple[int, ...]:
    """The sums over all workers."""
    sums = [0] * _FIELDS
    for path in Path(folder).glob("*.counters"):
        content = path.read_bytes()
        if len(content) == 8 * _FIELDS:
            sums = [one + more for one, more in zip(sums, struct.unpack(f"{_FIELDS}q", content), strict=True)]
    return tuple(sums)


def publish() -> None:
    """Make the folder, if no process did, and have Prometheus's registry show its sums."""
    if os.environ.get(FOLDER):
        return
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.core import CounterMetricFamily
    except ImportError:  # vLLM brings it; without, there is nobody who asks
        return
    folder = tempfile.mkdtemp(prefix="softsieve-")
    os.environ[FOLDER] = folder
    atexit.register(_remove, folder, os.getpid())

    class Collector:
        """What the registry asks."""

        def collect(self) -> Iterator[Any]:
            answers, bytes_read, *exact = total(folder)
            yield CounterMetricFamily("softsieve_answers", "Tokens that the adaptive head answered.", value=answers)
            yield CounterMetricFamily("softsieve_bytes_read", "Bytes that it read for them.", value=bytes_read)
            reasons = CounterMetricFamily("softsieve_exact", "Tokens that took the exact head.", labels=["reason"])
            for reason, count in zip(_REASONS, exact, strict=True):
                reasons.add_metric([reason.value], count)
            yield reasons

    REGISTRY.register(Collector())


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in a process that was forked
        shutil.rmtree(folder, ignore_errors=True)
