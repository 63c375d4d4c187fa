"""The loop: equal to a plain one where it should be, and what it does beyond."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve.errors import DivergedError, InputError
from softsieve.losses.objectives import ASSoftmax
from softsieve.reference import as_multilabel_stats
from softsieve.tasks.rows import Rows
from softsieve.training import InfoBatchSampler, SelectiveBackpropSampler, SeTaSampler, SolvedSampler
from softsieve.training.checkpoint import checkpoints, load_checkpoint
from softsieve.training.loop import Result, Trainer
from softsieve.training.settings import SKIP, Settings
from softsieve.training.steps import EagerSteps, GraphSteps
from tests.helpers import default_dtype
from tests.training.helpers import CLASSES, Judge, Net, equal_weights, flags, points, tokens, trainer


def close_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-4, atol=1e-6)


# -- a plain run -------------------------------------------------------------------------------------------------------


def plain_loop(model: nn.Module, rows: Rows, settings: Settings) -> list[float]:
    """What the trainer should come to, written out."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, fused=True)
    torch.manual_seed(settings.seed)
    losses, total, seen = [], settings.epochs * len(rows), 0
    for epoch in range(settings.epochs):
        order = SolvedSampler(len(rows), seed=settings.seed)
        order.epoch = epoch
        for index in torch.split(order._draw(), settings.batch_size):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate_at((seen + len(index) / 2) / total)  # in the middle of the batch
            seen += len(index)
            loss = F.cross_entropy(model(rows.inputs["features"][index]), rows.target[index], reduction="none").sum()
            (loss / len(index)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach() / len(index)))
    return losses


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.1])
def test_softmax_is_a_plain_loop_bit_for_bit(max_grad_norm: float) -> None:
    rows, model = points(90, noise=0.3), Net(dropout=0.3)
    made = trainer(rows, model=Net(dropout=0.3), loss="softmax", batch_size=16, max_grad_norm=max_grad_norm, epochs=3)
    losses = plain_loop(model, rows, made.settings)
    result = made.fit()
    assert equal_weights(made.weights(), model.state_dict())
    assert [line["loss"] for line in result.log] == pytest.approx(losses, rel=1e-6)
    assert (result.steps, result.trained, result.screened) == (18, 270, 0)
    assert result.best == {}
    assert not equal_weights(made.weights(), Net().state_dict())


def test_clipping_can_be_switched_off() -> None:
    ends = []
    for norm in (0.0, 1e9, 1e-3):
        made = trainer(points(40), loss="softmax", max_grad_norm=norm)
        made.fit()
        ends.append(made.weights())
    close_weights(ends[0], ends[1])
    assert not torch.allclose(ends[0]["head.weight"], ends[2]["head.weight"], rtol=1e-4)


def test_weight_decay_spares_vectors_and_frozen_weights_stay() -> None:
    model = Net()
    model.body.weight.requires_grad_(False)
    made = trainer(points(40), model=model, weight_decay=0.5)
    assert [(len(g["params"]), g["weight_decay"]) for g in made.replica.optimizer.param_groups] == [(1, 0.5), (2, 0.0)]
    made.fit()
    assert torch.equal(made.weights()["body.weight"], Net().body.weight)
    assert not torch.equal(made.weights()["head.weight"], Net().head.weight)


def test_seed_is_of_order_and_dropout() -> None:
    def run(seed: int) -> dict[str, Tensor]:
        made = trainer(points(40), model=Net(dropout=0.5), seed=seed)
        made.fit()
        return made.weights()

    assert equal_weights(run(1), run(1))
    assert not equal_weights(run(1), run(2))


def test_log() -> None:
    result = trainer(points(40), validation=points(24, seed=1), epochs=2, logging_steps=2, warmup_ratio=0.5).fit()
    train = [line for line in result.log if line["kind"] == "train"]
    assert [line["step"] for line in train] == [2, 4, 6, 8, 10]
    assert [line["samples"] for line in train] == [16, 32, 48, 64, 80]
    assert [line["progress"] for line in train] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [line["learning_rate"] for line in train] == pytest.approx([0.003, 0.007, 0.009, 0.005, 0.001])
    assert all(0 <= line["solved"] <= 1 and line["delta"] == 0.1 for line in train)
    validation = [line for line in result.log if line["kind"] == "validation"]
    assert [line["step"] for line in validation] == [5, 10]
    assert validation[-1].keys() == {"step", "kind", "progress", "loss", "accuracy"}
    assert result.seconds > result.evaluation_seconds > 0


