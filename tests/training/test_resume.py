"""Runs that are cut short go on as if they had not been; what is not theirs is refused; a full disk costs nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve.errors import InputError
from softsieve.training import SolvedSampler
from softsieve.training.checkpoint import checkpoints, load_checkpoint, restore_run
from softsieve.training.loop import Result, Trainer
from softsieve.training.replica import Replica
from tests.training.helpers import Net, equal_weights, flags, in_process, points, tokens, trainer

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "skipping": {"skip": "solved", "eval_batch_size": 32},
    "speed": {"speed_steps": 3, "speed_lambda": 2.0, "merge": False},
    "infobatch": {"loss": "softmax", "skip": "infobatch"},
    "selective-backprop": {"loss": "softmax", "skip": "selective-backprop", "eval_batch_size": 32},
    "seta": {"loss": "softmax", "skip": "seta"},
    "margin": {"delta_ratio": 0.7, "eval_steps": 4},
}


class Slow(Net):
    """Leaves time to be killed."""

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.01)
        return super().forward(features)


def make(mode: str, output: Path | None, *, kind: type[Net] = Net, **settings: Any) -> Trainer:
    chosen = {"epochs": 5, "save_steps": 3, "patience": 4, **MODES[mode], **settings}
    return trainer(
        points(120, noise=0.1),
        model=kind(dropout=0.2),
        validation=points(50, noise=0.1, seed=1),
        output=output,
        **chosen,
    )


def comparable(result: Result) -> dict[str, Any]:
    return {name: value for name, value in result._asdict().items() if "seconds" not in name}


def log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_from_any_checkpoint(mode: str, tmp_path: Path) -> None:
    whole = make(mode, tmp_path, save_total_limit=100)
    expected = whole.fit()
    assert log(tmp_path) == expected.log
    found = checkpoints(tmp_path)
    assert len(found) >= expected.steps // 3 - 1  # early stopping does not wait for one
    ends_of_epochs = {line["step"] for line in expected.log if line["kind"] == "validation"}
    last_of_an_epoch = [path for path in found if int(path.name.split("-")[1]) in ends_of_epochs]
    for folder in {found[0], *last_of_an_epoch[:1], found[len(found) // 2], found[-1]}:
        made = make(mode, tmp_path, save_total_limit=100)
        with torch.random.fork_rng():
            torch.manual_seed(123)
            result = made.fit(folder)
        assert comparable(result) == comparable(expected)
        assert equal_weights(made.weights(), whole.weights())
        assert log(tmp_path) == expected.log


@pytest.mark.parametrize("rows", [tokens(60), flags(60)], ids=["tokens", "flags"])
def test_other_targets(rows: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"skip": "solved", "save_steps": 5, "epochs": 3, "eval_batch_size": 16}
    whole = trainer(rows, model=Net(dropout=0.2), output=tmp_path, **options)
    whole.fit()
    made = trainer(rows, model=Net(dropout=0.2), **options)
    made.fit(checkpoints(tmp_path)[0])
    assert equal_weights(made.weights(), whole.weights())


def test_what_may_differ(tmp_path: Path) -> None:
    whole = make("plain", tmp_path, save_total_limit=100)
    whole.fit()
    made = make("plain", tmp_path / "other", save_steps=None, logging_steps=7, save_total_limit=1)
    made.fit(tmp_path / "checkpoint-9")
    assert equal_weights(made.weights(), whole.weights())
    assert checkpoints(tmp_path / "other") == []


@pytest.mark.parametrize("mode", ["plain", "skipping"])
def test_a_finished_run_goes_on_for_more_epochs(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(Replica, "set_learning_rate", lambda self, rate: rates.append(rate))  # left as it was
    whole = make(mode, tmp_path / "whole", epochs=6, patience=0)
    expected = whole.fit()
    planned = rates.copy()
    rates.clear()
    first = make(mode, tmp_path / "parts", epochs=3, patience=0, save_steps=0).fit()
    assert [path.name for path in checkpoints(tmp_path / "parts")] == [f"checkpoint-{first.steps}"]
    longer = make(mode, tmp_path / "parts", epochs=6, patience=0, save_steps=0)
    result = longer.fit(checkpoints(tmp_path / "parts")[-1])
    assert equal_weights(longer.weights(), whole.weights())
    assert (result.steps, result.trained, result.best) == (expected.steps, expected.trained, expected.best)
    assert rates[first.steps :] == planned[first.steps :]  # of a run that had so many epochs from the start
    assert rates[first.steps] > 10 * rates[first.steps - 1]  # which had come to next to nothing
    with pytest.raises(InputError, match="made with epochs=6, this run has 5"):
        make(mode, tmp_path / "parts", epochs=5, patience=0).fit(checkpoints(tmp_path / "parts")[-1])


@pytest.mark.parametrize("options", [{}, {"patience": 1, "epochs": 40}, {"eval_steps": 4}], ids=str)
def test_a_finished_run_that_is_resumed_has_nothing_left_to_do(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = make("plain", tmp_path, **options)
    expected = whole.fit()
    again = make("plain", tmp_path, **options)
    result = again.fit(checkpoints(tmp_path)[-1])
    assert comparable(result) == comparable(expected)
    assert equal_weights(again.weights(), whole.weights())
    assert log(tmp_path) == expected.log


def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    whole = make("skipping", tmp_path / "whole")
    expected = whole.fit()
    stopped = make("skipping", tmp_path / "parts", save_steps=None)
    stopped.stop = lambda: stopped.state.step == 13
    with pytest.raises(KeyboardInterrupt):
        stopped.fit()
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["checkpoint-13"]
    made = make("skipping", tmp_path / "parts")
    assert comparable(made.fit(checkpoints(tmp_path / "parts")[-1])) == comparable(expected)
    assert equal_weights(made.weights(), whole.weights())


def test_the_policy_of_skipping_may_differ(tmp_path: Path) -> None:
    """It changed with versions: a run goes on under that of today."""
    make("skipping", tmp_path, save_total_limit=100).fit()
    policy: dict[str, Any] = {"skip_margin": 0.7, "tolerance": 0.1, "recheck": 0.2, "screen_above": 0.0}
    made = make("skipping", tmp_path / "other", **policy)
    result = made.fit(tmp_path / "checkpoint-9")
    assert isinstance(made.sampler, SolvedSampler)
    assert made.sampler.skip_margin == pytest.approx(0.7)
    assert result.log[-1]["progress"] == 1


def test_margins_of_rows_that_the_sampler_was_not_told_of(tmp_path: Path) -> None:
    whole = make("skipping", tmp_path, save_total_limit=100)
    whole.fit()
    for folder in checkpoints(tmp_path):
        made = make("skipping", tmp_path / "other")
        restore_run(made, folder)
        if len(rows := made.state.pending_rows()):
            break
    assert len(rows)
    assert (made.results.margin[rows] != 0).all()
    assert torch.equal(made.results.solved[rows], made.results.margin[rows] > 0.1)


@pytest.mark.parametrize("mode", ["skipping", "infobatch", "selective-backprop", "seta"])
def test_checkpoints_do_not_change_the_run(mode: str, tmp_path: Path) -> None:
    results, ends = [], []
    for save_steps in (0, 3, 7):
        made = trainer(
            points(400, noise=0.1),
            model=Net(dropout=0.2),
            output=tmp_path / str(save_steps),
            save_steps=save_steps,
            epochs=8,
            tolerance=0.01,
            screen_above=0.5,
            **MODES[mode],
        )
        result = made.fit()
        results.append((result.steps, result.trained, result.screened))
        ends.append(made.weights())
    assert results[0] == results[1] == results[2]
    assert equal_weights(ends[0], ends[1])
    assert equal_weights(ends[0], ends[2])


class Idle(Net):
    """Has a layer that nothing goes through."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.idle = torch.nn.Linear(3, 3)


