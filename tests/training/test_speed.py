"""AS-Speed: the rule itself, and the published one where both speak."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from as_sm import compute_accumulation_step
from softsieve.training import ASSpeed

LAMBDAS = st.floats(0.1, 4)
COUNTS = st.integers(1, 64).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


def speed(lam: float, most: int, steps: int) -> ASSpeed:
    made = ASSpeed(lam, most)
    made.load_state_dict({"steps": steps})
    return made


@pytest.mark.parametrize(
    ("lam", "steps", "solved", "expected"),
    [
        (1.0, 1, 0, 1),
        (1.0, 1, 16, 2),
        (1.0, 1, 10, 1),  # 32 / 22 rounds to 1
        (1.0, 1, 11, 2),  # 32 / 21 rounds to 2
        (1.0, 1, 31, 2),  # 32 wanted: one more at a time
        (1.0, 3, 31, 4),
        (1.0, 5, 31, 5),  # the most
        (1.0, 3, 0, 3),  # never fewer
        (0.25, 1, 16, 1),  # 0.5 rounds to 0
        (0.75, 1, 16, 1),  # 1.5, as every half, rounds down
        (1.25, 2, 16, 2),
        (1.75, 3, 16, 3),
        (3.0, 1, 0, 2),
        (1.0, 1, 32, 2),  # all solved: towards the most
        (0.01, 4, 32, 5),
    ],
)
def test_rule(lam: float, steps: int, solved: int, expected: int) -> None:
    made = speed(lam, 5, steps)
    assert made.update(solved, 32) == expected
    assert made.steps == expected


@given(LAMBDAS, st.integers(1, 9), st.lists(COUNTS, max_size=30))
def test_rises_by_at_most_one_and_never_falls_or_passes_the_most(
    lam: float, most: int, counts: list[tuple[int, int]]
) -> None:
    made = ASSpeed(lam, most)
    path = [1] + [made.update(solved, total) for solved, total in counts]
    assert all(after - before in (0, 1) for before, after in pairwise(path))
    assert max(path) <= most


@given(LAMBDAS, COUNTS)
def test_equals_the_published_rule_when_one_step_away(lam: float, counts: tuple[int, int]) -> None:
    solved, total = counts
    masked = torch.zeros(total, 3)
    masked[:solved, 1:] = -float("inf")
    *_, published = compute_accumulation_step(masked, lam)
    if solved < total:
        assert speed(lam, 1000, max(1, published - 1)).update(solved, total) == published
        assert speed(lam, 1000, published).update(solved, total) == published


@pytest.mark.parametrize("lam", [0.5, 1.0, 1.5, 2.0])
def test_a_half_is_rounded_down(lam: float) -> None:
    for total in range(1, 65):
        for solved in range(total):
            wanted = math.ceil(Fraction(lam) * total / (total - solved) - Fraction(1, 2))
            assert speed(lam, 1000, max(1, wanted - 1)).update(solved, total) == max(1, wanted)


def test_all_solved_arrives_at_the_most() -> None:
    made = ASSpeed(lam=0.001, max_steps=4)
    assert [made.update(8, 8) for _ in range(5)] == [2, 3, 4, 4, 4]


def test_state() -> None:
    first, second = ASSpeed(max_steps=4), ASSpeed(max_steps=4)
    first.update(31, 32)
    second.load_state_dict(first.state_dict())
    assert second.steps == 2
    assert first.update(31, 32) == second.update(31, 32) == 3
    with pytest.raises(ValueError, match=r"steps: expected an int in \[1, 2\], found 3"):
        ASSpeed(max_steps=2).load_state_dict(first.state_dict())


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="lam: expected a number in"):
        ASSpeed(lam=0)
    with pytest.raises(TypeError, match="lam: expected a number, found str"):
        ASSpeed(lam="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_steps: expected an int in"):
        ASSpeed(max_steps=0)
    with pytest.raises(ValueError, match=r"solved: expected an int in \[0, 32\], found 33"):
        ASSpeed().update(33, 32)
    with pytest.raises(ValueError, match="total: expected an int in"):
        ASSpeed().update(0, 0)
    made = ASSpeed(max_steps=4)
    with pytest.raises(TypeError, match="solved: expected an int, found float"):
        made.update(31.0, 32)  # type: ignore[arg-type]
    assert made.steps == 1
