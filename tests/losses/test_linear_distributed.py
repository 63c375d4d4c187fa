"""Two processes that share a linear layer with its loss, or its batch, find what one process finds alone."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from softsieve import LinearASCrossEntropyLoss, linear_as_cross_entropy
from softsieve.kernels.cross_entropy import HAS_TRITON
from tests.helpers import IGNORED

WORLD = 2
LIMIT = 60.0  # seconds, for all that a group of two processes does
Found = dict[str, Any]


def launch(function: Callable[..., Found], folder: Path, *args: Any, world: int = WORLD) -> list[Found]:
    """What the function returns in each of the processes of a group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # for the processes, which import Triton after this
        arguments = (world, function, str(folder), args)
        context = spawn(worker, arguments, nprocs=world, join=False)  # type: ignore[no-untyped-call]
    limit = LIMIT * world / WORLD
    end = time.monotonic() + limit
    try:
        while not context.join(max(0.0, end - time.monotonic())):
            assert time.monotonic() < end, f"a process hangs: not done after {limit} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"found{rank}.pt") for rank in range(world)]


def worker(rank: int, world: int, function: Callable[..., Found], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name need not lead anywhere
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT / 2)
    )
    torch.save(function(rank, *args), f"{folder}/found{rank}.pt")
    gc.collect()  # what still holds the group would keep its threads alive past the interpreter, which aborts them
    dist.destroy_process_group()


# -- classes over several processes ------------------------------------------------------------------------------------

SHARDS = (130, 71)
CLASSES, FIRST = sum(SHARDS), SHARDS[0]
SHAPE, SIZE = (4, 8), 16
TWINS = {3: FIRST + 20, FIRST + 40: 9}  # classes with nearly the weight of one in the other shard
NAMES = ("hidden", "weight", "bias")
STATS = ("solved", "kept", "dense", "lse", "margin", "right")

CASES: dict[str, set[str]] = {  # what is asked of each
    "mean": set(),
    "none": {"none", "bias", "class_weight", "row_weight"},
    "softcap": {"bias", "softcap"},
    "ignored class": {"class_weight", "own index"},
    "delta 1": {"delta 1", "bias", "class_weight"},
    "delta of rows": {"delta of rows", "row_weight", "softcap"},
    "frozen weight": {"frozen weight", "none"},
    "frozen hidden": {"frozen hidden", "bias"},
    "all ignored": {"all ignored", "bias"},
}
BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"))]


