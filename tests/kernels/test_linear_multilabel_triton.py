"""The first pass over a layer in one launch against the pass over chunks of logits; labels that a GPU refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from softsieve.kernels import linear_multilabel as kernel
from softsieve.kernels import linear_multilabel_rows_triton as rows_triton
from softsieve.kernels import linear_multilabel_triton as triton_kernel
from softsieve.kernels.linear_types import Layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")


def make(rows: int, classes: int, size: int, labels: int, biased: bool) -> tuple[Layer, Tensor]:
    generator = torch.Generator().manual_seed(rows + classes)
    draw = [torch.randn(*shape, generator=generator) for shape in ((rows, size), (classes, size), (classes,))]
    hidden, weight, bias = (value.to(DEVICE, torch.float16) for value in draw)
    label = torch.rand(rows, classes, generator=generator).topk(labels).indices
    label[::3, -1] = -1  # padding, or a class of another shard
    return Layer(hidden, weight, bias if biased else None, 0.0), label.to(DEVICE)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 3, 1), (3, 5, 4, 2), (130, 300, 33, 3), (17, 2500, 16, 5), (5, 129, 130, 1)])
def test_one_launch_shows_what_chunks_show(shape: tuple[int, int, int, int], biased: bool) -> None:
    layer, label = make(*shape, biased)
    found, expected = (torch.full(label.shape, -INF, device=DEVICE) for _ in range(2))
    assert triton_kernel.scans_layer(layer)
    scanned, maxima = triton_kernel.scan_layer(layer, label, found)
    exact = Layer(layer.hidden.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float(), 0.0)
    chunked, marks = kernel._scan(exact, label, expected, "triton", 1 << 26)
    close: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(maxima.float(), marks.float(), **close)
    lse = [state.top + torch.log(torch.exp(-state.top) + state.total) for state in (scanned, chunked)]
    torch.testing.assert_close(*lse, **close)
    for name in ("top", "rival"):
        torch.testing.assert_close(getattr(scanned, name), getattr(chunked, name), **close)


def test_fp32_goes_in_chunks() -> None:
    layer, _ = make(3, 5, 4, 2, True)
    assert not triton_kernel.scans_layer(layer._replace(hidden=layer.hidden.float()))


def refused(labels: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the device would assert; it cannot be asked twice."""
    told: list[bool] = []
    monkeypatch.setattr(torch, "_assert_async", lambda valid, text: told.append(not bool(valid)))
    rows_triton.own_labels(torch.tensor(labels, device=DEVICE), 0, 7, 7, -100, check=True)
    return told[0]


def test_labels_are_looked_at_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not refused([[0, 6, -100], [3, -100, -100], [2, 1, 0]], monkeypatch)
    for wrong in ([[0, 7, -100]], [[0, -1, 3]], [[5, 2, 5]], [[-100, -100, -100]]):
        assert refused([[1, 2, 3], *wrong], monkeypatch)


def test_labels_count_from_the_first_class_of_a_shard() -> None:
    labels = torch.tensor([[0, 6, -100], [3, 5, 4]], device=DEVICE)
    own = rows_triton.own_labels(labels, 3, 2, 7, -100, check=False)
    assert own.tolist() == [[-1, -1, -1], [0, -1, 1]]
