"""The published interface: what its README prints, and the inputs on which the published code breaks."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import as_sm
from as_sm import AS_Softmax, Multi_label_AS_Softmax, compute_accumulation_step

INF = float("inf")
LOGITS = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3], [2.5, 3.5, 0.4, 0.3]])
LABELS = torch.tensor([1, 2, -100])
FLAGS = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]])
MASKED = torch.tensor([[-INF, 1.5, -INF, -INF], [2.5, 3.5, 0.4, 0.3], [2.5, 3.5, -INF, -INF]])


def test_single_label_readme_example() -> None:
    logits, labels = AS_Softmax(delta=0.10)(LOGITS, LABELS)
    assert torch.equal(logits, MASKED)
    assert torch.equal(labels, LABELS)


def test_token_shapes_are_flattened() -> None:
    logits, labels = AS_Softmax(0.10)(LOGITS.view(1, 3, 4), LABELS.view(1, 3))
    assert torch.equal(logits, MASKED)
    assert torch.equal(labels, LABELS)


def test_the_usual_script_trains_with_it() -> None:
    x = LOGITS.clone().requires_grad_()
    logits, labels = AS_Softmax(0.10)(x, LABELS)
    loss = F.cross_entropy(logits, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    assert x.grad is not None
    assert x.grad[0].tolist() == [0, 0, 0, 0]
    assert (x.grad[1] != 0).all()


def test_multilabel_readme_example() -> None:
    softmax = Multi_label_AS_Softmax(delta=0.10)
    mask_neg, mask_pos = softmax(LOGITS, FLAGS)
    p = LOGITS.softmax(-1)
    for row, flags, neg, pos in zip(p, FLAGS.bool(), mask_neg, mask_pos, strict=True):
        assert torch.equal(neg, row[flags].min() - row <= 0.10)
        assert torch.equal(pos, row - row[~flags].max() <= 0.10)
    loss = softmax.as_multilabel_categorical_crossentropy(LOGITS, FLAGS, mask_neg, mask_pos)
    assert f"{loss:.4f}" == "2.0778"


def test_accumulation_steps_as_published() -> None:
    assert compute_accumulation_step(MASKED, 1, True) == (1, 5, 1)  # 3 / 2, a half, which is rounded down
    assert compute_accumulation_step(MASKED, 2.0) == (1, 5, 3)
    assert compute_accumulation_step(MASKED, 0.1) == (1, 5, 1)
    assert compute_accumulation_step(MASKED, 5.0, False) == (1, 5, 1)
    assert compute_accumulation_step(LOGITS.view(1, 3, 4), 1) == (0, 0, 1)


@pytest.mark.parametrize("lamb", [0.5, 1.0, 1.5, 2.0])
def test_halves_are_rounded_down_as_published(lamb: float) -> None:
    """Against the formula in exact numbers: with 1e-8 more rows below the line no half stays one."""
    for samples in range(1, 33):
        masked = torch.zeros(samples, 3)
        for solved in range(samples):
            exact = Fraction(lamb) * samples / (samples - solved)
            down = max(1, math.ceil(exact - Fraction(1, 2)))
            assert compute_accumulation_step(masked, lamb) == (solved, 2 * solved, down)
            masked[solved, 1:] = -INF


def test_the_margin_of_the_module_is_the_default() -> None:
    assert as_sm.delta == 0.10
    assert AS_Softmax().delta == Multi_label_AS_Softmax().delta == as_sm.delta


def test_all_rows_solved_is_no_reason_for_200_million_steps() -> None:
    solved = torch.full((8, 4), -INF)
    solved[:, 1] = 1.0
    assert compute_accumulation_step(solved, 1) == (8, 24, 8)


@pytest.mark.parametrize("size", [100.0, 1e30])
def test_large_logits_do_not_overflow(size: float) -> None:
    softmax = Multi_label_AS_Softmax(delta=0.10)
    logits, flags = torch.tensor([[size, 0.0, -size]]), torch.tensor([[0, 1, 0]])
    loss = softmax.as_multilabel_categorical_crossentropy(logits, flags, *softmax(logits, flags))
    torch.testing.assert_close(loss, torch.tensor(size) + torch.tensor(2.0).log())
    masked, _ = AS_Softmax(0.10)(logits, torch.tensor([0]))
    assert torch.equal(masked, torch.tensor([[size, -INF, -INF]]))


def test_strides_do_not_matter() -> None:
    logits, labels = AS_Softmax(0.10)(LOGITS.T.contiguous().T, LABELS)
    assert torch.equal(logits, MASKED)
    assert torch.equal(labels, LABELS)
    wide = MASKED.repeat_interleave(2, 0)[::2]
    assert compute_accumulation_step(wide.T.contiguous().T, 1) == (1, 5, 1)


def test_rows_without_positives_or_negatives_keep_all() -> None:
    softmax = Multi_label_AS_Softmax(delta=0.10)
    logits, flags = torch.tensor([[3.0, -1.0], [3.0, -1.0]]), torch.tensor([[0, 0], [1, 1]])
    mask_neg, mask_pos = softmax(logits, flags)
    assert mask_neg[0].all()
    assert mask_pos[1].all()
    loss = softmax.as_multilabel_categorical_crossentropy(logits, flags, mask_neg, mask_pos)
    truth = (torch.log1p(logits[0].exp().sum()) + torch.log1p((-logits[1]).exp().sum())) / 2
    torch.testing.assert_close(loss, truth)


def test_float_labels_serve() -> None:
    softmax = Multi_label_AS_Softmax(delta=0.10)
    masks = softmax(LOGITS, FLAGS.float())
    loss = softmax.as_multilabel_categorical_crossentropy(LOGITS, FLAGS.float(), *masks)
    assert f"{loss:.4f}" == "2.0778"


@pytest.mark.parametrize("delta", [-0.1, 1.1, float("nan")])
def test_a_bad_margin_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta: expected a number in"):
        AS_Softmax(delta)(LOGITS, LABELS)
    with pytest.raises(ValueError, match="delta: expected a number in"):
        Multi_label_AS_Softmax(delta)(LOGITS, FLAGS)


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="target: expected shape"):
        Multi_label_AS_Softmax(0.1)(LOGITS, FLAGS[:2])
