"""The losses on a GPU: the results of the CPU, no host synchronisation, capturable in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve import as_cross_entropy, as_keep_mask, as_multilabel_loss, linear_as_cross_entropy, reference
from softsieve.kernels import cross_entropy_torch as kernel
from tests.helpers import IGNORED, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many blocks":
        monkeypatch.setattr(kernel, "BLOCK_ELSEWHERE", 700)


@pytest.fixture
def _no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), logits)[0]


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (252, 7), (123, 507)])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_float64_agrees_with_the_reference(
    shape: tuple[int, int], delta: float, reduction: str, weighted: bool
) -> None:
    """In plain torch, as on accelerators without Triton; the Triton kernels have their tests in tests/kernels."""
    logits, target = (part.cuda() for part in make(*shape))
    weight = torch.rand(shape[1], dtype=torch.float64, device="cuda") if weighted else None
    results = []
    for loss in (as_cross_entropy, reference.as_cross_entropy):
        x = logits.clone().requires_grad_()
        value = loss(x, target, delta=delta, reduction=reduction, weight=weight)
        results.append((value.detach(), gradient(value, x)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)
    _, stats = as_cross_entropy(logits, target, delta=delta, return_stats=True)
    for ours, truth in zip(stats, reference.as_stats(logits, target, delta=delta), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-12)
    assert torch.equal(as_keep_mask(logits, target, delta=delta).sum(-1), stats.kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("delta", [0.1, 1.0])
@pytest.mark.parametrize("shape", [(252, 7), (123, 507), (33, 50003)])
def test_no_worse_than_the_same_written_plainly(dtype: torch.dtype, delta: float, shape: tuple[int, int]) -> None:
    logits, target = (part.cuda() for part in make(*shape))
    logits = logits.to(dtype)
    keep = as_keep_mask(logits, target, delta=delta) | (target == IGNORED).unsqueeze(-1)

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x.masked_fill(~keep, -float("inf")), target)

    truth, theirs, ours = (x.detach().requires_grad_() for x in (logits.double(), logits, logits))
    values = [plain(truth), plain(theirs), as_cross_entropy(ours, target, delta=delta)]
    grads = [gradient(value, x) for value, x in zip(values, (truth, theirs, ours), strict=True)]
    for true, plainly, fused in (values, grads):
        slack = torch.finfo(dtype).eps * true.abs().max()
        assert (fused - true).abs().max() <= (plainly - true).abs().max() + slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_delta_one_is_cross_entropy(dtype: torch.dtype) -> None:
    logits, target = (part.cuda() for part in make(123, 507))
    logits = logits.to(dtype)
    rows = as_cross_entropy(logits, target, delta=1, reduction="none")
    torch.testing.assert_close(rows, F.cross_entropy(logits, target, reduction="none"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours, theirs = as_cross_entropy(logits, target, delta=1), F.cross_entropy(logits, target)
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours.double(), F.cross_entropy(logits.double(), target), rtol=1e-6, atol=0)


def test_solved_and_ignored_rows_are_exactly_zero() -> None:
    logits = torch.tensor(
        [[9.0, 0.0, 0.0], [float("nan"), 0.0, 0.0], [0.0, 1.0, 0.0]], device="cuda", requires_grad=True
    )
    loss = as_cross_entropy(logits, torch.tensor([0, -100, 2], device="cuda"), reduction="none")
    grad = gradient(loss, logits)
    assert loss[:2].tolist() == [0, 0]
    assert not grad[:2].any()
    assert grad[2].all()


@pytest.mark.usefixtures("_no_sync")
def test_no_host_synchronisation() -> None:
    logits = torch.randn(64, 50, device="cuda", requires_grad=True)
    target = torch.arange(64, device="cuda") % 50
    loss, _ = as_cross_entropy(logits, target, return_stats=True)
    loss.backward()  # type: ignore[no-untyped-call]
    as_keep_mask(logits, target)
    for against in ("labels", "threshold"):
        as_multilabel_loss(logits, logits.detach() > 1, against=against).backward()  # type: ignore[no-untyped-call]


def captured_step(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a step that was taken some times before, and what the step returns in it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


def test_capturable_in_a_graph() -> None:
    logits = torch.randn(64, 50, device="cuda", requires_grad=True)
    target = torch.randint(50, (64,), device="cuda")

    def step() -> Tensor:
        logits.grad = None
        loss = as_cross_entropy(logits, target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    graph, loss = captured_step(step)
    with torch.no_grad():
        logits.copy_(torch.randn_like(logits))
    graph.replay()
    assert logits.grad is not None
    fresh = logits.detach().clone().requires_grad_()
    truth = as_cross_entropy(fresh, target)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(logits.grad, gradient(truth, fresh))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_linear_layer_reads_nothing_on_the_host_and_is_capturable(dtype: torch.dtype) -> None:
    hidden = torch.randn(64, 32, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(5003, 32, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(5003, (64,), device="cuda")
    target[::9] = IGNORED

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        loss = linear_as_cross_entropy(hidden, weight, target)
        (3 * loss).backward()  # type: ignore[no-untyped-call]
        return loss

    graph, loss = captured_step(step)
    captured = hidden.grad, weight.grad
    with torch.no_grad():
        hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    values = [value.clone() for value in (loss, *captured) if value is not None]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad is not None
    assert weight.grad is not None
    for one, other in zip(values, (again, hidden.grad, weight.grad), strict=True):
        assert torch.equal(one, other)


def test_compiled() -> None:
    logits, target = (part.cuda() for part in make(40, 9))
    x = logits.clone().requires_grad_()
    compiled = torch.compile(lambda x: as_cross_entropy(x * 2, target), fullgraph=True)
    truth = as_cross_entropy(x * 2, target)
    torch.testing.assert_close(gradient(compiled(x), x), gradient(truth, x))
