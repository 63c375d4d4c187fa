"""Language models that train without logits in two processes: copies of one model, or shards of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softsieve.errors import InputError
from tests.losses.test_linear_distributed import Found, launch

pytest.importorskip("transformers")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from softsieve.integrations.causal_loss import accelerate_loss, loss_of
from softsieve.integrations.causal_trl import token_log_probs
from tests.integrations.architectures import make
from tests.integrations.test_causal_loss import batch_of, step

STEPS = 2
CASES = {  # whether the head is tied, whether it is sharded by itself, and whether the loss comes after the shards
    "one shard": (False, False, False),
    "own shard": (False, True, False),
    "later": (False, True, True),
    "tied": (True, False, False),
}
WRAPPERS: dict[str, dict[str, Any] | None] = {  # options of DDP; None: FSDP2
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "shards": None,
}


def whole(model: nn.Module) -> dict[str, Tensor]:
    parts = {name: value.detach() for name, value in model.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in parts.items()}


def train(model: Any, inner: Any, seeds: list[int]) -> dict[str, Tensor]:
    """The weights after some steps of SGD, and the losses."""
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    losses = []
    for number in range(STEPS):
        model.zero_grad()
        parts = [model(**batch_of(seed=10 * number + seed)).loss for seed in seeds]
        loss = torch.stack(parts).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return {**whole(inner), "losses": torch.stack(losses)}


def evaluated(mesh: Any) -> list[Tensor]:
    """Logits and predicted tokens of models whose weights are sharded again when the forward pass is over."""
    made = []
    for tied in (False, True):
        model = make("Llama", tie_word_embeddings=tied).eval()
        made.append(model(**batch_of()).logits.detach())
        accelerate_loss(model, evaluate=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        with torch.no_grad():
            made.append(model(**batch_of()).logits.detach())
            made.append(model(**batch_of()).logits.argmax(-1))
    with pytest.raises(InputError, match="found it sharded again after the forward pass"):
        model(**batch_of()).logits.sum()
    return made


def log_probs_in_two_processes(rank: int) -> Found:
    """Their gradients, in wrappers that look at what a forward pass uses, or shard weights after it."""
    made: Found = {}
    mesh = init_device_mesh("cpu", (2,))
    for name, options in WRAPPERS.items():
        model: Any = make("Llama")
        called = model if options is None else DistributedDataParallel(model, **options)
        if options is None:
            fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for _ in range(2):  # what a static graph is like is known after the first
            called.zero_grad()
            token_log_probs(called, batch_of(seed=rank)["input_ids"]).sum().backward()  # type: ignore[no-untyped-call]
        made[name] = gradients(model)
    return made


def gradients(model: nn.Module) -> dict[str, Tensor]:
    parts = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in parts.items()}


def in_two_processes(rank: int) -> Found:
    found: Found = {}
    model = make("Llama")
    accelerate_loss(model, delta=0.3)
    found["ddp"] = train(DistributedDataParallel(model), model, [rank])
    mesh = init_device_mesh("cpu", (2,))
    for name, (tied, own, later) in CASES.items():
        model = make("Llama", tie_word_embeddings=tied)
        if not later:
            accelerate_loss(model, delta=0.3)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if own:
            fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if later:
            accelerate_loss(model, delta=0.3)
        assert isinstance(model.lm_head.weight, DTensor)
        found[name] = train(model, model, [rank])
    found["logits"] = evaluated(mesh)
    model = make("Llama")
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    try:
        accelerate_loss(model)
    except InputError as error:
        found["error"] = str(error)
    assert loss_of(model) is None
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return launch(in_two_processes, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["ddp", *CASES])
def test_two_processes_train_as_one(ranks: list[Found], name: str) -> None:
    model = make("Llama", tie_word_embeddings=name == "tied")
    accelerate_loss(model, delta=0.3)
    alone = train(model, model, [0, 1])
    losses = torch.stack([part[name].pop("losses") for part in ranks]).mean(0)
    torch.testing.assert_close(losses, alone.pop("losses"), rtol=1e-4, atol=1e-5)
    for part in ranks:
        assert part[name].keys() == alone.keys()
        for key, weight in alone.items():
            torch.testing.assert_close(part[name][key], weight, rtol=1e-3, atol=1e-4)


def test_logits_of_an_evaluation_are_made_of_all_shards(ranks: list[Found]) -> None:
    for found in ranks:
        for dense, logits, tokens in (found["logits"][:3], found["logits"][3:]):
            torch.testing.assert_close(logits, dense)
            assert torch.equal(tokens, dense.argmax(-1))


def test_log_probs_of_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    model = make("Llama")
    both = [token_log_probs(model, batch_of(seed=seed)["input_ids"]).sum() for seed in (0, 1)]
    (sum(both) / 2).backward()  # type: ignore[union-attr]
    expected = gradients(model)
    for part in launch(log_probs_in_two_processes, tmp_path):
        assert part.keys() == WRAPPERS.keys()
        for name, found in part.items():
            assert found.keys() == expected.keys(), name
            for key, gradient in expected.items():
                torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4, msg=f"{name}: {key}")


def test_tensor_parallel_heads_are_refused(ranks: list[Found]) -> None:
    for part in ranks:
        assert "sharded by tensor parallelism" in part["error"]


def test_the_step_of_one_process_moves_the_weights() -> None:
    model = make("Llama")
    before = whole(model)
    before = {name: value.clone() for name, value in before.items()}
    after = train(model, model, [0])
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    assert step(model, batch_of())[1].keys() == before.keys()
