"""What a checkpoint of a `Trainer` holds, and how a run goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from softsieve import _checks
from softsieve.errors import InputError, first_line, shown
from softsieve.training.checkpoint import check_same, load_checkpoint, save_checkpoint
from softsieve.training.infobatch import InfoBatchSampler

if TYPE_CHECKING:
    from softsieve.training.loop import Trainer

FREE = ("save_steps", "save_total_limit", "logging_steps")  # settings that may differ when a run is resumed
PLACE = ("epoch", "in_epoch", "step", "position")  # attributes of a trainer that say where it is
COUNTS = ("trained", "screened", "best_step", "stale", "lines", "seconds", "evaluation_seconds")  # and what it has done


def save(trainer: Trainer) -> None:
    """Write a checkpoint, on the main process; all of them take part in collecting it."""
    trainer.figures()
    sampler = trainer.sampler.state_dict()
    # Kept aside, not reported now: what the sampler decides should not depend on when checkpoints are written.
    unreported = torch.cat([*trainer.unreported, trainer.queue[:0]])
    seen = unreported.to(trainer.device)
    state = {
        "settings": trainer.settings.asdict(),
        "rows": len(trainer.train),
        "ranks": trainer.ranks,
        "data": trainer.fingerprint,
        "sampler": {name: value for name, value in sampler.items() if not isinstance(value, Tensor)},
        "speed": trainer.speed.state_dict(),
        "delta": getattr(trainer.objective, "delta", None),
        "best": trainer.best,
        "scaler": trainer.accelerator.scaler.state_dict() if trainer.accelerator.scaler is not None else None,
        **{name: getattr(trainer, name) for name in (*PLACE, *COUNTS)},
    }
    files = {
        "model": trainer.weights(),
        "best": trainer.best_weights,
        "optimizer": _optimizer_tensors(trainer),
        "sampler": {name: value for name, value in sampler.items() if isinstance(value, Tensor)},
        "random": _random_states(trainer),
        "queue": {
            "queue": trainer.queue,
            "unreported": unreported,
            "solved": trainer.row_solved[seen],
            "loss": trainer.row_loss[seen],
        },
    }
    if trainer.accelerator.is_main_process and trainer.output is not None:
        save_checkpoint(trainer.output, trainer.step, state, files, keep=trainer.settings.save_total_limit)
    trainer.accelerator.wait_for_everyone()


def restore(trainer: Trainer, folder: Path) -> None:
    """Go on where a checkpoint was written.

    Raises:
        InputError: when it cannot be read or belongs to another model, other data or other settings.
    """
    state, files = load_checkpoint(folder)
    try:
        _expect(trainer, folder, state)
        weights = trainer.weights()
        if not trainer.sharded or trainer.rank == 0:
            check_same(folder / "model.safetensors", "checkpoint", files["model"], weights)
        _look_at(trainer, folder, state, files)
        trainer.load_weights(files["model"])
        template: Any = get_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer, options=trainer.whole)
        held: dict[str, dict[str, Tensor]] = {}
        for name, value in files["optimizer"].items():
            parameter, _, key = name.rpartition("/")
            held.setdefault(parameter, {})[key] = value
        if template:  # empty where the state will be broadcast to
            template["state"] = held
        # Not strict: a weight that never had a gradient has no state.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=trainer.sharded, strict=False)
        set_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer, template, options=options)
        for group in trainer.optimizer.param_groups:  # torch brings scalars to the CPU, where a graph sees no change
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(trainer.device)
        trainer.sampler.load_state_dict({**state["sampler"], **files["sampler"]})
        trainer.speed.load_state_dict(state["speed"])
        if state["delta"] is not None:
            trainer.objective.delta = state["delta"]  # type: ignore[attr-defined]
        if trainer.accelerator.scaler is not None and state["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(state["scaler"])
        for name in (*PLACE, *COUNTS):
            setattr(trainer, name, state[name])
        trainer.logged = trainer.step
        trainer.best, trainer.best_weights = state["best"], files.get("best", {})
        waiting = files["queue"]
        trainer.queue, trainer.unreported = waiting["queue"], [waiting["unreported"]]
        seen = waiting["unreported"].to(trainer.device)
        trainer.row_solved[seen] = waiting["solved"].to(trainer.device)
        trainer.row_loss[seen] = waiting["loss"].to(trainer.device)
        if isinstance(trainer.sampler, InfoBatchSampler):
            trainer.row_weight.copy_(trainer.sampler.weights)
        torch.set_rng_state(files["random"]["cpu"][trainer.rank].clone())  # it does not bear a view
        if trainer.device.type == "cuda" and "cuda" in files["random"]:
            torch.cuda.set_rng_state(files["random"]["cuda"][trainer.rank].clone())
    except KeyError as error:
        raise InputError(f"{folder}: incomplete checkpoint: {error} is missing") from error
    except (InputError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: broken checkpoint: {first_line(error)}") from error


def _expect(trainer: Trainer, folder: Path, state: dict[str, Any]) -> None:
    """Refuse a checkpoint of another run."""
    for name, here in {"rows": len(trainer.train), "ranks": trainer.ranks}.items():
        if state[name] != here:
            raise InputError(f"{folder}: made with {shown(state[name])} {name}, this run has {here}")
    if state["data"] != trainer.fingerprint:
        raise InputError(f"{folder}: made with other training data")
    for name, here in trainer.settings.asdict().items():
        if name not in FREE and state["settings"].get(name) != here:
            raise InputError(f"{folder}: made with {name}={shown(state['settings'].get(name))}, this run has {here!r}")


def _look_at(trainer: Trainer, folder: Path, state: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> None:
    """Refuse what cannot be where a run stands, before anything is changed.

    Raises:
        TypeError, ValueError: naming what was found.
    """
    for name in (*PLACE, *COUNTS):
        value = state[name]
        if name == "in_epoch":
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected true or false, found {type(value).__name__}")
        elif "seconds" in name:
            _checks.number(name, value, 0, 1e30)
        else:
            _checks.whole_number(name, value, 0, 2**62)
    _checks.whole_number("epoch", state["epoch"], 0, trainer.settings.epochs)
    if not all(type(value) in (int, float) for value in state["best"].values()):
        raise TypeError(f"best: expected numbers, found {shown(state['best'])}")
    if state["delta"] is not None:
        _checks.number("delta", state["delta"], 0, 1)
    waiting, last = files["queue"], len(trainer.train) - 1
    for name in ("queue", "unreported"):
        _checks.saved(name, waiting[name], trainer.queue, high=last, sized=False)
    seen = waiting["unreported"]
    _checks.saved("solved", waiting["solved"], torch.empty(len(seen), dtype=torch.bool), high=1)
    if waiting["loss"].shape != seen.shape or not waiting["loss"].is_floating_point():
        raise ValueError(f"loss: expected one number a row of {len(seen)}, found shape {tuple(waiting['loss'].shape)}")
    _checks.saved("cpu", files["random"]["cpu"], torch.get_rng_state().expand(trainer.ranks, -1), high=255)
    if trainer.sharded:
        return
    weights = trainer.weights()
    if files.get("best"):
        check_same(folder / "best.safetensors", "checkpoint", files["best"], weights)
    for name, value in files["optimizer"].items():
        parameter, _, key = name.rpartition("/")
        weight = weights.get(parameter)
        if weight is None or value.shape != (weight.shape if key != "step" else ()):
            raise ValueError(f"optimizer: {name}: expected what goes with a weight, found shape {tuple(value.shape)}")


def _optimizer_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """The optimizer's state by parameter and name, e.g. ``head.weight/exp_avg``."""
    held: Any = get_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer, options=trainer.whole).get(
        "state", {}
    )
    return {f"{name}/{key}": torch.as_tensor(v) for name, state in held.items() for key, v in state.items()}


def _random_states(trainer: Trainer) -> dict[str, Tensor]:
    """The generators of every process, one a row."""
    states = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: trainer.gather(value[None].to(trainer.device), trainer.ranks).cpu() for name, value in states.items()}