def test_weights_that_never_had_a_gradient(tmp_path: Path) -> None:
    whole = make("plain", tmp_path, kind=Idle)
    whole.fit()
    made = make("plain", tmp_path, kind=Idle)
    made.fit(checkpoints(tmp_path)[0])
    assert equal_weights(made.weights(), whole.weights())


def train_slowly(mode: str, output: Path) -> None:
    make(mode, output, kind=Slow).fit()


@pytest.mark.parametrize("mode", ["plain", "skipping", "speed"])
def test_killed(mode: str, tmp_path: Path) -> None:
    whole = make(mode, None)
    expected = whole.fit()
    child = in_process(train_slowly, mode, tmp_path)
    deadline = time.monotonic() + 60
    while not checkpoints(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.25))
    child.kill()
    child.join()
    assert child.exitcode == -9
    found = checkpoints(tmp_path)
    assert 1 <= len(found) <= 3  # the third was about to be removed
    made = make(mode, tmp_path)
    result = made.fit(found[-1])
    assert comparable(result) == comparable(expected)
    assert equal_weights(made.weights(), whole.weights())
    assert log(tmp_path) == expected.log
    assert len({(line["step"], line["kind"]) for line in log(tmp_path)}) == len(expected.log)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    output = tmp_path_factory.mktemp("finished")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    make("plain", output, save_total_limit=1, epochs=1, patience=0).fit()
    return output


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def refuse(output: Path, words: str, *, made: Trainer | None = None) -> bool:
    """Whether the model is as it was, after an error in one line and no change to the files."""
    if made is None:
        made = make("plain", output, epochs=1, patience=0)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    weights = made.weights()
    with pytest.raises(InputError, match=words) as error:
        made.fit(output / "checkpoint-15")
    assert "\n" not in str(error.value)
    assert str(output) in str(error.value)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    return equal_weights(weights, made.weights())


