"""Files: what was saved comes back, and anything else is refused."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from softsieve import AdaptiveSoftmax
from softsieve.errors import InputError
from softsieve.heads import index_file
from softsieve.heads.engine import State
from tests.heads.instances import peaked


def made(**options: Any) -> tuple[AdaptiveSoftmax, torch.Tensor]:
    weight, x = peaked(30, 300, 60, torch.Generator().manual_seed(0))
    chosen: dict[str, Any] = {"delta": 0.1, "method": "coordinates", **options}
    head = AdaptiveSoftmax(weight.to(torch.bfloat16), torch.linspace(0, 1, 30), beta=1.5, **chosen)
    if head.guarantee == "calibrated":
        head.calibrate(x[5:], 3)
    return head, x[:5]


@pytest.mark.parametrize("options", [{}, {"rotate": True, "seed": 4}, {"guarantee": "pac", "noise": 9.0}], ids=str)
def test_round_trip(tmp_path: Path, options: dict[str, Any]) -> None:
    head, x = made(**options)
    head.save(tmp_path / "head.safetensors")
    again = AdaptiveSoftmax.load(str(tmp_path / "head.safetensors"))
    assert repr(again) == repr(head)
    assert again.weight.dtype == torch.bfloat16
    first, second = (h.topk(x, 3, generator=torch.Generator().manual_seed(1)) for h in (head, again))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["head.safetensors"]


def test_an_uncalibrated_head(tmp_path: Path) -> None:
    AdaptiveSoftmax(torch.ones(3, 2)).save(tmp_path / "head")
    assert AdaptiveSoftmax.load(tmp_path / "head").calibrations == {}


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a file, found none"):
        AdaptiveSoftmax.load(tmp_path / "none")
    with pytest.raises(InputError, match="expected a file, found a folder"):
        AdaptiveSoftmax.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04K\x01.", bytes(100), b"\xff" * 100])
def test_foreign_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "head").write_bytes(content)
    with pytest.raises(InputError, match=r"head: (cannot be read|expected)"):
        AdaptiveSoftmax.load(tmp_path / "head")


def test_foreign_safetensors(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3, 2)}, tmp_path / "head")
    with pytest.raises(InputError, match="expected a saved AdaptiveSoftmax, found another safetensors file"):
        AdaptiveSoftmax.load(tmp_path / "head")


def test_newer_format(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3, 2)}, tmp_path / "head", {"format": "softsieve.head", "version": "99"})
    with pytest.raises(InputError, match="expected format version 3, found 99"):
        AdaptiveSoftmax.load(tmp_path / "head")


SETTINGS = {
    "eps": 0.3,
    "delta": 0.1,
    "beta": 1.0,
    "method": "coordinates",
    "guarantee": "calibrated",
    "noise": None,
    "read_chosen": True,
    "rotate": False,
    "seed": 0,
    "calibrations": {},
}
LARGE = torch.ones(3, 40)  # whose calibration has one round


@pytest.mark.parametrize(
    ("tensors", "settings", "says"),
    [
        ({}, SETTINGS, "'weight'"),
        ({"weight": torch.ones(3)}, SETTINGS, r"weight: expected a matrix"),
        ({"weight": torch.full((3, 2), torch.nan)}, SETTINGS, "weight: expected finite"),
        ({"weight": torch.ones(3, 2), "extra": torch.ones(1)}, SETTINGS, "unexpected content"),
        ({"weight": torch.ones(3, 2)}, {**SETTINGS, "extra": 1}, "unexpected content"),
        ({"weight": torch.ones(3, 2)}, {**SETTINGS, "eps": 2}, "eps: "),
        ({"weight": torch.ones(3, 2)}, {**SETTINGS, "method": ["exact"]}, "method: "),
        ({"weight": torch.ones(3, 2)}, {"eps": 0.3}, "'delta'"),
        ({"weight": LARGE, "calibrations.1": torch.ones(1)}, SETTINGS, "unexpected content"),
        ({"weight": LARGE}, {**SETTINGS, "calibrations": {"1": 9}}, "'calibrations.1'"),
        ({"weight": LARGE}, {**SETTINGS, "calibrations": [1]}, "broken"),
        ({"weight": LARGE, "calibrations.1": torch.ones(2)}, {**SETTINGS, "calibrations": {"1": 9}}, "1 numbers"),
        ({"weight": LARGE, "calibrations.1": -torch.ones(1)}, {**SETTINGS, "calibrations": {"1": 9}}, "1 numbers"),
        (
            {"weight": LARGE, "calibrations.1": torch.ones(1).long()},
            {**SETTINGS, "calibrations": {"1": 9}},
            "1 numbers",
        ),
        ({"weight": LARGE, "calibrations.9": torch.ones(1)}, {**SETTINGS, "calibrations": {"9": 9}}, "k: "),
        ({"weight": LARGE, "calibrations.x": torch.ones(1)}, {**SETTINGS, "calibrations": {"x": 9}}, "broken"),
        ({"weight": LARGE, "calibrations.1": torch.ones(1)}, {**SETTINGS, "calibrations": {"1": "9"}}, "queries: "),
        (
            {"weight": LARGE, "calibrations.1": torch.ones(1)},
            {**SETTINGS, "guarantee": "pac", "calibrations": {"1": 9}},
            "made for another guarantee",
        ),
    ],
)
def test_broken_content(tmp_path: Path, tensors: Any, settings: Any, says: str) -> None:
    index_file.write(tmp_path / "head", tensors, settings)
    with pytest.raises(InputError, match=says):
        AdaptiveSoftmax.load(tmp_path / "head")


@pytest.mark.parametrize("settings", ["[]", "{", "null", '{"eps": NaN}', "[" * 100_000])
def test_broken_settings(tmp_path: Path, settings: str) -> None:
    metadata = {"format": "softsieve.head", "version": "2", "settings": settings}
    save_file({"weight": torch.ones(3, 2)}, tmp_path / "head", metadata)
    with pytest.raises(InputError):
        AdaptiveSoftmax.load(tmp_path / "head")


def test_truncated_and_flipped(tmp_path: Path) -> None:
    """A clear error, or a head that answers; never anything else."""
    head, x = made()
    path = tmp_path / "head"
    head.save(path)
    whole = path.read_bytes()
    chosen = random.Random(0)
    for length in sorted(chosen.randrange(len(whole)) for _ in range(40)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            AdaptiveSoftmax.load(path)
    for _ in range(200):
        broken = bytearray(whole)
        broken[chosen.randrange(2000)] ^= 1 << chosen.randrange(8)
        path.write_bytes(broken)
        with contextlib.suppress(InputError):
            head = AdaptiveSoftmax.load(path)
            with contextlib.suppress(ValueError):  # flipped weights may have logits beyond their dtype
                head.topk(x, 3)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, _ = made()
    path = tmp_path / "head"
    head.save(path)
    before = path.read_bytes()

    def full(part: Path, tensors: object, metadata: object) -> None:
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_file, "write_aligned", full)
    with pytest.raises(InputError, match=r"cannot be written: .*No space left"):
        head.save(path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["head"]


def test_a_bias_that_is_part_of_the_weight(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    AdaptiveSoftmax(weight, weight[0]).save(tmp_path / "head")
    assert torch.equal(AdaptiveSoftmax.load(tmp_path / "head").bias, weight[0])  # type: ignore[arg-type]


def test_nowhere_to_write(tmp_path: Path) -> None:
    head, _ = made()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        head.save(tmp_path / "file" / "folder")
    with pytest.raises(InputError, match="cannot be written"):
        head.save(tmp_path)


def test_metadata_is_plain(tmp_path: Path) -> None:
    head, _ = made()
    head.save(tmp_path / "head")
    _, settings = index_file.read(tmp_path / "head")
    assert json.loads(json.dumps(settings)) == settings
    assert settings["calibrations"] == {"3": 55}


def addresses(path: Path) -> list[range]:
    """Where a file is mapped into the memory of this process."""
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [range(*(int(end, 16) for end in span[0].split("-"))) for span in spans]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux says which memory is a file's")
def test_processes_share_the_memory_of_a_file(tmp_path: Path) -> None:
    """Weight and records of an index are read where the file is mapped, each row in whole cache lines."""
    weight, x = peaked(3000, 192, 700, torch.Generator().manual_seed(0))
    head = AdaptiveSoftmax(weight.to(torch.bfloat16), delta=0.1, method="cascade")
    head.calibrate(x[5:], 3)
    head.save(tmp_path / "head")
    again = AdaptiveSoftmax.load(tmp_path / "head")
    tensors = {"weight": again.weight, "records": again._engine.index.records}  # type: ignore[union-attr]
    for name, value in tensors.items():
        assert value.data_ptr() % 64 == 0, name
        assert any(value.data_ptr() in span for span in addresses(tmp_path / "head")), name
    for first, second in zip(head.topk(x[:5], 3), again.topk(x[:5], 3), strict=True):
        assert torch.equal(first, second)


def test_records_that_begin_within_a_line_are_copied(tmp_path: Path) -> None:
    """As those of files that earlier versions wrote."""
    head, x = made(method="cascade")
    head.save(tmp_path / "head")
    tensors, settings = index_file.read(tmp_path / "head")
    odd = {"a": torch.zeros(1, dtype=torch.int8), **tensors}  # sorted before the records by the library
    save_file(odd, tmp_path / "odd", {"format": "softsieve.head"})
    records = load_file(tmp_path / "odd")["index.records"]
    assert records.data_ptr() % 64
    again = AdaptiveSoftmax._from_state(State({**tensors, "index.records": records}, settings))
    assert again._engine.index.records.data_ptr() % 64 == 0  # type: ignore[union-attr]
    for first, second in zip(head.topk(x, 3), again.topk(x, 3), strict=True):
        assert torch.equal(first, second)
