"""Answers are judged by what was promised."""

from __future__ import annotations

import pytest
import torch

from softsieve.reference.answers import is_right

LOGITS = torch.tensor([[2.0, 1.0, 0.0, 1.0], [0.0, 0.0, 3.0, -1.0]], dtype=torch.float64)
P = LOGITS.softmax(-1)


@pytest.mark.parametrize(
    ("indices", "factor", "expected"),
    [
        ([[0], [2]], 1.0, [True, True]),
        ([[0], [2]], 1.29, [True, True]),
        ([[0], [2]], 1.31, [False, False]),
        ([[0], [2]], 0.69, [False, False]),
        ([[1], [2]], 1.0, [False, True]),
        ([[0, 1], [2, 0]], 1.0, [True, True]),
        ([[0, 3], [2, 1]], 1.0, [True, True]),  # tied with the ones above
        ([[0, 2], [2, 3]], 1.0, [False, False]),
        ([[1, 3], [0, 1]], 1.0, [False, False]),  # without the best
        ([[0, 0], [2, 2]], 1.0, [False, False]),
        ([[0, 1, 3], [2, 0, 0]], 1.0, [True, False]),  # the value is right, the row is there twice
    ],
)
def test_an_answer_is_right_when_values_and_probabilities_are(
    indices: list[list[int]], factor: float, expected: list[bool]
) -> None:
    chosen = torch.tensor(indices)
    probs = (factor * P.gather(-1, chosen)).float()
    assert is_right(chosen, probs, LOGITS, eps=0.3).tolist() == expected


def test_every_probability_of_an_answer_counts() -> None:
    chosen = torch.tensor([0, 1])
    probs = P[0, :2] * torch.tensor([1.0, 1.5])
    assert not is_right(chosen, probs, LOGITS[0], eps=0.3)
    assert not is_right(chosen, torch.full((2,), torch.nan), LOGITS[0], eps=0.3)


def test_rounding_is_allowed_for_in_values_and_in_probabilities() -> None:
    exact = torch.tensor([1.0, 1.0 + 1e-4, -200.0], dtype=torch.float64)
    probs = exact.softmax(-1)
    chosen = torch.tensor([0])
    assert not is_right(chosen, probs[:1], exact, eps=0.1)
    assert is_right(chosen, probs[:1], exact, eps=0.1, rounding=1e-3)
    assert is_right(torch.tensor([0]), 1.1005 * probs[:1], exact, eps=0.1, rounding=1e-3)
    assert not is_right(torch.tensor([0]), 1.102 * probs[:1], exact, eps=0.1, rounding=1e-3)
    all_three = torch.tensor([1, 0, 2])
    assert is_right(all_three, probs[all_three].float().where(all_three < 2, 0.0), exact, eps=0.1)  # it underflows
