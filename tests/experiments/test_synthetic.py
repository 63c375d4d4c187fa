"""The synthetic sets are the paper's, and what is counted is counted right."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from experiments import synthetic
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax, TopK

D = 20_000


def made(name: str, d: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    return synthetic.instance(name, 10, d, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_pull_has_the_declared_variance(name: str) -> None:
    weight, x = made(name)
    assert weight.shape == (10, D)
    assert weight.dtype == x.dtype == torch.float32
    pulls = D * weight * x
    assert pulls[1:].var().item() == pytest.approx(synthetic.NOISE[name], rel=0.05)
    assert abs(pulls[1:].mean().item()) < 0.02


def test_the_first_row_of_set_one_stands_out_by_one() -> None:
    weight, x = made("one")
    assert x.eq(1).all()
    assert (weight[0] @ x).item() == pytest.approx(1, abs=0.02)
    assert (D * weight[0]).var().item() == pytest.approx(0.1, rel=0.05)


def test_the_query_of_set_two_is_the_signs_of_the_first_row() -> None:
    weight, x = made("two")
    assert x.abs().eq(1).all()
    assert torch.equal(weight[0] * x, weight[0].abs())
    assert (weight[0] @ x).item() == pytest.approx(math.sqrt(2 / math.pi), abs=0.02)


def test_exact_logits_are_those_of_the_float32_weight_in_float64() -> None:
    weight, x = made("two", 1000)
    expected = (weight.double() * x.double()).sum(1)
    torch.testing.assert_close(synthetic.exact_logits(weight, x, columns=333), expected, rtol=1e-12, atol=0)


def test_sizes_are_in_equal_ratios() -> None:
    sizes = synthetic.dimensions(20, 10**3, 10**6)
    assert (len(sizes), sizes[0], sizes[-1]) == (20, 10**3, 10**6)
    ratios = [big / small for small, big in pairwise(sizes)]
    assert max(ratios) / min(ratios) < 1.01
    assert synthetic.dimensions(1, 10**3, 10**4) == [10**4]
    with pytest.raises(InputError, match="max_d: expected at least min_d 1000, found 10"):
        synthetic.dimensions(2, 1000, 10)


def test_rows_say_what_was_read_and_how_often_it_was_right() -> None:
    shares: list[float] = []
    rows = synthetic.run(
        n=20, min_d=500, max_d=20_000, steps=2, trials=4, progress=lambda _, share: shares.append(share)
    )
    keys = [(row["set"], row["d"], row["chosen"]) for row in rows]
    assert keys == [(s, d, c) for s in ("one", "two") for d in (500, 20_000) for c in ("estimated", "read")]
    assert sum(shares) == pytest.approx(1)
    for row in rows:
        assert row["gain"] == pytest.approx(row["n"] * row["d"] / row["coordinates"])
        assert row["gain"] >= 1
        assert row["success"] >= 0.75  # of 4; the promise is 0.9
        assert row["trials"] == 4
    small, large = (row for row in rows if row["set"] == "one" and row["chosen"] == "estimated")
    assert large["gain"] > 3 * small["gain"]  # what is read grows less than d
    assert rows == synthetic.run(n=20, min_d=500, max_d=20_000, steps=2, trials=4)


def test_wrong_answers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AdaptiveSoftmax.topk
    answered: list[TopK] = []

    def wrong_every_other_time(self: AdaptiveSoftmax, *args: object, **kwargs: object) -> TopK:
        found = honest(self, *args, **kwargs)  # type: ignore[arg-type]
        wrong = len(answered) // 2 % 2  # both ways of an instance, so every other instance
        answered.append(found)
        return found._replace(probs=found.probs * (1 + wrong), coordinates=torch.tensor(100 * (1 + wrong)))

    monkeypatch.setattr(AdaptiveSoftmax, "topk", wrong_every_other_time)
    rows = synthetic.run(n=10, min_d=100, max_d=100, steps=1, trials=4, sets=["one"])
    assert len(answered) == 8
    for row in rows:
        assert row["success"] == 0.5
        assert row["coordinates"] == 150
        assert row["deviation"] == pytest.approx(math.sqrt(4 * 50**2 / 3))
        assert row["gain"] == pytest.approx(10 * 100 / 150)


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(InputError, match="set: expected one of one, two, found 'three'"):
        synthetic.run(sets=["three"])
