"""Files without the weight: it comes back with the one that they were made of, and with no other."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from softsieve import AdaptiveSoftmax
from softsieve.errors import InputError
from softsieve.heads import index_file
from tests.heads.instances import peaked

ROWS, SIZE = 600, 40


def cascading(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple[AdaptiveSoftmax, Tensor]:
    weight, x = peaked(ROWS, SIZE, 240, torch.Generator().manual_seed(0))
    own = torch.linspace(0, 1, ROWS).to(dtype) if bias else None
    head = AdaptiveSoftmax(weight.to(dtype), own, eps=0.2, delta=0.1, beta=0.5, method="cascade")
    head.calibrate(x[20:], [1, 3], generator=torch.Generator().manual_seed(1))
    return head, x[:20]


def other(method: str) -> tuple[AdaptiveSoftmax, Tensor]:
    """A head without an index."""
    weight, x = peaked(30, 300, 60, torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"rotate": True} if method == "coordinates" else {}
    head = AdaptiveSoftmax(weight, torch.linspace(0, 1, 30), delta=0.1, method=method, **options)
    if method == "coordinates":
        head.calibrate(x[5:], 3)
    return head, x[:5]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[AdaptiveSoftmax, Tensor, Path]:
    head, x = cascading()
    path = tmp_path_factory.mktemp("saved") / "head"
    head.save(path, weight=False)
    return head, x, path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, bias: bool) -> None:
    head, x = cascading(dtype, bias=bias)
    head.save(tmp_path / "head", weight=False)
    with safe_open(tmp_path / "head", "pt") as file:
        assert not {"weight", "bias"} & set(file.keys())
    again = AdaptiveSoftmax.load(str(tmp_path / "head"), weight=head.weight, bias=head.bias)
    assert repr(again) == repr(head)
    assert again.weight.data_ptr() == head.weight.data_ptr()  # no copy
    assert again.calibrations == head.calibrations
    assert not head.topk(x).exact.all()
    for k in (1, 3):
        assert all(torch.equal(*pair) for pair in zip(head.topk(x, k), again.topk(x, k), strict=True))
    assert torch.equal(head.logits(x), again.logits(x))
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("method", ["coordinates", "exact", "auto"])
def test_heads_without_an_index(tmp_path: Path, method: str) -> None:
    head, x = other(method)
    head.save(tmp_path / "head", weight=False)
    again = AdaptiveSoftmax.load(tmp_path / "head", weight=head.weight, bias=head.bias)
    first, second = (one.topk(x, 3, generator=torch.Generator().manual_seed(1)) for one in (head, again))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    changed = head.weight.clone()
    changed[[2, 5]] += 1
    with pytest.raises(InputError, match="2 of 30 rows differ"):
        AdaptiveSoftmax.load(tmp_path / "head", weight=changed, bias=head.bias)


def test_the_weight_may_lie_elsewhere(saved: tuple[AdaptiveSoftmax, Tensor, Path]) -> None:
    """By columns, or as parameters that get gradients."""
    head, x, path = saved
    weight, bias = nn.Parameter(head.weight.T.contiguous().T), nn.Parameter(head.bias.clone())  # type: ignore[union-attr]
    assert not weight.is_contiguous()
    again = AdaptiveSoftmax.load(path, weight=weight, bias=bias)
    assert torch.equal(again.topk(x, 3).indices, head.topk(x, 3).indices)
    assert again.calibrations


def test_another_weight_is_refused(saved: tuple[AdaptiveSoftmax, Tensor, Path]) -> None:
    head, _, path = saved
    weight, bias = head.weight, head.bias
    assert bias is not None
    changed = weight.clone()
    changed[3, 0] = changed[3, 0].nextafter(torch.tensor(9e9))  # by the last bit
    with pytest.raises(InputError, match=f"weight: expected the one .*head was made of.*: 1 of {ROWS} rows differ"):
        AdaptiveSoftmax.load(path, weight=changed, bias=bias)
    shifted = bias.clone()
    shifted[:7] += 1
    with pytest.raises(InputError, match=f"7 of {ROWS} rows differ"):
        AdaptiveSoftmax.load(path, weight=weight, bias=shifted)
    with pytest.raises(InputError, match=r"weight: expected float32 of shape \(600, 40\), .*found bfloat16 of shape"):
        AdaptiveSoftmax.load(path, weight=weight.bfloat16(), bias=bias)
    with pytest.raises(InputError, match=r"weight: expected .* found float32 of shape \(599, 40\)"):
        AdaptiveSoftmax.load(path, weight=weight[1:], bias=bias[1:])
    with pytest.raises(InputError, match=r"bias: expected float32 of shape \(600,\), .*found none"):
        AdaptiveSoftmax.load(path, weight=weight)
    with pytest.raises(InputError, match=r"weight: expected .* found list"):
        AdaptiveSoftmax.load(path, weight=weight.tolist(), bias=bias)


def test_a_weight_that_is_missing_or_too_much(saved: tuple[AdaptiveSoftmax, Tensor, Path], tmp_path: Path) -> None:
    head, _, path = saved
    with pytest.raises(InputError, match="head: has no weight: give the one that it was made of"):
        AdaptiveSoftmax.load(path)
    with pytest.raises(InputError, match="head: has no weight"):
        AdaptiveSoftmax.load(path, bias=head.bias)
    head.save(tmp_path / "whole")
    with pytest.raises(InputError, match=r"weight: expected none, because .*whole has its own, found one"):
        AdaptiveSoftmax.load(tmp_path / "whole", weight=head.weight, bias=head.bias)
    with pytest.raises(InputError, match="bias: expected none"):
        AdaptiveSoftmax.load(tmp_path / "whole", bias=head.bias)
    plain = AdaptiveSoftmax(torch.ones(3, 2))
    plain.save(tmp_path / "plain", weight=False)
    with pytest.raises(InputError, match=r"bias: expected none, which .*plain was made of, found float32"):
        AdaptiveSoftmax.load(tmp_path / "plain", weight=plain.weight, bias=torch.ones(3))


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, _ = other("exact")
    head.save(tmp_path / "head", weight=False)
    before = (tmp_path / "head").read_bytes()

    def full(part: Path, tensors: object, metadata: object) -> None:
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_file, "write_aligned", full)
    with pytest.raises(InputError, match=r"cannot be written: .*No space left"):
        head.save(tmp_path / "head", weight=False)
    assert (tmp_path / "head").read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize(
    ("note", "tensors", "says"),
    [
        (None, {}, "broken"),
        ([], {}, "broken"),
        ({}, {}, "broken: 'weight'"),
        ({"weight": "float32 of shape (3, 2)"}, {}, "broken: 'bias'"),
        ({"weight": 7, "bias": "none"}, {}, "weight: expected 7"),
        ({"weight": "float32 of shape (3, 2)", "bias": "none"}, {}, "broken: 'index.checksums'"),
        (
            {"weight": "float32 of shape (3, 2)", "bias": "none"},
            {"checksums": torch.zeros(4, dtype=torch.int64)},
            "checksums: expected one a row",
        ),
        (
            {"weight": "float32 of shape (3, 2)", "bias": "none"},
            {"checksums": torch.zeros(3, dtype=torch.int64)},
            "3 of 3 rows differ",
        ),
    ],
)
def test_broken_notes(tmp_path: Path, note: Any, tensors: dict[str, Tensor], says: str) -> None:
    head = AdaptiveSoftmax(torch.rand(3, 2))
    head.save(tmp_path / "good")
    _, settings = index_file.read(tmp_path / "good")
    index_file.write(tmp_path / "head", tensors or {"extra": torch.ones(1)}, {**settings, "left out": note})
    with pytest.raises(InputError, match=says):
        AdaptiveSoftmax.load(tmp_path / "head", weight=head.weight)


def test_truncated_and_flipped(saved: tuple[AdaptiveSoftmax, Tensor, Path], tmp_path: Path) -> None:
    """A clear error, or a head that answers; never anything else."""
    head, x, good = saved
    whole, path, chosen = good.read_bytes(), tmp_path / "head", random.Random(0)
    for length in sorted(chosen.randrange(len(whole)) for _ in range(10)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            AdaptiveSoftmax.load(path, weight=head.weight, bias=head.bias)
    for _ in range(60):
        broken = bytearray(whole)
        broken[chosen.randrange(3000)] ^= 1 << chosen.randrange(8)
        path.write_bytes(broken)
        with contextlib.suppress(InputError, RuntimeError):  # of a calibration for another eps
            AdaptiveSoftmax.load(path, weight=head.weight, bias=head.bias).topk(x, 3)


def test_metadata_is_plain(saved: tuple[AdaptiveSoftmax, Tensor, Path]) -> None:
    _, settings = index_file.read(saved[2])
    assert json.loads(json.dumps(settings)) == settings
    assert settings["left out"] == {"weight": "float32 of shape (600, 40)", "bias": "float32 of shape (600,)"}
