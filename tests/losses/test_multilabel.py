"""as_multilabel_loss against the reference, the plain loss and the paper's example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from softsieve import MultiLabelStats, as_multilabel_loss, reference
from softsieve.losses.multilabel import multilabel_rows
from tests.helpers import default_dtype

INF, NAN = float("inf"), float("nan")
LOGITS = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3], [2.5, 3.5, 0.4, 0.3]])
TARGET = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]])
RULES = ["labels", "threshold"]


def make(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Rows of all kinds, with the first without positives and the second without negatives."""
    target = (torch.rand(rows, classes) < 0.3).long()
    target[0], target[1 % rows] = 0, 1
    return torch.randn(rows, classes, dtype=torch.float64) * 2 + 3 * target * torch.rand(rows, 1), target


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (57, 13), (31, 205)])
@pytest.mark.parametrize("delta", [0.0, 0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("against", RULES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_agrees_with_the_reference(shape: tuple[int, int], delta: float, against: str, reduction: str) -> None:
    logits, target = make(*shape)
    results = []
    for loss in (as_multilabel_loss, reference.as_multilabel_loss):
        x = logits.clone().requires_grad_()
        value = loss(x, target, delta=delta, against=against, reduction=reduction)
        results.append((value.detach(), torch.autograd.grad(value.sum(), x)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-13)


def confident(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Like `make`, with rows from surely wrong to surely right."""
    logits, target = make(rows, classes)
    return logits + torch.linspace(-2, 12, rows, dtype=logits.dtype)[:, None] * (2 * target - 1), target


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (57, 13), (31, 205)])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("against", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_statistics_agree_with_the_reference(
    shape: tuple[int, int], delta: float, against: str, dtype: torch.dtype
) -> None:
    logits, target = confident(*shape)
    logits = logits.to(dtype)
    loss, stats = as_multilabel_loss(
        logits.requires_grad_(), target, delta=delta, against=against, reduction="none", return_stats=True
    )
    assert isinstance(stats, MultiLabelStats)
    solved, kept, margin = reference.as_multilabel_stats(logits.double(), target, delta=delta, against=against)
    wide = torch.promote_types(dtype, torch.float32)
    assert [s.dtype for s in stats] == [torch.bool, torch.long, wide]
    assert not any(s.requires_grad for s in stats)
    torch.testing.assert_close(
        stats.margin.double(), margin.detach(), rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6
    )
    assert torch.equal(stats.kept, kept)
    assert torch.equal(stats.solved, solved)
    assert not loss[stats.solved].any()
    if against == "threshold":
        assert torch.equal(stats.margin > delta, stats.solved)
    if against == "threshold" and shape[0] > 30 and delta < 1:
        assert solved.any()
        assert (~solved & (kept < shape[1])).any()


def test_example_of_the_paper() -> None:
    assert round(as_multilabel_loss(LOGITS, TARGET, delta=0.1).item(), 4) == 2.0778


def test_delta_one_is_the_plain_multilabel_softmax_loss() -> None:
    logits, target = make(40, 9)
    negative = (logits.exp() * (1 - target)).sum(-1)
    positive = ((-logits).exp() * target).sum(-1)
    plain = torch.log1p(negative) + torch.log1p(positive)
    torch.testing.assert_close(as_multilabel_loss(logits, target, delta=1.0, reduction="none"), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_delta_one_is_the_plain_loss_by_both_rules(dtype: torch.dtype) -> None:
    """To the last bit where it is written as the plain loss is, to rounding where it is fused."""
    logits, target = confident(60, 9)
    results = []
    for keep in (None, *RULES):
        x = logits.to(dtype, copy=True).requires_grad_()
        if keep is None:
            rows = multilabel_rows(x, target == 0, target == 1).to(dtype)
        else:
            rows = as_multilabel_loss(x, target, delta=1.0, against=keep, reduction="none")
        results.append((rows, torch.autograd.grad(rows.sum(), x)[0]))
    plain, by_labels, by_threshold = results
    assert all(torch.equal(a, b) for a, b in zip(by_labels, plain, strict=True))
    torch.testing.assert_close(by_threshold, plain)


@pytest.mark.parametrize("delta", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("against", RULES)
def test_gradcheck(delta: float, against: str) -> None:
    logits, target = make(6, 5)
    assert torch.autograd.gradcheck(
        lambda x: as_multilabel_loss(x, target, delta=delta, against=against), (logits.requires_grad_(),)
    )


ROWS = st.lists(st.tuples(st.floats(-40, 40), st.booleans()), min_size=1, max_size=6)


@given(ROWS, st.floats(0, 1), st.floats(0, 1), st.sampled_from(RULES), st.randoms())
def test_invariants(row: list[tuple[float, bool]], one: float, other: float, against: str, random: Any) -> None:
    logits, target = torch.tensor([x for x, _ in row], dtype=torch.float64), torch.tensor([y for _, y in row])
    low, high = sorted((one, other))
    loss = as_multilabel_loss(logits, target, delta=low, against=against)
    assert 0 <= loss <= as_multilabel_loss(logits, target, delta=high, against=against) + 1e-12
    order = list(range(len(row)))
    random.shuffle(order)
    torch.testing.assert_close(as_multilabel_loss(logits[order], target[order], delta=low, against=against), loss)


@given(
    ROWS,
    st.one_of(st.just(0.0), st.floats(0, 1)),
    st.sampled_from(RULES),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_statistics_promise(row: list[tuple[float, bool]], delta: float, against: str, dtype: torch.dtype) -> None:
    logits, target = torch.tensor([x for x, _ in row], dtype=dtype), torch.tensor([y for _, y in row])
    x = logits.clone().requires_grad_()
    loss, (solved, kept, margin) = as_multilabel_loss(x, target, delta=delta, against=against, return_stats=True)
    (grad,) = torch.autograd.grad(loss, x)
    assert -1 <= margin <= 1
    assert grad.count_nonzero() <= kept  # masked classes have no gradient
    if solved:
        assert torch.equal(logits > 0, target)
        assert loss == 0
        assert not grad.any()
    if against == "threshold":
        assert solved == (kept == 0)
        assert margin <= 0 or torch.where(target, logits > 0, logits < 0).all()
        if abs(float(margin) - delta) > 1e-6:
            assert solved == (margin > delta)


def test_masked_classes_have_exactly_no_gradient() -> None:
    logits, target = confident(80, 9)
    for against in RULES:
        x = logits.clone().requires_grad_()
        loss = as_multilabel_loss(x, target, delta=0.3, against=against, reduction="sum")
        (grad,) = torch.autograd.grad(loss, x)
        _, kept, _ = reference.as_multilabel_stats(logits, target, delta=0.3, against=against)
        assert torch.equal((grad != 0).sum(-1), kept)
        assert ((kept > 0) & (kept < 9)).any()


def test_a_row_that_is_far_apart_is_exactly_zero_in_loss_and_gradient() -> None:
    logits = torch.tensor([[5.0, 5.0, -3.0]], requires_grad=True)
    for against in RULES:
        loss = as_multilabel_loss(logits, torch.tensor([[1, 1, 0]]), delta=0.1, against=against)
        (grad,) = torch.autograd.grad(loss, logits)
        assert loss == 0
        assert grad.tolist() == [[0, 0, 0]]


def test_a_margin_apart_on_one_side_of_0_is_solved_by_neither_rule() -> None:
    logits, target = (
        torch.tensor([[9.0, 5.0, 1.0], [-1.0, -5.0, -9.0], [5.0, -5.0, -9.0]]),
        torch.tensor([[1, 0, 0]] * 3),
    )
    for against, kept in {"labels": [0, 0, 0], "threshold": [2, 1, 0]}.items():
        loss, stats = as_multilabel_loss(logits, target, against=against, reduction="none", return_stats=True)
        assert stats.kept.tolist() == kept
        assert (loss > 0).tolist() == [count > 0 for count in kept]
        assert stats.solved.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("against", "row", "flags", "margin"),
    [
        ("labels", [9.0, 8.0], [1, 1], -1.0),
        ("labels", [-9.0], [0], -1.0),
        ("labels", [1.0, 1.0], [1, 0], 0.0),
        ("threshold", [-1e4, -1e4], [0, 0], 1.0),
        ("threshold", [1e4], [1], 1.0),
        ("threshold", [-2.0], [0], 0.76159416),  # tanh(1)
        ("threshold", [2.0, 1.0], [1, 1], 0.42051248),
        ("threshold", [2.0, -3.0], [1, 0], 0.76159416),  # the lesser side
        ("threshold", [0.0, 5.0], [0, 1], 0.0),
        ("threshold", [1e4, -1e4], [0, 1], -1.0),
    ],
)
def test_margins(against: str, row: list[float], flags: list[int], margin: float) -> None:
    logits, target = torch.tensor([row]), torch.tensor([flags])
    _, stats = as_multilabel_loss(logits, target, delta=0.4, against=against, return_stats=True)
    torch.testing.assert_close(stats.margin, torch.tensor([margin]), rtol=1e-6, atol=0)
    assert stats.solved.tolist() == [against == "threshold" and margin > 0.4]


@pytest.mark.parametrize("size", [100.0, 1e4, 3e38])
@pytest.mark.parametrize("against", RULES)
def test_no_finite_logit_overflows(size: float, against: str) -> None:
    logits = torch.tensor([[size, -size, 0.0]], requires_grad=True)
    loss = as_multilabel_loss(logits, torch.tensor([[0, 1, 0]]), delta=0.1, against=against, reduction="sum")
    torch.testing.assert_close(loss, torch.tensor(2 * size) if size < 1e38 else torch.tensor(INF))
    loss, stats = as_multilabel_loss(logits, torch.tensor([[0, 0, 1]]), delta=0.1, against=against, return_stats=True)
    torch.testing.assert_close(loss, torch.tensor(size) + torch.tensor(2.0).log())
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, torch.tensor([[1.0, 0.0, -0.5]]))
    assert stats.margin.tolist() == [-1.0]


def test_at_delta_0_a_huge_logit_leaves_others_decided_by_their_sign() -> None:
    logits, target = torch.tensor([[3e38, -1.0, 0.5]]), torch.tensor([[0, 0, 0]])
    _, stats = as_multilabel_loss(logits, target, delta=0.0, against="threshold", return_stats=True)
    assert stats.kept.tolist() == [2]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("against", RULES)
def test_nan_and_inf_are_never_a_silent_zero(bad: float, place: int, against: str) -> None:
    logits = torch.tensor([[9.0, -9.0, -9.0]] * 2)
    logits[0, place] = bad
    rows, stats = as_multilabel_loss(
        logits, torch.tensor([[1, 0, 0], [1, 0, 0]]), against=against, reduction="none", return_stats=True
    )
    assert rows[0].isnan()
    assert rows[1].isfinite()
    assert stats.margin.isnan().tolist() == [True, False]
    assert stats.solved.tolist() == [False, True]


@pytest.mark.parametrize("against", RULES)
def test_minus_inf_of_a_negative_is_fine(against: str) -> None:
    with_hole, stats = as_multilabel_loss(
        torch.tensor([[1.0, 2.0, -INF]]), torch.tensor([[1, 0, 0]]), against=against, return_stats=True
    )
    without, others = as_multilabel_loss(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]]), against=against, return_stats=True
    )
    torch.testing.assert_close(with_hole, without)
    torch.testing.assert_close(stats.margin, others.margin)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32])
def test_targets_of_any_dtype(dtype: torch.dtype) -> None:
    assert torch.equal(as_multilabel_loss(LOGITS, TARGET.to(dtype)), as_multilabel_loss(LOGITS, TARGET))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("against", RULES)
def test_half_precision_rounds_once(dtype: torch.dtype, against: str) -> None:
    logits, target = make(50, 20)
    logits = logits.to(dtype)
    ours = as_multilabel_loss(logits, target, against=against, reduction="none")
    assert ours.dtype == dtype
    wide = as_multilabel_loss(logits.float(), target, against=against, reduction="none")
    torch.testing.assert_close(ours.float(), wide.to(dtype).float())
    with torch.autocast("cpu", dtype=dtype):
        loss, stats = as_multilabel_loss(logits, target, against=against, return_stats=True)
    assert loss.dtype == stats.margin.dtype == torch.float32
    torch.testing.assert_close(loss, wide.mean())


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("against", RULES)
def test_the_default_dtype_changes_nothing(default: torch.dtype, against: str) -> None:
    logits, target = make(50, 20)

    def found() -> list[Tensor]:
        loss, stats = as_multilabel_loss(logits.float(), target, against=against, return_stats=True)
        return [loss, *stats]

    plain = found()
    with default_dtype(default):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found(), plain, strict=True))


@pytest.mark.parametrize("against", RULES)
def test_leading_shapes_and_strides(against: str) -> None:
    logits, target = make(24, 5)
    options: dict[str, Any] = {"against": against, "reduction": "none", "return_stats": True}
    flat, flat_stats = as_multilabel_loss(logits, target, **options)
    folded, stats = as_multilabel_loss(logits.view(2, 3, 4, 5), target.view(2, 3, 4, 5), **options)
    assert torch.equal(folded.flatten(), flat)
    for ours, theirs in zip(stats, flat_stats, strict=True):
        assert torch.equal(ours, theirs.view(2, 3, 4))
    turned, _ = as_multilabel_loss(logits.T.contiguous().T, target.T.contiguous().T, **options)
    torch.testing.assert_close(turned, flat)
    alone, stats = as_multilabel_loss(logits[3], target[3], **options)
    assert alone.shape == stats.margin.shape == ()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": None}, TypeError, "logits: expected a torch.Tensor, found NoneType"),
        ({"logits": torch.zeros(0, 4)}, ValueError, r"logits: expected a non-empty .* found shape \(0, 4\)"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, r"target: expected shape \(3, 4\) .* found \(3,\)"),
        ({"target": TARGET.to(torch.complex64)}, TypeError, "target: expected 0/1 flags, found torch.complex64"),
        ({"target": TARGET * 2}, ValueError, "target: expected only 0 and 1, found 2"),
        ({"target": TARGET * 0.5}, ValueError, "target: expected only 0 and 1, found 0.5"),
        ({"target": TARGET * NAN}, ValueError, "target: expected only 0 and 1, found nan"),
        ({"target": -TARGET}, ValueError, "target: expected only 0 and 1, found -1"),
        ({"delta": NAN}, ValueError, "delta: expected a number in .* found nan"),
        ({"against": "classes"}, ValueError, "against: expected one of 'labels', 'threshold', found 'classes'"),
        ({"against": None}, ValueError, "against: expected one of 'labels', 'threshold', found None"),
        ({"reduction": "max"}, ValueError, "reduction: expected one of .* found 'max'"),
    ],
)
def test_bad_input_is_refused_at_the_door(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": LOGITS, "target": TARGET, **change}
    with pytest.raises(error, match=message):
        as_multilabel_loss(arguments.pop("logits"), arguments.pop("target"), **arguments)
