"""`softsieve head bench`: a table, pictures and a record from one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from softsieve.cli import app
from softsieve.comparisons import head_methods
from softsieve.comparisons import heads as suite
from softsieve.comparisons.output import read_table
from softsieve.data.synthetic_heads import make_head

FEW = ["--calibration", "40", "--test-queries", "10", "--delta", "0.1"]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A weight with the states of two texts beside it."""
    weight, calibration, test = make_head(120, 12, rank=6, calibration=60, test=30)
    save_file({"weight": weight}, tmp_path / "head.safetensors", metadata={"model": "tiny"})
    states = {
        f"{text}.{part}": rows.half() for text in "ab" for part, rows in (("calibration", calibration), ("test", test))
    }
    save_file(states, tmp_path / "states.safetensors")
    return tmp_path / "head.safetensors"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["head", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_head_bench_writes_table_pictures_and_record(head: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "points"
    states = str(tmp_path / "states.safetensors")
    few = [*FEW, "--method", "coordinates", "--method", "SVD preview", "--k", "1", "--k", "2"]
    done = run("bench", str(head), "--queries", states, *few, "--threads", "1", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.parent.iterdir()} == {f"points.{kind}" for kind in ("csv", "json", "png", "svg")}
    about, rows = read_table(out.with_suffix(".csv"))
    assert ",".join(rows[0]) == ",".join(suite.Result._fields)
    assert (about["experiment"], about["model"], about["n"], about["d"]) == ("head-bench", "tiny", "120", "12")
    assert about.keys() >= {"commit", "torch", "processor", "threads", "seed", "eps"}
    assert list(dict.fromkeys((row["corpus"], row["k"]) for row in rows)) == [(c, k) for c in "ab" for k in "12"]
    assert list(dict.fromkeys(row["method"] for row in rows)) == [
        "exact fp32",
        "exact bf16",
        "SVD preview",
        "coordinates",
    ]
    assert {row["queries"] for row in rows} == {"10"}
    assert all(float(row["success"]) == 1 for row in rows if row["method"] == "exact fp32")
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["suite"] == "head-bench"
    assert record["provenance"]["versions"]["torch"]
    assert [r["method"] for r in record["results"]] == [row["method"] for row in rows]
    assert str(tmp_path) not in out.with_suffix(".csv").read_text() + out.with_suffix(".json").read_text()
    for word in ("coordinates", "100.0%", "rank d/4, 64 rows", str(out.with_suffix(".json"))):
        assert word in done.output.replace("\n", "")


def test_one_corpus_and_a_folder_for_the_results(head: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    (tmp_path / "results").mkdir()
    states = str(tmp_path / "states.safetensors")
    few = [*FEW, "--method", "faiss IVF", "--corpus", "b", "--k", "1"]
    done = run("bench", str(head), "--queries", states, *few, "--out", str(tmp_path / "results"))
    assert done.exit_code == 0, done.output
    _, rows = read_table(tmp_path / "results" / "head-bench.csv")
    assert {row["corpus"] for row in rows} == {"b"}
    assert {row["method"] for row in rows} == {"exact fp32", "exact bf16", "faiss IVF"}
    assert head_methods.NOTE in done.output.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "none.safetensors"], "none.safetensors: no such file"),
        (["bench", "text"], "text: cannot be read as safetensors"),
        (["bench", "head.safetensors"], "queries: expected tensors NAME.calibration and NAME.test, found none"),
        (
            ["bench", "head.safetensors", "--queries", "states.safetensors", "--corpus", "c"],
            "corpus: expected one of 'a'",
        ),
        (["bench", "head.safetensors", "--queries", "states.safetensors", "--method", "c"], "method: expected one of"),
        (["bench", "head.safetensors", "--queries", "states.safetensors", "--k", "121"], "k: expected 1 to 120"),
        (["bench", "head.safetensors", "--eps", "1"], "eps: expected a number between 0 and 1"),
        (["bench", "head.safetensors", "--delta", "0"], "delta: expected a number between 0 and 1"),
        (["bench", "head.safetensors", "--out", "text/out"], "text/out: cannot be written to"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], message: str, head: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")  # the folder that tests run in
    before = set(tmp_path.iterdir())
    done = run(*arguments)
    assert done.exit_code == 1, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--k", "--calibration", "--test-queries", "--threads"])
def test_numbers_out_of_range_are_refused(option: str) -> None:
    done = run("bench", "head.safetensors", option, "0")
    assert done.exit_code == 2
    assert option in done.output
