"""Checkpoints: folders of safetensors and JSON that are either there as a whole or not at all, and what they hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from softsieve import _checks, _digests
from softsieve._files import remove_folder, replacing_folder, sweep
from softsieve._safetensors import read_tensors
from softsieve.errors import InputError, first_line, shown

if TYPE_CHECKING:
    from softsieve.training.loop import Trainer

FORMAT = 1
# Settings of a resumed run; the policy of skipping changes with versions.
MAY_DIFFER = (
    "save_steps", "save_total_limit", "logging_steps", "skip_margin", "skip_after", "tolerance", "recheck",
    "screen_above",
)  # fmt: skip
_NAME = re.compile(r"checkpoint-(\d+)")
_DIGEST = "digest"  # of the rest of a state


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make ``folder`` with what ``fill`` writes into the path it is given, or leave everything as it was."""
    try:
        with replacing_folder(folder) as part:
            fill(part)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: cannot be written: {error}") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors by name in one safetensors file; those that share memory are written once each."""
    copies = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    save_file(copies, path, _digests.noted(copies))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; refused when it has digests of them that differ."""
    tensors, metadata = read_tensors(path)
    _digests.check(path, metadata, tensors)
    return tensors


def save_checkpoint(
    output: Path, step: int, state: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]], *, keep: int
) -> Path:
    """Write ``output/checkpoint-STEP``: ``state`` as JSON, ``files`` as safetensors.

    Keeps the ``keep`` latest; later ones are of a run that this one went back on, and go like the end of its log.
    """

    def fill(part: Path) -> None:
        content = json.loads(json.dumps({"format": FORMAT, **state}))
        (part / "state.json").write_text(json.dumps({**content, _DIGEST: _digest(content)}))
        for name, tensors in files.items():
            save_tensors(part / f"{name}.safetensors", tensors)

    folder = output / f"checkpoint-{step}"
    sweep(output, _NAME.pattern)
    write_folder(folder, fill)
    everything = checkpoints(output)
    after = everything.index(folder) + 1
    for old in everything[: max(0, after - keep)] + everything[after:]:
        remove_folder(old)
    return folder


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What `save_checkpoint` wrote: the state, and the tensors by file and name."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    digest = state.pop(_DIGEST, None) if isinstance(state, dict) else None
    if digest is not None and digest != _digest(state):
        raise InputError(f"{path}: damaged: it is not what was written")
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
        raise InputError(f"{path}: expected a checkpoint of format {FORMAT}")
    return state, {file.stem: load_tensors(file) for file in sorted(folder.glob("*.safetensors"))}


def _digest(state: dict[str, Any]) -> int:
    return _digests.digest(json.dumps(state, sort_keys=True))


def checkpoints(output: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    steps = {path: _NAME.fullmatch(path.name) for path in output.glob("checkpoint-*")}
    return [path for _, path in sorted((int(match[1]), path) for path, match in steps.items() if match)]


def check_same(path: Path, name: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit a model, naming the first that is missing, too many or of another shape."""
    for key in sorted({*saved, *expected}):
        shape = str(tuple(saved[key].shape)) if key in saved else "missing"
        wanted = str(tuple(expected[key].shape)) if key in expected else "nothing"
        if shape != wanted:
            raise InputError(f"{path}: not a {name} of this model: {key} is {shape}, expected {wanted}")


def _empty_rows() -> Tensor:
    return torch.empty(0, dtype=torch.long)


