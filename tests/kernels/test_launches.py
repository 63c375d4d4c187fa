"""Launches without Triton's own questions: the same code for the same key, and Triton asked where it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from softsieve.kernels import launches


class Compiled:
    """What Triton returns of a launch."""

    packed_metadata = ()

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self.launched.append((grid, *args))


class Kernel:
    """Compiles at every launch, unless it is interpreted."""

    def __init__(self, *, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled | None]:
        def launch(*args: Any, num_warps: int) -> Compiled | None:
            self.compiled.append(Compiled())
            return None if self.interpreted else self.compiled[-1]

        return launch


def test_a_key_is_compiled_once() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    launch = launches.Launches(kernel)
    for key in ("a", "b", "a", "a"):
        launch(key, (x,), (2, 1, 1), x, key, num_warps=4)
    assert len(kernel.compiled) == 2
    assert kernel.compiled[0].launched == [((2, 1, 1), x, "a")] * 2
    assert not kernel.compiled[1].launched


def test_what_is_not_aligned_is_triton_s_to_look_at() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    launch = launches.Launches(kernel)
    for some in (x, x[1:], x[4:], x[1:]):
        launch("key", (x, some), (1, 1, 1), some, num_warps=1)
    assert len(kernel.compiled) == 3
    assert len(kernel.compiled[0].launched) == 1


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(interpreted=True)
    launch = launches.Launches(kernel)
    for _ in range(3):
        launch("key", (), (1, 1, 1), num_warps=1)
    assert len(kernel.compiled) == 3
    assert not launch.compiled


def test_keys_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MOST", 3)
    launch = launches.Launches(Kernel())
    for key in range(10):
        launch(key, (), (1, 1, 1), num_warps=1)
        assert len(launch.compiled) <= 3


def test_a_key_of_types_tells_apart_what_triton_does() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    launch = launches.Launches(kernel)
    others = [(x, 1), (x, 5), (x, 16), (x, 2**31), (x, 2.0), (x.half(), 16)]
    for args in (*others, (x, 7), (x, 32), (torch.ones(8), 3), (x, 3.0), *others):
        launch.by_types((1, 1, 1), args, (64,), num_warps=1)
    assert len(kernel.compiled) == len(others)
    launch.by_types((1, 1, 1), (x, 16), (128,), num_warps=1)
    launch.by_types((1, 1, 1), (x, 16), (64,), num_warps=2)
    assert len(kernel.compiled) == len(others) + 2
    assert [args[2:] for args in kernel.compiled[1].launched] == [(7, 64), (3, 64), (5, 64)]
