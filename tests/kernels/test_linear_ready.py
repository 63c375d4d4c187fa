"""The linear loss whose logits are held inside `torch.compile`: on a CPU, and by Triton's interpreter or a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.measure import peak_bytes
from softsieve import linear_as_cross_entropy, reference
from softsieve.kernels import linear, linear_ready, linear_rows
from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.kernels.linear_types import NUMBERS, Options
from tests.helpers import IGNORED, spy
from tests.kernels.test_linear_rows import CLASSES, MEMORY, OPTIONS, ROWS, make_layer

DEVICES = {"torch": "cpu", "triton": "cuda" if torch.cuda.is_available() else "cpu"}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
COMPILERS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]
WAYS = ["torch", pytest.param("triton", marks=needs_triton)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def layer(way: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias, target = make_layer(torch.float64, **options)
    leaves = (x.detach().to(DEVICES[way], dtype).requires_grad_() for x in (hidden, weight, bias))
    return *leaves, target.to(DEVICES[way])  # type: ignore[return-value]


def compiled(way: str, weight: Tensor, target: Tensor, *, compiler: Any = "aot_eager", **options: Any) -> Any:
    """A function of hidden states: loss and statistics."""
    options = {"backend": way, "memory": MEMORY, "return_stats": True, **options}
    options = {name: x.to(DEVICES[way]) if isinstance(x, Tensor) else x for name, x in options.items()}
    return torch.compile(
        lambda hidden: linear_as_cross_entropy(hidden, weight, target, **options), backend=compiler, fullgraph=True
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("way", WAYS)
def test_agrees_with_the_reference(way: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "forward_counted", None)  # nothing goes the other way
    hidden, weight, bias, target = layer(way)
    leaves = [hidden, weight, bias]
    ours, stats = compiled(way, weight, target, bias=bias, **options)(hidden)
    wide = [x.detach().double().cpu().requires_grad_() for x in leaves]
    loss = reference.linear_as_cross_entropy(wide[0], wide[1], target.cpu(), bias=wide[2], **options)
    torch.testing.assert_close(ours.detach().cpu().double(), loss.detach(), rtol=2e-5, atol=1e-6)
    grads = torch.autograd.grad(3 * ours, leaves)
    for grad, true in zip(grads, torch.autograd.grad(3 * loss, wide), strict=True):
        torch.testing.assert_close(grad.cpu().double(), true, rtol=1e-4, atol=2e-6)
    shared = {name: options[name] for name in ("delta", "softcap") if name in options}
    states, rows, own = (x.detach() for x in wide)
    known = reference.linear_as_stats(states, rows, target.cpu(), bias=own, **shared)
    for one, other in zip(stats, known, strict=True):
        torch.testing.assert_close(one.cpu().to(other.dtype), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_does_not_hold_logits_has_the_same_outputs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a large layer of which few rows are dense: the graph is compiled, the op decides when it runs."""
    hidden, weight, bias, target = layer(way)
    leaves = [hidden, weight, bias]
    function = compiled(way, weight, target, bias=bias)

    def run() -> tuple[Tensor, ...]:
        loss, stats = function(hidden)
        return loss.detach(), *stats, *torch.autograd.grad(3 * loss, leaves)

    held = run()
    if way == "triton":
        monkeypatch.setattr("softsieve.kernels.linear_held.choose", lambda *_: 0)
    monkeypatch.setattr(linear_rows, "block_rows", lambda *_: 0)
    runs = spy(monkeypatch, linear, "backward")
    for ours, other in zip(held, run(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=2e-6)
    assert len(runs) == 1


@pytest.mark.parametrize("compiler", COMPILERS)
def test_logits_are_held_in_the_memory_that_is_allowed(compiler: str) -> None:
    """The gradient of the loss is multiplied where the gradients are, not into other memory of their size."""
    hidden, weight = torch.randn(1500, 32, requires_grad=True), torch.randn(20_000, 32, requires_grad=True)
    target, memory = torch.randint(20_000, (1500,)), 200 * 10**6
    function = compiled("torch", weight, target, compiler=compiler, memory=memory, return_stats=False)
    gradients = hidden.nbytes + weight.nbytes

    def call() -> None:
        hidden.grad = weight.grad = None
        (function(hidden) / 3).backward()

    call()
    hidden.grad = weight.grad = None
    peak = peak_bytes(call) - gradients
    assert 1500 * 20_000 * 4 < peak <= memory


@pytest.mark.parametrize("way", WAYS)
def test_only_wanted_gradients_are_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = spy(monkeypatch, linear_ready, "forward")
    hidden, weight, bias, target = layer(way)
    for leaf in (hidden, weight, bias):
        for other in (hidden, weight, bias):
            other.requires_grad_(other is leaf)
        eager = linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=way, memory=MEMORY)
        loss, _ = compiled(way, weight, target, bias=bias)(hidden)
        torch.testing.assert_close(torch.autograd.grad(loss, leaf), torch.autograd.grad(eager, leaf))
    assert len(runs) == 3
    with torch.no_grad():
        compiled(way, weight, target, bias=bias)(hidden)
    assert len(runs) == 3


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_must_wait_for_their_factors_go_the_other_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = spy(monkeypatch, linear_ready, "forward")
    hidden, weight, _, target = layer(way)
    factor = torch.linspace(0, 2, ROWS, device=hidden.device)
    function = compiled(way, weight, target, reduction="none", return_stats=False)
    eager = linear_as_cross_entropy(hidden, weight, target, reduction="none", backend=way)
    ours, other = (torch.autograd.grad(loss, hidden, factor)[0] for loss in (function(hidden), eager))
    torch.testing.assert_close(ours, other, rtol=1e-4, atol=2e-6)
    assert not runs


