"""The compiled loops of the loss on logits against its plain torch, in every number that they hand on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve import as_cross_entropy, reference
from softsieve.kernels import cross_entropy as ops
from softsieve.kernels import cross_entropy_numba as loops
from softsieve.kernels import cross_entropy_torch as plain
from tests.helpers import IGNORED, distance_to_margin, make

INF, NAN = float("inf"), float("nan")
NAMES = ("loss", "threshold", "kept", "lse", "norm", "share", "margin")


@pytest.fixture(params=["one thread", "threads and blocks"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "one thread":
        monkeypatch.setattr(loops, "SMALL", 0)
        monkeypatch.setattr(plain, "BLOCK", 5000)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def clear_rows(logits: Tensor, target: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Those in which no class is so near the margin that rounding decides."""
    rows = (distance_to_margin(logits.double(), target, delta) > 1e-5).all(-1)
    return logits[rows], target[rows]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 4), (252, 7), (123, 507), (33, 1031)])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_numbers_and_gradients_are_those_of_plain_torch(
    shape: tuple[int, int], delta: float, dtype: torch.dtype, weighted: bool, reduction: str
) -> None:
    logits, target = make(*shape)
    logits, target = clear_rows(logits.to(dtype), target, delta)
    if not len(logits):
        pytest.skip("a class is at the margin in every row")
    weight = torch.rand(shape[1]) + 0.1 if weighted else None
    options = target, weight, delta, IGNORED, reduction
    truth = plain.forward(logits, *options)
    loss, numbers, work = loops.forward_numbers(logits, *options)
    for name, ours, theirs in zip(NAMES, (loss, *ops._split(numbers, *work)), truth, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6, msg=name)
    upstream = torch.rand(truth[0].shape) + 0.5
    ours = loops.backward_numbers(upstream, logits, target, numbers, work, torch.empty_like(logits))
    _, threshold, kept, lse, norm, share, _ = truth
    theirs = plain.backward(upstream * share, logits, target, threshold, kept, lse, norm)
    torch.testing.assert_close(ours, theirs, rtol=max(2e-5, torch.finfo(dtype).eps), atol=1e-6)
    assert torch.equal(ours == 0, theirs == 0)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5])
def test_fp32_agrees_with_the_reference_in_float64(delta: float) -> None:
    logits, target = make(123, 507)
    logits, target = clear_rows(logits.float(), target, delta)
    x, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    ours, truth = as_cross_entropy(x, target, delta=delta), reference.as_cross_entropy(wide, target, delta=delta)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=0)
    (grad,), (true_grad,) = torch.autograd.grad(ours, x), torch.autograd.grad(truth, wide)
    torch.testing.assert_close(grad.double(), true_grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 255, 256, 257, 4097, 70_000])
def test_sums_have_the_bits_of_cross_entropy_at_any_number_of_rows(rows: int) -> None:
    logits, target = torch.randn(rows, 3), torch.randint(3, (rows,))
    target[torch.rand(rows) < 0.2] = IGNORED
    target[0] = 1
    weight = torch.rand(3)
    for reduction in ("mean", "sum"):
        for each in (None, weight):
            ours = as_cross_entropy(logits, target, delta=1, reduction=reduction, weight=each)
            assert torch.equal(ours, F.cross_entropy(logits, target, reduction=reduction, weight=each))


@pytest.mark.parametrize("shift", [0.0, 1e4, -3e4])
def test_gradients_of_logits_far_from_zero_keep_their_digits(shift: float) -> None:
    logits = (torch.randn(50, 40) * 3).mul(1024).round().div(1024) + shift
    target = torch.randint(40, (50,))
    x, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    as_cross_entropy(x, target, delta=1).backward()  # type: ignore[no-untyped-call]
    F.cross_entropy(wide, target).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=2e-6, atol=1e-9)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("row", "lse"),
    [([0.0, NAN], NAN), ([INF, 0.0], INF), ([0.0, INF], INF), ([-INF, -INF], -INF), ([-500.0, 3.0], 3.0)],
)
def test_log_sums_of_odd_rows_are_those_of_torch(row: list[float], lse: float) -> None:
    _, stats = as_cross_entropy(torch.tensor([row]), torch.tensor([0]), return_stats=True)
    torch.testing.assert_close(stats.lse, torch.tensor([lse]), equal_nan=True)
    torch.testing.assert_close(stats.lse, torch.tensor([row]).logsumexp(-1), equal_nan=True)


