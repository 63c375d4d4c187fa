"""Memory stays flat over ten thousand queries and over a thousand steps of training, in a process of its own each.

After a warm-up, growth is measured in bytes that the process holds (what is free given back first) and in tensors
alive. The bounds fail for a leak of a kilobyte a query: at the end of each run it leaks that on purpose, which must
be seen.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softsieve import AdaptiveSoftmax, SolvedSampler, as_cross_entropy, linear_as_cross_entropy

CLEAN, LEAKING = 4, 1  # parts of a run
HOLES = 6000  # pieces of memory that are taken first, so that a leak has to be new memory
LEAK = 1000  # bytes an iteration that must be noticed


def note() -> dict[str, int]:
    """What there is now: bytes and tensors."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "tensors": tensors}


class Watch:
    """Called at every iteration: notes the state of things after each part, and leaks in the last ones."""

    def __init__(self, iterations: int) -> None:
        self.each = iterations // CLEAN
        self.done = -max(self.each, 300)
        self.notes: list[dict[str, int]] = []
        self.allocate = ctypes.CDLL(None).malloc

    def __call__(self) -> None:
        if self.done == CLEAN * self.each:
            self.notes.append(note())
        if self.done in (0, CLEAN * self.each):
            for _ in range(HOLES):
                self.allocate(LEAK)
        if self.done >= 0 and self.done % self.each == 0:
            self.notes.append(note())
        self.done += 1
        if self.done > CLEAN * self.each:
            self.allocate(LEAK)

    @property
    def over(self) -> bool:
        return len(self.notes) > 1 + CLEAN + LEAKING


def queries(watch: Watch) -> None:
    spread = torch.arange(1, 25) ** -0.5
    g = torch.Generator().manual_seed(0)
    head = AdaptiveSoftmax(torch.randn(2000, 24, generator=g) * spread, method="cascade", delta=0.1)
    states = 3 * torch.randn(1000, 24, generator=g) * spread
    head.calibrate(states, [1, 8], generator=g)
    turn = 0
    while not watch.over:
        watch()
        turn += 1
        head.topk(states[turn % 1000], 1 + turn % 8)
        if turn % 25 == 0:  # batches of changing size
            some = states[: 1 + turn % 37]
            head.topk(some)
            head.logits(some[:3])
            head.sample(some, top_k=4, generator=g)


def loss_loop(watch: Watch) -> None:
    """As in the README: a loader, a sampler that is told what is solved."""
    g = torch.Generator().manual_seed(0)
    target = torch.arange(600) % 5
    features = 3 * torch.randn(5, 16, generator=g)[target] + torch.randn(600, 16, generator=g)
    model, sampler = nn.Linear(16, 5), SolvedSampler(600)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.arange(600), features, target)
    while not watch.over:
        for index, x, y in torch.utils.data.DataLoader(data, batch_size=20, sampler=sampler):
            watch()
            loss, stats = as_cross_entropy(model(x), y, return_stats=True)
            sampler.update(index, stats.solved)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def linear_loop(watch: Watch) -> None:
    g = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(500, 16, generator=g))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    while not watch.over:
        watch()
        rows = 8 + watch.done % 5
        hidden = torch.randn(rows, 16, generator=g, requires_grad=True)
        loss, stats = linear_as_cross_entropy(hidden, weight, torch.arange(rows), return_stats=True)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert stats.kept.sum() > 0


def trainer_loop(watch: Watch) -> None:
    from tests.training.helpers import Net, points, trainer

    class Over(Exception):  # noqa: N818
        """Enough steps."""

    class Watched(Net):
        def forward(self, features: Tensor) -> Tensor:
            watch()
            if watch.over:
                raise Over
            return super().forward(features)

    settings: dict[str, Any] = {"epochs": 1000, "skip": "solved", "logging_steps": 500, "tolerance": 0.0}
    with suppress(Over):
        trainer(points(160, noise=0.5), model=Watched(), validation=points(40), **settings).fit(None)


LOOPS: dict[str, tuple[Callable[[Watch], None], int]] = {
    "queries": (queries, 10_000),
    "loss": (loss_loop, 1_600),
    "linear": (linear_loop, 1_600),
    "trainer": (trainer_loop, 1_600),
}


def measure(name: str) -> None:
    """What the process does: prints the notes."""
    torch.set_num_threads(1)
    loop, iterations = LOOPS[name]
    watch = Watch(iterations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop(watch)
    print(json.dumps(watch.notes))  # noqa: T201


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("name", LOOPS)
def test_memory_stays_flat(name: str) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tests.rough.test_memory import measure; measure(sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[2]), name],
        capture_output=True, text=True, check=False, env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notes: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    assert len(notes) == 2 + CLEAN + LEAKING
    each = LOOPS[name][1] // CLEAN
    _, settled, *_, clean = notes[: CLEAN + 1]  # the first part may still fill caches
    filled, *_, leaked = notes[CLEAN + 1 :]
    assert (clean["bytes"] - settled["bytes"]) / (each * (CLEAN - 1)) < LEAK / 2, notes
    assert clean["tensors"] - settled["tensors"] < each / 100, notes
    assert (leaked["bytes"] - filled["bytes"]) / (each * LEAKING) > LEAK / 2, notes  # it would have been seen
