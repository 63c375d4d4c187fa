"""Settings: refused when they are made, with the name of what is wrong; schedules; a round trip through JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softsieve.losses.objectives import SINGLE_LABEL, AMSoftmax, ASSoftmax, MultiLabelASSoftmax, MultiLabelSoftmax
from softsieve.training.recipes import suited
from softsieve.training.settings import PLAIN, Settings


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"learning_rate": 0}, ValueError, "learning_rate: expected a number above 0, found 0"),
        ({"learning_rate": -1e-3}, ValueError, "learning_rate: expected a number in"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate: .*found nan"),
        ({"learning_rate": "fast"}, TypeError, "learning_rate: expected a number, found str"),
        *(
            ({name: 0}, ValueError, rf"{name}: expected an int in \[1, ")
            for name in ("epochs", "batch_size", "eval_batch_size", "logging_steps", "save_total_limit")
        ),
        ({"speed_steps": 0}, ValueError, "(max|speed)_steps: expected an int in"),
        ({"epochs": 1.5}, TypeError, "epochs: expected an int, found float"),
        *(
            ({name: -1}, ValueError, rf"{name}: expected an int in \[0, ")
            for name in ("eval_steps", "save_steps", "patience", "seed")
        ),
        ({"weight_decay": -0.1}, ValueError, "weight_decay: expected a number in"),
        ({"max_grad_norm": -1}, ValueError, "max_grad_norm: expected a number in"),
        ({"tolerance": 2.0}, ValueError, "tolerance: expected a number in"),
        ({"recheck": 0.0}, ValueError, "recheck: expected a number in"),
        ({"skip_margin": 0}, ValueError, r"skip_margin: expected a number in \(0, 1\], found 0"),
        ({"skip_margin": 1.1}, ValueError, r"skip_margin: expected a number in \[0, 1\], found 1.1"),
        ({"skip_margin": float("nan")}, ValueError, "skip_margin: .* found nan"),
        ({"skip_margin": "a"}, TypeError, "skip_margin: expected a number, found str"),
        ({"screen_above": -1.0}, ValueError, "screen_above: expected a number in"),
        ({"warmup_ratio": 1.5}, ValueError, "warmup_ratio: expected a number in"),
        ({"delta": 2}, ValueError, "final: expected a number in|delta: expected a number in"),
        ({"delta_ratio": -1}, ValueError, "ratio: expected a number in"),
        ({"delta_shape": "round"}, ValueError, "shape: expected one of 'linear', 'cosine', found 'round'"),
        ({"speed_lambda": 0}, ValueError, "lam.*: expected a number in"),
        ({"skip": "all"}, ValueError, "skip: expected one of 'no', 'solved', 'infobatch', .*, 'seta', found 'all'"),
        ({"precision": "fp8"}, ValueError, "precision: expected one of 'no', 'bf16', 'fp16', found 'fp8'"),
        ({"loss": "softmax", "skip": "solved"}, ValueError, "skip='solved': expected the loss 'as-softmax'"),
        ({"loss": "softmax", "speed_steps": 2}, ValueError, "speed_steps=2: expected the loss 'as-softmax'"),
        (
            {"loss": "am-softmax", "loss_options": {"k": 3}},
            TypeError,
            "am-softmax: expected options among .*, found 'k'",
        ),
        ({"loss": "am-softmax", "loss_options": {"margin": 9}}, ValueError, r"margin: expected a number in \[0, 2\]"),
        ({"loss": "softmax", "loss_options": {"margin": 0.1}}, TypeError, "softmax: expected options among"),
        ({"loss_options": {"delta": 0.1}}, ValueError, "loss_options: expected options that .*, found 'delta'"),
        ({"loss": "softmax", "loss_options": {"reduction": "sum"}}, ValueError, "loss_options: .*found 'reduction'"),
        ({"loss": "softmax", "loss_options": [1]}, TypeError, "loss_options: expected a dict, found list"),
        ({"graphs": True, "precision": "fp16"}, ValueError, "graphs: expected a constant delta"),
        ({"graphs": True, "delta_ratio": 0.5}, ValueError, "graphs: expected a constant delta"),
        ({"compiled": 1}, TypeError, "compiled: expected True or False, found int"),
        ({"compiled": True, "freeze_encoder": True}, ValueError, "compiled: expected an encoder that is trained"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Settings(**options)


def test_allowed() -> None:
    for rival in ("infobatch", "selective-backprop", "seta"):
        Settings(loss="softmax", skip=rival)
    Settings(loss="softmax", graphs=True, delta_ratio=0.5)  # a margin that is not used
    Settings(graphs=True, precision="bf16", speed_steps=4, skip="solved")


def test_objectives() -> None:
    for loss in SINGLE_LABEL:
        made = Settings(loss=loss).objective(multilabel=False)
        assert type(made) is SINGLE_LABEL[loss]
        assert made.reduction == "none"
    assert Settings(delta=0.2).objective(multilabel=False) == ASSoftmax(delta=0.2, reduction="none")
    assert Settings(delta=0.2).objective(multilabel=True) == MultiLabelASSoftmax(delta=0.2, reduction="none")
    assert isinstance(Settings(loss="softmax").objective(multilabel=True), MultiLabelSoftmax)
    coming_down = Settings(delta=0.2, initial_delta=0.9, delta_ratio=0.5)
    assert coming_down.objective(multilabel=False) == ASSoftmax(delta=0.9, reduction="none")


def test_options_of_a_loss() -> None:
    settings = Settings(loss="am-softmax", loss_options={"scale": 20.0, "margin": 0.2})
    assert settings == Settings(loss="am-softmax", loss_options={"margin": 0.2, "scale": 20.0})
    assert len({settings, Settings(loss="am-softmax")}) == 2  # as keys
    assert settings.objective(multilabel=False) == AMSoftmax(margin=0.2, scale=20.0, reduction="none")
    assert settings.asdict()["loss_options"] == {"margin": 0.2, "scale": 20.0}
    assert Settings(**json.loads(json.dumps(settings.asdict()))) == settings
    assert dataclasses.replace(settings, seed=1).loss_options == settings.loss_options
    assert Settings(loss_options={}) == Settings()
    assert "loss_options" not in Settings().asdict()  # as it was when there were none


def test_schedule_counts_in_shares_of_training() -> None:
    schedule = Settings(delta=0.2, initial_delta=1.0, delta_ratio=0.5).schedule()
    assert [schedule(done) for done in (0, 0.25, 0.5, 1)] == [1.0, pytest.approx(0.6), 0.2, 0.2]
    assert Settings(delta=0.3).schedule()(0) == 0.3


@given(st.floats(0, 1), st.floats(0, 1))
def test_learning_rate(progress: float, warmup: float) -> None:
    rate = Settings(learning_rate=0.5, warmup_ratio=warmup).learning_rate_at(progress)
    expected = progress / warmup if progress < warmup else (1 - progress) / (1 - warmup) if warmup < 1 else 0
    assert rate == pytest.approx(0.5 * expected)
    assert 0 <= rate <= 0.5


def test_learning_rate_at_its_corners() -> None:
    s = Settings(learning_rate=0.5, warmup_ratio=0.2)
    assert [s.learning_rate_at(p) for p in (0, 0.1, 0.2, 0.6, 1)] == [0, 0.25, 0.5, pytest.approx(0.25), 0]
    assert Settings(learning_rate=0.5, warmup_ratio=0).learning_rate_at(0) == 0.5


def test_round_trip_through_json() -> None:
    settings = Settings(epochs=7, delta_ratio=0.3, precision="bf16")
    assert Settings(**json.loads(json.dumps(settings.asdict()))) == settings
    newer = {
        "loss_options",
        "skip_margin",
        "skip_after",
        "many_classes",
        "head_step",
        "head_dtype",
        "head_rate",
        "class_weights",
        "freeze_encoder",
        "compiled",
    }  # said where they are given, so that others read as they did
    assert not newer & settings.asdict().keys()
    assert {*settings.asdict(), *newer} == {field.name for field in dataclasses.fields(Settings)}
    given = dataclasses.replace(settings, skip_margin=0.6, skip="solved")
    assert given.asdict()["skip_margin"] == 0.6
    assert given.asdict()["skip_after"] == settings.skip_after
    assert Settings(**json.loads(json.dumps(given.asdict()))) == given


def test_what_depends_on_data_is_filled_in_and_what_is_given_stays() -> None:
    settings = Settings(epochs=4, metric="loss")
    given = settings.asdict()
    assert [given[name] for name in ("learning_rate", "delta", "greater_is_better")] == [None, None, False]
    full = settings.filled(suited("multilabel", ["a", "b"], 5000, hidden_size=None))
    assert (full.epochs, full.metric, full.learning_rate, full.batch_size, full.delta) == (4, "loss", 1e-2, 64, 0.7)
    assert full.filled(PLAIN) == full
    assert None not in settings.filled().asdict().values()
    encoder = settings.filled(suited("text", ["a", "b"], 5000, hidden_size=768))
    assert (encoder.learning_rate, encoder.delta) == (5e-5, 0.1)
