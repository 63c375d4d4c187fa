"""The Triton kernels against the torch version of the same ops: on the GPU where there is one, else interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import distance_to_margin, make

pytest.importorskip("triton", reason="needs Triton")

from softsieve.kernels import cross_entropy, cross_entropy_torch, cross_entropy_triton
from softsieve.kernels.cross_entropy_triton import backward, forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
}


def both(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, delta: float = 0.1, reduction: str = "mean"
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Loss, row scalars and gradient by Triton and by torch, on the CPU."""
    on_device = [None if part is None else part.to(DEVICE) for part in (logits, target, weight)]
    assert on_device[0] is not None
    assert on_device[1] is not None
    ours, valid = forward(on_device[0], on_device[1], on_device[2], delta, -100, reduction)
    assert valid
    _, *scalars, share, _ = ours
    grad = backward(share, on_device[0], on_device[1], *scalars)
    truth = cross_entropy_torch.forward(logits, target, weight, delta, -100, reduction)
    _, *scalars, share, _ = truth
    true_grad = cross_entropy_torch.backward(share, logits, target, *scalars)
    return tuple(part.cpu() for part in (*ours, grad)), (*truth, true_grad)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (37, 123), (5, 4099)])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_torch(shape: tuple[int, int], delta: float, dtype: torch.dtype, weighted: bool) -> None:
    logits, target = make(*shape)
    logits = logits.to(dtype)
    weight = torch.rand(shape[1], dtype=dtype) + 0.1 if weighted else None
    clear = (distance_to_margin(logits, target, delta) > 1e-6).all(-1)
    target = target.where(clear, -100)  # what rounding decides may be decided either way
    assert clear.float().mean() > 0.5
    for reduction in ("none", "mean", "sum") if shape == (37, 123) else ("mean",):
        ours, truth = both(logits, target, weight=weight, delta=delta, reduction=reduction)
        names = ("loss", "threshold", "kept", "lse", "norm", "share", "margin", "grad")
        for name, a, b in zip(names, ours, truth, strict=True):
            assert a.dtype == b.dtype
            if name != "norm":
                torch.testing.assert_close(a, b, **TOLERANCE[dtype], msg=f"{name} differs: {a} {b}")


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_function_of_eager_mode_is_that_of_torch(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, constants and both derivatives; the rest of it is the same for the loops of a CPU."""
    logits, target = make(37, 23)
    clear = (distance_to_margin(logits, target, 0.1) > 1e-6).all(-1)
    target, weight = target.where(clear, -100).to(DEVICE), torch.rand(23).to(DEVICE)
    results = []
    for narrow in (True, False):
        x = logits.to(DEVICE, torch.float32 if narrow else torch.float64).requires_grad_()
        monkeypatch.setattr(cross_entropy, "uses_numba", lambda _: False)
        monkeypatch.setattr(cross_entropy, "uses_triton", lambda logits: logits.dtype == torch.float32)
        each = weight.to(x.dtype)
        loss, *constants = cross_entropy.as_cross_entropy(x, target, each, 0.1, -100, reduction)
        alone = cross_entropy.as_cross_entropy_loss(x, target, each, 0.1, -100, reduction)
        assert torch.equal(alone, loss)
        (grad,) = torch.autograd.grad(alone.sum(), x)
        (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), x)
        results.append([part.double() for part in (loss, *constants, grad, slope, second)])
    for name, ours, truth in zip(
        ("loss", "threshold", "kept", "lse", "norm", "share", "margin", "grad", "slope", "second"),
        *results,
        strict=True,
    ):
        if name != "norm":
            torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("classes", [65, 128, 129, 300])
def test_rows_that_are_longer_than_a_program_holds(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of 32 classes, four times in turn; some rows have lanes of nothing but -inf."""
    monkeypatch.setattr(cross_entropy_triton, "WHOLE", 64)
    monkeypatch.setattr(cross_entropy_triton, "LONG_FEW", (1, 32, 1))
    monkeypatch.setattr(cross_entropy_triton, "FEW", 20)
    monkeypatch.setattr(cross_entropy_triton, "LONG", (2, 16, 1))
    cross_entropy_triton.shapes.cache_clear()
    for rows in (20, 21):
        logits, target = make(rows, classes)
        logits = logits.float()
        logits[::4, : classes - 3] = -INF
        target[::4] = classes - 1
        clear = (distance_to_margin(logits.where(logits > -INF, -1e4), target, 0.1) > 1e-6).all(-1)
        for a, b in zip(*both(logits, target.where(clear, -100)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    cross_entropy_triton.shapes.cache_clear()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("alone", [0, 8192])
def test_one_program_or_many_add_up_the_same(alone: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_triton, "ALONE", alone)
    cross_entropy_triton.shapes.cache_clear()
    for rows, classes, at_once in ((1, 5, 1), (33, 150, 8), (40, 100, 64 if alone else 16)):
        assert cross_entropy_triton.shapes(rows, classes)[1][0] == at_once
        logits, target = make(rows, classes)
        ours, truth = both(logits.float(), target, weight=torch.rand(classes), reduction=reduction)
        for place in (0, 5, 7):
            torch.testing.assert_close(ours[place], truth[place].to(ours[place].dtype), rtol=1e-4, atol=1e-6)
    cross_entropy_triton.shapes.cache_clear()


def test_the_norm_gives_the_softmax_over_kept_classes_also_far_from_zero() -> None:
    logits, target = make(37, 50, ignored=0)
    logits = (logits + 3e4).float()  # lse alone is good to 2e-3 here
    (_, threshold, _, lse, norm, *_), _ = both(logits, target)
    x = logits.double()
    q = torch.exp((logits - lse.unsqueeze(1)) - norm.unsqueeze(1)).double()
    truth = x.masked_fill(logits < threshold.unsqueeze(1), -INF).softmax(-1)
    kept = truth > 0
    torch.testing.assert_close(q[kept], truth[kept], rtol=2e-5, atol=1e-7)


def test_solved_and_ignored_rows_are_exactly_zero() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [NAN, INF, 0.0], [0.0, 1.0, 0.0]])
    (loss, _, kept, lse, _, share, margin, grad), _ = both(logits, torch.tensor([0, -100, 2]), reduction="none")
    assert loss[:2].tolist() == [0, 0]
    assert kept.tolist() == [1, 0, 3]
    assert lse[1] == share[1] == margin[1] == 0
    assert not grad[:2].any()
    assert grad[2].all()


@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
def test_what_is_not_finite(delta: float) -> None:
    logits = torch.zeros(6, 5)
    logits[0, 0] = logits[1, 1] = NAN
    logits[2, 0] = logits[3, 1] = INF
    logits[4, 0] = -INF  # the target
    logits[5, 1:4] = -INF
    ours, truth = both(logits, torch.zeros(6, dtype=torch.long), delta=delta, reduction="none")
    assert ours[0][:4].isnan().all()
    for a, b in zip(*((x[0], x[6], x[7][4:], x[2][:1]) for x in (ours, truth)), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert ours[7][:4].isnan().any(-1).all()


def test_a_first_block_of_minus_infinities() -> None:
    logits, target = make(3, 5000, ignored=0)
    logits = logits.float()
    logits[:, :4096] = -INF
    target[:] = 4500
    ours, truth = both(logits, target)
    assert ours[0].isfinite()
    torch.testing.assert_close(ours[6:], truth[6:])
    torch.testing.assert_close(ours[0], truth[0])


def test_strided_inputs() -> None:
    logits, target = make(20, 30)
    logits, weight = logits.float(), torch.rand(30)
    truth = both(logits, target, weight=weight)[1]
    for strided in (logits.T.contiguous().T, logits.repeat_interleave(2, 0)[::2]):
        every_second = target.repeat_interleave(2)[::2], weight.repeat_interleave(2)[::2]
        ours, _ = both(strided, every_second[0], weight=every_second[1])
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bad", [-1, 5])
def test_bad_labels_are_told(bad: int) -> None:
    logits, target = torch.zeros(3, 5, device=DEVICE), torch.tensor([0, bad, -100], device=DEVICE)
    _, valid = forward(logits, target, None, 0.1, -100, "mean")
    assert not valid


def test_many_rows_reduce_to_the_same() -> None:
    logits, target = make(1100, 2)
    logits = logits.float()
    ours, truth = both(logits, target)
    torch.testing.assert_close(ours[0], truth[0])
    torch.testing.assert_close(ours[5], truth[5])
