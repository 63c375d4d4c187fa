"""as_multilabel_loss against the reference, the plain loss and the paper's example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from softsieve import as_multilabel_loss, reference
from tests.helpers import default_dtype

INF, NAN = float("inf"), float("nan")
LOGITS = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3], [2.5, 3.5, 0.4, 0.3]])
TARGET = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]])


def make(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Rows of all kinds, with the first without positives and the second without negatives."""
    target = (torch.rand(rows, classes) < 0.3).long()
    target[0], target[1 % rows] = 0, 1
    return torch.randn(rows, classes, dtype=torch.float64) * 2 + 3 * target * torch.rand(rows, 1), target


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (57, 13), (31, 205)])
@pytest.mark.parametrize("delta", [0.0, 0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_agrees_with_the_reference(shape: tuple[int, int], delta: float, reduction: str) -> None:
    logits, target = make(*shape)
    results = []
    for loss in (as_multilabel_loss, reference.as_multilabel_loss):
        x = logits.clone().requires_grad_()
        value = loss(x, target, delta=delta, reduction=reduction)
        results.append((value.detach(), torch.autograd.grad(value.sum(), x)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-13)


def test_example_of_the_paper() -> None:
    assert round(as_multilabel_loss(LOGITS, TARGET, delta=0.1).item(), 4) == 2.0778


def test_delta_one_is_the_plain_multilabel_softmax_loss() -> None:
    logits, target = make(40, 9)
    negative = (logits.exp() * (1 - target)).sum(-1)
    positive = ((-logits).exp() * target).sum(-1)
    plain = torch.log1p(negative) + torch.log1p(positive)
    torch.testing.assert_close(as_multilabel_loss(logits, target, delta=1.0, reduction="none"), plain)


@pytest.mark.parametrize("delta", [0.05, 1.0])
def test_gradcheck(delta: float) -> None:
    logits, target = make(6, 5)
    assert torch.autograd.gradcheck(lambda x: as_multilabel_loss(x, target, delta=delta), (logits.requires_grad_(),))


@given(
    st.lists(st.tuples(st.floats(-40, 40), st.booleans()), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.randoms(),
)
def test_invariants(row: list[tuple[float, bool]], one: float, other: float, random: Any) -> None:
    logits, target = torch.tensor([x for x, _ in row], dtype=torch.float64), torch.tensor([y for _, y in row])
    low, high = sorted((one, other))
    loss = as_multilabel_loss(logits, target, delta=low)
    assert 0 <= loss <= as_multilabel_loss(logits, target, delta=high) + 1e-12
    order = list(range(len(row)))
    random.shuffle(order)
    torch.testing.assert_close(as_multilabel_loss(logits[order], target[order], delta=low), loss)


def test_a_row_that_is_far_apart_is_exactly_zero_in_loss_and_gradient() -> None:
    logits = torch.tensor([[5.0, 5.0, -3.0]], requires_grad=True)
    loss = as_multilabel_loss(logits, torch.tensor([[1, 1, 0]]), delta=0.1)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss == 0
    assert grad.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("size", [100.0, 1e4, 3e38])
def test_no_finite_logit_overflows(size: float) -> None:
    logits = torch.tensor([[size, -size, 0.0]], requires_grad=True)
    loss = as_multilabel_loss(logits, torch.tensor([[0, 1, 0]]), delta=0.1, reduction="sum")
    torch.testing.assert_close(loss, torch.tensor(2 * size) if size < 1e38 else torch.tensor(INF))
    loss = as_multilabel_loss(logits, torch.tensor([[0, 0, 1]]), delta=0.1)
    torch.testing.assert_close(loss, torch.tensor(size) + torch.tensor(2.0).log())
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, torch.tensor([[1.0, 0.0, -0.5]]))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 1])
def test_nan_and_inf_are_never_a_silent_zero(bad: float, place: int) -> None:
    logits = torch.zeros(2, 3)
    logits[0, place] = bad
    rows = as_multilabel_loss(logits, torch.tensor([[1, 0, 0], [1, 0, 0]]), reduction="none")
    assert rows[0].isnan()
    assert rows[1].isfinite()


def test_minus_inf_of_a_negative_is_fine() -> None:
    with_hole = as_multilabel_loss(torch.tensor([[1.0, 2.0, -INF]]), torch.tensor([[1, 0, 0]]))
    torch.testing.assert_close(with_hole, as_multilabel_loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]])))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32])
def test_targets_of_any_dtype(dtype: torch.dtype) -> None:
    assert torch.equal(as_multilabel_loss(LOGITS, TARGET.to(dtype)), as_multilabel_loss(LOGITS, TARGET))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    logits, target = make(50, 20)
    logits = logits.to(dtype)
    ours = as_multilabel_loss(logits, target, reduction="none")
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours.float(), as_multilabel_loss(logits.float(), target, reduction="none").to(dtype).float()
    )
    with torch.autocast("cpu", dtype=dtype):
        assert as_multilabel_loss(logits, target).dtype == torch.float32


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(default: torch.dtype) -> None:
    logits, target = make(50, 20)
    plain = as_multilabel_loss(logits, target)
    with default_dtype(default):
        found = as_multilabel_loss(logits, target)
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)


def test_leading_shapes_and_strides() -> None:
    logits, target = make(24, 5)
    flat = as_multilabel_loss(logits, target, reduction="none")
    folded = as_multilabel_loss(logits.view(2, 3, 4, 5), target.view(2, 3, 4, 5), reduction="none")
    assert torch.equal(folded.flatten(), flat)
    turned = as_multilabel_loss(logits.T.contiguous().T, target.T.contiguous().T, reduction="none")
    torch.testing.assert_close(turned, flat)


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
        ({"reduction": "max"}, ValueError, "reduction: expected one of .* found 'max'"),
    ],
)
def test_bad_input_is_refused_at_the_door(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": LOGITS, "target": TARGET, **change}
    with pytest.raises(error, match=message):
        as_multilabel_loss(arguments.pop("logits"), arguments.pop("target"), **arguments)
