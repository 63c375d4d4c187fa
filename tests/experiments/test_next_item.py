"""`python -m experiments next-item`: reading, splits, metrics, training, resuming and serving."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from experiments.commands import app
from experiments.item_model import ItemModel, batch_loss, last_states, metrics, ranks
from experiments.item_sequences import Questions, Sequences, leave_last_out, pad, read_sequences
from experiments.next_item import Job, make_model, serve, step, train
from softsieve.comparisons.output import read_table
from softsieve.errors import DivergedError, InputError

ITEMS = 30
SMALL: dict[str, Any] = {"size": 16, "layers": 1, "heads": 2, "length": 6, "dropout": 0.0}


def write_cycles(path: Path, users: int = 60) -> Path:
    """Users who take items in a circle, from anywhere: what comes next is certain."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(ITEMS, (users,), generator=draw).tolist()
    lines = [f"u{user} i{(start + n) % ITEMS}" for user, start in enumerate(starts) for n in range(4 + user % 6)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def cycles(tmp_path: Path) -> Path:
    return write_cycles(tmp_path / "cycles.txt")


def new_model(items: int = ITEMS, **changes: Any) -> ItemModel:
    torch.manual_seed(0)
    model = ItemModel(items, **{**SMALL, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# -- reading -----------------------------------------------------------------------------------------------------------


def test_plain_and_packed_files_are_the_same(tmp_path: Path) -> None:
    text = "7 b\n7 a\n\n9\tb\r\n9 c\n9 b\n"
    (tmp_path / "plain.txt").write_text(text)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("plain.txt", "packed.txt.gz"):
        users, items = read_sequences(tmp_path / name)
        assert [user.tolist() for user in users] == [[0, 1], [0, 2, 0]]
        assert items == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1\nb\n", r"taken\.txt:2: expected USER ITEM, two words, found 'b'"),
        ("a 1\na 2 3\n", r"taken\.txt:2: expected USER ITEM, two words, found 'a 2 3'"),
        ("a 1\nb 1\na 2\n", r"taken\.txt:3: expected the lines of a user together, found 'a' again"),
        ("\n\n", r"taken\.txt: expected lines USER ITEM, found none"),
    ],
)
def test_bad_lines_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "taken.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        read_sequences(tmp_path / "taken.txt")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken.txt.gz").write_bytes(gzip.compress(b"a 1\n" * 99)[:-9])
    with pytest.raises(InputError, match=r"damaged \.gz file"):
        read_sequences(tmp_path / "taken.txt.gz")


# -- splits ------------------------------------------------------------------------------------------------------------


def test_the_items_asked_for_are_not_trained_on() -> None:
    """Every item of a user is another one, so a leak would show."""
    users = [torch.arange(100 * user, 100 * user + count) for user, count in enumerate((1, 2, 3, 4, 9, 60))]
    split = leave_last_out(Sequences(users, [str(item) for item in range(600)]))
    assert [len(items) for items in split.train] == [2, 2, 7, 58]  # of users with 2, 4, 9 and 60 items
    trained = set(torch.cat(split.train).tolist())
    asked = [items for items in users if len(items) >= 3]
    assert split.test.answers.tolist() == [int(items[-1]) for items in asked]
    assert split.validation.answers.tolist() == [int(items[-2]) for items in asked]
    assert not trained & {*split.test.answers.tolist(), *split.validation.answers.tolist()}
    for part, end in ((split.validation, -2), (split.test, -1)):
        assert [items.tolist() for items in part.histories] == [items[:end].tolist() for items in asked]
    window, counts = pad(split.train, 51)  # what a step trains on
    assert counts.tolist() == [2, 2, 7, 51]
    assert set(window.flatten().tolist()) - {0} <= trained
    assert window[3, -1] == 557  # the most recent


@pytest.mark.parametrize(
    ("counts", "message"), [([1, 2], "3 items to be asked for the last"), ([3, 1], "2 items to train on")]
)
def test_data_without_anything_to_do_are_refused(counts: list[int], message: str) -> None:
    with pytest.raises(InputError, match=f"data: expected users with {message}, found none"):
        leave_last_out(Sequences([torch.arange(count) for count in counts], list("abc")))


# -- model and metrics -------------------------------------------------------------------------------------------------


def test_what_is_behind_a_state_does_not_matter() -> None:
    model = new_model().eval()
    items = torch.randint(ITEMS, (3, 6))
    other = items.clone()
    other[:, 4:] = (other[:, 4:] + 1) % ITEMS
    torch.testing.assert_close(model(items)[:, :4], model(other)[:, :4])
    assert not torch.allclose(model(items)[:, 4:], model(other)[:, 4:])
    alone = model(items[:1, :3])[0, -1]
    torch.testing.assert_close(last_states(model, [items[0, :3], items[1]])[0], alone)


