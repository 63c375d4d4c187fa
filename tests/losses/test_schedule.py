"""DeltaSchedule against its table."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softsieve import DeltaSchedule, reference

share = st.floats(0, 1)


@given(share, share, share, st.integers(1, 200), st.sampled_from(["linear", "cosine"]))
def test_agrees_with_the_reference(final: float, initial: float, ratio: float, total: int, shape: str) -> None:
    schedule = DeltaSchedule(final=final, initial=initial, ratio=ratio, total_steps=total, shape=shape)
    table = reference.delta_table(final, initial, ratio, total, shape)
    assert [schedule(step) for step in range(total)] == pytest.approx(table, abs=1e-9)


@given(share, share, st.floats(0.01, 1), st.sampled_from(["linear", "cosine"]))
def test_comes_down_and_stays(one: float, other: float, ratio: float, shape: str) -> None:
    final, initial = sorted((one, other))
    schedule = DeltaSchedule(final=final, initial=initial, ratio=ratio, total_steps=500, shape=shape)
    values = [schedule(step) for step in range(501)]
    assert values[0] == initial
    assert values[-1] == final
    assert all(a >= b - 1e-12 for a, b in pairwise(values))
    assert schedule(10_000) == final


def test_ratio_zero_is_constant_and_needs_no_length() -> None:
    assert [DeltaSchedule(final=0.2)(step) for step in (0, 1, 100)] == [0.2, 0.2, 0.2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"final": 1.5}, ValueError, r"final: expected a number in \[0, 1\], found 1.5"),
        ({"initial": -1}, ValueError, "initial: expected"),
        ({"ratio": float("nan")}, ValueError, "ratio: expected .* found nan"),
        ({"ratio": "half"}, TypeError, "ratio: expected a number, found str"),
        ({"ratio": 0.5}, ValueError, "total_steps: expected a number of steps for ratio=0.5, found None"),
        ({"ratio": 0.5, "total_steps": 0}, ValueError, "total_steps: expected"),
        ({"shape": "square"}, ValueError, "shape: expected one of 'linear', 'cosine', found 'square'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DeltaSchedule(**options)


def test_bad_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="step: expected"):
        DeltaSchedule()(-1)
