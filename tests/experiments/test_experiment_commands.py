"""`python -m experiments`: results with their provenance from one command each."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from experiments.commands import app
from softsieve.comparisons.output import read_table

COLUMNS = {
    "synthetic": "set,chosen,n,d,trials,coordinates,deviation,gain,success",
    "variance": "data,estimator,rotated,n,d,size,mse,mse_error,variance,mean_square",
    "histograms": "data,size,what,low,high,count",
    "logistic": "data,guarantee,chosen,delta,gain,success,success_error,exact,nonzero,accuracy,n,d,queries,paper_gain",
}
SMALL = {
    "synthetic": ["--n", "10", "--min-d", "200", "--max-d", "2000", "--steps", "2", "--trials", "2"],
    "variance": ["--n", "10", "--d", "32", "--queries", "4", "--shares", "2", "--repeats", "1"],
    "histograms": ["--n", "10", "--d", "32", "--queries", "8", "--bins", "5"],
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.mark.parametrize("name", SMALL)
def test_an_experiment_writes_a_table_and_two_pictures(name: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "results"
    done = run(name, *SMALL[name], "--seed", "3", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.parent.iterdir()} == {"results.csv", "results.png", "results.svg"}
    about, rows = read_table(out.with_suffix(".csv"))
    assert about["experiment"] == name
    assert about["seed"] == "3"
    assert about.keys() >= {"commit", "date", "torch", "processor", "n"}
    assert ",".join(rows[0]) == COLUMNS[name]
    assert str(out.with_suffix(".csv")) in done.output.replace("\n", "")


@pytest.mark.parametrize("name", ["variance", "histograms"])
def test_a_real_head_is_one_more_instance(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file({"weight": torch.randn(30, 12)}, tmp_path / "head.safetensors")
    states = {f"{text}.{part}": torch.randn(9, 12) for text in "ab" for part in ("calibration", "test")}
    save_file(states, tmp_path / "queries.safetensors")
    real = ["--head", str(tmp_path / "head.safetensors"), "--queries-file", str(tmp_path / "queries.safetensors")]
    done = run(name, *SMALL[name], *real, "--corpus", "b", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "out.csv")
    assert (about["head"], about["queries_file"], about["corpus"]) == (
        "head.safetensors",
        "queries.safetensors",
        "b",
    )
    assert [*dict.fromkeys(row["data"] for row in rows)] == ["gaussian", "heavy-tailed", "head b"]
    assert str(tmp_path) not in (tmp_path / "out.csv").read_text()


def test_logistic_trains_on_the_files_of_mnist(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    for part, count in (("train", 240), ("t10k", 40)):
        digits = np.arange(count, dtype=np.uint8) % 2
        pixels = draw.integers(0, 100, (count, 28, 28), dtype=np.uint8)
        pixels[digits == 1, 10:18] = 250
        for what, array in (("images-idx3", pixels), ("labels-idx1", digits)):
            header = struct.pack(f">{array.ndim + 1}i", 0x800 + array.ndim, *array.shape)
            (tmp_path / "mnist" / f"{part}-{what}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    few = ["--epochs", "1", "--calibration", "19", "--queries", "20", "--delta", "0.1", "--delta", "0.2"]
    done = run("logistic", "--data", "mnist", "--data-dir", str(tmp_path), *few, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    about, rows = read_table(tmp_path / "out.csv")
    assert ",".join(rows[0]) == COLUMNS["logistic"]
    assert [float(row["delta"]) for row in rows] == [0.1, 0.2] * 4
    assert {row["d"] for row in rows} == {"25088"}
    assert all(float(row["success"]) >= 0.6 and float(row["accuracy"]) > 0.9 for row in rows)
    assert (about["calibration"], about["queries"]) == ("19", "20")
    assert (tmp_path / "out.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synthetic", "--max-d", "10"], "max_d: expected at least min_d 1000, found 10"),
        (["synthetic", *SMALL["synthetic"], "--eps", "2"], "eps: expected"),
        (["synthetic", *SMALL["synthetic"], "--delta", "0"], "delta: expected"),
        (["histograms", "--share", "0"], "share: expected"),
        (["variance", "--head", "text"], "text: cannot be read as safetensors"),
        (["logistic", "--data", "cifar10"], "data: expected one of mnist, eurosat"),
        (["logistic", "--data", "mnist", "--data-dir", "none"], "no such folder"),
        (["delta-sweep", "--task", "text"], "text: expected"),
        (["accuracy-epochs", "--task", "clinc150", "--data-dir", "none"], "none"),
        (["loss-accuracy", "--task", "clinc150", "--learning-rate", "0"], "learning_rate: expected a number above 0"),
        (["accumulation", "--task", "clinc150", "--precision", "int4"], "precision: expected one of"),
        (["variance", "--out", "text/out"], "text/out: cannot be written to"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")  # the folder that tests run in
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("option", ["--trials", "--steps", "--n"])
def test_numbers_out_of_range_are_refused(option: str) -> None:
    done = run("synthetic", option, "0")
    assert done.exit_code == 2
    assert option in done.output