def test_strided_logits_and_labels_and_gradients_from_above() -> None:
    logits, target = torch.randn(5, 60).t().requires_grad_(), torch.randint(5, (120,))[::2]
    loss = as_cross_entropy(logits, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)  # an expanded number
    dense = logits.detach().contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(as_cross_entropy(dense, target.contiguous(), reduction="sum"), dense)
    assert torch.equal(grad, expected)


def test_second_derivatives_of_fp32_are_those_of_float64() -> None:
    logits, target = make(9, 5)

    def penalty(x: Tensor) -> Tensor:
        loss = as_cross_entropy(x, target)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    narrow, wide = penalty(logits.float().requires_grad_()), penalty(logits.clone().requires_grad_())
    assert wide.any()
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-6)


def test_transforms_of_torch_func_take_gradients_of_fp32() -> None:
    logits, target = torch.randn(12, 5), torch.randint(5, (12,))
    found = torch.func.grad(lambda x: as_cross_entropy(x, target))(logits)
    x = logits.clone().requires_grad_()
    assert torch.equal(found, torch.autograd.grad(as_cross_entropy(x, target), x)[0])


def test_a_tensor_that_is_left_of_a_transform_is_as_any_other() -> None:
    logits, target, left = torch.randn(12, 5), torch.randint(5, (12,)), []

    def leak(x: Tensor) -> Tensor:
        left.append(x)
        return x.sum()

    torch.func.grad(leak)(logits)
    assert torch.equal(as_cross_entropy(left[0], target), as_cross_entropy(logits, target))


@pytest.mark.parametrize("changed", ["logits", "target", "lse"])
def test_what_backward_reads_may_not_change_before(changed: str) -> None:
    leaf, target = torch.randn(12, 5, requires_grad=True), torch.randint(5, (12,))
    logits = leaf * 2
    loss, stats = as_cross_entropy(logits, target, return_stats=True)
    {"logits": logits, "target": target, "lse": stats.lse}[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_logits_say_where_the_loss_is_whatever_the_default_device() -> None:
    logits, target = torch.randn(12, 5), torch.randint(5, (12,))
    expected = as_cross_entropy(logits, target)
    with torch.device("meta"):
        loss = as_cross_entropy(logits, target)
    assert torch.equal(loss, expected)


def test_backward_may_run_again() -> None:
    logits, target = torch.randn(12, 5, requires_grad=True), torch.randint(5, (12,))
    loss = as_cross_entropy(logits, target)
    once, again = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)


def test_labels_out_of_range_are_refused_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "BLOCK", 50)
    target = torch.randint(5, (40,))
    target[33] = 5
    for small in (loops.SMALL, 0):
        monkeypatch.setattr(loops, "SMALL", small)
        for weight in (None, torch.rand(5)):
            for reduction in ("none", "mean", "sum"):
                with pytest.raises(ValueError, match="labels in"):
                    as_cross_entropy(torch.randn(40, 5), target, weight=weight, reduction=reduction)


def test_a_weight_that_adds_up_to_nothing_divides_by_one() -> None:
    logits, target = torch.randn(2, 3), torch.tensor([0, 1])
    losses = as_cross_entropy(logits, target, delta=1, reduction="none")
    for weight in (torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, -1.0, 0.0]), torch.tensor([-1.0, 0.0, 0.0])):
        parts = weight[:2].sum() or 1.0
        mean = as_cross_entropy(logits, target, delta=1, weight=weight)
        torch.testing.assert_close(mean, (losses * weight[:2]).sum() / parts)


def test_without_numba_it_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = torch.randn(12, 5, requires_grad=True), torch.randint(5, (12,))
    compiled = as_cross_entropy(logits, target)
    monkeypatch.setattr(ops, "HAS_NUMBA", False)
    monkeypatch.setattr(ops, "_loops", lambda: pytest.fail("the loops were asked"))
    loss = as_cross_entropy(logits, target)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, compiled)