@dataclass
class RunState:
    """What changes while a run goes on. Model, optimizer, sampler and generators have states of their own."""

    epoch: int = 0
    in_epoch: bool = False
    step: int = 0  # optimizer steps
    position: int = 0  # in the sampler's plan of this epoch
    trained: int = 0  # rows that went forward and backward
    screened: int = 0  # rows that went forward only
    best_step: int = 0
    stale: int = 0  # evaluations since the best one
    lines: int = 0  # of the log, when the checkpoint was written
    seconds: float = 0.0  # of training and evaluation
    evaluation_seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)  # the evaluation of the best weights
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    queue: Tensor = field(default_factory=_empty_rows)  # rows of the plan before `position` that wait for a batch
    pending: list[Tensor] = field(default_factory=list)  # rows trained since the sampler was told of any

    def pending_rows(self) -> Tensor:
        return torch.cat([*self.pending, _empty_rows()])

    @classmethod
    def from_checkpoint(
        cls, state: dict[str, Any], files: dict[str, dict[str, Tensor]], *, epochs: int, rows: int
    ) -> RunState:
        """What `save_run` wrote; an error names what is missing or cannot be of a run of so many epochs and rows."""
        for name, default in NUMBERS.items():
            if isinstance(default, bool):
                if not isinstance(state[name], bool):
                    raise TypeError(f"{name}: expected true or false, found {type(state[name]).__name__}")
            elif isinstance(default, float):
                _checks.number(name, state[name], 0, 1e30)
            else:
                _checks.whole_number(name, state[name], 0, epochs if name == "epoch" else 2**62)
        if not all(type(value) in (int, float) for value in state["best"].values()):
            raise TypeError(f"best: expected numbers, found {shown(state['best'])}")
        waiting = {name: files["queue"][name] for name in ("queue", "unreported")}
        for name, value in waiting.items():
            _checks.saved(name, value, _empty_rows(), high=rows - 1, sized=False)
        numbers = {name: state[name] for name in NUMBERS}
        queue, pending = waiting.values()
        return cls(**numbers, best=state["best"], best_weights=files.get("best", {}), queue=queue, pending=[pending])


# The fields that are single numbers, which a checkpoint has as JSON, and their defaults.
NUMBERS: dict[str, Any] = {entry.name: entry.default for entry in fields(RunState) if entry.default is not MISSING}


def save_run(trainer: Trainer) -> None:
    """Write a checkpoint of a run, on the main process; all of them take part in collecting it."""
    run, replica, results = trainer.state, trainer.replica, trainer.results
    results.figures(run.step)  # refuses a loss that is not finite
    sampler = trainer.sampler.state_dict()
    # Kept aside: what the sampler decides should not depend on when checkpoints are written.
    pending = run.pending_rows()
    rows = pending.to(replica.device)
    scaler = replica.accelerator.scaler
    state = {
        "settings": trainer.settings.asdict(),
        "rows": len(trainer.train),
        "ranks": replica.ranks,
        "data": trainer.fingerprint,
        "sampler": {name: value for name, value in sampler.items() if not isinstance(value, Tensor)},
        "speed": trainer.speed.state_dict(),
        "delta": getattr(replica.objective, "delta", None),
        "best": run.best,
        "scaler": None if scaler is None else scaler.state_dict(),
        **{name: getattr(run, name) for name in NUMBERS},
    }
    files = {
        "model": replica.weights(),
        "best": run.best_weights,
        "optimizer": replica.optimizer_tensors(),
        "sampler": {name: value for name, value in sampler.items() if isinstance(value, Tensor)},
        "random": replica.random_states(),
        "queue": {
            "queue": run.queue,
            "unreported": pending,
            "solved": results.solved[rows],
            "loss": results.loss[rows],
            "margin": results.margin[rows],
        },
    }
    if replica.is_main and trainer.output is not None:
        save_checkpoint(trainer.output, run.step, state, files, keep=trainer.settings.save_total_limit)
    replica.accelerator.wait_for_everyone()