def test_of_another_model(output: Path) -> None:
    class Wide(Net):
        def __init__(self, dropout: float) -> None:
            super().__init__(dropout=dropout, hidden=32)

    made = make("plain", output, kind=Wide, epochs=1, patience=0)
    words = r"model.safetensors: not a checkpoint of this model: body.bias is \(16,\), expected \(32,\)$"
    assert refuse(output, words, made=made)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 0.02}, r"checkpoint-15: made with learning_rate=0.01, this run has 0.02$"),
        ({"loss": "softmax"}, r"checkpoint-15: made with loss='as-softmax', this run has 'softmax'$"),
        ({"skip": "solved"}, r"checkpoint-15: made with skip='no', this run has 'solved'$"),
        ({"skip": "infobatch"}, r"checkpoint-15: made with skip='no', this run has 'infobatch'$"),
        ({"seed": 1}, r"checkpoint-15: made with seed=42, this run has 1$"),
    ],
)
def test_of_other_settings(output: Path, settings: dict[str, Any], words: str) -> None:
    assert refuse(output, words, made=make("plain", output, **{"epochs": 1, "patience": 0, **settings}))


def test_of_other_options_of_the_loss(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": "label-smoothing", "epochs": 1, "patience": 0, "save_total_limit": 1}
    make("plain", tmp_path, loss_options={"smoothing": 0.2}, **options).fit()
    make("plain", tmp_path, loss_options={"smoothing": 0.2}, **options).fit(tmp_path / "checkpoint-15")
    words = r"made with loss_options=\{'smoothing': 0.2\}, this run has None$"
    assert refuse(tmp_path, words, made=make("plain", tmp_path, **options))
    words = r"made with loss_options=\{'smoothing': 0.2\}, this run has \{'smoothing': 0.1\}$"
    assert refuse(tmp_path, words, made=make("plain", tmp_path, loss_options={"smoothing": 0.1}, **options))


def test_of_other_data(output: Path) -> None:
    settings: dict[str, Any] = {"validation": points(50, seed=1), "epochs": 1, "save_steps": 3, "output": output}
    assert refuse(output, "made with 120 rows, this run has 119$", made=trainer(points(119), **settings))
    assert refuse(output, "made with other training data$", made=trainer(points(120, seed=7), **settings))


def test_not_there(output: Path) -> None:
    shutil.rmtree(output / "checkpoint-15")
    refuse(output, "checkpoint-15/state.json: cannot be read: ")


@pytest.mark.parametrize("name", ["model", "optimizer", "sampler", "random", "queue"])
def test_file_that_is_cut_short_or_missing(output: Path, name: str) -> None:
    path = output / "checkpoint-15" / f"{name}.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert refuse(output, rf"{name}.safetensors: cannot be read as safetensors: ")
    path.unlink()
    refuse(output, rf"checkpoint-15: incomplete checkpoint: '{name}' is missing$")


@pytest.mark.parametrize("name", ["settings", "rows", "data", "sampler", "speed", "best", "step"])
def test_state_with_something_missing(output: Path, name: str) -> None:
    path = output / "checkpoint-15" / "state.json"
    state = json.loads(path.read_text())
    del state[name], state["digest"]
    path.write_text(json.dumps(state))
    refuse(output, rf"checkpoint-15: incomplete checkpoint: '{name}' is missing$")


# -- a full disk -------------------------------------------------------------------------------------------------------


class Filling(Net):
    """After some steps, files may not grow beyond a kilobyte."""

    def forward(self, features: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + int(self.training)
        if self.calls == 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return super().forward(features)


def train_on_a_full_disk(output: Path, logging_steps: int, answer: Connection) -> None:
    try:
        make("plain", output, kind=Filling, logging_steps=logging_steps).fit()
        answer.send(None)
    except BaseException as error:
        answer.send((type(error).__name__, str(error)))


@pytest.mark.parametrize(("logging_steps", "file"), [(1000, "checkpoint-9"), (1, "log.jsonl")])
def test_full_disk(tmp_path: Path, logging_steps: int, file: str) -> None:
    mine, its = multiprocessing.Pipe()
    child = in_process(train_on_a_full_disk, tmp_path, logging_steps, its)
    kind, words = mine.recv()
    child.join()
    assert kind == "InputError"
    assert words.startswith(f"{tmp_path / file}: cannot be written: ")
    assert "File too large" in words
    assert "\n" not in words
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-6"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    whole = make("plain", None, logging_steps=logging_steps)
    expected = whole.fit()
    made = make("plain", tmp_path, logging_steps=logging_steps)
    assert comparable(made.fit(checkpoints(tmp_path)[-1])) == comparable(expected)
    assert equal_weights(made.weights(), whole.weights())
    assert load_checkpoint(checkpoints(tmp_path)[-1])[0]["step"] > 6