def problem(case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Hidden states, weight, bias and target; options; the gradient that comes from above.

    The hidden states lean to the weight of their label, some much and some not at all: rows are of all kinds. Some have
    a label with a twin, so that the only other class they keep is in the other shard. All numbers are those of float32.
    """
    wants, generator = CASES[case], torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 64).round() / 64

    rows = SHAPE[0] * SHAPE[1]
    weight, bias = normal(CLASSES, SIZE), normal(CLASSES) / 2
    target = torch.randint(CLASSES, (rows,), generator=generator)
    target[:8] = torch.tensor(list(TWINS)).repeat(4)
    for label, twin in TWINS.items():
        weight[twin], bias[twin] = weight[label], bias[label] - 1 / 16
        weight[twin, 0] += 1 / 64
    lean = torch.linspace(0, 1.5, rows)[torch.randperm(rows, generator=generator)]
    lean[:4] = 1.0
    hidden = ((normal(rows, SIZE) / 2 + lean[:, None] * weight[target]) * 64).round() / 64
    target[8:-2][torch.rand(rows - 10, generator=generator) < 0.15] = IGNORED
    if "all ignored" in wants:
        target.fill_(IGNORED)

    options: dict[str, Any] = {"reduction": "none" if "none" in wants else "mean", "delta": 0.1}
    if "delta 1" in wants:
        options["delta"] = 1.0
    if "softcap" in wants:
        options["softcap"] = 16.0
    if "own index" in wants:
        options["ignore_index"] = int(target[-2:].max())
        target[target == IGNORED] = options["ignore_index"]
    if "class_weight" in wants:
        options["class_weight"] = (torch.rand(CLASSES, generator=generator) + 0.5).to(dtype)
    if "row_weight" in wants:
        options["row_weight"] = (torch.rand(SHAPE, generator=generator) + 0.5).to(dtype)
    if "delta of rows" in wants:  # a little less than the label's probability keeps many, a little more keeps all
        p = logits_of(hidden, weight, None, options).softmax(-1).gather(1, target.clamp_min(0)[:, None]).squeeze(1)
        factor = torch.tensor([0.05, 0.6, 0.95, 1.05]).repeat(rows // 4)
        options["delta"] = (p * factor).clamp(max=1).to(torch.float32).view(SHAPE)
    tensors = {"hidden": hidden.view(*SHAPE, SIZE).to(dtype), "weight": weight.to(dtype), "target": target.view(SHAPE)}
    if "bias" in wants:
        tensors["bias"] = bias.to(dtype)
    above = torch.rand(SHAPE, generator=generator).to(dtype) if "none" in wants else torch.tensor(1.5, dtype=dtype)
    return tensors, options, above


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    x = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    cap = options.get("softcap")
    return x if cap is None else cap * torch.tanh(x / cap)


def solve(
    case: str, tensors: dict[str, Tensor], options: dict[str, Any], above: Tensor, backend: str, group: Any = None
) -> Found:
    """Loss, statistics and gradients, by name; None for a gradient that there is not."""
    leaves = {
        name: tensors[name].clone().requires_grad_(f"frozen {name}" not in CASES[case])
        for name in NAMES
        if name in tensors
    }
    loss, stats = linear_as_cross_entropy(
        leaves["hidden"],
        leaves["weight"],
        tensors["target"],
        bias=leaves.get("bias"),
        backend=backend,
        group=group,
        return_stats=True,
        **options,
    )
    loss.backward(above)
    return {"loss": loss.detach(), **stats._asdict(), **{name: leaf.grad for name, leaf in leaves.items()}}


def rows_of(rank: int) -> slice:
    return slice(0, FIRST) if rank == 0 else slice(FIRST, CLASSES)


def dtype_for(backend: str) -> torch.dtype:
    return torch.float32 if backend == "triton" else torch.float64


def mistakes() -> dict[str, dict[str, Any]]:
    """Arguments that are to be refused."""
    target = {label: torch.tensor([0, FIRST, label, CLASSES - 1]) for label in (CLASSES, -1)}
    return {
        "beyond the last": {"target": target[CLASSES]},
        "below the first": {"target": target[-1]},
        "class weights of the shard": {"class_weight": torch.ones(min(SHARDS))},
    }


def sharded(rank: int, backend: str) -> Found:
    """All cases, and what is said to mistakes."""
    group = dist.group.WORLD
    found: Found = {}
    for case in CASES:
        tensors, options, above = problem(case, dtype_for(backend))
        for name in ("weight", "bias"):
            if name in tensors:
                tensors[name] = tensors[name][rows_of(rank)]
        found[case] = solve(case, tensors, options, above, backend, group)
    hidden, weight = torch.ones(4, SIZE), torch.ones(SHARDS[rank], SIZE)
    for name, change in mistakes().items():
        options = {"target": torch.tensor([0, 1, FIRST, CLASSES - 1])} | change
        try:
            linear_as_cross_entropy(hidden, weight, **options, backend=backend, group=group)
        except Exception as error:
            found[name] = type(error).__name__, str(error)
        else:
            found[name] = "", "nothing was raised"
    return found


@pytest.fixture(scope="module", params=BACKENDS)
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Found]]:
    return request.param, launch(sharded, tmp_path_factory.mktemp("shards"), request.param)


@pytest.mark.parametrize("case", CASES)
def test_shards_find_what_the_whole_layer_finds(shards: tuple[str, list[Found]], case: str) -> None:
    backend, found = shards
    tensors, options, above = problem(case, torch.float64)
    expected = solve(case, tensors, options, above, "reference")
    rtol, atol = (1e-9, 1e-11) if backend == "torch" else (2e-4, 2e-6)
    for rank, ours in enumerate(part[case] for part in found):
        for name in ("loss", *STATS, *(name for name in NAMES if name in tensors)):
            value, wanted = ours[name], expected[name]
            assert (value is None) == (wanted is None), name
            if wanted is None:
                continue
            if name in ("weight", "bias"):
                wanted = wanted[rows_of(rank)]
            else:
                assert torch.equal(value, found[0][case][name]), f"{name}: not alike on all ranks"
            assert value.dtype == (dtype_for(backend) if wanted.is_floating_point() else wanted.dtype), name
            torch.testing.assert_close(value.to(wanted.dtype), wanted, rtol=rtol, atol=atol, msg=f"{{}} {name}".format)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("delta 1", "all ignored")])
def test_cases_have_rows_of_all_kinds(case: str) -> None:
    """Solved, sparse and dense ones with labels in both shards, and none that rounding could decide."""
    tensors, options, above = problem(case, torch.float64)
    index = options.get("ignore_index", IGNORED)
    target = tensors["target"].flatten()
    target = target.masked_fill(target == index, IGNORED)
    expected = solve(case, tensors, options, above, "reference")
    solved, kept, dense = (expected[name].flatten() for name in ("solved", "kept", "dense"))
    logits = logits_of(tensors["hidden"].flatten(0, 1), tensors["weight"], tensors.get("bias"), options)
    label, p = target.clamp_min(0)[:, None], logits.softmax(-1)
    ahead = (p.gather(1, label) - p) - torch.as_tensor(options["delta"]).double().reshape(-1, 1)  # by more than delta
    ahead.scatter_(1, label, torch.inf)
    assert (ahead.abs() / p.gather(1, label))[target >= 0].min() > 3e-6
    keep = ahead <= 0
    assert torch.equal(keep.sum(-1)[target >= 0] + 1, kept[target >= 0])
    beside = torch.stack([keep[:, rows_of(rank)].any(-1) for rank in range(WORLD)], 1)
    counted, second, sparse = target >= 0, target >= FIRST, (kept > 1) & ~dense
    assert (~counted).any()
    for here in (counted & ~second, counted & second):
        for kind in (solved, sparse, dense):
            assert (here & kind).any()
    for rank, here in enumerate((~second, second)):  # all others that are kept are in the other shard
        assert (sparse & here & ~beside[:, rank] & beside[:, 1 - rank]).any()
    if case == "delta of rows":
        assert (sparse & (kept > 40)).any()  # more than are listed


@pytest.mark.parametrize("name", mistakes())
def test_mistakes_are_refused_on_all_ranks(shards: tuple[str, list[Found]], name: str) -> None:
    _, found = shards
    assert [part[name][0] for part in found] == ["ValueError"] * WORLD, [part[name] for part in found]
    assert str(CLASSES) in found[0][name][1]


# -- rows over several processes ---------------------------------------------------------------------------------------

STEPS = 2  # the second one takes the loss of weights that the first one has put together
WAYS = ("ddp", "fsdp of the whole", "fsdp of the layers")


class Net(nn.Module):
    """A small model that ends with the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 8, dtype=torch.float64)
        self.criterion = LinearASCrossEntropyLoss(8, 21, 0.1, bias=True, return_stats=True, dtype=torch.float64)
        with torch.no_grad():
            self.criterion.weight.mul_(12)

    def forward(self, inputs: Tensor, target: Tensor) -> Any:
        return self.criterion(torch.tanh(self.body(inputs)), target)


