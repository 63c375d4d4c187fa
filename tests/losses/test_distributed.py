"""Two processes under DDP end with the gradient that one process has for the whole batch."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from softsieve import ASCrossEntropyLoss
from tests.helpers import make

WORLD = 2


def model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(6, 9, dtype=torch.float64)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    _, target = make(32, 9, ignored=0)
    return torch.randn(32, 6, dtype=torch.float64) * 3, target


def gradient(rank: int) -> torch.Tensor:
    parallel = DistributedDataParallel(model())
    inputs, target = (part.chunk(WORLD)[rank] for part in batch())
    ASCrossEntropyLoss(0.1)(parallel(inputs), target).backward()
    grad = parallel.module.weight.grad
    assert isinstance(grad, torch.Tensor)
    return grad


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name need not lead anywhere
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    torch.save(gradient(rank), f"{folder}/grad{rank}.pt")
    gc.collect()  # what still holds the group would keep its threads alive past the interpreter, which aborts them
    dist.destroy_process_group()


def test_ddp_gradient_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    spawn(worker, (str(tmp_path),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    alone = model()
    inputs, target = batch()
    loss, stats = ASCrossEntropyLoss(0.1, return_stats=True)(alone(inputs), target)
    assert stats.solved.any()
    assert not stats.solved.all()
    loss.backward()
    for rank in range(WORLD):
        torch.testing.assert_close(torch.load(tmp_path / f"grad{rank}.pt"), alone.weight.grad)