# -- accumulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (points(90, noise=0.1), {"epochs": 4}),
        (tokens(75), {"epochs": 4}),
        (flags(75), {"epochs": 8, "learning_rate": 0.03}),  # which are solved late
    ],
    ids=["points", "tokens", "flags"],
)
def test_windows_in_one_pass_or_several(rows: Rows, options: dict[str, Any]) -> None:
    """Also the last window of an epoch, which is short, and rows of tokens that count differently."""
    ends, logs = [], []
    for merge in (True, False):
        made = trainer(rows, speed_steps=4, speed_lambda=3.0, merge=merge, **options)
        result = made.fit()
        assert made.speed.steps == 4
        ends.append(made.weights())
        logs.append(result.log)
    close_weights(*ends)
    assert [line["samples"] for line in logs[0]] == [line["samples"] for line in logs[1]]
    for first, second in zip(*logs, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-3, abs=1e-6)
        assert first["solved"] == second["solved"]


def test_speed_reaches_its_most_and_takes_fewer_steps() -> None:
    plain = trainer(points(160), epochs=6).fit()
    made = trainer(points(160), epochs=6, speed_steps=3)
    fast = made.fit()
    assert made.speed.steps == 3
    assert fast.trained == plain.trained == 6 * 160
    assert fast.steps < 0.6 * plain.steps
    sizes = torch.tensor([0, *(line["samples"] for line in fast.log)]).diff()
    assert set(sizes.tolist()) >= {8, 16, 24}
    assert sizes[0] == 8
    for line, size in zip(fast.log, sizes.tolist(), strict=True):  # by samples, not by steps
        assert line["progress"] == pytest.approx(line["samples"] / (6 * 160))
        middle = (line["samples"] - size / 2) / (6 * 160)
        assert line["learning_rate"] == pytest.approx(made.settings.learning_rate_at(middle))


def test_speed_hears_of_the_latest_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(points(160, noise=0.2), epochs=4, speed_steps=4)
    take, update = made._take_step, made.speed.update
    windows, latest, heard, answers = [], [], [], [1]

    def watched_step(index: Tensor, micro_batches: int) -> None:
        take(index, micro_batches)
        windows.append(micro_batches)
        latest.append((int(made.results.solved[index[-8:]].sum()), len(index[-8:])))

    def watched_update(solved: int, total: int) -> int:
        heard.append((solved, total))
        answers.append(update(solved, total))
        return answers[-1]

    monkeypatch.setattr(made, "_take_step", watched_step)
    monkeypatch.setattr(made.speed, "update", watched_update)
    made.fit()
    assert heard == latest[: len(heard)]
    assert windows[: len(answers)] == answers
    assert windows[len(answers) :] == [4] * (len(windows) - len(answers))  # the most: nobody needs to ask
    assert set(windows) == {1, 2, 3, 4}


# -- skipping ----------------------------------------------------------------------------------------------------------


def test_skipping_trains_fewer_rows_and_counts_screened_ones() -> None:
    rows, validation = points(400), points(100, seed=1)
    plain = trainer(rows, validation=validation, epochs=8).fit()
    made = trainer(rows, validation=validation, epochs=8, skip="solved", eval_batch_size=64)
    result = made.fit()
    assert plain.trained == 8 * 400
    assert plain.screened == 0
    assert result.trained < 0.5 * plain.trained
    assert 0 < result.screened < plain.trained - result.trained
    assert result.best["accuracy"] >= plain.best["accuracy"] - 0.02
    assert result.log[-1]["progress"] == 1
    train = [line["progress"] for line in result.log if line["kind"] == "train"]
    assert train == sorted(train)  # rows left out count as seen


def test_skipping_nothing_is_the_plain_run() -> None:
    ends = []
    nothing: dict[str, Any] = {"skip": "solved", "tolerance": 0.0, "screen_above": 1.0, "eval_batch_size": 16}
    for options in ({}, nothing):
        made = trainer(points(100, noise=0.1), model=Net(dropout=0.2), epochs=5, **options)
        result = made.fit()
        ends.append(made.weights())
        assert result.trained == 500
        assert result.screened < 0.1 * 500 if options else result.screened == 0  # but for those always screened
        assert isinstance(made.sampler, SolvedSampler)
        assert made.sampler.solved.any()
    assert equal_weights(*ends)


