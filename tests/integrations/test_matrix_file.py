"""Weights and queries from files: what is in them, a part of the rows at a time, and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from softsieve.errors import InputError
from softsieve.integrations import matrix_file
from softsieve.integrations.matrix_file import read_queries, read_weight


def counted(rows: int, size: int = 3) -> Tensor:
    """Rows that say which they are."""
    return torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, size).contiguous()


def numbers(path: Path, corpora: list[str] | None, part: str, step: int, **options: Any) -> list[int]:
    """Which rows are read."""
    return [int(row[0]) for block in read_queries(path, corpora, part, step=step, **options) for row in block]


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_weight_from_numpy(dtype: Any, order: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.npy"
    array = np.array(np.random.default_rng(0).standard_normal((7, 3)), dtype, order=order)
    np.save(path, array)
    before = path.read_bytes()
    weight, bias = read_weight(path)
    assert bias is None
    np.testing.assert_array_equal(weight.numpy(), array)
    assert weight.numpy().dtype == dtype
    weight += 1  # of its own: the file stays
    assert path.read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weight_from_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = {name: torch.randn(5, 3).to(dtype) for name in ("weight", "other")}
    vectors = {name: torch.randn(5) for name in ("bias", "more")}
    save_file({**tensors, **vectors}, path)
    for name, bias, expected in (("weight", None, "bias"), ("other", None, "bias"), ("other", "more", "more")):
        weight, found = read_weight(path, name, bias)
        assert torch.equal(weight, tensors[name])
        assert found is not None
        assert torch.equal(found, vectors[expected])
    save_file(tensors, path)
    assert read_weight(path)[1] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor": "x"}, r"w\.safetensors: expected a tensor 'x', found 'bias', 'weight'"),
        ({"bias": "b"}, r"w\.safetensors: expected a tensor 'b', found"),
    ],
)
def test_tensors_that_are_not_there(options: dict[str, str], says: str, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=says):
        read_weight(tmp_path / "w.safetensors", **options)


class Trap:
    """What must not happen when a file is read."""

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (Path("executed"),)


def read_both(path: Path) -> None:
    """Each must refuse by itself."""
    with pytest.raises(InputError) as first:
        read_weight(path)
    with pytest.raises(InputError) as second:
        list(read_queries(path, None, "test", step=1))
    assert str(first.value) == str(second.value)
    raise first.value


@pytest.mark.parametrize("name", ["w.npy", "w.safetensors"])
def test_missing_and_damaged_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    with pytest.raises(InputError, match=rf"{name}: no such file"):
        read_both(path)
    path.mkdir()
    with pytest.raises(InputError, match=rf"{name}: no such file"):
        read_both(path)
    path.rmdir()
    if name == "w.npy":
        np.save(path, np.ones((50, 3)))
    else:
        save_file({"weight": torch.ones(50, 3)}, path)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[:-1], whole[:100], whole[:20], bytes(200), pickle.dumps(Trap())):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}: cannot be read as (\.npy|safetensors): "):
            read_both(path)
    assert not (tmp_path / "executed").exists()


def test_objects_are_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "w.npy", np.array([Trap()], dtype=object))
    with pytest.raises(InputError, match=r"w\.npy: cannot be read as \.npy: "):
        read_both(tmp_path / "w.npy")
    assert not (tmp_path / "executed").exists()


def test_several_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", a=np.ones(3))
    (tmp_path / "w.npz").rename(tmp_path / "w.npy")
    with pytest.raises(InputError, match=r"w\.npy: expected one array, found several"):
        read_both(tmp_path / "w.npy")


@pytest.mark.parametrize("name", ["w.pt", "w", "w.safetensors.bak"])
def test_other_endings(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(InputError, match=r": expected a file \.safetensors or \.npy"):
        read_both(tmp_path / name)


# -- queries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 100])
@pytest.mark.parametrize("kind", [".npy", ".safetensors"])
def test_two_halves(rows: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without overlap, nothing left out, however many are read at a time."""
    monkeypatch.setattr(matrix_file, "ROWS", 4)
    path = tmp_path / f"q{kind}"
    if kind == ".npy":
        np.save(path, counted(rows).numpy())
    else:
        save_file({"q": counted(rows)}, path)
    assert numbers(path, None, "calibration", 1) == list(range(rows))
    assert numbers(path, None, "calibration", 2) == list(range(0, rows, 2))
    assert numbers(path, None, "calibration", -2) == list(range(1, rows, 2))
    assert numbers(path, None, "test", 1) == list(range(rows))


