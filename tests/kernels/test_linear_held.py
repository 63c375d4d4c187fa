"""The linear loss of rows whose logits are held on a GPU, against the reference; interpreted where there is no GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve import linear_as_cross_entropy, reference
from softsieve.kernels import linear
from tests.helpers import IGNORED
from tests.kernels.test_linear_rows import CLASSES, ROWS, make_layer

pytest.importorskip("triton", reason="needs Triton")

from softsieve.kernels import linear_held
from softsieve.kernels.linear_types import Options, Targets

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"delta": 0.0},
    {"delta": 1.0},
    {"delta": torch.linspace(0, 1, ROWS)},
    {"class_weight": torch.linspace(0.5, 2, CLASSES)},
    {"row_weight": torch.linspace(0.1, 3, ROWS), "reduction": "sum"},
    {"row_weight": torch.zeros(ROWS)},
    {"softcap": 5.0},
]


@pytest.fixture(name="blocks", params=["one block", "many blocks"], autouse=True)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Many: blocks of 16 rows at most, where gradients of the reduced loss are wanted."""
    monkeypatch.setattr(linear, "load_backend", None)  # nothing goes the other way
    if request.param == "many blocks":
        monkeypatch.setattr(linear_held, "UNIT", 8)
        monkeypatch.setattr(linear_held, "block_rows", lambda *_: 16)
        monkeypatch.setattr(linear_held, "pays", lambda *_: True)
    return str(request.param)


def layer(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias, target = make_layer(torch.float64, **options)
    leaves = (x.detach().to(DEVICE, dtype).requires_grad_() for x in (hidden, weight, bias))
    return *leaves, target.to(DEVICE)  # type: ignore[return-value]


def exact(
    leaves: list[Tensor], target: Tensor, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Loss, three times its gradients, and what is known of the rows, in float64 on the CPU."""
    wide = [x.detach().double().cpu().requires_grad_() for x in leaves]
    shared: dict[str, Any] = {"bias": wide[2] if len(wide) > 2 else None}
    options = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
    loss = reference.linear_as_cross_entropy(wide[0], wide[1], target.cpu(), **shared, **options)
    shared |= {name: options[name] for name in ("delta", "softcap") if name in options}
    stats = reference.linear_as_stats(wide[0].detach(), wide[1].detach(), target.cpu(), **shared)
    return loss.detach(), torch.autograd.grad(3 * loss, wide), tuple(x.detach() for x in stats)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_agrees_with_the_reference(options: dict[str, Any], biased: bool) -> None:
    hidden, weight, bias, target = layer()
    leaves = [hidden, weight, bias][: 2 + biased]
    on_device: dict[str, Any] = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    ours, stats = linear_as_cross_entropy(
        hidden, weight, target, bias=bias if biased else None, backend="triton", return_stats=True, **on_device
    )
    loss, grads, known = exact(leaves, target, **options)
    torch.testing.assert_close(ours.detach().cpu().double(), loss, rtol=2e-5, atol=1e-6)
    for grad, true in zip(torch.autograd.grad(3 * ours, leaves), grads, strict=True):
        torch.testing.assert_close(grad.cpu().double(), true, rtol=1e-4, atol=2e-6)
    for one, other in zip(stats, known, strict=True):
        torch.testing.assert_close(one.cpu().to(other.dtype), other, rtol=1e-4, atol=1e-5)
    if not options:
        assert stats.solved.sum() > 5
        assert stats.dense.sum() > 5
        assert int((target != IGNORED).sum()) == int((stats.kept > 0).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_that_must_wait_for_the_factor(dtype: torch.dtype, blocks: str) -> None:
    """Of rows that are not reduced, and of a dtype in which a row's share of a mean would be lost: 1e-9 of it here."""
    if blocks == "many blocks":
        pytest.skip("they are in one block")
    hidden, weight, _, target = layer(dtype)
    options: dict[str, Any] = {"reduction": "none"} if dtype == torch.float32 else {"row_weight": None}
    loss = linear_as_cross_entropy(hidden, weight, target, backend="triton", **options)
    factor = torch.linspace(0, 2, ROWS, device=DEVICE) if loss.ndim else torch.tensor(1e-4, device=DEVICE)
    grads = torch.autograd.grad(loss, [hidden, weight], factor.to(loss.dtype), retain_graph=True)
    again = torch.autograd.grad(loss, [hidden, weight], 2 * factor.to(loss.dtype))  # the logits are made anew
    wide = [x.detach().double().cpu().requires_grad_() for x in (hidden, weight)]
    truth = reference.linear_as_cross_entropy(wide[0], wide[1], target.cpu(), **options)
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-7}
    for grad, twice, true in zip(grads, again, torch.autograd.grad(truth, wide, factor.double().cpu()), strict=True):
        torch.testing.assert_close(grad.cpu().double(), true, **tolerance)
        torch.testing.assert_close(twice.cpu().double(), 2 * true, **tolerance)


@pytest.mark.parametrize("classes", [64, 65, 90, 128, 130, 200])
@pytest.mark.parametrize("capped", [False, True])
def test_classes_that_make_no_whole_line(classes: int, capped: bool) -> None:
    """What is left over of the weight is multiplied by itself, with rows of 0."""
    generator = torch.Generator().manual_seed(classes)
    hidden, weight = (torch.randn(n, 12, generator=generator).to(DEVICE).requires_grad_() for n in (ROWS, classes))
    target = torch.randint(classes, (ROWS,), generator=generator).to(DEVICE)
    options: dict[str, Any] = {"softcap": 3.0} if capped else {}
    loss = linear_as_cross_entropy(hidden, weight, target, backend="triton", **options)
    truth, grads, _ = exact([hidden, weight], target, **options)
    torch.testing.assert_close(loss.detach().cpu().double(), truth, rtol=2e-5, atol=1e-6)
    for grad, true in zip(torch.autograd.grad(3 * loss, [hidden, weight]), grads, strict=True):
        torch.testing.assert_close(grad.cpu().double(), true, rtol=1e-4, atol=2e-6)


def test_only_wanted_gradients_are_made_and_they_can_be_made_again() -> None:
    hidden, weight, bias, target = layer()
    loss = linear_as_cross_entropy(hidden, weight.detach(), target, backend="triton")
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, hidden)
    torch.testing.assert_close(second, 2 * first)
    loss = linear_as_cross_entropy(hidden.detach(), weight.detach(), target, bias=bias, backend="triton")
    (to_bias,) = torch.autograd.grad(loss, bias)
    assert to_bias.shape == bias.shape