@pytest.mark.parametrize("way", WAYS)
def test_all_ignored_is_zero_with_gradients(way: str) -> None:
    hidden, weight, bias, target = layer(way)
    loss, stats = compiled(way, weight, torch.full_like(target, IGNORED), bias=bias)(hidden)
    loss.backward()
    assert loss == 0
    assert not stats.kept.any()
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_half_precision() -> None:
    """Gradients in bf16, and a factor that is not rounded to it."""
    hidden, weight, _, target = layer("torch", lift=0.0)
    options: dict[str, Any] = {"delta": 1.0, "reduction": "sum"}
    function = compiled("torch", weight, target, return_stats=False, **options)
    wide = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, weight)]
    truth = torch.autograd.grad(reference.linear_as_cross_entropy(wide[0], wide[1], target, **options) / 3, wide)
    with torch.autocast("cpu", torch.bfloat16):
        loss = function(hidden)
    for grad, true in zip(torch.autograd.grad(loss / 3, [hidden, weight]), truth, strict=True):
        assert torch.equal(grad, grad.bfloat16().float())
        assert float((grad - true).norm() / true.norm()) < torch.finfo(torch.bfloat16).eps
        assert float((grad * true).sum() / (true * true).sum()) == pytest.approx(1, abs=5e-4)


def test_other_numbers_of_rows_are_compiled_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    _, weight, _, _ = layer("torch")
    step = torch.compile(
        lambda h, t: linear_as_cross_entropy(h, weight, t, memory=MEMORY), backend=counter, fullgraph=True
    )
    for rows in (20, 31, 44, 57, 60):
        hidden, target = torch.randn(rows, weight.shape[1], requires_grad=True), torch.arange(rows)
        loss, eager = step(hidden, target), linear_as_cross_entropy(hidden, weight, target)
        torch.testing.assert_close(torch.autograd.grad(loss, hidden), torch.autograd.grad(eager, hidden))
    assert counter.frame_count <= 2  # once for the first number, once for any


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, _, target = layer("torch")
    loss, _ = compiled("torch", weight, target, compiler="eager")(hidden)
    with pytest.raises(NotImplementedError, match="found a second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("way", WAYS)
def test_which_layers_it_serves(way: str) -> None:
    hidden, weight = torch.empty(1000, 8, device="meta"), torch.empty(20_000, 8, device="meta")
    if way == "torch":
        hidden, weight = torch.empty(1000, 8), torch.empty(20_000, 8)

    def serves(memory: int = 0, rows: int = 1000, dtype: torch.dtype = torch.float32, **changes: Any) -> bool:
        return linear_ready.serves(
            hidden[:rows].to(dtype), weight.to(dtype), Options(backend=way, memory=memory, **changes)
        )

    assert serves(10**9)
    assert not serves(10**9, group="0")
    assert not serves(10**9, reduction="none")
    assert serves(rows=10) == serves() == (way == "triton")  # of a small layer on a GPU, whatever it was told
    assert not serves(10**9, dtype=torch.float16)


@needs_triton
def test_a_large_layer_on_a_gpu_is_told_to_hold_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_ready, "SMALL", 1000 * 8 * 20_000 - 1)
    hidden, weight = torch.empty(1000, 8, device="meta"), torch.empty(20_000, 8, device="meta")
    assert not linear_ready.serves(hidden, weight, Options(backend="triton"))
    assert linear_ready.serves(hidden, weight, Options(backend="triton", memory=10**9))


@pytest.mark.parametrize("way", WAYS)
def test_the_op_passes_the_checks_of_torch(way: str) -> None:
    hidden, weight, bias, target = layer(way)
    delta = torch.full((), 0.1, device=hidden.device)
    arguments = (hidden, weight, bias, target, delta, None, None)
    options = Options(backend=way, memory=MEMORY)
    torch.library.opcheck(linear_ready.forward_op, (*arguments, *options, [True] * 3))
    loss, numbers, to_hidden, to_weight, to_bias = linear_ready.forward_op(*arguments, *options, [True, False, True])
    assert (loss.shape, numbers.shape, to_hidden.shape, to_bias.shape) == (
        (),
        (NUMBERS, ROWS),
        hidden.shape,
        (CLASSES,),
    )
    assert to_weight.numel() == 0
