"""The linear loss of rows whose logits are held on a GPU, against the reference; interpreted where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve import linear_as_cross_entropy, reference
from softsieve.kernels import linear
from tests.helpers import IGNORED
from tests.kernels.test_linear_rows import CLASSES, ROWS, make_layer

pytest.importorskip("triton", reason="needs Triton")

from softsieve.kernels import linear_held

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


@pytest.fixture(params=["one block", "many blocks"], autouse=True)
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