def test_nothing_is_left_out_before_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 13 steps an epoch, 5 epochs: the first 40 are those of the plain run, and all are with 65."""
    taken: list[Tensor] = []
    run = EagerSteps.run

    def watched(self: EagerSteps, index: Tensor, micro_batches: int) -> None:
        taken.append(index)
        run(self, index, micro_batches)

    monkeypatch.setattr(EagerSteps, "run", watched)

    def steps(**options: Any) -> tuple[list[Tensor], Result]:
        taken.clear()
        result = trainer(points(100), epochs=5, **options).fit()
        return list(taken), result

    plain, _ = steps()
    policy: dict[str, Any] = {"skip": "solved", "eval_batch_size": 16, "screen_above": 1 / 3}
    ends = {after: steps(skip_after=after, **policy) for after in (0, 40, 65)}
    assert len(plain) == len(ends[65][0]) == 65
    for after, (rows, _) in ends.items():
        assert all(torch.equal(one, other) for one, other in zip(plain[:after], rows[:after], strict=True))
    assert ends[65][1].screened == 0
    assert ends[0][1].trained < ends[40][1].trained < 500


@pytest.mark.parametrize("skip_margin", [None, 0.2])
def test_screening_takes_out_what_leads_and_no_more(
    skip_margin: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """With everything screened in one block, whatever is trained did not lead when the epoch began, or is picked."""
    monkeypatch.setattr("softsieve.training.loop.FRESH", 1)
    policy: dict[str, Any] = {"tolerance": 0.0, "screen_above": 0.0, "recheck": 0.1, "skip_margin": skip_margin}
    made = trainer(points(100, noise=0.1), epochs=6, skip="solved", **policy)
    sampler = made.sampler
    assert isinstance(sampler, SolvedSampler)
    model, epochs, waiting, margins = made.model, [-1], [], []
    step, screened = made._take_step, sampler.screened

    def watched_screening(*args: Any, **options: Any) -> Tensor:
        leave = screened(*args, **options)
        margins.append(sampler.skip_margin)
        return leave

    def watched(index: Tensor, micro_batches: int) -> None:
        if made.state.epoch not in epochs:  # the weights are those that screening saw
            epochs.append(made.state.epoch)
            model.eval()
            with torch.no_grad():
                shown = made.replica.row_losses(made.train.batch(torch.arange(100)))[1].margin
            model.train()
            waiting.append(len(made.state.queue) + len(index))
            expected = (shown < margins[-1]) | sampler._picked
            assert waiting[-1] == int(expected.sum())
            assert expected[index].all()
        step(index, micro_batches)

    monkeypatch.setattr(made, "_take_step", watched)
    monkeypatch.setattr(sampler, "screened", watched_screening)
    result = made.fit()
    assert len(waiting) == 6
    assert 0 < min(waiting) < 50
    assert result.screened == 6 * 100
    assert result.trained == sum(waiting)
    if skip_margin is None:
        assert margins[0] == pytest.approx(0.775)  # until it is known that nothing slips without dropout
        assert margins[-1] < 0.3
    else:
        assert margins == pytest.approx([0.2] * 6)


def test_the_sampler_hears_of_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a schedule brings it down, a row leads by that of its time."""
    made = trainer(points(100), epochs=6, skip="solved", delta=0.2, initial_delta=0.9, delta_ratio=0.5)
    sampler = made.sampler
    assert isinstance(sampler, SolvedSampler)
    assert sampler.delta == 0.2
    heard: dict[str, list[float]] = {"update": [], "screened": []}
    for name in heard:
        method = getattr(sampler, name)

        def watched(*args: Any, name: str = name, method: Any = method, delta: float) -> Any:
            assert delta == made.replica.objective.delta  # type: ignore[attr-defined]
            heard[name].append(delta)
            return method(*args, delta=delta)

        monkeypatch.setattr(sampler, name, watched)
    made.fit()
    for deltas in heard.values():
        assert deltas == sorted(deltas, reverse=True)
        assert deltas[0] > 0.5
        assert deltas[-1] == pytest.approx(0.2, abs=0.01)  # the last screening may be a little earlier


