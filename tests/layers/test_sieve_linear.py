"""A layer that steps inside its backward pass ends where torch.optim ends with the whole gradient; and it serves.

Training runs on a GPU where there is one. Serving and refusals are the same there, and run on the CPU.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from softsieve import AdaptiveSoftmax, HeadAdamW, HeadSGD, SieveLinear
from softsieve.heads.watching import WeightChanged
from softsieve.kernels import linear_step, updates
from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.layers.optimizers import HeadOptimizer
from softsieve.reference import losses as reference
from tests.helpers import IGNORED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, CLASSES, ROWS = 11, 301, 23


class Rule(NamedTuple):
    ours: Callable[[], HeadOptimizer]
    theirs: Callable[[Iterable[Any]], torch.optim.Optimizer]


RULES = {
    "sgd": Rule(lambda: HeadSGD(0.7), lambda p: torch.optim.SGD(p, 0.7)),
    "sgd, decay": Rule(lambda: HeadSGD(0.7, weight_decay=0.03), lambda p: torch.optim.SGD(p, 0.7, weight_decay=0.03)),
    "sgd, momentum": Rule(
        lambda: HeadSGD(0.3, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, weight_decay=0.01),
    ),
    "adamw": Rule(
        lambda: HeadAdamW(0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
}


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of classes, also of those that are listed."""
    monkeypatch.setattr(linear_step, "WORK", 1 << 14)
    monkeypatch.setattr(linear_step, "LISTED", 1 << 10)


def make(
    several: bool, kind: str, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer, states and labels. Rows are of all kinds, or all of them solved but for their labels."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(SIZE, CLASSES, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(CLASSES, SIZE, generator=generator))
        layer.bias.copy_(torch.randn(CLASSES, generator=generator) * 0.3)
    target = torch.rand(ROWS, CLASSES, generator=generator).topk(3).indices
    lean = torch.linspace(0, 2, ROWS)[:, None]
    hidden = torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64) * 0.5
    hidden += lean * layer.weight.detach()[target[:, 0]]
    if kind == "listed":  # nothing reaches the threshold, neither do the labels
        with torch.no_grad():
            layer.bias.sub_(20 if several else 0)
        hidden *= 0.1 if several else 3
    target[::4, 2] = target[1::5, 1] = IGNORED
    if not several:
        target = target[:, 0]
        target[::6] = IGNORED
    return layer.to(DEVICE, dtype), hidden.to(DEVICE, dtype), target.to(DEVICE)


def dense_loss(several: bool, hidden: Tensor, layer: nn.Linear, target: Tensor, **options: Any) -> Tensor:
    loss = reference.linear_as_multilabel_loss if several else reference.linear_as_cross_entropy
    return loss(hidden, layer.weight, target, bias=layer.bias, **options)


def optimize(layer: nn.Linear, rule: Rule) -> torch.optim.Optimizer:
    """torch's own; the bias has no weight decay."""
    biases = [] if layer.bias is None else [{"params": [layer.bias], "weight_decay": 0.0}]
    return rule.theirs([{"params": [layer.weight]}, *biases])


