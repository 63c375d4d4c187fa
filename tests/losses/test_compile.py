"""The losses inside torch.compile: whole graphs, the same results, and no compilation for every new delta."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from softsieve import ASCrossEntropyLoss, ASMultiLabelLoss, as_cross_entropy, as_keep_mask, as_multilabel_loss
from tests.helpers import make

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def value_and_grad(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_graphs_with_the_same_results(backend: str) -> None:
    logits, target = make(40, 9)
    flags = torch.randint(2, (40, 9))
    weight = torch.rand(9, dtype=torch.float64)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: as_cross_entropy(x * 2, target),
        lambda x: as_cross_entropy(x.view(5, 8, 9) * 2, target.view(5, 8), reduction="none", weight=weight),
        lambda x: as_cross_entropy(x * 2, target, return_stats=True)[0],
        lambda x: as_multilabel_loss(x * 2, flags),
        lambda x: as_multilabel_loss(x * 2, flags, against="threshold"),
        lambda x: as_multilabel_loss(x * 2, flags, against="threshold", return_stats=True)[0],
    ]
    for function in functions:
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        torch.testing.assert_close(value_and_grad(compiled, logits), value_and_grad(function, logits))
    stats = torch.compile(lambda x: as_cross_entropy(x, target, return_stats=True)[1], fullgraph=True, backend=backend)
    for ours, eager in zip(stats(logits), as_cross_entropy(logits, target, return_stats=True)[1], strict=True):
        torch.testing.assert_close(ours, eager)
    mask = torch.compile(lambda x: as_keep_mask(x, target), fullgraph=True, backend=backend)
    assert torch.equal(mask(logits), as_keep_mask(logits, target))


@pytest.mark.parametrize(
    "criterion", [ASCrossEntropyLoss(1.0), ASMultiLabelLoss(1.0), ASMultiLabelLoss(1.0, against="threshold")]
)
def test_a_delta_that_moves_is_not_compiled_anew(criterion: ASCrossEntropyLoss | ASMultiLabelLoss) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    logits, target = make(20, 5)
    if isinstance(criterion, ASMultiLabelLoss):
        target = torch.randint(2, (20, 5))
    step = torch.compile(criterion, fullgraph=True, backend=counter)
    for i in range(20):
        criterion.delta = 1 - 0.04 * i
        torch.testing.assert_close(step(logits, target), criterion(logits, target))
    assert counter.frame_count <= 2  # once for the first value, once for any


@pytest.mark.parametrize(
    ("loss", "bad"),
    [(as_cross_entropy, torch.tensor([0, 7])), (as_multilabel_loss, torch.full((2, 3), 2))],
)
def test_bad_labels_are_refused_in_compiled_code_too(loss: Any, bad: Tensor) -> None:
    compiled = torch.compile(lambda x, t: loss(x, t), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="target: expected"):
        compiled(torch.zeros(2, 3), bad)


def test_an_ambiguous_shape_is_told_in_compiled_code_too() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x, t: as_cross_entropy(x, t), fullgraph=True, backend=counter)
    for length in range(2, 9):
        logits, target = torch.randn(2, length, 12), torch.randint(12, (2, length))
        torch.testing.assert_close(step(logits, target), as_cross_entropy(logits, target))
    assert counter.frame_count <= 2  # once for the first length, once for any
    with pytest.warns(UserWarning, match="logits: expected classes in the last dimension"):
        step(torch.randn(2, 12, 12), torch.randint(12, (2, 12)))


def test_fake_tensors_go_through_the_ops() -> None:
    with FakeTensorMode():
        logits = torch.randn(4, 5, requires_grad=True)
        loss, stats = as_cross_entropy(logits, torch.zeros(4, dtype=torch.long), return_stats=True)
        (grad,) = torch.autograd.grad(loss, logits)
    assert (loss.shape, stats.kept.dtype, grad.shape) == ((), torch.int64, (4, 5))
    assert (stats.margin.shape, stats.margin.dtype) == ((4,), torch.float32)


def test_function_transforms_take_the_gradient() -> None:
    logits, target = make(12, 5)
    gradient = torch.func.grad(lambda x: as_cross_entropy(x, target))(logits)
    torch.testing.assert_close(gradient, value_and_grad(lambda x: as_cross_entropy(x, target), logits)[1])


def test_the_ops_pass_the_checks_of_torch() -> None:
    logits, target = make(12, 5)
    logits.requires_grad_()
    delta = torch.tensor(0.1, dtype=torch.float64)
    for weight in (None, torch.rand(5, dtype=torch.float64)):
        for reduction in ("none", "mean", "sum"):
            arguments = (logits, target, weight, delta, -100, reduction)
            torch.library.opcheck(torch.ops.softsieve.as_cross_entropy.default, arguments)
    _, *scalars, share, _ = (output.detach() for output in torch.ops.softsieve.as_cross_entropy(*arguments))
    saved = (share.requires_grad_(), logits, target, *scalars)
    torch.library.opcheck(torch.ops.softsieve.as_cross_entropy_backward.default, saved)
    torch.library.opcheck(torch.ops.softsieve.positives.default, (torch.randint(2, (3, 4)),))