def test_screening_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is screened more than a sixteenth of the data, or a batch, ahead of training."""
    made = trainer(points(400, noise=0.1), epochs=3, skip="solved", tolerance=0.0, screen_above=0.0)
    sizes = []
    screen = made._screen

    def watched(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        assert len(made.state.queue) < made.settings.batch_size
        return screen(rows)

    monkeypatch.setattr(made, "_screen", watched)
    made.fit()
    assert max(sizes) == 400 // 16
    assert sum(sizes) == 3 * 400


def test_evaluation_leaves_no_trace() -> None:
    """Neither dropout nor weights notice that the model was evaluated."""
    made = trainer(points(60), model=Net(dropout=0.5), validation=points(40, seed=1))
    before, state = made.weights(), torch.get_rng_state()
    first, decided = made.evaluate()
    second, _ = made.evaluate(points(40, seed=1))
    assert first == second
    assert decided.shape == (40,)
    assert equal_weights(before, made.weights())
    assert torch.equal(state, torch.get_rng_state())
    assert made.model.training


def test_sampler_hears_of_every_row() -> None:
    for skip in ("no", "solved"):
        made = trainer(points(100), epochs=3, skip=skip)
        made.fit()
        made.update_sampler()
        assert isinstance(made.sampler, SolvedSampler)
        state = made.sampler.state_dict()
        assert (state["seen_in"][state["plan"]] == 2).all()
        if skip == "no":
            assert torch.equal(state["margins"], made.results.margin)
            assert torch.equal(made.sampler.solved, made.results.solved)
            assert made.results.solved.any()


def test_infobatch_weights_enter_the_loss() -> None:
    rows, ends = points(100, noise=0.3), []
    made = trainer(rows, loss="softmax", skip="infobatch", epochs=8)
    assert isinstance(made.sampler, InfoBatchSampler)
    result = made.fit()
    assert result.trained < 800
    assert made.sampler.weights.max() == 1  # the last epoch visits everything
    for factor in (1.0, 3.0):
        made = trainer(rows, loss="softmax", skip="infobatch", epochs=1, max_grad_norm=0.0, batch_size=100)
        made.results.weight = torch.full((100,), factor)
        made.steps.batch_loss(torch.arange(100), torch.tensor(100)).backward()  # type: ignore[no-untyped-call]
        ends.append(made.model.head.weight.grad.clone())
        assert torch.equal(made.results.loss, F.cross_entropy(made.model(**rows.inputs), rows.target, reduction="none"))
        shown = made.results.tally[0].clone()
        GraphSteps(made.replica, made.train, made.results, made.settings).step(0, torch.arange(100))
        torch.testing.assert_close(made.results.tally[0], 2 * shown)  # what is logged has no weights, in a graph or not
    torch.testing.assert_close(3 * ends[0], ends[1])


def test_selective_backprop_screens_everything_and_trains_on_what_it_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = points(400, noise=0.3)
    made = trainer(rows, loss="softmax", skip="selective-backprop", epochs=6, eval_batch_size=32)
    assert isinstance(made.sampler, SelectiveBackpropSampler)
    blocks, choose = [], made.sampler.choose

    def watched(loss: Tensor) -> Tensor:
        blocks.append(len(loss))
        return choose(loss)

    monkeypatch.setattr(made.sampler, "choose", watched)
    result = made.fit()
    assert sum(blocks) == 2400
    assert max(blocks) == 400 // 16  # a model changes while it is trained: no block is long
    assert result.screened == made.sampler.screened == 6 * 400
    assert 0.4 * 2400 < result.trained < 0.6 * 2400
    chosen = made.state.pending_rows()
    loss = made.evaluator.screen(rows, torch.arange(400))[0]
    left = torch.ones(400, dtype=torch.bool).index_fill(0, chosen, False)
    assert loss[chosen].mean() > 2 * loss[left].mean()  # of the last epoch


def test_seta_visits_a_window_of_the_rows() -> None:
    made = trainer(points(400, noise=0.3), loss="softmax", skip="seta", epochs=8)
    result = made.fit()
    assert result.screened == 0
    assert 8 * 200 < result.trained < 8 * 360
    assert isinstance(made.sampler, SeTaSampler)
    assert made.sampler.loss.isfinite().all()


def test_infobatch_uses_the_weights_of_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(points(100, noise=0.3), loss="softmax", skip="infobatch", epochs=8)
    assert isinstance(made.sampler, InfoBatchSampler)
    step, different = made._take_step, 0

    def watched(index: Tensor, micro_batches: int) -> None:
        nonlocal different
        assert torch.equal(made.results.weight, made.sampler.weights)  # type: ignore[attr-defined]
        different += int((made.results.weight != 1).any())
        step(index, micro_batches)

    monkeypatch.setattr(made, "_take_step", watched)
    made.fit()
    assert different > 10
    assert made.sampler.loss.isfinite().all()


# -- margin ------------------------------------------------------------------------------------------------------------


def test_margin_comes_down() -> None:
    made = trainer(points(80), epochs=2, delta=0.2, initial_delta=0.8, delta_ratio=0.5)
    assert isinstance(made.replica.objective, ASSoftmax)
    assert made.replica.objective.delta == 0.8
    deltas = [line["delta"] for line in made.fit().log]
    assert deltas == pytest.approx([max(0.2, 0.8 - 0.6 * 2 * (step - 0.5) / 20) for step in range(1, 21)])


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_best_weights_are_restored() -> None:
    class Judged(Judge):
        """Says that the first evaluation is the best."""

        scores = iter([0.2, 0.9, 0.5, 0.8])

        def metrics(self, decided: Tensor, target: Tensor) -> dict[str, float]:
            return {"accuracy": next(self.scores)}

    settings = Settings(batch_size=8, epochs=3, learning_rate=0.01, logging_steps=1)
    rows = points(40)
    judge = Judged()
    made = Trainer(Net(), settings.objective(multilabel=False), rows, judge, settings, validation=points(20, seed=1))
    # The first score went to the check of the metric's name.
    kept = []
    judge_step = made._judge

    def watched(journal: Any) -> bool:
        kept.append(made.weights())
        return judge_step(journal)

    made._judge = watched  # type: ignore[method-assign]
    result = made.fit()
    assert (result.best["accuracy"], result.best_step, result.steps) == (0.9, 5, 15)
    assert equal_weights(made.weights(), kept[0])
    assert not equal_weights(made.weights(), kept[-1])


def test_of_two_that_are_equally_right_the_surer_is_best() -> None:
    made = trainer(points(40), validation=points(20, seed=1), epochs=12, loss="softmax")
    result = made.fit()
    validation = [line for line in result.log if line["kind"] == "validation"]
    right = [line for line in validation if line["accuracy"] == max(v["accuracy"] for v in validation)]
    assert len(right) > 1
    assert result.best["loss"] == min(line["loss"] for line in right) < right[0]["loss"]


def test_best_of_a_run_that_gets_worse() -> None:
    """A learning rate that is too high, and a metric to be minimised."""
    validation = points(60, seed=1, noise=0.2)
    made = trainer(
        points(60, noise=0.5),
        validation=validation,
        epochs=30,
        learning_rate=0.1,
        metric="loss",
        greater_is_better=False,
    )
    result = made.fit()
    losses = {line["step"]: line["loss"] for line in result.log if line["kind"] == "validation"}
    assert result.best["loss"] == min(losses.values())
    assert losses[result.best_step] == min(losses.values())
    assert result.best_step < result.steps
    assert made.evaluate()[0] == result.best


def test_patience() -> None:
    made = trainer(
        points(60, noise=0.5),
        validation=points(60, seed=1, noise=0.2),
        epochs=60,
        learning_rate=0.1,
        metric="loss",
        greater_is_better=False,
        patience=3,
    )
    result = made.fit()
    evaluated = [line["step"] for line in result.log if line["kind"] == "validation"]
    assert len(evaluated) < 60
    assert evaluated.index(result.best_step) == len(evaluated) - 4
    assert made.evaluate()[0] == result.best


def test_eval_steps() -> None:
    result = trainer(points(80), validation=points(20, seed=1), epochs=2, eval_steps=6).fit()
    assert [line["step"] for line in result.log if line["kind"] == "validation"] == [6, 12, 18, 20]
    result = trainer(points(80), validation=points(20, seed=1), epochs=2, eval_steps=10).fit()
    assert [line["step"] for line in result.log if line["kind"] == "validation"] == [10, 20]


def test_eval_steps_of_a_run_without_steps() -> None:
    model = Net()
    trainer(points(60), model=model, loss="softmax", epochs=60).fit()
    made = trainer(
        points(60),
        model=model,
        validation=points(20, seed=1),
        skip="solved",
        skip_margin=0.5,
        screen_above=0.0,
        recheck=1e-6,
        eval_steps=4,
    )
    result = made.fit()
    assert result.steps == 0
    assert result.best["accuracy"] > 0.9


def test_evaluation_does_not_depend_on_its_batches() -> None:
    rows = tokens(50, longest=7)
    found: list[tuple[float, float, list[int]]] = []
    for size in (50, 7, 1):
        made = trainer(tokens(20), validation=rows, eval_batch_size=size)
        metrics, decided = made.evaluate()
        assert decided.shape == rows.target.shape
        counted = rows.target != -100
        found.append((metrics["loss"], metrics["accuracy"], decided[counted].tolist()))
    for loss, *others in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert tuple(others) == found[0][1:]


def test_evaluation_is_the_mean_over_what_counts() -> None:
    for rows in (points(50), tokens(50)):
        made = trainer(rows, loss="softmax")
        with torch.no_grad():
            logits = made.model(**rows.inputs)
        metrics, _ = made.evaluate(rows)
        assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits.flatten(0, -2), rows.target.flatten())))
        counted = rows.target != -100
        assert metrics["accuracy"] == pytest.approx(float((logits.argmax(-1) == rows.target)[counted].float().mean()))


# -- kinds of targets --------------------------------------------------------------------------------------------------


def test_tokens() -> None:
    rows, model = tokens(60), Net()
    loss = F.cross_entropy(model(**rows.inputs).flatten(0, 1), rows.target.flatten())  # mean over what counts
    loss.backward()  # type: ignore[no-untyped-call]
    mean = pytest.approx(float(loss.detach()), rel=1e-5)
    made = trainer(rows, loss="softmax")
    made.steps.batch_loss(torch.arange(60), (rows.target != -100).sum()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(made.model.head.weight.grad, model.head.weight.grad)
    assert made.results.figures(0)[0] == mean
    assert trainer(rows, loss="softmax", batch_size=60).fit().log[0]["loss"] == mean
    result = trainer(tokens(150), validation=tokens(30, seed=1), epochs=8, skip="solved").fit()
    assert result.best["accuracy"] > 0.9
    assert result.trained < 8 * 150


def test_tokens_are_solved_when_all_that_count_are() -> None:
    made = trainer(tokens(40), delta=0.1)
    rows = made.train
    logits, row = made.replica.row_losses(rows.batch(torch.arange(40), positions=rows.target.shape[1]))
    _, positions, margins = made.replica.objective(logits, rows.target)
    assert positions is not None
    assert margins is not None
    counted = [rows.target[i] != -100 for i in range(40)]
    by_hand = [bool(positions[i][counted[i]].all()) for i in range(40)]
    assert row.solved.tolist() == by_hand
    assert 0 < sum(by_hand) < 40  # some by chance, those without labels among them
    worst = [min(margins[i][counted[i]].tolist(), default=1.0) for i in range(40)]  # a row leads as its worst token
    assert row.margin.tolist() == worst
    assert worst.count(1.0) == sum(not some.any() for some in counted) > 0
    assert torch.equal(made.evaluator.screen(rows, torch.arange(40))[1], row.margin)


def test_rows_of_many_labels_lead_by_the_threshold() -> None:
    rows = flags(40)
    made = trainer(rows, delta=0.3, epochs=8, learning_rate=0.03)
    made.fit()
    logits, row = made.replica.row_losses(rows.batch(torch.arange(40)))
    margins = as_multilabel_stats(logits.detach(), rows.target, delta=0.3, against="threshold")[-1]
    torch.testing.assert_close(row.margin, margins)
    made.results.note(torch.arange(40), row, torch.tensor(40))
    made.state.pending.append(torch.arange(40))
    made.update_sampler()
    assert isinstance(made.sampler, SolvedSampler)
    assert torch.equal(made.sampler.margins, row.margin.detach())
    assert torch.equal(made.sampler.solved, row.solved)
    assert 0 < int(row.solved.sum()) < 40


@pytest.mark.parametrize("loss", ["softmax", "as-softmax"])
def test_as_many_positions_as_classes_are_nothing_to_tell(loss: str) -> None:
    rows = tokens(40, longest=CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer(rows, validation=rows, loss=loss).fit()


def test_multilabel() -> None:
    result = trainer(flags(200), validation=flags(60, seed=1), epochs=20, learning_rate=0.02).fit()
    assert result.best["accuracy"] > 0.85
    skipping = trainer(flags(200), validation=flags(60, seed=1), epochs=20, learning_rate=0.02, skip="solved").fit()
    assert skipping.best["accuracy"] > 0.83
    assert skipping.trained < result.trained


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [*({"skip": skip} for skip in SKIP), {"speed_steps": 2, "merge": False}])
def test_the_default_dtype_changes_nothing(default: torch.dtype, settings: dict[str, Any], tmp_path: Path) -> None:
    rows, model = points(40), Net()
    plain = trainer(rows, validation=rows, **settings).fit()
    with default_dtype(default):
        found = trainer(rows, model=model, validation=rows, output=tmp_path, save_steps=2, **settings).fit()
    timed = ("seconds", "evaluation_seconds", "log")
    assert {k: v for k, v in found._asdict().items() if k not in timed} == {
        k: v for k, v in plain._asdict().items() if k not in timed
    }


def test_bf16() -> None:
    made = trainer(points(80), validation=points(40, seed=1), epochs=4, precision="bf16")
    result = made.fit()
    assert result.best["accuracy"] > 0.95
    assert all(value.dtype == torch.float32 for value in made.weights().values())
    exact = Net().double()
    exact.load_state_dict(made.weights())
    features = points(40, seed=1).inputs["features"]
    with torch.no_grad():
        error = (made.model(features).double() - exact(features.double())).abs().max()
    assert 1e-5 < error < 0.1  # products were rounded


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": points(0)}, "^training data: expected rows, found none$"),
        ({"validation": points(0)}, "^validation data: expected rows, found none$"),
        ({"validation": points(4), "metric": "f1"}, "^metric: expected one of loss, accuracy, found 'f1'$"),
        ({"patience": 2}, "^early stopping and eval_steps need validation data, found none$"),
        ({"eval_steps": 2}, "^early stopping and eval_steps need validation data, found none$"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        trainer(**{"train": points(10), **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which records graphs")
def test_without_a_gpu_graphs_are_left_out_with_a_notice() -> None:
    with pytest.warns(UserWarning, match="graphs: runs without, .* one process on a CUDA device, found cpu$"):
        made = trainer(points(80), epochs=2, graphs=True)
    made.fit()
    plain = trainer(points(80), epochs=2)
    plain.fit()
    assert equal_weights(made.weights(), plain.weights())


def test_evaluation_without_rows() -> None:
    with pytest.raises(InputError, match="evaluation: expected rows"):
        trainer(points(10)).evaluate()


def test_loss_that_is_not_finite(tmp_path: Path) -> None:
    rows = points(80)
    order = SolvedSampler(80, seed=42).plan
    rows.inputs["features"][order[60]] = float("inf")  # in step 8
    made = trainer(rows, output=tmp_path, save_steps=3, logging_steps=100, epochs=1)
    with pytest.raises(InputError, match=r"^the loss is (nan|inf) at step 9: try a smaller learning rate"):
        made.fit()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-6"]
    _, files = load_checkpoint(tmp_path / "checkpoint-6")
    assert all(value.isfinite().all() for value in files["model"].values())


def test_loss_that_is_not_finite_is_noticed_at_the_end() -> None:
    rows = points(80)
    rows.inputs["features"][:] = float("nan")
    with pytest.raises(InputError, match=r"^the loss is nan at step 10"):
        trainer(rows, logging_steps=100, epochs=1).fit()


def test_a_model_that_diverges_in_its_last_step_is_noticed_when_it_is_judged() -> None:
    """The losses of training are those before their steps."""
    with pytest.raises(DivergedError, match=r"^the validation loss is (nan|inf) at step 1: try a smaller"):
        trainer(points(80), validation=points(20), batch_size=80, epochs=1, learning_rate=1e38, weight_decay=0.0).fit()


def test_one_row_and_batches_larger_than_the_data() -> None:
    result = trainer(points(1), batch_size=64, epochs=3, skip="solved").fit()
    assert result.trained + result.screened >= 3
    assert trainer(points(1), validation=points(1), epochs=2).fit().best_step in (1, 2)


def test_rows_of_several_devices_are_refused() -> None:
    """An index on the device of the target picks anything from a tensor elsewhere."""
    with pytest.raises(ValueError, match="features: expected a tensor on meta, as the target, found cpu"):
        Rows({"features": torch.ones(3, 2)}, torch.zeros(3, dtype=torch.long, device="meta"))
