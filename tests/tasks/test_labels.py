"""Many labels a row: numbers, flags and ranks, and their figures of merit against values by hand and scikit-learn's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, ndcg_score

from softsieve.tasks import labels
from softsieve.tasks.labels import (
    best_logits,
    fit_threshold,
    label_flags,
    label_metrics,
    propensities,
    rank_labels,
)


def numbers(flags: torch.Tensor) -> torch.Tensor:
    """Flags as padded numbers, with a column more than is needed."""
    out = torch.full((len(flags), int(flags.sum(1).max()) + 1), -100)
    for row, some in enumerate(flags):
        found = some.nonzero().flatten().flip(0)
        out[row, : len(found)] = found
    return out


def make(rows: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator)
    return logits, torch.rand(rows, classes, generator=generator) < torch.linspace(0.05, 0.5, classes)


def test_values_by_hand() -> None:
    target = torch.tensor([[0, 2], [-100, -100], [1, 0]])
    ranked = torch.tensor([[0, ~1, ~2], [~2, ~1, ~0], [2, 1, 0]])
    # 3 found of 4, one too many: micro 2 * 3 / (4 + 4); the third label is never right.
    found = label_metrics(ranked, target, 3)
    first, second = 1 + 1 / math.log2(3), 1 / math.log2(3) + 0.5  # gained by places 1 and 2, and by 2 and 3
    expected = {
        "micro_f1": 0.75, "macro_f1": 2 / 3, "exact_match": 1 / 3, "p@1": 0.5, "p@3": 4 / 6, "p@5": 4 / 10,
        "ndcg@5": ((1 + 0.5) / first + second / first) / 2,
    }  # fmt: skip
    assert found == pytest.approx(expected)
    weighted = label_metrics(ranked, target, 3, propensity=torch.tensor([0.5, 0.25, 0.2]))
    assert {name: weighted[name] for name in expected} == found
    # Weights 2, 4 and 5: gained 2 + 0 of 5 + 4 at the first place, all of (5 + 2) + (4 + 2) at the third.
    assert weighted["psp@1"] == pytest.approx(2 / 9)
    assert weighted["psp@3"] == weighted["psp@5"] == pytest.approx(1)
    assert all(type(value) is float for value in weighted.values())


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 100))
def test_as_scikit_learn_has_it(rows: int, classes: int, seed: int) -> None:
    logits, flags = make(rows, classes, seed)
    found = label_metrics(rank_labels(logits), numbers(flags), classes)
    for average in ("micro", "macro"):
        expected = f1_score(flags.numpy(), (logits > 0).numpy(), average=average, zero_division=0)
        if classes > 1:  # one column is taken for two classes
            assert found[f"{average}_f1"] == pytest.approx(expected)
    assert found["exact_match"] == pytest.approx(float(((logits > 0) == flags).all(1).double().mean()))
    some = flags.any(1)
    if some.any() and classes > 1:
        assert found["ndcg@5"] == pytest.approx(ndcg_score(flags[some].numpy(), logits[some].numpy(), k=5))
    first = flags[some].gather(1, logits[some].argmax(1, keepdim=True))
    assert found["p@1"] == pytest.approx(float(first.double().mean()) if some.any() else 0)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, flags = make(50, 12)
    ranked, target = rank_labels(logits), numbers(flags)
    whole = labels._find(ranked, target)
    assert torch.equal(labels._find(ranked, target, block=200), whole)
    assert torch.equal(whole.sum(1), flags.sum(1))


def test_only_so_many_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "RANKED", 4)
    logits, _ = make(20, 9)
    ranked = rank_labels(logits)
    assert ranked.shape == (20, 4)
    for row, some in zip(logits.tolist(), ranked.tolist(), strict=True):
        best = sorted(range(9), key=lambda i: -row[i])[:4]
        assert some == [i if row[i] > 0 else ~i for i in best]


def test_flags_and_back() -> None:
    _, flags = make(20, 7)
    flags[0], flags[1] = False, True
    assert torch.equal(label_flags(numbers(flags), 7), flags)
    assert torch.equal(label_flags(numbers(flags).int(), 7), flags)


def test_rare_labels_have_small_propensities() -> None:
    found = propensities(torch.tensor([0, 1, 10, 1000, 10**6]), 10**6)
    assert found.tolist() == sorted(found.tolist())
    scale = (math.log(10**6) - 1) * 2.5**0.55
    assert found[2] == pytest.approx(1 / (1 + scale * math.exp(-0.55 * math.log(11.5))))
    assert 0 < found[0] < 0.1
    assert found[-1] > 0.98


def test_nothing_at_all_is_zero() -> None:
    found = label_metrics(torch.tensor([[~0, ~1]]), torch.tensor([[-100]]), 2, propensity=torch.ones(2))
    assert found.pop("exact_match") == 1
    assert set(found.values()) == {0.0}


def test_a_threshold_is_the_best_there_is() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 6, generator=generator)
    target = torch.randint(6, (40, 1), generator=generator)
    fitted = fit_threshold(best_logits(logits), target)

    def judge(edge: float, least: int) -> float:
        return label_metrics(rank_labels(logits - edge, least=least), target, 6)["micro_f1"]

    assert judge(fitted.logit, fitted.least) == pytest.approx(fitted.micro_f1)
    every = [judge(edge, least) for edge in torch.linspace(-4, 4, 201).tolist() for least in (0, 1)]
    assert fitted.micro_f1 >= max(every) - 1e-9


def test_rows_get_their_best_label_where_that_helps() -> None:
    logits = torch.tensor([[5.0, 4.0, 4.0], [-5.0, -6.0, -6.0]])
    fitted = fit_threshold(best_logits(logits), torch.tensor([[0], [0]]))
    assert fitted.least == 1
    assert rank_labels(logits - fitted.logit, least=1)[:, 0].tolist() == [0, 0]
    assert (rank_labels(logits - fitted.logit, least=1)[:, 1:] < 0).all()
    empty = fit_threshold(best_logits(logits), torch.tensor([[-100], [-100]]))
    assert empty.least == 0


@pytest.mark.parametrize(("labels", "taken"), [([[-100], [-100]], 0), ([[0, 1], [0, 1]], 4)])
def test_a_threshold_below_or_above_all_logits(labels: list[list[int]], taken: int) -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.5]])
    fitted = fit_threshold(best_logits(logits), torch.tensor(labels))
    assert (rank_labels(logits - fitted.logit, least=fitted.least) >= 0).sum() == taken