def test_an_even_number_is_read_at_a_time() -> None:
    """Or every other part would begin with the other half."""
    assert matrix_file.ROWS % 2 == 0


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Queries of three texts: numbers from 0, 100 and 200; the last for tests from 1000 on. One has none."""
    path = tmp_path / "q.safetensors"
    tensors = {f"{name}.calibration": counted(4) + 100 * number for number, name in enumerate(("a", "b", "c.d"))}
    tensors |= {f"{name}.test": counted(2) + 1000 + 100 * number for number, name in enumerate(("a", "b"))}
    save_file({"weight": torch.full((9, 3), -1.0), **tensors}, path)
    return path


def test_texts(texts: Path) -> None:
    every = [*range(4), *range(100, 104), *range(200, 204)]
    assert sorted(numbers(texts, None, "calibration", 1)) == every
    assert sorted(numbers(texts, [], "calibration", 1)) == every
    assert numbers(texts, ["b"], "calibration", 1) == [100, 101, 102, 103]
    assert numbers(texts, ["c.d", "a"], "calibration", 1) == [200, 201, 202, 203, 0, 1, 2, 3]
    assert numbers(texts, ["c.d", "a"], "calibration", 2) == [200, 202, 0, 2]
    assert numbers(texts, ["c.d", "a"], "calibration", -2) == [201, 203, 1, 3]
    assert sorted(numbers(texts, None, "test", 1)) == [1000, 1001, 1100, 1101]
    assert numbers(texts, ["b"], "test", 1, missing=True) == [1100, 1101]


@pytest.mark.parametrize("corpora", [["x"], ["a", "x"]])
def test_texts_that_are_not_there(corpora: list[str], texts: Path) -> None:
    with pytest.raises(InputError, match=r"q\.safetensors: expected x\.calibration, found 'a\.calibration'"):
        numbers(texts, corpora, "calibration", 1)


def test_none_for_tests(tmp_path: Path, texts: Path) -> None:
    """Where there may be none: also for a text that is named."""
    path = tmp_path / "one.safetensors"
    save_file({"a.calibration": counted(4), "weight": counted(3)}, path)
    assert numbers(path, None, "test", 1, missing=True) == []
    np.save(tmp_path / "q.npy", counted(3).numpy())
    assert numbers(tmp_path / "q.npy", None, "test", 1, missing=True) == []
    with pytest.raises(InputError, match=r"expected tensors NAME\.test or a single matrix, found 'a\.cal"):
        numbers(path, None, "test", 1)
    with pytest.raises(InputError, match=r"expected c\.d\.test, found"):
        numbers(texts, ["c.d"], "test", 1)


def test_none_for_tests_of_a_text_that_is_named(texts: Path) -> None:
    assert numbers(texts, ["c.d"], "test", 1, missing=True) == []
    assert numbers(texts, ["a", "c.d"], "test", 1, missing=True) == [1000, 1001]


def test_the_only_matrix(tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    save_file({"states": counted(3), "scale": torch.ones(3)}, path)
    assert numbers(path, None, "calibration", 1) == [0, 1, 2]
    save_file({"states": counted(3), "weight": counted(3)}, path)
    with pytest.raises(InputError, match=r"expected tensors NAME\.calibration or a single matrix, found 'states', 'w"):
        numbers(path, None, "calibration", 1)
    save_file({"scale": torch.ones(3)}, path)
    with pytest.raises(InputError, match=r"or a single matrix, found 'scale'"):
        numbers(path, None, "calibration", 1)


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2)])
def test_arrays_that_are_no_matrix(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.save(tmp_path / "q.npy", np.ones(shape))
    with pytest.raises(InputError, match=r"q\.npy: expected a matrix \(N, d\), found shape \("):
        numbers(tmp_path / "q.npy", None, "calibration", 1)