def brute_force(model: ItemModel, questions: Questions, *, exclude_seen: bool, k: int) -> dict[str, float]:
    """User by user, with a sorted list."""
    hits, gains = [], []
    for history, answer in zip(questions.histories, questions.answers.tolist(), strict=True):
        state = model.eval()(history[-model.length :][None])[0, -1]
        scores = (model.weight @ state).tolist()
        gone = set(history.tolist()) - {answer} if exclude_seen else set()
        order = sorted((i for i in range(len(scores)) if i not in gone), key=lambda i: -scores[i])
        place = order.index(answer)
        hits.append(place < k)
        gains.append(1 / math.log2(place + 2) if place < k else 0)
    return {f"hr@{k}": sum(hits) / len(hits), f"ndcg@{k}": sum(gains) / len(gains)}


@pytest.mark.parametrize("exclude_seen", [False, True])
def test_metrics_are_those_of_a_sorted_list(exclude_seen: bool) -> None:
    """More users than are ranked at a time, histories longer than the model reads, answers that were seen before."""
    model, draw = new_model(), torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (150,), generator=draw).tolist()
    histories = [torch.randint(ITEMS, (length,), generator=draw) for length in lengths]
    questions = Questions(histories, torch.randint(ITEMS, (150,), generator=draw))
    assert any(int(answer) in items.tolist() for items, answer in zip(*questions, strict=True))
    found = metrics(ranks(model, questions, exclude_seen=exclude_seen), k=5)
    assert found == pytest.approx(brute_force(model, questions, exclude_seen=exclude_seen, k=5))
    assert 0.05 < found["hr@5"] < 0.5


def test_ties_count_against_the_model() -> None:
    model = new_model()
    torch.nn.init.zeros_(model.items.weight)
    assert ranks(model, Questions([torch.tensor([1])], torch.tensor([0]))).tolist() == [ITEMS - 1]


# -- training ----------------------------------------------------------------------------------------------------------


