"""Lines of tables: which runs are one, what they are called, and their means and deviations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from softsieve.report.groups import Line, curve, data_sets, lines_of
from softsieve.report.read import read_all
from softsieve.report.sections import sections
from tests.report.conftest import MakeRun


def _lines(tmp_path: Path, make_run: MakeRun, *settings: dict[str, Any]) -> list[Line]:
    for number, told in enumerate(settings):
        make_run(tmp_path / f"run-{number:02}", **{"seed": number, **told})
    return lines_of(read_all([tmp_path]).runs)


def test_lines_are_named_by_what_sets_them_apart(tmp_path: Path, make_run: MakeRun) -> None:
    lines = _lines(
        tmp_path,
        make_run,
        {"loss": "softmax"},
        {"loss": "as-softmax", "delta": 0.1},
        {"loss": "as-softmax", "delta": 0.1, "skip": "solved"},
        {"loss": "as-softmax", "speed_steps": 2},
        {"loss": "softmax", "skip": "infobatch"},
        {"loss": "softmax", "skip": "selective-backprop"},
        {"loss": "softmax", "skip": "seta"},
        {"loss": "as-softmax", "speed_steps": 2, "skip": "solved", "patience": 1},
        {"loss": "entmax-1.5"},
    )
    assert [line.label for line in lines] == [
        "softmax",
        "AS-Softmax, delta 0.1",
        "AS-Softmax, delta 0.1, solved rows skipped",
        "AS-Speed",
        "softmax with InfoBatch",
        "softmax with Selective-Backprop",
        "softmax with SeTa",
        "AS-Speed, solved rows skipped, stopped early",
        "entmax-1.5",
    ]


def test_namesakes_are_told_apart_by_the_settings_in_which_they_differ(tmp_path: Path, make_run: MakeRun) -> None:
    lines = _lines(
        tmp_path,
        make_run,
        {"loss": "softmax", "learning_rate": 0.001, "batch_size": 8},
        {"loss": "softmax", "learning_rate": 0.01, "batch_size": 8},
        {"loss": "as-softmax", "speed_steps": 2, "delta": 0.1},
        {"loss": "as-softmax", "speed_steps": 2, "delta": 0.3},
        {"loss": "sparsemax", "learning_rate": 0.1},
    )
    assert [line.label for line in lines] == [
        "softmax, learning rate 0.001",
        "softmax, learning rate 0.01",
        "AS-Speed, delta 0.1",
        "AS-Speed, delta 0.3",
        "sparsemax",
    ]


def test_seeds_are_one_line_and_a_margin_that_nothing_uses_makes_no_other(tmp_path: Path, make_run: MakeRun) -> None:
    lines = _lines(
        tmp_path,
        make_run,
        {"loss": "softmax", "delta": 0.1},
        {"loss": "softmax", "delta": 0.5, "parameters": 99},
        {"loss": "as-softmax", "seed": 7},
        {"loss": "as-softmax", "seed": 7},
    )
    assert [(line.label, line.seeds) for line in lines] == [("softmax", "2"), ("AS-Softmax, delta 0.1", "1 (2 runs)")]


def test_data_sets_have_tables_of_their_own(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "a", data="letters")
    make_run(tmp_path / "b", data="digits")
    make_run(tmp_path / "c", data="letters", seed=1)
    found = [(data, [line.seeds for line in lines]) for data, lines in data_sets(read_all([tmp_path]).runs)]
    assert found == [("letters", ["2"]), ("digits", ["1"])]


def test_means_and_deviations_are_those_of_the_seeds(tmp_path: Path, make_run: MakeRun) -> None:
    for seed, accuracy in enumerate((0.90, 0.92, 0.97)):
        make_run(tmp_path / f"as-{seed}", seed=seed, accuracy=accuracy)
    make_run(tmp_path / "softmax", loss="softmax", accuracy=0.9)
    table = sections(read_all([tmp_path]))[0].parts[0].blocks[0]
    assert table.kind == "table"
    rows = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}  # type: ignore[union-attr]
    ours, base = rows["AS-Softmax, delta 0.1"], rows["softmax"]
    # By hand: mean 93, squares of the distances 9 + 1 + 16 over n - 1 = 2, and the root of 13 is 3.606.
    assert ours["test accuracy %"] == f"93.00 ± {math.sqrt(13):.2f}" == "93.00 ± 3.61"
    assert ours["seeds"] == "3"
    assert ours["rows trained"] == "90"  # alike in all runs
    assert ours["seconds"] == "2.0 ± 0.0"
    assert base["test accuracy %"] == "90.00"
    assert type(ours["test accuracy %"]).__name__ == "Best"
    assert type(base["test accuracy %"]) is str


def test_curves_that_agree_in_place_are_averaged_there(tmp_path: Path, make_run: MakeRun) -> None:
    for seed, values in enumerate(([4.0, 2.0], [2.0, 1.0])):
        log = [
            {"step": 5 * (i + 1), "kind": "train", "loss": loss, "progress": (i + 1) / 2}
            for i, loss in enumerate(values)
        ]
        make_run(tmp_path / str(seed), seed=seed, log=log)
    found = curve(lines_of(read_all([tmp_path]).runs)[0], "train", "loss")
    assert found is not None
    assert (found.x, found.mean, found.runs) == ([0.5, 1.0], [3.0, 1.5], 2)
    assert found.deviation == pytest.approx([math.sqrt(2), math.sqrt(0.5)])


def test_curves_at_other_places_are_read_between_their_points(tmp_path: Path, make_run: MakeRun) -> None:
    places = [(0.0, 0.0), (1.0, 10.0)], [(0.2, 1.0), (0.6, 1.0), (0.8, 1.0)]  # y = 10 x, and y = 1
    for seed, points in enumerate(places):
        log = [{"step": i, "kind": "train", "solved": y, "progress": x} for i, (x, y) in enumerate(points)]
        make_run(tmp_path / str(seed), seed=seed, log=log)
    line = lines_of(read_all([tmp_path]).runs)[0]
    found = curve(line, "train", "solved")
    assert found is not None
    assert found.x == pytest.approx([0.2, 0.5, 0.8])  # where both are, at as many places as the longer has
    assert found.mean == pytest.approx([1.5, 3.0, 4.5])
    assert curve(line, "validation", "accuracy") is None


def test_many_runs_make_few_figures(tmp_path: Path, make_run: MakeRun) -> None:
    for seed in range(3):
        for number in range(14):
            make_run(tmp_path / f"{number}-{seed}", seed=seed, delta=number / 20, accuracy=0.5 + number / 40)
    blocks = sections(read_all([tmp_path]))[0].parts[0].blocks
    figures = [block for block in blocks if block.kind == "figure"]
    assert len(figures) == 5
    assert len(blocks[0].rows) == 14  # type: ignore[union-attr]
    loss = next(figure for figure in figures if figure.title == "Training loss over training")  # type: ignore[union-attr]
    assert sum(trace["showlegend"] for trace in loss.plot["data"]) == 12  # type: ignore[union-attr]


def test_the_gist_says_what_is_best_and_by_how_little(tmp_path: Path, make_run: MakeRun) -> None:
    scores = {"as-softmax": (0.90, 0.94), "softmax": (0.90, 0.93), "sparsemax": (0.5, 0.5)}
    for loss, values in scores.items():
        for seed, accuracy in enumerate(values):
            make_run(tmp_path / f"{loss}-{seed}", loss=loss, seed=seed, accuracy=accuracy)
    (said,) = sections(read_all([tmp_path]))[0].glance
    assert said == (
        "letters: AS-Softmax, delta 0.1 has the best test accuracy, 92.00 ± 2.83 %; softmax has 91.50 ± 2.12 %, "
        "a difference within one deviation."
    )


def test_what_is_fastest_is_said_where_times_compare(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "a", loss="softmax")
    fast = make_run(tmp_path / "b", skip="solved") / "run.json"
    fast.write_text(fast.read_text().replace('"seconds": 2.0', '"seconds": 0.5'))
    _, said = sections(read_all([tmp_path]))[0].glance
    assert said.startswith(
        "letters: AS-Softmax, delta 0.1, solved rows skipped takes 4.0 times less time than softmax;"
    )
    fast.write_text(fast.read_text().replace("a processor", "another"))
    assert len(sections(read_all([tmp_path]))[0].glance) == 1


def test_plain_softmax_is_the_first_line_and_costs_follow_the_score(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", loss="softmax")
    (part,) = sections(read_all([tmp_path]))[0].parts
    table = part.blocks[0]
    assert [row[0] for row in table.rows] == ["softmax", "AS-Softmax, delta 0.1"]  # type: ignore[union-attr]
    columns = list(table.head)  # type: ignore[union-attr]
    assert columns[:4] == ["trained with", "seeds", "test accuracy %", "seconds"]
    assert columns[-1] == "steps"
    others = part.blocks[2]
    assert others.caption == "letters: the other figures of validation rows"  # type: ignore[union-attr]
    assert list(others.head) == ["trained with", "accuracy %", "loss"]  # type: ignore[union-attr]


def test_what_was_run_is_said_with_commit_machine_and_date(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "a")
    late = make_run(tmp_path / "b", seed=1) / "run.json"
    late.write_text(late.read_text().replace("T02:00", "T05:30").replace('"modified": false', '"modified": true'))
    table, folded = sections(read_all([tmp_path]))[-1].blocks
    assert list(table.rows[0]) == [  # type: ignore[union-attr]
        "letters: AS-Softmax, delta 0.1",
        "training, 2 runs",
        "2026-11-16 02:00 to 05:30",
        "0123456789 and 0123456789, modified",
        "a processor, 2 threads",
        "2.13.0",
    ]
    told = {row[0]: row[1] for row in folded.blocks[0].rows}  # type: ignore[union-attr]
    assert (told["seed"], told["rows"], told["metric"]) == ("0 and 1", "train 100, test 50", "accuracy")
    assert told["version of python"] == "3.11.7"