def test_no_graph_is_made_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hidden, weight, _, target = layer()
    with torch.no_grad():
        assert linear_as_cross_entropy(hidden, weight, target, backend="triton").grad_fn is None


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, _, target = layer()
    (grad,) = torch.autograd.grad(
        linear_as_cross_entropy(hidden, weight, target, backend="triton"), hidden, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="found a second derivative"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


def test_a_weight_that_changed_since_is_refused() -> None:
    hidden, weight, _, target = layer()
    loss = linear_as_cross_entropy(hidden, weight, target, backend="triton")
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_all_ignored_is_zero_with_gradients() -> None:
    hidden, weight, bias, target = layer()
    loss = linear_as_cross_entropy(hidden, weight, torch.full_like(target, IGNORED), bias=bias, backend="triton")
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def options_of(memory: int = 0, **changes: Any) -> Options:
    return Options(backend="triton", memory=memory, **changes)


def test_a_block_has_as_many_rows_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    weight = torch.empty(1001, 4, dtype=torch.bfloat16)
    many = torch.empty(100_000, 4, dtype=torch.bfloat16)
    for memory in (10**7, 10**8):
        height = linear_held.block_rows(many, weight, options_of(memory))
        assert height % linear_held.UNIT == 0
        assert memory >= height * 1024 * 2 + 48 * 100_000 > memory - linear_held.UNIT * 1024 * 2
        assert next(linear_held._blocks(100_000, height)) == slice(0, height)
    assert linear_held.block_rows(many[:500], weight, options_of(10**7)) == 500
    assert linear_held.block_rows(many, weight, options_of(5 * 10**6)) == 0  # fewer rows than pay
    assert linear_held.block_rows(many, weight, options_of(10**8, reduction="none")) == 0
    assert linear_held.block_rows(many.half(), weight.half(), options_of(10**8)) == 0
    assert linear_held.block_rows(many[:500].half(), weight.half(), options_of(10**7)) == 500
    assert linear_held.block_rows(many, weight, Options(backend="torch", memory=10**8)) == 0


@pytest.mark.parametrize("dense", [False, True])
def test_a_sample_of_a_large_layer_says_whether_blocks_pay(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(linear_held, "block_rows", lambda *_: 256)
    hidden, weight = torch.randn(2, 600, 8, device=DEVICE).unbind()
    targets = Targets(torch.arange(600, device=DEVICE), 0.1)
    weight = F.normalize(weight)  # so that each row's own product is the largest
    if not dense:
        hidden = 100 * weight
    choose = partial(linear_held.choose, hidden, weight[:600], None, targets, options_of())
    assert choose(True) == 256  # it is small
    assert choose(False) == 0  # no gradients are wanted
    monkeypatch.setattr(linear_held, "SMALL", 0)
    monkeypatch.setattr(linear_held, "SUMMED", 0)
    assert choose(True) == (256 if dense else 0)
    monkeypatch.setattr(linear_held, "SUMMED", 1000)
    assert choose(True) == 0  # however many are dense