def test_a_delta_of_1_is_cross_entropy_with_logits() -> None:
    """Loss and all gradients, those of the tied embedding included; users of one item have no position."""
    users = [torch.randint(ITEMS, (count,)) for count in (1, 2, 9, 4)]
    model = new_model()
    found = []
    for loss in ("logits", "1"):
        model.zero_grad()
        value = batch_loss(model, users, loss).loss
        value.backward()  # type: ignore[no-untyped-call]
        found.append([value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == 1 + len(list(model.parameters()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss", ["logits", "1"])
def test_a_step_trains_on_every_position_and_no_other(loss: str) -> None:
    """The mean over users one by one, each without padding, of all items that follow another."""
    model = new_model().eval()
    users = [torch.randint(ITEMS, (count,)) for count in (2, 9, 4)]  # the second is longer than the model reads
    losses = []
    for items in users:
        recent = items[-model.length - 1 :]
        logits = model(recent[None, :-1])[0] @ model.weight.T
        losses.append(torch.nn.functional.cross_entropy(logits, recent[1:], reduction="none"))
    assert [len(one) for one in losses] == [1, 6, 3]
    torch.testing.assert_close(batch_loss(model, users, loss).loss, torch.cat(losses).mean())


@pytest.mark.parametrize("loss", ["logits", "1", "0.1"])
def test_a_cycle_is_learnt(loss: str, cycles: Path) -> None:
    split = leave_last_out(read_sequences(cycles))
    run = train(Job(str(cycles), loss, epochs=25, learning_rate=1e-2, batch=8, **SMALL), split)
    first, last = run["validation_curve"][0], run["validation"]
    assert first["ndcg@10"] < 0.9 < last["ndcg@10"]
    assert run["test"]["ndcg@10"] > 0.9
    assert run["best_epoch"] == last["epoch"]
    assert run["turns"]["fresh"].keys() == {"logits", loss}
    assert all(turn["peak_mb"] > 0 for turn in run["turns"]["trained"].values())
    if loss == "0.1":
        assert first["solved"] < 0.1 < run["validation_curve"][-1]["solved"]


def test_the_test_metric_is_that_of_the_best_epoch(cycles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import next_item as suite

    scores = iter([0.2, 0.5, 0.4])
    states = []

    def judged(model: ItemModel, questions: Questions, *, exclude_seen: bool) -> torch.Tensor:
        states.append(model.weight.detach().clone())
        return torch.tensor([0])

    monkeypatch.setattr(suite, "ranks", judged)
    monkeypatch.setattr(suite, "metrics", lambda *_: {"ndcg@10": next(scores, 0.1), "hr@10": 0.0})
    run = train(Job(str(cycles), "1", epochs=3, batch=8, **SMALL), leave_last_out(read_sequences(cycles)))
    assert (run["best_epoch"], run["validation"]["ndcg@10"], run["test"]["ndcg@10"]) == (2, 0.5, 0.1)
    torch.testing.assert_close(states[3], states[1], rtol=0, atol=0)
    assert not torch.equal(states[3], states[2])


def test_a_loss_that_is_not_finite_stops(cycles: Path) -> None:
    split = leave_last_out(read_sequences(cycles))
    job = Job(str(cycles), "logits", **SMALL)
    model, optimizer = make_model(job, split.items)
    torch.nn.init.constant_(model.items.weight, torch.inf)
    with pytest.raises(DivergedError, match="the loss is nan"):
        step(model, optimizer, split.train[:4], job)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "focal"}, r"loss: expected 'logits' or a delta in \[0, 1\], found 'focal'"),
        ({"loss": "1.5"}, r"loss: expected 'logits' or a delta in \[0, 1\], found '1.5'"),
        ({"loss": "nan"}, "loss: expected"),
        ({"learning_rate": 0.0}, "learning_rate: expected"),
        ({"dropout": 1.0}, r"dropout: expected a number in \[0, 1\), found 1.0"),
        ({"size": 7}, "size: expected a multiple of the 2 heads, found 7"),
        ({"precision": "fp8"}, "precision: expected"),
        ({"device": "tpu"}, "device: expected one of 'cpu'"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Job(**{"data": "taken.txt", "loss": "logits", **options})


def test_serving_is_judged_beside_the_exact_products(tmp_path: Path) -> None:
    torch.manual_seed(0)
    users = [torch.randint(400, (5,)) for _ in range(700)]
    split = leave_last_out(Sequences(users, [str(item) for item in range(400)]))
    rows = serve(new_model(400), split, 0, queries=20)
    assert [(row["method"], row["delta"]) for row in rows] == [
        ("exact fp32", None), ("exact bf16", None), ("cascade", 0.01), ("cascade", 0.1)
    ]  # fmt: skip
    assert all(row["topk_right"] >= 0.7 and row["ms"] > 0 for row in rows if row["method"] != "exact bf16")


# -- the command -------------------------------------------------------------------------------------------------------


def run_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["next-item", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


FEW = ["--epochs", "2", "--batch", "16", "--size", "8", "--layers", "1", "--length", "6", "--learning-rate", "1e-2"]


def test_the_command_goes_on_where_it_was(cycles: Path, tmp_path: Path) -> None:
    out = tmp_path / "results" / "items"
    arguments = ["--data", str(cycles), *FEW, "--learning-rate", "3e-2", "--grid", "0.3", "--grid", "0.5", "--no-serve"]
    done = run_command(*arguments, "--seeds", "1", "--out", str(out))
    assert done.exit_code == 0, done.output
    files = {path: path.stat().st_mtime_ns for path in out.with_suffix(".runs").iterdir()}
    assert len(files) == 2 + 2 + 2  # rates with logits, the grid, and 1 and 0.1
    done = run_command(*arguments, "--seeds", "2", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert len(list(out.with_suffix(".runs").iterdir())) == len(files) + 4
    about, rows = read_table(out.with_suffix(".csv"))
    assert (about["experiment"], about["data"], about["items"]) == ("next-item", "cycles.txt", str(ITEMS))
    assert about.keys() >= {"commit", "torch", "processor", "epochs", "exclude_seen"}
    assert [(row["loss"], row["seeds"]) for row in rows[:3]] == [("logits", "2"), ("delta 1", "2"), ("delta 0.1", "2")]
    record = json.loads(out.with_suffix(".json").read_text())
    tried = [(one["loss"], one["learning_rate"]) for one in record["settings"]["tried"]]
    rate = record["settings"]["learning_rate"]
    assert tried == [("logits", 0.01), ("logits", 0.03), ("0.3", rate), ("0.5", rate)]
    best = max(record["settings"]["tried"][2:], key=lambda one: one["validation"]["ndcg@10"])
    assert rows[3]["loss"] == f"delta {best['loss']}"
    assert {run["loss"] for run in record["results"]} == {"logits", "1", "0.1", best["loss"]}
    assert str(tmp_path) not in out.with_suffix(".json").read_text()
    assert out.with_suffix(".png").exists()
    next(iter(files)).write_text("{}")
    done = run_command(*arguments, "--seeds", "2", "--out", str(out))
    assert done.exit_code == 1
    assert "remove it to make the run again" in done.stderr.replace("\n", " ")


def test_two_runs_at_a_time_give_what_one_gives(cycles: Path, tmp_path: Path) -> None:
    found = []
    for name, more in {"one": [], "two": ["--side-by-side", "2"]}.items():
        arguments = ["--data", str(cycles), *FEW, "--loss", "1", "--loss", "0.1", "--seeds", "1", "--no-serve"]
        done = run_command(*arguments, *more, "--threads", "1", "--out", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        runs = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        found.append([(run["loss"], run["test"], run["validation"]) for run in runs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "none.txt"], "none.txt: no such file"),
        (["--data", "bad.txt"], "bad.txt:1: expected USER ITEM"),
        (["--data", "bad.txt", "--loss", "focal"], "loss: expected 'logits' or a delta"),
        (["--data", "bad.txt", "--device", "tpu"], "device: expected one of"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("one\n")
    done = run_command(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]
