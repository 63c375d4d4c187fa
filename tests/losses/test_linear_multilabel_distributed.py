"""Three processes that share a linear layer with its multi-label loss find what one process finds alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from softsieve import linear_as_multilabel_loss
from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.reference import losses as reference
from tests.helpers import IGNORED
from tests.losses.test_linear_distributed import Found, launch

SHARDS = (130, 1, 71)  # classes of each process
ENDS = (130, 131, 202)
CLASSES, SIZE, SHAPE = sum(SHARDS), 32, (4, 6)
CASES: dict[str, dict[str, Any]] = {
    "mean": {"delta": 0.3},
    "none": {"delta": 0.3, "reduction": "none", "bias": True},
    "delta 0": {"delta": 0.0, "bias": True},
    "delta 1": {"delta": 1.0, "reduction": "sum"},
    "frozen weight": {"delta": 0.3, "frozen": "weight"},
    "frozen hidden": {"delta": 0.3, "frozen": "hidden", "bias": True},
}
BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"))]


def rows_of(rank: int) -> slice:
    return slice(ENDS[rank] - SHARDS[rank], ENDS[rank])


def problem(dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows of all kinds, with labels in all shards or in some. All numbers are those of float32."""
    generator = torch.Generator().manual_seed(3)
    rows = SHAPE[0] * SHAPE[1]
    weight = torch.randn(CLASSES, SIZE, generator=generator)
    labels = torch.rand(rows, CLASSES, generator=generator).topk(5).indices
    labels[::4, 1] = ENDS[0]  # the one class of the second shard
    labels[::4, 0] = 3
    labels[::4, 2:] = torch.tensor([200, 150, 7])
    hidden = torch.randn(rows, SIZE, generator=generator) * 0.4
    weight[:, 0] = 1  # moves all logits
    hidden[:, 0] = torch.linspace(-10, -1, rows)[torch.randperm(rows, generator=generator)]
    weight[:, -rows:] = 0  # each moves the labels of one row
    weight[labels, torch.arange(SIZE - rows, SIZE)[:, None]] = 1
    hidden[range(rows), range(SIZE - rows, SIZE)] = torch.linspace(4, 22, rows)
    labels[1::3, 2:] = IGNORED
    bias = torch.randn(CLASSES, generator=generator) * 0.2
    parts = {"hidden": hidden.view(*SHAPE, SIZE), "weight": weight, "bias": bias}
    return {name: part.to(dtype) for name, part in parts.items()} | {"labels": labels.view(*SHAPE, 5)}


def solve(case: str, tensors: dict[str, Tensor], backend: str, group: Any = None) -> Found:
    """Loss, statistics and gradients, by name; None for a gradient that there is not."""
    options = dict(CASES[case])
    frozen, biased = options.pop("frozen", None), options.pop("bias", False)
    names = ("hidden", "weight", "bias") if biased else ("hidden", "weight")
    leaves = {name: tensors[name].clone().requires_grad_(name != frozen) for name in names}
    loss, stats = linear_as_multilabel_loss(
        leaves["hidden"], leaves["weight"], tensors["labels"], bias=leaves.get("bias"), backend=backend, group=group,
        return_stats=True, **options,
    )  # fmt: skip
    loss.backward(torch.linspace(0.5, 1, loss.numel(), dtype=loss.dtype).view(loss.shape))
    return {"loss": loss.detach(), **stats._asdict(), **{name: leaf.grad for name, leaf in leaves.items()}}


def dtype_for(backend: str) -> torch.dtype:
    return torch.float32 if backend == "triton" else torch.float64


MISTAKES = {
    "beyond the last": (torch.tensor([[0, CLASSES]]), str(CLASSES)),
    "twice, in another shard": (torch.tensor([[ENDS[0], ENDS[0]]]), "twice in row 0"),
    "no label": (torch.tensor([[IGNORED, IGNORED]]), "none in row 0"),
}


def sharded(rank: int, backend: str) -> Found:
    """All cases, and what is said to mistakes."""
    found: Found = {}
    for case in CASES:
        tensors = problem(dtype_for(backend))
        for name in ("weight", "bias"):
            tensors[name] = tensors[name][rows_of(rank)]
        found[case] = solve(case, tensors, backend, dist.group.WORLD)
    for name, (labels, _) in MISTAKES.items():
        try:
            linear_as_multilabel_loss(
                torch.ones(1, SIZE), torch.ones(SHARDS[rank], SIZE), labels, backend=backend, group=dist.group.WORLD
            )
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module", params=BACKENDS)
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Found]]:
    return request.param, launch(sharded, tmp_path_factory.mktemp("shards"), request.param, world=len(SHARDS))


@pytest.mark.parametrize("case", CASES)
def test_shards_find_what_the_whole_layer_finds(shards: tuple[str, list[Found]], case: str) -> None:
    backend, found = shards
    expected = solve(case, problem(torch.float64), "reference")
    rtol, atol = (1e-9, 1e-11) if backend == "torch" else (2e-4, 4e-6)
    for rank, ours in enumerate(part[case] for part in found):
        assert ours.keys() == expected.keys()
        for name, wanted in expected.items():
            value = ours[name]
            assert (value is None) == (wanted is None), name
            if wanted is None:
                continue
            if name in ("weight", "bias"):
                wanted = wanted[rows_of(rank)]
            else:
                assert torch.equal(value, found[0][case][name]), f"{name}: not alike on all ranks"
            torch.testing.assert_close(value.to(wanted.dtype), wanted, rtol=rtol, atol=atol, msg=f"{{}} {name}".format)


def test_the_problem_has_rows_of_all_kinds() -> None:
    tensors = problem(torch.float64)
    options: dict[str, Any] = {"delta": 0.3}
    _, kept, margin = reference.linear_as_multilabel_stats(
        tensors["hidden"], tensors["weight"], tensors["labels"], **options
    )
    assert (kept == 0).sum() > 2
    assert ((kept > 0) & (kept < 30)).sum() > 2
    assert (kept > 190).sum() > 5
    assert (margin - 0.3).abs().min() > 1e-4


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_on_all_ranks(shards: tuple[str, list[Found]], name: str) -> None:
    for part in shards[1]:
        assert MISTAKES[name][1] in part[name]
