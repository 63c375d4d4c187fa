"""Rows: a batch is what indexing gives, cut to its longest row."""

from __future__ import annotations

import pytest
import torch

from softsieve.tasks.rows import IGNORED, UNSEEN, LabelRows, Rows
from tests.training.helpers import flags, points, tokens


def test_batch_is_what_indexing_gives() -> None:
    rows, index = points(30), torch.tensor([7, 0, 7, 29])
    batch = rows.batch(index)
    assert len(rows) == 30
    assert torch.equal(batch.inputs["features"], rows.inputs["features"][index])
    assert torch.equal(batch.target, rows.target[index])


def test_batch_is_cut_to_its_longest_row() -> None:
    rows = tokens(30, longest=9)
    assert rows.lengths is not None
    index = (rows.lengths <= 4).nonzero().flatten()[:3]
    longest = int(rows.lengths[index].max())
    assert longest < 9
    batch = rows.batch(index)
    assert torch.equal(batch.inputs["features"], rows.inputs["features"][index, :longest])
    assert torch.equal(batch.target, rows.target[index, :longest])
    for positions in (6, 9):
        longer = rows.batch(index, positions=positions)
        assert torch.equal(longer.inputs["features"], rows.inputs["features"][index, :positions])
        assert torch.equal(longer.target, rows.target[index, :positions])


def test_rounded_positions_hold_every_row_and_are_few() -> None:
    lengths = torch.arange(1, 301)
    rows = Rows({}, torch.zeros(300), lengths=lengths)
    rounded = [rows.positions(torch.tensor([row]), rounded=True) for row in range(300)]
    assert all(length <= up <= max(8, 1.34 * length) or length < 25 for length, up in enumerate(rounded, 1))
    assert sorted(set(rounded)) == [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 300]
    assert rows.positions(torch.tensor([3, 11])) == 12
    assert rows.positions(torch.tensor([3, 11]), rounded=True) == 16
    assert points(5).positions(torch.arange(5), rounded=True) == 0


def test_only_sequences_are_cut() -> None:
    features, mask = torch.randn(4, 6), torch.ones(4, 6)
    rows = Rows(
        {"mask": mask, "features": features},
        torch.arange(4),
        lengths=torch.tensor([1, 2, 3, 6]),
        sequences=("mask",),
    )
    batch = rows.batch(torch.tensor([1, 0]))
    assert batch.inputs["mask"].shape == (2, 2)
    assert torch.equal(batch.inputs["features"], features[[1, 0]])
    assert batch.target.tolist() == [1, 0]


def test_to_keeps_everything() -> None:
    for rows in (points(5), tokens(5), flags(5)):
        moved = rows.to("cpu")
        assert torch.equal(moved.target, rows.target)
        assert moved.lengths is rows.lengths
        assert moved.sequences == rows.sequences


def test_fingerprint_tells_data_apart() -> None:
    made = {kind(20, seed=seed).fingerprint() for kind in (points, tokens, flags) for seed in (0, 1) for _ in range(2)}
    assert len(made) == 6
    rows = points(20)
    other = Rows({"features": rows.inputs["features"].clone()}, rows.target)
    other.inputs["features"][19, 5] += 1e-6
    assert other.fingerprint() != rows.fingerprint()
    renamed = Rows({"other": rows.inputs["features"]}, rows.target)
    assert renamed.fingerprint() != rows.fingerprint()
    half = Rows({"features": rows.inputs["features"].bfloat16()}, rows.target)
    assert half.fingerprint() != rows.fingerprint()


def test_rows_must_be_as_many_as_targets() -> None:
    with pytest.raises(ValueError, match="features: expected 4 rows, as many as targets, found 3"):
        Rows({"features": torch.zeros(3, 2)}, torch.zeros(4, dtype=torch.long))


def test_labels_that_training_has_not_seen_are_in_no_batch() -> None:
    target = torch.tensor([[1, UNSEEN], [UNSEEN, IGNORED]], dtype=torch.int32)
    rows = LabelRows({"x": torch.zeros(2, 1)}, target)
    assert rows.batch(torch.arange(2)).target.tolist() == [[1, IGNORED], [IGNORED, IGNORED]]
    assert rows.target is target
