"""`softsieve head build`, `calibrate` and `query` on tiny files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from softsieve import AdaptiveSoftmax
from softsieve.cli import app
from softsieve.data.synthetic_heads import make_head
from softsieve.heads import index_file
from softsieve.heads.cascade.fit import CascadeCalibration
from softsieve.reference.heads import topk_softmax

N, D = 300, 32


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["head", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


def done(*arguments: str | Path) -> Result:
    found = run(*arguments)
    assert found.exit_code == 0, (found.output, found.exception)
    return found


@pytest.fixture
def head(tmp_path: Path) -> tuple[Tensor, Tensor]:
    """A weight and queries, and files with them: both kinds, with a bias or not, of one text or two."""
    weight, x, test = make_head(N, D, rank=8, calibration=400, test=40)
    weight = weight.float()
    np.save(tmp_path / "w.npy", weight.numpy())
    np.save(tmp_path / "q.npy", x.numpy())
    save_file({"weight": weight}, tmp_path / "w.safetensors")
    bias = torch.linspace(0, 3, N)
    save_file({"lm_head": weight.bfloat16(), "bias": bias, "own": bias + 1}, tmp_path / "b.safetensors")
    texts = {"a.calibration": x[:200], "b.calibration": x[200:], "a.test": test[:20], "b.test": test[20:]}
    save_file(texts, tmp_path / "q.safetensors")
    save_file({name: value.clone() for name, value in texts.items() if "test" not in name}, tmp_path / "c.safetensors")
    return weight, x


def build(*more: str | Path, weight: str = "w.safetensors", queries: str = "q.safetensors") -> Result:
    return done("build", weight, "--queries", queries, "--out", "i.safetensors", "--delta", "0.1", *more)


def fit(head: AdaptiveSoftmax, k: int) -> CascadeCalibration:
    found = head.calibrations[k]
    assert isinstance(found, CascadeCalibration)
    return found


@pytest.mark.parametrize(("weight", "queries"), [("w.npy", "q.npy"), ("w.safetensors", "q.safetensors")])
def test_build_calibrate_query(weight: str, queries: str, head: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    built = build("--seed", "3", weight=weight, queries=queries)
    assert "300 x 32: built in " in built.stderr
    assert "next: softsieve head calibrate" in built.stderr
    index = AdaptiveSoftmax.load("i.safetensors")
    assert (index.method, index.eps, index.delta, index.beta, index.seed) == ("auto", 0.3, 0.1, 1.0, 3)
    assert torch.equal(index.weight, head[0])
    assert index.index is not None
    assert index.calibrations == {}

    said = done("calibrate", "i.safetensors", "--queries", queries, "--k", "1", "--k", "8", "--k", "0")
    index = AdaptiveSoftmax.load("i.safetensors")
    assert sorted(index.calibrations) == [0, 1, 8]
    for k in (0, 1, 8):
        assert f"k = {k}: 200 queries, reads {fit(index, k).read:.2%} of the weight; faster up to " in said.stderr
        assert fit(index, k).width < math.inf
    assert said.stderr.count("on 40 others: right ") == (3 if queries == "q.safetensors" else 0)
    assert said.stderr.rstrip().endswith("written to i.safetensors")

    table = done("query", "i.safetensors", "--queries", queries, "--k", "2", "--count", "3").stdout
    first = head[1][:3] if queries == "q.npy" else make_head(N, D, rank=8, calibration=400, test=40).test[:3]
    truth = topk_softmax(head[0], first, 2)
    for number in range(3):
        best, second = truth.indices[number].tolist()
        assert f"{best} {second}" in table or f"{second} {best}" in table
        assert f"{float(truth.probs[number, 0]):.2f}"[:3] in table
    assert "top 2 with eps 0.3, delta 0.1" in table
    assert sorted(path.name for path in tmp_path.glob("*i.safetensors*")) == ["i.safetensors"]


def test_bias_and_names(head: tuple[Tensor, Tensor]) -> None:
    build("--tensor", "lm_head", "--beta", "0.7", "--eps", "0.2", weight="b.safetensors")
    index = AdaptiveSoftmax.load("i.safetensors")
    assert index.bias is not None
    assert torch.equal(index.bias, torch.linspace(0, 3, N))
    assert torch.equal(index.weight, head[0].bfloat16())
    assert (index.beta, index.eps) == (0.7, 0.2)
    build("--tensor", "lm_head", "--bias", "own", weight="b.safetensors")
    index = AdaptiveSoftmax.load("i.safetensors")
    assert index.bias is not None
    assert torch.equal(index.bias, torch.linspace(0, 3, N) + 1)
    done("calibrate", "i.safetensors", "--queries", "q.safetensors")
    assert "bytes" in done("query", "i.safetensors", "--queries", "q.safetensors").stdout


def test_to_another_file(head: tuple[Tensor, Tensor]) -> None:
    build()
    before = Path("i.safetensors").read_bytes()
    done("calibrate", "i.safetensors", "--queries", "q.safetensors", "--out", "j.safetensors")
    assert Path("i.safetensors").read_bytes() == before
    assert sorted(AdaptiveSoftmax.load("j.safetensors").calibrations) == [1]
    done("calibrate", "j.safetensors", "--queries", "q.safetensors", "--k", "4")
    assert sorted(AdaptiveSoftmax.load("j.safetensors").calibrations) == [1, 4]


def test_the_same_seed(head: tuple[Tensor, Tensor]) -> None:
    fits = []
    for seed in ("1", "1", "2"):
        build()
        done("calibrate", "i.safetensors", "--queries", "q.safetensors", "--seed", seed)
        fits.append(fit(AdaptiveSoftmax.load("i.safetensors"), 1)._replace(batch=0))
    assert fits[0] == fits[1] != fits[2]


@pytest.mark.parametrize("kind", [".npy", ".safetensors"])
def test_rows_of_build_are_not_those_of_calibrate(kind: str, head: tuple[Tensor, Tensor]) -> None:
    """What one does not read may be anything."""
    for name, first in (("even", 0), ("odd", 1)):
        rows = head[1].clone()
        rows[1 - first :: 2] = math.nan
        if kind == ".npy":
            np.save(name + kind, rows.numpy())
        else:
            save_file({"a.calibration": rows[:200].clone(), "b.calibration": rows[200:].clone()}, name + kind)
    build(queries="even" + kind)
    done("calibrate", "i.safetensors", "--queries", "odd" + kind)
    assert fit(AdaptiveSoftmax.load("i.safetensors"), 1).queries == 200
    refused = "queries: expected finite numbers"
    assert refused in run("build", "w.npy", "--queries", "odd" + kind, "--out", "j.safetensors").stderr
    assert refused in run("build", "w.npy", "--queries", "even" + kind, "--out", "j.safetensors", "--all").stderr
    assert refused in run("calibrate", "i.safetensors", "--queries", "even" + kind).stderr
    assert refused in run("calibrate", "i.safetensors", "--queries", "odd" + kind, "--all").stderr


def test_all_rows(head: tuple[Tensor, Tensor]) -> None:
    build("--all")
    every = AdaptiveSoftmax.load("i.safetensors")
    done("calibrate", "i.safetensors", "--queries", "q.safetensors", "--all")
    assert fit(AdaptiveSoftmax.load("i.safetensors"), 1).queries == 400
    expected = AdaptiveSoftmax(head[0])
    expected.build(head[1])
    assert every.index is not None
    assert expected.index is not None
    torch.testing.assert_close(every.index.unit, expected.index.unit, rtol=1e-4, atol=0)
    build()
    half = AdaptiveSoftmax.load("i.safetensors")
    assert half.index is not None
    assert not torch.allclose(half.index.unit, every.index.unit, rtol=1e-4)


def test_some_texts(head: tuple[Tensor, Tensor]) -> None:
    build("--corpus", "b")
    said = done("calibrate", "i.safetensors", "--queries", "q.safetensors", "--corpus", "b")
    assert "k = 1: 100 queries" in said.stderr
    assert "on 20 others" in said.stderr
    said = done("calibrate", "i.safetensors", "--queries", "q.safetensors", "--corpus", "b", "--corpus", "a")
    assert "k = 1: 200 queries" in said.stderr
    table = done("query", "i.safetensors", "--queries", "q.safetensors", "--corpus", "b", "--count", "1").stdout
    first = make_head(N, D, rank=8, calibration=400, test=40).test[20]
    assert f" {int((head[0] @ first).argmax())} " in table


def test_a_text_without_tests(head: tuple[Tensor, Tensor]) -> None:
    build()
    for more in ([], ["--corpus", "a"]):
        said = done("calibrate", "i.safetensors", "--queries", "c.safetensors", *more)
        assert "others: right" not in said.stderr


def test_too_few(head: tuple[Tensor, Tensor]) -> None:
    build()
    np.save("few.npy", head[1][:20].numpy())
    with pytest.warns(UserWarning, match="queries: 10 are too few for delta 0.1, which takes 65"):
        said = done("calibrate", "i.safetensors", "--queries", "few.npy")
    assert "k = 1: 10 queries, no margin suffices, reads everything" in said.stderr
    assert "all" in done("query", "i.safetensors", "--queries", "q.npy").stdout


def test_a_new_folder(head: tuple[Tensor, Tensor]) -> None:
    """`softsieve head extract` makes it, too."""
    done("build", "w.npy", "--queries", "q.npy", "--out", "new/folder/i.safetensors")
    AdaptiveSoftmax.load("new/folder/i.safetensors")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def damaged(tmp_path: Path) -> None:
    """Files that are no good."""
    whole = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "folder.safetensors").mkdir()
    np.save(tmp_path / "vector.npy", np.ones(D, np.float32))
    np.save(tmp_path / "wide.npy", np.ones((9, D + 1), np.float32))
    np.save(tmp_path / "whole.npy", np.ones((9, D), np.int64))
    np.save(tmp_path / "empty.npy", np.ones((0, D), np.float32))
    np.save(tmp_path / "nan.npy", np.full((9, D), np.nan, np.float32))
    save_file({"one": torch.ones(2, D), "two": torch.ones(2, D)}, tmp_path / "two.safetensors")
    save_file({"weight": torch.ones(N, D), "bias": torch.ones(N + 1)}, tmp_path / "bias.safetensors")
    wide = {"a.calibration": torch.randn(200, D), "a.test": torch.randn(5, D + 1)}
    save_file(wide, tmp_path / "test.safetensors")
    index_file.write(tmp_path / "broken.safetensors", {"weight": torch.ones(3, D)}, {"eps": 0.3})
    AdaptiveSoftmax(torch.ones(3, D), method="coordinates").save(tmp_path / "coordinates.safetensors")
    AdaptiveSoftmax(torch.ones(3, D), method="exact").save(tmp_path / "exact.safetensors")


def fails(tmp_path: Path, message: str, *arguments: str) -> None:
    """In one line, and every file is as it was."""
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = run(*arguments)
    assert found.exit_code == 1, found.output
    assert isinstance(found.exception, SystemExit), found.exception
    assert found.stderr.startswith("softsieve: "), found.stderr
    assert found.stderr.count("\n") == 1
    assert message in found.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": "none.npy"}, "none.npy: no such file"),
        ({"weight": "none.safetensors"}, "none.safetensors: no such file"),
        ({"weight": "w.txt"}, "w.txt: no such file"),
        ({"weight": "half.safetensors"}, "half.safetensors: cannot be read as safetensors"),
        ({"weight": "text.npy"}, "text.npy: cannot be read as .npy"),
        ({"weight": "vector.npy"}, "weight: expected a matrix (n, d), found shape (32,)"),
        ({"weight": "whole.npy"}, "weight: expected a floating-point dtype, found torch.int64"),
        ({"weight": "nan.npy"}, "weight: expected finite numbers"),
        ({"weight": "q.safetensors"}, "q.safetensors: expected a tensor 'weight', found 'a.calibration'"),
        ({"weight": "bias.safetensors"}, "bias: expected shape (300,), one a row, found (301,)"),
        ({"--tensor": "x"}, "w.safetensors: expected a tensor 'x', found 'weight'"),
        ({"--bias": "x"}, "w.safetensors: expected a tensor 'x', found 'weight'"),
        ({"--queries": "none.npy"}, "none.npy: no such file"),
        ({"--queries": "half.safetensors"}, "half.safetensors: cannot be read as safetensors"),
        ({"--queries": "wide.npy"}, "queries: expected shape (..., 32), found (5, 33)"),
        ({"--queries": "whole.npy"}, "queries: expected a floating-point dtype"),
        ({"--queries": "nan.npy"}, "queries: expected finite numbers"),
        ({"--queries": "empty.npy"}, "queries: expected some, found none"),
        ({"--queries": "two.safetensors"}, "expected tensors NAME.calibration or a single matrix, found 'one', 'two'"),
        ({"--corpus": "x"}, "q.safetensors: expected x.calibration, found 'a.calibration'"),
        ({"--out": "i.bin"}, "i.bin: expected a file .safetensors"),
        ({"--out": "folder.safetensors"}, "folder.safetensors: expected a file, found a folder"),
        ({"--out": "w.npy/i.safetensors"}, "cannot be written to"),
        ({"--eps": "1"}, "eps: expected a number between 0 and 1"),
        ({"--delta": "0"}, "delta: expected a number between 0 and 1"),
        ({"--beta": "nan"}, "beta: expected a number"),
    ],
    ids=str,
)
def test_build_refuses(change: dict[str, str], message: str, head: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    damaged(tmp_path)
    (tmp_path / "i.safetensors").write_bytes(b"what was there")
    options = {"--queries": "q.safetensors", "--out": "i.safetensors", **change}
    weight = options.pop("weight", "w.safetensors")
    fails(tmp_path, message, "build", weight, *(word for option in options.items() for word in option))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": "none.safetensors"}, "none.safetensors: expected a file, found none"),
        ({"index": "half.safetensors"}, "half.safetensors: cannot be read"),
        ({"index": "w.safetensors"}, "w.safetensors: expected a saved AdaptiveSoftmax, found another safetensors file"),
        ({"index": "broken.safetensors"}, "broken.safetensors: broken: "),
        ({"index": "w.npy"}, "w.npy: expected a file .safetensors"),
        ({"index": "exact.safetensors"}, "found a head with method exact"),
        ({"index": "coordinates.safetensors"}, "coordinates"),
        ({"--queries": "none.npy"}, "none.npy: no such file"),
        ({"--queries": "text.npy"}, "text.npy: cannot be read as .npy"),
        ({"--queries": "wide.npy"}, "queries: expected shape (..., 32), found (4, 33)"),
        ({"--queries": "empty.npy"}, "queries: expected"),
        ({"--queries": "nan.npy"}, "queries: expected finite numbers"),
        ({"--queries": "two.safetensors"}, "expected tensors NAME.calibration or a single matrix"),
        ({"--queries": "test.safetensors"}, "expected shape (..., 32), found (5, 33)"),
        ({"--corpus": "x"}, "q.safetensors: expected x.calibration"),
        ({"--k": "301"}, "k: expected an int in [0, 300], found 301"),
        ({"--out": "i.bin"}, "i.bin: expected a file .safetensors"),
        ({"--out": "folder.safetensors"}, "folder.safetensors: expected a file, found a folder"),
    ],
    ids=str,
)
def test_calibrate_refuses(change: dict[str, str], message: str, head: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    damaged(tmp_path)
    build()
    options = {"--queries": "q.safetensors", **change}
    index = options.pop("index", "i.safetensors")
    fails(tmp_path, message, "calibrate", index, *(word for option in options.items() for word in option))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": "none.safetensors"}, "none.safetensors: expected a file, found none"),
        ({"index": "half.safetensors"}, "half.safetensors: cannot be read"),
        ({"index": "w.safetensors"}, "w.safetensors: expected a saved AdaptiveSoftmax"),
        ({"--queries": "none.npy"}, "none.npy: no such file"),
        ({"--queries": "wide.npy"}, "x: expected shape (..., 32), found (1, 33)"),
        ({"--queries": "c.safetensors"}, "expected tensors NAME.test or a single matrix"),
        ({"--queries": "empty.npy"}, "expected"),
        ({"--corpus": "x"}, "q.safetensors: expected x.test"),
        ({"--k": "301"}, "k: expected an int in [1, 300], found 301"),
    ],
    ids=str,
)
def test_query_refuses(change: dict[str, str], message: str, head: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    damaged(tmp_path)
    build()
    options = {"--queries": "q.safetensors", **change}
    index = options.pop("index", "i.safetensors")
    fails(tmp_path, message, "query", index, *(word for option in options.items() for word in option))


@pytest.mark.parametrize("command", ["build", "calibrate"])
def test_a_full_disk(
    command: str, head: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()

    def full(part: Path, tensors: Any, metadata: Any) -> None:
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_file, "write_aligned", full)
    if command == "build":
        fails(tmp_path, "No space left", "build", "w.npy", "--queries", "q.npy", "--out", "i.safetensors")
    else:
        fails(tmp_path, "No space left", "calibrate", "i.safetensors", "--queries", "q.npy")


def test_wrong_numbers(head: tuple[Tensor, Tensor]) -> None:
    for arguments in (["calibrate", "i", "--queries", "q", "--k", "-1"], ["query", "i", "--queries", "q", "--k", "0"]):
        found = run(*arguments)
        assert found.exit_code == 2
        assert "--k" in found.output
