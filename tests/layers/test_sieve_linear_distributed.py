"""Classes sharded over processes: each rank steps its own rows, and together they are the layer of one process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from softsieve import HeadSGD, SieveLinear
from tests.layers.test_sieve_linear import CLASSES, SIZE, make
from tests.losses.test_linear_distributed import Found, launch

FIRST = 130  # classes of the first process


def sharded(rank: int) -> Found:
    """Two steps of both losses with classes sharded, and what is said without a group."""
    found: Found = {}
    for several in (False, True):
        plain, _, _ = make(several, "all kinds")
        rows = slice(0, FIRST) if rank == 0 else slice(FIRST, CLASSES)
        layer = SieveLinear(SIZE, len(plain.weight[rows]), optimizer=HeadSGD(0.5), dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(plain.weight[rows])
            layer.bias.copy_(plain.bias[rows])
        for step in range(2):
            _, hidden, target = make(several, "all kinds", seed=step)
            hidden.requires_grad_()
            layer.loss(hidden, target, delta=0.3, group=dist.group.WORLD).backward()  # type: ignore[no-untyped-call]
        found[str(several)] = [layer.weight.detach(), layer.bias.detach(), hidden.grad]
        try:
            layer.loss(hidden, target)
        except ValueError as error:
            found["error"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return launch(sharded, folder)


@pytest.mark.parametrize("several", [False, True])
def test_ranks_step_what_one_process_steps(ranks: list[Found], several: bool) -> None:
    layer = SieveLinear.from_linear(copy.deepcopy(make(several, "all kinds")[0]), optimizer=HeadSGD(0.5))
    for step in range(2):
        _, hidden, target = make(several, "all kinds", seed=step)
        hidden.requires_grad_()
        layer.loss(hidden, target, delta=0.3).backward()  # type: ignore[no-untyped-call]
    parts = [part[str(several)] for part in ranks]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), layer.weight.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), layer.bias.detach(), rtol=1e-9, atol=1e-12)
    for part in parts:
        torch.testing.assert_close(part[2], hidden.grad, rtol=1e-9, atol=1e-12)


def test_copies_are_refused(ranks: list[Found]) -> None:
    for part in ranks:
        assert part["error"].startswith("group: expected the group over which classes are sharded, found None with 2")