def batch() -> tuple[Tensor, Tensor]:
    """Rows of all kinds, as many of them ignored in one half as in the other."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(32, 6, dtype=torch.float64, generator=generator) * 3
    net = Net()
    with torch.no_grad():
        target = F.linear(torch.tanh(net.body(inputs)), net.criterion.weight).argmax(-1)  # which rows are right about
    target[::3] = torch.randint(21, (11,), generator=generator)
    target[[1, 9, 12, 17, 20, 31]] = IGNORED
    return inputs, target


def train(model: nn.Module, inputs: Tensor, target: Tensor) -> Found:
    """The weights after some steps, by name, and what the loss has seen in the first of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: Found = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, stats = model(inputs, target)
        loss.backward()
        optimizer.step()
        seen = seen or {"loss": loss.detach(), **stats._asdict()}
    return seen | {name.removeprefix("module."): whole(value) for name, value in model.named_parameters()}


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def parallel(rank: int) -> Found:
    """What is trained in each of the ways, from this process's half of the batch."""
    mesh, half = init_device_mesh("cpu", (WORLD,)), [part.chunk(WORLD)[rank] for part in batch()]
    found = {"ddp": train(DistributedDataParallel(Net()), *half)}
    for way in WAYS[1:]:
        net = Net()
        for part in (net.body, net.criterion) if way == "fsdp of the layers" else ():
            fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
        assert isinstance(net.criterion.weight, DTensor)  # a half of it
        found[way] = train(net, *half)
    return found


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return launch(parallel, tmp_path_factory.mktemp("halves"))


@pytest.mark.parametrize("way", WAYS)
def test_halves_of_a_batch_train_as_the_whole(halves: list[Found], way: str) -> None:
    expected = train(Net(), *batch())
    counted = batch()[1] != IGNORED
    solved, dense = expected["solved"], expected["dense"]
    for kind in (solved, dense, counted & ~solved & ~dense, ~counted):
        assert all(half.any() for half in kind.chunk(WORLD))
    ours = [found[way] for found in halves]
    for name, _ in Net().named_parameters():
        assert torch.equal(ours[0][name], ours[1][name]), name
        torch.testing.assert_close(ours[0][name], expected[name])
    torch.testing.assert_close(torch.stack([part["loss"] for part in ours]).mean(), expected["loss"])
    for name in ("solved", "kept", "dense", "right"):
        assert torch.equal(torch.cat([part[name] for part in ours]), expected[name]), name