def restore_run(trainer: Trainer, folder: Path) -> None:
    """Go on where a checkpoint was written; refused when it belongs to another model, other data or settings."""
    state, files = load_checkpoint(folder)
    replica, results = trainer.replica, trainer.results
    try:
        _check_same_run(trainer, folder, state)
        _check_tensors(trainer, folder, state, files)
        run = RunState.from_checkpoint(state, files, epochs=trainer.settings.epochs, rows=len(trainer.train))
        replica.load_weights(files["model"])
        replica.load_optimizer_tensors(files["optimizer"])
        trainer.sampler.load_state_dict({**state["sampler"], **files["sampler"]})
        trainer.speed.load_state_dict(state["speed"])
        if state["delta"] is not None:
            replica.objective.delta = state["delta"]  # type: ignore[attr-defined]
        if replica.accelerator.scaler is not None and state["scaler"] is not None:
            replica.accelerator.scaler.load_state_dict(state["scaler"])
        if trainer.settings.epochs > state["settings"]["epochs"]:
            run.stale = 0  # who asks for more epochs does not want the end that patience came to
        trainer.state = run
        rows = run.pending_rows().to(replica.device)
        results.solved[rows] = files["queue"]["solved"].to(replica.device)
        results.loss[rows] = files["queue"]["loss"].to(replica.device)
        results.margin[rows] = _pending_margins(files["queue"]).to(replica.device)
        replica.load_random_states(files["random"])
    except KeyError as error:
        raise InputError(f"{folder}: incomplete checkpoint: {error} is missing") from error
    except (InputError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: broken checkpoint: {first_line(error)}") from error


def _pending_margins(queue: dict[str, Tensor]) -> Tensor:
    """Margins of the rows that the sampler is not told of; earlier versions only wrote whether they are solved."""
    return queue["margin"] if "margin" in queue else queue["solved"].float() * 2 - 1


def _check_same_run(trainer: Trainer, folder: Path, state: dict[str, Any]) -> None:
    """Refuse a checkpoint of another run."""
    for name, count in {"rows": len(trainer.train), "ranks": trainer.replica.ranks}.items():
        if state[name] != count:
            raise InputError(f"{folder}: made with {shown(state[name])} {name}, this run has {count}")
    if state["data"] != trainer.fingerprint:
        raise InputError(f"{folder}: made with other training data")
    for name, value in {**dict.fromkeys(state["settings"]), **trainer.settings.asdict()}.items():
        saved = state["settings"].get(name)
        if name == "epochs" and type(saved) is int and value > saved:
            continue  # the run is made longer
        if name not in MAY_DIFFER and saved != value:
            raise InputError(f"{folder}: made with {name}={shown(saved)}, this run has {value!r}")


def _check_tensors(trainer: Trainer, folder: Path, state: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> None:
    """Refuse tensors that cannot be of this run, before anything is changed."""
    replica, weights = trainer.replica, trainer.replica.weights()
    if not replica.sharded or replica.is_main:
        check_same(folder / "model.safetensors", "checkpoint", files["model"], weights)
    if state["delta"] is not None:
        _checks.number("delta", state["delta"], 0, 1)
    queue, count = files["queue"], len(files["queue"]["unreported"])
    _checks.saved("solved", queue["solved"], torch.empty(count, dtype=torch.bool), high=1)
    for name, values in {"loss": queue["loss"], "margin": _pending_margins(queue)}.items():
        if values.shape != (count,) or not values.is_floating_point():
            raise ValueError(f"{name}: expected one number a row of {count}, found shape {tuple(values.shape)}")
    _checks.row_margins(_pending_margins(queue))
    _checks.saved("cpu", files["random"]["cpu"], torch.get_rng_state().expand(replica.ranks, -1), high=255)
    if replica.sharded:
        return
    if files.get("best"):
        check_same(folder / "best.safetensors", "checkpoint", files["best"], weights)
    for name, value in files["optimizer"].items():
        parameter, _, key = name.rpartition("/")
        weight = weights.get(parameter)
        if weight is None or value.shape != (weight.shape if key != "step" else ()):
            raise ValueError(f"optimizer: {name}: expected what goes with a weight, found shape {tuple(value.shape)}")
