"""The Triton kernels of the multi-label loss against plain torch: on the GPU where there is one, else interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from softsieve.kernels import multilabel_torch
from softsieve.kernels.multilabel_triton import backward, forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
}


def make(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Rows from surely wrong to surely right, the first without positives and the second without negatives."""
    generator = torch.Generator().manual_seed(rows + classes)
    target = torch.rand(rows, classes, generator=generator) < 0.2
    target[0], target[1 % rows] = False, True
    logits = torch.randn(rows, classes, generator=generator) * 2
    return logits + torch.linspace(-2, 12, rows)[:, None] * (2.0 * target - 1), target


def both(logits: Tensor, target: Tensor, delta: float, reduction: str = "none") -> tuple[list[Tensor], list[Tensor]]:
    """Loss, sides, kept, margin and gradient by Triton, and in float64 by torch."""
    x, flags = logits.to(DEVICE), target.to(DEVICE)
    (loss, sides, kept, margin), valid = forward(x, flags, delta, reduction)
    assert valid
    factor = torch.linspace(0.5, 1, len(x))
    ours = [loss, sides, kept, margin, backward(factor.to(DEVICE), x, flags, sides, kept)]
    true_loss, *others = multilabel_torch.forward(logits.double(), target, delta)
    grad = multilabel_torch.backward(factor.double(), logits.double(), target, *others[:2])
    reduced = true_loss if reduction == "none" else true_loss.mean() if reduction == "mean" else true_loss.sum()
    return [part.cpu() for part in ours], [reduced, *others, grad]


def decided(logits: Tensor, target: Tensor, delta: float) -> Tensor:
    """Rows in which rounding decides nothing."""
    _, sides, _, _ = multilabel_torch.forward(logits.double(), target, delta)
    z = torch.where(target != 0, -logits, logits).double()
    cut = torch.where(target != 0, sides[:, 1:2], sides[:, :1])
    ends = sides[:, :2] == -INF  # a side that is nearly not dense has a cut far below
    return ((z - cut).abs() > 1e-5 * z.abs().clamp_min(1)).all(-1) & (ends | (sides[:, :2] > -12)).all(-1)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (37, 123), (5, 4099)])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_agrees_with_torch(shape: tuple[int, int], delta: float, dtype: torch.dtype) -> None:
    logits, target = make(*shape)
    logits = logits.to(dtype)
    clear = decided(logits, target, delta)
    logits, target = logits[clear], target[clear]
    assert clear.float().mean() > 0.5
    for reduction in ("none", "mean", "sum") if shape == (37, 123) else ("mean",):
        ours, truth = both(logits, target, delta, reduction)
        for name, a, b in zip(("loss", "sides", "kept", "margin", "grad"), ours, truth, strict=True):
            if name != "sides":
                assert a.dtype == (dtype if name == "grad" else torch.long if name == "kept" else torch.float32)
                torch.testing.assert_close(a.to(b.dtype), b, **TOLERANCE[dtype], msg=f"{name}: {{}}".format)
    if shape == (37, 123) and 0 < delta < 1:
        assert (ours[2] == 0).any()
        assert ((ours[2] > 0) & (ours[2] < 23)).any()


@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
def test_what_is_not_finite(delta: float) -> None:
    logits = torch.full((6, 5), -3.0)
    target = torch.zeros(6, 5, dtype=torch.bool)
    target[:, 0] = True
    logits[0, 0], logits[1, 1] = NAN, NAN
    logits[2, 0], logits[3, 1] = INF, INF
    logits[4, 0] = -INF
    logits[5, 1:4] = -INF
    ours, truth = both(logits, target, delta)
    assert ours[0][:4].isnan().all()
    assert ours[3][:4].isnan().all()
    assert ours[0][4] == INF
    assert ours[4][:4].isnan().any(-1).all()
    usual = [0, 1, 2, 3, 5]
    for place in (0, 2, 3, 4):  # not the sides, which may be anything there
        ours_usual, true_usual = ours[place][usual].double(), truth[place][usual].double()
        torch.testing.assert_close(ours_usual, true_usual, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_strided_inputs_and_flags_of_any_dtype(dtype: torch.dtype) -> None:
    logits, target = make(20, 30)
    truth = both(logits, target, 0.4)[1]
    flags = target.to(dtype)
    for x, y in (
        (logits.T.contiguous().T, flags.T.contiguous().T),
        (logits.repeat_interleave(2, 0)[::2], flags.repeat_interleave(3, 0)[::3]),
    ):
        ours = both(x, y, 0.4)[0]
        for place in (0, 2, 3, 4):  # not the sides, which may be anything where nothing is kept
            torch.testing.assert_close(ours[place].to(truth[place].dtype), truth[place], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [2, -1, 0.5, NAN])
def test_bad_flags_are_told(bad: float) -> None:
    flags = torch.zeros(3, 5, device=DEVICE)
    flags[1, 2] = bad
    _, valid = forward(torch.zeros(3, 5, device=DEVICE), flags, 0.1, "mean")
    assert not valid