@pytest.mark.parametrize("kind", ["all kinds", "listed"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_torch(rule: str, several: bool, biased: bool, kind: str) -> None:
    plain, _, _ = make(several, kind)
    if not biased:
        plain.bias = None  # type: ignore[assignment]
    first = plain.weight.detach().clone()
    ours = SieveLinear.from_linear(copy.deepcopy(plain), optimizer=RULES[rule].ours())
    optimizer = optimize(plain, RULES[rule])
    for step in range(4):
        _, hidden, target = make(several, kind, seed=step)
        states, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        loss = ours.loss(states, target, delta=0.3)
        expected = dense_loss(several, theirs, plain, target, delta=0.3)
        (2 * loss).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        (2 * expected).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(states.grad, theirs.grad, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-10, atol=1e-13)
        if biased:
            torch.testing.assert_close(ours.bias, plain.bias, rtol=1e-10, atol=1e-13)
    assert ours.optimizer is not None
    assert ours.optimizer.steps == 4
    assert ours.weight.grad is None
    assert not torch.equal(ours.weight, first)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("several", [False, True])
def test_rows_are_weighted_from_outside(several: bool, reduction: str) -> None:
    plain, hidden, target = make(several, "all kinds")
    ours = SieveLinear.from_linear(copy.deepcopy(plain), optimizer=HeadSGD(0.5))
    above = torch.linspace(-1, 2, ROWS, dtype=torch.float64) if reduction == "none" else torch.tensor(0.3).double()
    above = above.to(DEVICE)
    loss, stats = ours.loss(hidden, target, delta=0.3, reduction=reduction, return_stats=True)
    loss.backward(above)  # type: ignore[no-untyped-call]
    dense_loss(several, hidden, plain, target, delta=0.3, reduction=reduction).backward(above)  # type: ignore[no-untyped-call]
    optimize(plain, RULES["sgd"]._replace(theirs=lambda p: torch.optim.SGD(p, 0.5))).step()
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-10, atol=1e-13)
    assert stats.solved.shape == (ROWS,)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("kind", ["all kinds", "listed"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_triton_steps_as_torch_does(rule: str, several: bool, kind: str) -> None:
    plain, hidden, target = make(several, kind)
    ours = SieveLinear.from_linear(copy.deepcopy(plain).float(), optimizer=RULES[rule].ours())
    states, theirs = hidden.float().requires_grad_(), hidden.clone().requires_grad_()
    ours.loss(states, target, delta=0.3, backend="triton").backward()  # type: ignore[no-untyped-call]
    dense_loss(several, theirs, plain, target, delta=0.3).backward()  # type: ignore[no-untyped-call]
    optimize(plain, RULES[rule]).step()
    torch.testing.assert_close(states.grad, theirs.grad, rtol=1e-3, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-3, atol=1e-4, check_dtype=False)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("several", [False, True])
def test_products_step_as_gradients_do(several: bool, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the weight is made where it is used. On a GPU, bfloat16 alone does that unasked."""
    plain, hidden, target = make(several, "all kinds")
    if not biased:
        plain.bias = None  # type: ignore[assignment]
    calls: list[slice] = []
    step_product = HeadSGD.step_product

    def counted(self: HeadSGD, layer: Any, classes: slice, *others: Any) -> None:
        calls.append(classes)
        step_product(self, layer, classes, *others)

    monkeypatch.setattr(updates, "multiplies", lambda value, rows: True)
    monkeypatch.setattr(HeadSGD, "step_product", counted)
    monkeypatch.setattr(linear_step, "WORK", 1 << 13)
    ours = SieveLinear.from_linear(copy.deepcopy(plain).float(), optimizer=HeadSGD(0.7))
    states, theirs = hidden.float().requires_grad_(), hidden.clone().requires_grad_()
    ours.loss(states, target, delta=0.3, backend="triton").backward()  # type: ignore[no-untyped-call]
    dense_loss(several, theirs, plain, target, delta=0.3).backward()  # type: ignore[no-untyped-call]
    optimize(plain, RULES["sgd"]).step()
    assert len(calls) > 1
    torch.testing.assert_close(states.grad, theirs.grad, rtol=1e-3, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-3, atol=1e-4, check_dtype=False)
    if biased:
        torch.testing.assert_close(ours.bias, plain.bias, rtol=1e-3, atol=1e-4, check_dtype=False)


def test_autograd_is_told_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels change memory unseen; interpreted ones do not, so it is the call that is looked at."""
    told: list[Tensor] = []
    monkeypatch.setattr(torch.autograd.graph, "increment_version", told.append)
    plain, hidden, target = make(False, "all kinds")
    layer = SieveLinear.from_linear(plain, optimizer=HeadSGD(0.5))
    layer.loss(hidden, target).backward()  # type: ignore[no-untyped-call]
    assert [id(value) for value in told] == [id(layer.weight), id(layer.bias)]


def test_classes_without_a_gradient_are_not_touched() -> None:
    plain, hidden, target = make(True, "listed")
    layer = SieveLinear.from_linear(plain, optimizer=HeadSGD(0.5))
    before = layer.weight.detach().clone()
    layer.loss(hidden, target, delta=0.3).backward()  # type: ignore[no-untyped-call]
    changed = (layer.weight != before).any(1).nonzero().squeeze(1)
    assert set(changed.tolist()) == set(target[target != IGNORED].tolist())


def test_nothing_of_the_size_of_the_weight_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.measure import peak_bytes

    monkeypatch.undo()
    layer = SieveLinear(64, 400_000 if DEVICE == "cpu" else 4_000_000, optimizer=HeadSGD(0.1), dtype=torch.bfloat16)
    layer = layer.to(DEVICE)
    hidden, target = torch.randn(8, 64, device=DEVICE), torch.randint(400_000, (8,), device=DEVICE)  # all dense

    for _ in range(2):
        loss = layer.loss(hidden, target)
        peak = peak_bytes(loss.backward, device=DEVICE)
    assert peak < 0.5 * layer.weight.nbytes


def test_hidden_states_may_need_no_gradient() -> None:
    _, hidden, target = make(False, "all kinds")
    layer = SieveLinear(SIZE, CLASSES, optimizer=HeadSGD(0.1), dtype=torch.float64, device=DEVICE)
    before = layer.weight.detach().clone()
    layer.loss(hidden, target).backward()  # type: ignore[no-untyped-call]
    assert not torch.equal(layer.weight, before)
    with torch.no_grad():
        assert not layer.loss(hidden, target).requires_grad


def test_without_an_optimizer_there_are_gradients() -> None:
    plain, hidden, target = make(False, "all kinds")
    layer = SieveLinear.from_linear(plain)
    layer.loss(hidden, target, delta=0.2).backward()  # type: ignore[no-untyped-call]
    expected = torch.autograd.grad(dense_loss(False, hidden, plain, target, delta=0.2), plain.weight)[0]
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-9, atol=1e-13)
    assert layer(hidden).requires_grad


# -- bfloat16 ----------------------------------------------------------------------------------------------------------


def test_tiny_steps_add_up_with_stochastic_rounding_alone() -> None:
    target = torch.randint(40, (64,)).to(DEVICE)
    states = (torch.randn(64, 8) * 0.5).to(DEVICE)
    losses = {}
    for stochastic in (True, False):
        torch.manual_seed(0)
        layer = SieveLinear(8, 40, optimizer=HeadSGD(1e-3, stochastic=stochastic), dtype=torch.bfloat16).to(DEVICE)
        first = layer.weight.detach().clone()
        for _ in range(300):
            loss = layer.loss(states, target, delta=1.0)
            loss.backward()  # type: ignore[no-untyped-call]
        losses[stochastic] = float(loss.detach()), float((layer.weight != first).float().mean())
    assert losses[False][1] < 0.3  # most weights have not moved
    assert losses[True][1] > 0.6
    assert losses[True][0] < losses[False][0] - 0.002


def test_states_are_cast_and_loss_is_not() -> None:
    layer = SieveLinear(SIZE, CLASSES, optimizer=HeadAdamW(), dtype=torch.bfloat16, device=DEVICE)
    hidden = torch.randn(5, SIZE, requires_grad=True, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = layer.loss(hidden, torch.arange(5, device=DEVICE))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    assert layer.optimizer is not None
    assert {b.dtype for b in layer.optimizer.buffers()} == {torch.float32}
    assert layer(hidden).dtype == torch.bfloat16


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_resumes_to_the_last_bit(rule: str, dtype: torch.dtype) -> None:
    def run(layer: SieveLinear, steps: range) -> None:
        for step in steps:
            _, hidden, target = make(True, "all kinds", seed=step, dtype=torch.float32)
            layer.loss(hidden, target).backward()  # type: ignore[no-untyped-call]

    layer = SieveLinear(SIZE, CLASSES, optimizer=RULES[rule].ours(), dtype=dtype, device=DEVICE)
    run(layer, range(3))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    run(layer, range(3, 6))
    file.seek(0)
    other = SieveLinear(SIZE, CLASSES, optimizer=RULES[rule].ours(), dtype=dtype, device=DEVICE)
    other.load_state_dict(torch.load(file))
    run(other, range(3, 6))
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.bias, other.bias)
    for ours, theirs in zip(layer.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_copy_is_independent() -> None:
    _, hidden, target = make(False, "all kinds", dtype=torch.float32)
    layer = SieveLinear(SIZE, CLASSES, optimizer=HeadAdamW(0.1), device=DEVICE)
    other = copy.deepcopy(layer)
    layer.loss(hidden, target).backward()  # type: ignore[no-untyped-call]
    assert other.optimizer is not None
    assert other.optimizer.steps == 0
    other.loss(hidden, target).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(layer.weight, other.weight)


# -- what is refused ---------------------------------------------------------------------------------------------------


def stepping(**options: Any) -> tuple[SieveLinear, Tensor, Tensor]:
    layer = SieveLinear(SIZE, CLASSES, optimizer=HeadSGD(0.1), **options)
    return layer, torch.randn(4, SIZE, requires_grad=True), torch.arange(4)


def test_a_second_backward_pass_is_refused() -> None:
    layer, hidden, target = stepping()
    loss = layer.loss(hidden, target)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="expected once, found a second pass"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_losses_that_wait_for_each_other_are_refused() -> None:
    layer, hidden, target = stepping()
    losses = [layer.loss(hidden, target) for _ in range(2)]
    losses[0].backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="every backward pass is a step"):
        losses[1].backward()  # type: ignore[no-untyped-call]


def test_two_losses_of_one_backward_pass_are_refused() -> None:
    layer, hidden, target = stepping()
    with pytest.raises(RuntimeError, match="every backward pass is a step"):
        (layer.loss(hidden, target) + layer.loss(hidden, target)).backward()  # type: ignore[no-untyped-call]


def test_second_derivatives_are_refused_before_the_step() -> None:
    layer, hidden, target = stepping()
    before = layer.weight.detach().clone()
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(layer.loss(hidden, target), hidden, create_graph=True)
    assert torch.equal(layer.weight, before)


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        stepping(dtype=torch.float16)
    layer, hidden, target = stepping()
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="scaled loss"):
        layer.loss(hidden, target)


def test_what_cannot_be_stepped_is_refused() -> None:
    layer, hidden, target = stepping()
    with pytest.raises(ValueError, match=r"backend: .*'reference'"):
        layer.loss(hidden, target, backend="reference")
    layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"weight: .* frozen"):
        layer.loss(hidden, target)
    layer.weight.requires_grad_()
    layer.weight.data = torch.randn(SIZE, CLASSES).t()
    with pytest.raises(ValueError, match=r"weight: .* contiguous"):
        layer.loss(hidden, target)
    moved = SieveLinear(SIZE, CLASSES, optimizer=HeadAdamW()).bfloat16()
    with pytest.raises(ValueError, match=r"optimizer: weight_exp_avg: expected torch\.float32"):
        moved.loss(hidden, target)


def test_an_optimizer_is_for_one_layer() -> None:
    optimizer = HeadSGD(0.1)
    SieveLinear(3, 5, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"optimizer: .* in use"):
        SieveLinear(3, 5, optimizer=optimizer)
    with pytest.raises(TypeError, match="optimizer: expected HeadSGD or HeadAdamW, found SGD"):
        SieveLinear(3, 5, optimizer=torch.optim.SGD([torch.ones(1)], 0.1))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs_are_refused() -> None:
    layer, hidden, target = stepping()
    with pytest.raises(Exception, match="eager mode"):
        torch.compile(layer.loss, backend="eager", fullgraph=True)(hidden, target)


# -- serving -----------------------------------------------------------------------------------------------------------


def test_before_serving_answers_are_exact() -> None:
    layer, hidden, target = stepping()
    layer.loss(hidden, target).backward()  # type: ignore[no-untyped-call]
    answer = layer.topk(hidden.detach(), 3)
    assert answer.exact.all()
    assert torch.equal(answer.indices, layer(hidden).topk(3).indices)
    layer.loss(hidden, target).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(layer.topk(hidden.detach(), 3).indices, layer(hidden).topk(3).indices)
    layer.weight.data = torch.randn_like(layer.weight)
    assert torch.equal(layer.topk(hidden.detach(), 3).indices, layer(hidden).topk(3).indices)


def test_a_served_layer_trains_on_and_is_refreshed() -> None:
    torch.manual_seed(0)
    layer = SieveLinear(32, 1500, optimizer=HeadSGD(1.0))
    with torch.no_grad():
        layer.bias.fill_(-30.0)
        layer.weight.mul_(8)
    queries = torch.randn(900, 32)
    head = layer.serve(queries, k=[1, 3], delta=0.05, method="cascade")
    assert head.weight.data_ptr() == layer.weight.data_ptr()
    assert torch.equal(layer.topk(queries[:5], 3).indices, layer(queries[:5]).topk(3).indices)
    labels = torch.arange(60).view(20, 3)
    # Of the other classes all are solved.
    layer.loss(queries[:20], labels).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(WeightChanged):
        layer.topk(queries[:5], 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 50 < layer.refresh() <= 60
        assert layer.refresh() == 0
    assert torch.equal(layer.topk(queries[:20], 3).indices, layer(queries[:20]).topk(3).indices)
    with torch.no_grad():
        layer.weight.mul_(1.5)
    with pytest.warns(UserWarning, match="1500 of 1500 classes changed"):
        layer.refresh()


def test_above_asks_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(AdaptiveSoftmax, "above", lambda *args: calls.append(args), raising=False)
    layer, hidden, _ = stepping()
    layer.above(hidden.detach(), 0.5)
    assert calls[0][0].weight.data_ptr() == layer.weight.data_ptr()
    assert calls[0][2] == 0.5


# -- found by a second reader ------------------------------------------------------------------------------------------


def test_a_bias_that_changed_before_the_step_is_noticed() -> None:
    layer, hidden, target = stepping()
    loss = layer.loss(hidden, target)
    with torch.no_grad():
        layer.bias.add_(1)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="weight and bias of the forward pass"):
        loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(layer.weight, before)


def test_the_loss_is_float32_under_autocast() -> None:
    layer, hidden, target = stepping()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.loss(hidden.bfloat16(), target).dtype == torch.float32


def test_a_layer_made_float16_later_is_refused() -> None:
    layer, hidden, target = stepping()
    with pytest.raises(ValueError, match="float16"):
        layer.half().loss(hidden, target)


def test_without_gradients_nothing_steps_and_nothing_is_refused() -> None:
    layer, hidden, target = stepping()
    expected = layer.loss(hidden, target).detach()
    layer.requires_grad_(False)
    with torch.no_grad():
        for backend in ("auto", "reference"):
            torch.testing.assert_close(layer.loss(hidden, target, backend=backend), expected, rtol=1e-5, atol=1e-6)
    assert layer.optimizer is not None
    assert layer.optimizer.steps == 0


def test_an_index_of_another_weight_is_not_refreshed() -> None:
    layer = SieveLinear(16, 500)
    assert layer.serve(torch.randn(200, 16), delta=0.2).index is not None
    layer.weight = nn.Parameter(torch.randn(500, 16))
    assert layer.served is None
    assert layer.refresh() == 0


@pytest.mark.parametrize("several", [False, True])
def test_what_is_no_group_is_refused(several: bool) -> None:
    layer, hidden, target = stepping()
    labels = target[:, None] if several else target
    with pytest.raises(TypeError, match="group: expected a process group"):
        layer.loss(hidden, labels, group=3)


def test_a_momentum_of_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"momentum: expected a number in \[0, 1\), found 1"):
        HeadSGD(0.1, momentum=1)
