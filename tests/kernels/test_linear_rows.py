"""The linear loss of rows whose logits are held, against the reference and the way that does not hold them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.measure import peak_bytes
from softsieve import LinearASCrossEntropyLoss, linear_as_cross_entropy, reference
from softsieve.kernels import linear, linear_rows
from softsieve.kernels.cross_entropy import HAS_TRITON
from tests.helpers import IGNORED, spy

MEMORY = 10**7
ROWS, SIZE, CLASSES = 60, 12, 90
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"delta": 0.0},
    {"delta": 1.0},
    {"delta": torch.linspace(0, 1, ROWS)},
    {"class_weight": torch.linspace(0.5, 2, CLASSES).double()},
    {"row_weight": torch.linspace(0.1, 3, ROWS).double(), "reduction": "sum"},
    {"row_weight": torch.zeros(ROWS).double()},
    {"softcap": 5.0},
]


@pytest.fixture(params=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many: blocks of 7 rows, of which 3 are worked on at a time."""
    if request.param == "many blocks":
        monkeypatch.setattr(linear_rows, "block_rows", lambda _, __, options: 7 if options.memory else 0)
        monkeypatch.setattr(linear_rows, "ON_CPU", 3 * CLASSES * 8)


def make_layer(
    dtype: torch.dtype = torch.float64, *, lift: float = 20.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states of which some are solved, some dense and some ignored; weight, bias and labels."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, SIZE, generator=generator, dtype=torch.float64) for n in (ROWS, CLASSES))
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    hidden += torch.linspace(0, lift, ROWS)[:, None] * weight[target] / SIZE
    target[::9] = IGNORED
    bias = torch.randn(CLASSES, generator=generator, dtype=torch.float64)
    return (*(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), target)  # type: ignore[return-value]


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_agrees_with_the_reference(options: dict[str, Any], biased: bool) -> None:
    hidden, weight, bias, target = make_layer()
    leaves = [hidden, weight, bias][: 2 + biased]
    own = bias if biased else None
    ours, stats = linear_as_cross_entropy(hidden, weight, target, bias=own, memory=MEMORY, return_stats=True, **options)
    truth = reference.linear_as_cross_entropy(hidden, weight, target, bias=own, **options)
    assert ours.grad_fn is not None
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-12)
    found, expected = torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * truth, leaves)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    without = linear_as_cross_entropy(hidden, weight, target, bias=own, return_stats=True, **options)[1]
    for one, other in zip(stats, without, strict=True):
        torch.testing.assert_close(one, other)
    if not options:
        counted = int((target != IGNORED).sum())
        assert 5 < stats.solved.sum() < counted - 5
        assert stats.dense.sum() > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_as_good_as_without_held_logits(dtype: torch.dtype) -> None:
    hidden, weight, bias, target = make_layer(dtype, lift=0.0)
    leaves = [hidden, weight, bias]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = torch.autograd.grad(
        reference.linear_as_cross_entropy(wide[0], wide[1], target, bias=wide[2], delta=1.0), wide
    )
    errors = []
    for memory in (None, MEMORY):
        loss = linear_as_cross_entropy(hidden, weight, target, bias=bias, delta=1.0, memory=memory)
        grads = torch.autograd.grad(loss, leaves)
        assert [grad.dtype for grad in grads] == [dtype] * 3
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(grads, truth, strict=True)])
    for before, held in zip(*errors, strict=True):
        assert held <= 1.1 * before + torch.finfo(dtype).eps / 8


