"""Errors of the estimators, measured on data whose answers are known; and the inputs of the experiments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import variance
from experiments.variance import Instance
from softsieve.errors import InputError
from softsieve.heads.coordinates.estimators import ESTIMATORS, Estimate

PARTS = ("calibration", "test")


def test_there_is_a_row_for_every_estimator_rotation_and_size() -> None:
    found = variance.instances(n=30, d=100, queries=20)
    assert [instance.name for instance in found] == ["gaussian", "heavy-tailed"]
    shares: list[float] = []
    rows = variance.run(found, shares=3, repeats=4, progress=lambda _, share: shares.append(share))
    keys = {(row["data"], row["estimator"], row["rotated"], row["size"]) for row in rows}
    assert len(keys) == len(rows) == 2 * len(ESTIMATORS) * 2 * 3
    assert {row["size"] for row in rows} == {25, 50, 100}
    assert sum(shares) == pytest.approx(1)
    for row in rows:
        if row["size"] < row["d"]:
            assert row["variance"] == pytest.approx(row["mse"], rel=0.5)  # estimates of variance are unbiased
        elif row["estimator"].endswith("without") and row["rotated"] == "no":
            assert row["mse"] < 1e-10 * row["mean_square"]
    by = {(row["data"], row["estimator"], row["rotated"], row["size"]): row["mse"] for row in rows}
    best, plain = (by["heavy-tailed", name, "no", 25] for name in ("importance-without", "uniform-with"))
    assert best < 0.7 * plain


def test_errors_are_measured_against_the_exact_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_off(weight: torch.Tensor, x: torch.Tensor, size: int, **_: object) -> Estimate:
        return Estimate(x @ weight.T + 2, torch.full((len(x), len(weight)), 0.5 * size))

    monkeypatch.setitem(ESTIMATORS, "uniform-with", two_off)
    monkeypatch.setattr(variance, "MOST_TERMS", 100)  # a query at a time
    row = variance.run(variance.instances(n=5, d=16, queries=6), shares=1)[0]
    assert row["estimator"] == "uniform-with"
    assert row["mse"] == pytest.approx(4, rel=1e-5)
    assert row["mse_error"] == pytest.approx(0, abs=1e-5)
    assert row["variance"] == 8


def test_rotation_leaves_the_logits_as_they_are() -> None:
    instance = variance.instances(n=5, d=12, queries=6)[0]
    turned = variance.rotated(instance, generator=torch.Generator().manual_seed(0))
    assert turned.weight.shape == (5, 16)
    torch.testing.assert_close(turned.queries @ turned.weight.T, instance.queries @ instance.weight.T)


def test_made_up_entries_have_one_deviation_and_different_tails() -> None:
    gaussian, heavy = variance.instances(n=400, d=1000, queries=2)
    for instance in (gaussian, heavy):
        assert (instance.weight * 1000**0.5).std().item() == pytest.approx(1, rel=0.1)
    assert heavy.weight.abs().max() > 3 * gaussian.weight.abs().max()


@pytest.fixture
def head(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    torch.manual_seed(0)
    states = {f"{text}.{part}": torch.randn(rows, 12) for text, rows in (("a", 8), ("b", 9)) for part in PARTS}
    save_file({"weight": torch.randn(40, 12, dtype=torch.bfloat16), **states}, path, metadata={"beta": "2.0"})
    return path


def test_a_head_is_read_with_the_test_states_of_a_text(head: Path) -> None:
    first = variance.real(head)
    tensors = load_file(head)
    assert first.name == "small a"
    assert torch.equal(first.weight, tensors["weight"].float())
    assert torch.equal(first.queries, 2 * tensors["a.test"])
    assert torch.equal(variance.real(head, corpus="b").queries, 2 * tensors["b.test"])


def test_states_may_be_in_a_file_of_their_own(head: Path, tmp_path: Path) -> None:
    save_file({f"mine.{part}": torch.ones(2, 12) for part in PARTS}, tmp_path / "queries.safetensors")
    assert variance.real(head, tmp_path / "queries.safetensors").queries.eq(2).all()


def test_some_rows_and_queries_of_a_head_are_drawn(head: Path) -> None:
    *_, part = variance.instances(n=5, d=4, queries=3, head=head, head_rows=7)
    assert (part.weight.shape, part.queries.shape) == ((7, 12), (3, 12))
    whole = variance.real(head)
    for few, all_of_them in ((part.weight, whole.weight), (part.queries, whole.queries)):
        assert len({tuple(row) for row in few.tolist()} & {tuple(row) for row in all_of_them.tolist()}) == len(few)
    *_, full = variance.instances(n=5, d=4, queries=100, head=head)
    assert (full.weight.shape, full.queries.shape) == ((40, 12), (8, 12))


def test_bad_heads_are_refused(head: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"small\.safetensors: expected 'c', found 'a', 'b'"):
        variance.real(head, corpus="c")
    save_file({"weight": torch.ones(2, 12)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"w\.safetensors: expected some text, found none"):
        variance.real(tmp_path / "w.safetensors")
    with pytest.raises(InputError, match="head: expected with queries of its own"):
        variance.instances(n=5, d=4, queries=3, queries_file=head)


def test_a_size_of_one_can_be_drawn() -> None:
    rows = variance.run([Instance("tiny", torch.ones(2, 1), torch.ones(3, 1))], repeats=1)
    assert {row["size"] for row in rows} == {1}
    assert len(variance.draw(rows).axes) == 2
