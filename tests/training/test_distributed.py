"""Two processes decide alike and end with the weights of one that has batches of twice the size; sharded ones, too."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor

from softsieve.training import SolvedSampler
from softsieve.training.classifier import Classifier
from softsieve.training.loop import Trainer
from softsieve.training.sampler import UNSEEN
from tests.training.helpers import Net, equal_weights, flags, in_process, points, tokens, trainer

WORLD = 2
Found = dict[str, Any]


def launch(function: Callable[[int, Path], Found], folder: Path) -> list[Found]:
    """What the function returns in each of the processes of a group."""
    workers = [in_process(worker, function, rank, folder) for rank in range(WORLD)]
    for process in workers:
        process.join(120)
        process.kill()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error*")))
    assert not errors, errors
    assert [process.exitcode for process in workers] == [0] * WORLD
    return [torch.load(folder / f"found{rank}.pt") for rank in range(WORLD)]


def worker(function: Callable[[int, Path], Found], rank: int, folder: Path) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name need not lead anywhere
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ |= {name: str(value) for name, value in place.items()}  # as launchers say it
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    try:
        torch.save(function(rank, folder), folder / f"found{rank}.pt")
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the other one waits for us
    gc.collect()  # what still holds the group would keep its threads alive past the interpreter, which aborts them
    dist.destroy_process_group()


# -- the sampler -------------------------------------------------------------------------------------------------------

ROWS, EPOCHS = 101, 8
POLICIES: dict[str, dict[str, Any]] = {
    "all that may be": {"tolerance": 1.0, "recheck": 0.2},
    "by risk": {"tolerance": 0.03},
    "own margin": {"tolerance": 1.0, "margin": 0.6},
}


def shown(epoch: int) -> Tensor:
    """The margins of an epoch: they grow."""
    return (2 * torch.rand(ROWS, generator=torch.Generator().manual_seed(epoch)) - 1 + 0.2 * epoch).clamp(-1, 1)


def screen(sampler: SolvedSampler, rows: Tensor, epoch: int) -> None:
    """Of the rows that are screened some slip when they are trained, or never are."""
    if len(screened := rows[sampler.worth_screening(rows)]):
        leave = sampler.screened(screened, shown(epoch)[screened])
        sampler.update(screened[~leave], torch.where(screened % 3 == 0, 0.0, shown(epoch)[screened])[~leave])


def parts_of_updates(rank: int, _: Path) -> Found:
    plans: Found = {}
    for name, policy in POLICIES.items():
        mine = SolvedSampler(ROWS, **policy, num_replicas=WORLD, rank=rank)
        whole = SolvedSampler(ROWS, **policy)  # for loops that gather what all saw, as ours does
        plans[name] = []
        for epoch in range(EPOCHS):
            share = torch.tensor(list(mine))
            known = mine.margins.clone()
            mine.update(share, shown(epoch)[share])
            plan = whole.next_epoch()
            whole.update(plan, shown(epoch)[plan])
            plans[name].append({"share": share, "plan": mine.plan, "margins": known, "gathered": plan})
    screener = SolvedSampler(ROWS, tolerance=0.1, recheck=0.3, num_replicas=WORLD, rank=rank)
    plans["screening"] = []
    for epoch in range(EPOCHS):
        share = torch.tensor(list(screener))
        plans["screening"].append({**screener.state_dict(), "skip_margin": screener.skip_margin})
        if epoch > 1 or rank == 1:  # one rank begins earlier
            screen(screener, share, epoch)
    return plans


@pytest.fixture(scope="module")
def samplers(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return launch(parts_of_updates, tmp_path_factory.mktemp("samplers"))


@pytest.mark.parametrize("policy", POLICIES)
def test_samplers_decide_alike(samplers: list[Found], policy: str) -> None:
    alone = SolvedSampler(ROWS, **POLICIES[policy])
    known, sizes = torch.full((ROWS,), UNSEEN), []
    for epoch, (first, second) in enumerate(zip(*(found[policy] for found in samplers), strict=True)):
        plan = alone.next_epoch()
        alone.update(plan, shown(epoch)[plan])
        assert torch.equal(first["plan"], second["plan"])
        assert torch.equal(first["margins"], known)  # what both saw together
        assert torch.equal(second["margins"], known)
        assert torch.equal(torch.cat([first["share"], second["share"]]), first["plan"])
        assert len(first["share"]) == len(second["share"])
        assert torch.equal(first["gathered"], plan)
        assert torch.equal(second["gathered"], plan)
        known[first["plan"]] = shown(epoch)[first["plan"]]
        sizes.append(len(plan))
    assert min(sizes) < 0.9 * ROWS


def test_samplers_that_are_told_of_screening_know_the_same(samplers: list[Found]) -> None:
    margins = []
    for epoch, (first, second) in enumerate(zip(*(found["screening"] for found in samplers), strict=True)):
        assert first["screens"] == second["screens"] == (epoch > 0)  # as soon as one rank does
        for name, value in first.items():
            if name != "position":
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[name])), name
        assert not first["waiting"].any()
        margins.append(first["skip_margin"])
    assert margins[0] == pytest.approx(0.1)
    assert max(margins) > 0.7
    assert float(first["slips"].sum()) > 1


# -- training ----------------------------------------------------------------------------------------------------------

# Batches of 4 on each of two processes, 8 on one: 45 rows leave 5 for the last step, 3 here and 2 there.
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (points(45, noise=0.1), {"eval_steps": 4, "loss": "softmax"}),
    "skipping": (points(181, noise=0.05), {"skip": "solved", "epochs": 6, "eval_batch_size": 15}),
    "windows": (points(99, noise=0.1), {"speed_steps": 3, "speed_lambda": 2.0, "merge": False}),
    "tokens": (tokens(85), {"skip": "solved", "epochs": 5, "speed_steps": 2, "merge": False, "eval_batch_size": 3}),
    "flags": (flags(45), {"delta_ratio": 0.5}),
    "infobatch": (points(45, noise=0.2), {"loss": "softmax", "skip": "infobatch", "epochs": 4}),
    "selective": (
        points(181, noise=0.2),
        {"loss": "softmax", "skip": "selective-backprop", "epochs": 3, "eval_batch_size": 15},
    ),
    "seta": (points(45, noise=0.2), {"loss": "softmax", "skip": "seta", "epochs": 4}),
}
SHARDED = ("plain", "skipping", "windows")


def make(name: str, *, processes: int = 1, dropout: float = 0.0, **settings: Any) -> Trainer:
    rows, options = RUNS[name]
    chosen = {"epochs": 3, "eval_batch_size": 50, **options, **settings}
    chosen["batch_size"] = 8 // processes
    chosen["eval_batch_size"] *= WORLD // processes
    kind = {torch.bool: flags}.get(rows.target.dtype, tokens if rows.target.ndim > 1 else points)
    return trainer(rows, model=Net(dropout=dropout), validation=kind(21, seed=1), **chosen)


def outcome(made: Trainer, resume: Path | None = None) -> Found:
    result = made.fit(resume)
    assert made.validation is not None
    return {
        "weights": made.weights(),
        "result": {name: value for name, value in result._asdict().items() if "seconds" not in name},
        "sampler": made.sampler.state_dict(),
        "sharded": made.replica.sharded,
        "decided": made.evaluate()[1] * (made.validation.target != -100),  # elsewhere batches are cut differently
    }


def run_all(rank: int, folder: Path) -> Found:
    found = {name: outcome(make(name, processes=WORLD)) for name in RUNS}
    return {**found, **resumed(folder)}


def resumed(folder: Path) -> Found:
    """A whole run, and the rest of it from a checkpoint, each process with its own dropout."""
    settings: dict[str, Any] = {"processes": WORLD, "dropout": 0.3, "save_steps": 4, "save_total_limit": 99}
    whole = outcome(make("skipping", output=folder / "run", **settings))
    rest = outcome(make("skipping", output=folder / "run", **settings), folder / "run" / "checkpoint-8")
    return {"whole": whole, "rest": rest}


def run_sharded(rank: int, folder: Path) -> Found:
    shard("NO_WRAP")
    found = {name: outcome(make(name, processes=WORLD)) for name in SHARDED}
    found |= resumed(folder)
    shard("SIZE_BASED_WRAP")
    return {**found, "layers": outcome(make("plain", processes=WORLD))}


def shard(policy: str) -> None:
    """As `accelerate launch --use_fsdp` says it: the whole model, or layer by layer.

    Accelerate shards on accelerators alone, though FSDP itself does not mind: we have it take the CPU for one.
    """
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": policy}
    os.environ |= {"FSDP_MIN_NUM_PARAMS": "50", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return launch(run_all, tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return launch(run_sharded, tmp_path_factory.mktemp("fsdp"))


def compare(alone: Found, found: Found) -> None:
    """To rounding; what is counted exactly."""
    for name, value in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-3, atol=1e-5)
    for name in ("best_step", "steps", "trained", "screened"):
        assert found["result"][name] == alone["result"][name], name
    for here, there in zip(found["result"]["log"], alone["result"]["log"], strict=True):
        assert here["kind"] == there["kind"]
        for figure in there.keys() - {"kind"}:
            assert here[figure] == pytest.approx(there[figure], rel=1e-3, abs=1e-5)
    for name, value in alone["sampler"].items():
        torch.testing.assert_close(found["sampler"][name], value, rtol=1e-3, atol=1e-3)
    assert torch.equal(found["decided"], alone["decided"])


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one_with_twice_the_batch(ddp: list[Found], name: str) -> None:
    alone = outcome(make(name))
    for found in ddp:
        assert not found[name]["sharded"]
        compare(alone, found[name])
    first, second = (found[name] for found in ddp)
    assert equal_weights(first["weights"], second["weights"])
    assert first["result"] == second["result"]
    for key, value in first["sampler"].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(second["sampler"][key]))
    if "skip" in RUNS[name][1]:
        assert first["result"]["trained"] < len(RUNS[name][0]) * RUNS[name][1]["epochs"]


@pytest.mark.parametrize("name", [*SHARDED, "layers"])
def test_sharded_model(fsdp: list[Found], name: str) -> None:
    """Whose weights come together on the main process."""
    alone = outcome(make("plain" if name == "layers" else name))
    main, other = (found[name] for found in fsdp)
    assert main["sharded"]
    assert other["sharded"]
    compare(alone, main)
    assert main["result"] == other["result"]
    assert other["weights"] == {}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resume(kind: str, request: pytest.FixtureRequest) -> None:
    for rank, found in enumerate(request.getfixturevalue(kind)):
        whole, rest = found["whole"], found["rest"]
        if rank > 0:  # only the main process reads the log of the first part
            whole["result"]["log"] = whole["result"]["log"][-len(rest["result"]["log"]) :]
        assert whole["result"] == rest["result"]
        assert equal_weights(whole["weights"], rest["weights"])
        assert torch.equal(whole["decided"], rest["decided"])


def test_a_group_of_one_process_trains_texts_as_no_group_does(tmp_path: Path) -> None:
    """Accelerate wraps the model for it, and what it wraps with takes no sparse gradient."""
    texts, labels = ["a fine film", "a dull film"] * 20, ["good", "poor"] * 20
    alone = Classifier(epochs=2, validation_share=0).fit(texts, labels)
    PartialState._reset_state()
    AcceleratorState._reset_state()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        grouped = Classifier(epochs=2, validation_share=0).fit(texts, labels)
    finally:
        dist.destroy_process_group()
    ours, theirs = grouped.model_.state_dict(), alone.model_.state_dict()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)