def test_gradients_in_float16_are_those_of_the_scaled_loss() -> None:
    """A mean over many rows, whose gradients float16 cannot hold before they are scaled."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = ((torch.randn(n, 8, generator=generator) / 10).half().requires_grad_() for n in (4096, 2000))
    target = torch.randint(2000, (4096,), generator=generator)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = torch.autograd.grad(1024 * torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, target), wide)
    for memory in (None, 10**9):
        loss = linear_as_cross_entropy(hidden, weight, target, delta=1.0, memory=memory)
        for grad, true in zip(torch.autograd.grad(1024 * loss, (hidden, weight)), truth, strict=True):
            assert float((grad.double() - true).norm() / true.norm()) < 2 * torch.finfo(torch.float16).eps


def test_only_wanted_gradients_are_made_and_only_once() -> None:
    hidden, weight, _, target = make_layer()
    loss = linear_as_cross_entropy(hidden, weight.detach(), target, memory=MEMORY)
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, hidden)  # made again, by the other way
    torch.testing.assert_close(second, 2 * first)
    with torch.no_grad():
        assert linear_as_cross_entropy(hidden, weight, target, memory=MEMORY).grad_fn is None


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, _, target = make_layer()
    (grad,) = torch.autograd.grad(
        linear_as_cross_entropy(hidden, weight, target, memory=MEMORY), hidden, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="found a second derivative"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


def test_a_weight_that_changed_since_is_refused() -> None:
    hidden, weight, _, target = make_layer()
    loss = linear_as_cross_entropy(hidden, weight, target, memory=MEMORY)
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_all_ignored_is_zero_with_gradients() -> None:
    hidden, weight, bias, target = make_layer()
    loss = linear_as_cross_entropy(hidden, weight, torch.full_like(target, IGNORED), bias=bias, memory=MEMORY)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_it_keeps_to_the_memory_that_it_is_allowed() -> None:
    hidden, weight = torch.randn(1500, 32, requires_grad=True), torch.randn(20_000, 32, requires_grad=True)
    target = torch.randint(20_000, (1500,))
    gradients = hidden.nbytes + weight.nbytes

    def call(memory: int) -> None:
        hidden.grad = weight.grad = None
        linear_as_cross_entropy(hidden, weight, target, memory=memory).backward()  # type: ignore[no-untyped-call]

    peaks = {}
    for memory in (10**7, 64 * 10**6, 200 * 10**6):
        call(memory)
        hidden.grad = weight.grad = None
        peaks[memory] = peak_bytes(partial(call, memory)) - gradients
        assert peaks[memory] <= memory
    assert peaks[200 * 10**6] > 1500 * 20_000 * 4  # all logits are held
    assert 64 * 10**6 > peaks[64 * 10**6] > 3 * 10**7


def test_too_little_memory_says_what_it_needs() -> None:
    hidden, weight, _, target = make_layer(torch.float32)
    with pytest.raises(ValueError, match=r"memory: expected at least (\d+) bytes, for 128 classes of 60 rows .* 1000"):
        linear_as_cross_entropy(hidden, weight, target, memory=1000)
    with pytest.raises(TypeError, match="memory: expected an int, found float"):
        linear_as_cross_entropy(hidden, weight, target, memory=1e9)  # type: ignore[call-overload]
    for memory in (0, -1):
        with pytest.raises(ValueError, match="memory: expected"):
            linear_as_cross_entropy(hidden, weight, target, memory=memory)


def test_the_memory_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, target = torch.randn(20, 24, requires_grad=True), torch.randint(300, (20,))
    plain = LinearASCrossEntropyLoss(24, 300, backend="torch")
    criterion = LinearASCrossEntropyLoss(24, 300, backend="torch", memory=10**7)
    criterion.load_state_dict(plain.state_dict())
    runs = spy(monkeypatch, linear_rows, "forward")
    grads = [torch.autograd.grad(module(hidden, target), hidden) for module in (plain, criterion)]
    torch.testing.assert_close(*grads)
    assert len(runs) == 1
    criterion.memory = 5000
    with pytest.raises(
        ValueError, match=r"^memory: expected at least (\d+) bytes, for 128 classes of 20 rows"
    ) as refusal:
        criterion(hidden, target)
    criterion.memory = int(re.findall(r"\d+", str(refusal.value))[0])  # what it needs is enough
    torch.testing.assert_close(torch.autograd.grad(criterion(hidden, target), hidden), grads[0])
    with pytest.raises(TypeError, match=r"^memory: expected an int, found float"):
        LinearASCrossEntropyLoss(4, 5, memory=1e9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"))]
)
def test_more_memory_rounds_the_gradient_of_the_weight_less_often(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over groups of rows are rounded to 16 bits once for each group."""
    monkeypatch.setattr(linear, "ROWS", 1 << 10)  # 20 groups
    if backend == "triton":
        monkeypatch.setattr("softsieve.kernels.linear_held.block_rows", lambda *_: 0)
    dtype = torch.bfloat16 if backend == "torch" else torch.float16  # the interpreter is wrong for bf16
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(dtype).requires_grad_() for n in (200, 40))
    target = torch.randint(40, (200,), generator=generator)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = reference.linear_as_cross_entropy(wide[0], wide[1], target, delta=1.0, reduction="sum")
    (truth,) = torch.autograd.grad(loss, wide[1])
    errors = []
    for memory in (None, 10**11):
        ours = linear_as_cross_entropy(
            hidden, weight, target, delta=1.0, reduction="sum", backend=backend, memory=memory
        )
        (grad,) = torch.autograd.grad(ours, weight)
        errors.append(float((grad.double() - truth).norm() / truth.norm()))
    assert errors[1] < 0.75 * errors[0]
    assert errors[1] < torch.finfo(dtype).eps / 2
