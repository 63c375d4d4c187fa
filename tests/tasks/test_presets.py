"""Presets from tiny files of the layout of the real ones."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softsieve.errors import InputError
from softsieve.tasks.examples import KINDS, Data, Examples, label_names
from softsieve.tasks.presets import PRESETS, load_preset


def pack(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def archive(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def wav(*samples: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return file.getvalue()


def rows(part: Examples | None) -> list[tuple[Any, Any]]:
    assert part is not None
    assert len(part.where) == len(part.inputs)
    return list(zip(part.inputs, part.labels, strict=True))


def both(data: Data) -> list[tuple[Any, Any]]:
    """Training and held-out rows together, of which the held-out ones are a tenth but at least one."""
    assert data.validation is not None
    together = rows(data.train) + rows(data.validation)
    assert len(data.validation.inputs) == max(1, len(together) // 10)
    return sorted(together, key=str)


def test_every_preset_has_a_kind_and_says_what_it_misses(tmp_path: Path) -> None:
    for name, preset in PRESETS.items():
        assert preset.kind in KINDS
        with pytest.raises(InputError, match=f"{tmp_path / preset.folder}: no such folder, expected there for {name}"):
            load_preset(name, tmp_path)
        (tmp_path / preset.folder).mkdir(exist_ok=True)
        with pytest.raises(InputError, match=rf"^{tmp_path / preset.folder}/[\w./-]+: no such file"):
            load_preset(name, tmp_path)
    with pytest.raises(InputError, match=r"preset: expected one of sst5, .* found 'sst2'"):
        load_preset("sst2", tmp_path)


def test_sst5(tmp_path: Path) -> None:
    for part, label in (("train", 4), ("dev", 0), ("test", 0)):
        pack(tmp_path / f"sst5/{part}.tsv", f'label\ttext\n{label}\tA "{part} .\n0\tNo .\n')
    data = load_preset("sst5", str(tmp_path))
    assert data[:2] == ("sst5", "text")
    assert rows(data.train) == [('A "train .', "4"), ("No .", "0")]
    assert rows(data.validation)[0] == ('A "dev .', "0")
    assert rows(data.test)[0] == ('A "test .', "0")


def test_clinc150(tmp_path: Path) -> None:
    splits = {
        f"{scope}{part}": [[f"{part} text", intent]]
        for part in ("train", "val", "test")
        for scope, intent in (("", "alarm"), ("oos_", "oos"))
    }
    path = tmp_path / "clinc150/data_full.json.gz"
    pack(path, json.dumps(splits))
    data = load_preset("clinc150", tmp_path)
    assert data.kind == "text"
    for part, name in ((data.train, "train"), (data.validation, "val"), (data.test, "test")):
        assert rows(part) == [(f"{name} text", "alarm"), (f"{name} text", "oos")]
    assert data.train.where == [f"{path}:train:1", f"{path}:oos_train:1"]
    pack(path, json.dumps({"train": []}))
    with pytest.raises(InputError, match=r"files not as expected for clinc150 \(KeyError: 'oos_train'\)"):
        load_preset("clinc150", tmp_path)
    pack(path, "{")
    with pytest.raises(InputError, match=r"data_full\.json\.gz: invalid JSON"):
        load_preset("clinc150", tmp_path)


def test_goemotions(tmp_path: Path) -> None:
    pack(tmp_path / "goemotions/labels.txt", "joy\nanger\nneutral\n")
    for split in ("train", "dev", "test"):
        pack(tmp_path / f"goemotions/{split}.tsv.gz", f'"{split}\t2,0\tid1\n[NAME], no\t1\tid2\n')
    data = load_preset("goemotions", tmp_path)
    assert data.kind == "multilabel"
    assert label_names(data) == ["anger", "joy", "neutral"]
    for part, name in ((data.train, "train"), (data.validation, "dev"), (data.test, "test")):
        assert rows(part) == [(f'"{name}', ["neutral", "joy"]), ("[NAME], no", ["anger"])]
    pack(tmp_path / "goemotions/test.tsv.gz", "text\t0\n")
    with pytest.raises(InputError, match=r"goemotions: files not as expected for goemotions \(ValueError"):
        load_preset("goemotions", tmp_path)


def test_eurlex57k(tmp_path: Path) -> None:
    for part, only in (("train", "1"), ("dev", "2"), ("test", "3")):
        documents = [{"text": f"{part} text", "labels": ["9", only]}, {"text": "none", "labels": []}]
        pack(tmp_path / f"eurlex57k/{part}.jsonl.gz", "".join(json.dumps(one) + "\n" for one in documents))
    data = load_preset("eurlex57k", tmp_path)
    assert data.kind == "multilabel"
    assert label_names(data) == ["1", "2", "3", "9"]  # also those that training does not show
    for examples, name, only in ((data.train, "train", "1"), (data.validation, "dev", "2"), (data.test, "test", "3")):
        assert rows(examples) == [(f"{name} text", ["9", only]), ("none", [])]
    pack(tmp_path / "eurlex57k/dev.jsonl.gz", json.dumps({"text": "no labels"}) + "\n")
    with pytest.raises(InputError, match=r"files not as expected for eurlex57k \(KeyError: 'labels'\)"):
        load_preset("eurlex57k", tmp_path)


def test_reuters(tmp_path: Path) -> None:
    documents = [
        (["acq", "odd"], "A", "text"),
        (["corn"], "B", ""),
        (["odd"], "C", "c"),
        ([], "D", "d"),
        (["acq"], "E", "e"),
    ]
    lines = "".join(json.dumps(dict(zip(("topics", "title", "text"), one, strict=True))) + "\n" for one in documents)
    for part in ("train", "test"):
        pack(tmp_path / f"reuters21578/{part}.jsonl.gz", lines)
    pack(tmp_path / "reuters21578/topics90.txt", "acq\ncorn\n")
    data = load_preset("reuters", tmp_path)
    expected = [("A\ntext", ["acq"]), ("B", ["corn"]), ("E\ne", ["acq"])]
    assert data.kind == "multilabel"
    assert both(data) == rows(data.test) == expected
    assert ("B", ["corn"]) in rows(data.train)  # the only one of its topic is not held out


def test_conll2003(tmp_path: Path) -> None:
    tags = ["I-PER", "I-PER", "B-PER", "I-PER", "O", "I-ORG", "I-LOC", "B-LOC", "I-ORG"]
    text = (
        "-DOCSTART- -X- O O\n\n" + "".join(f"w{i} NN I-NP {tag}\n" for i, tag in enumerate(tags)) + "\nx NN O I-PER\n"
    )
    for split in ("train", "valid", "test"):
        pack(tmp_path / f"conll2003/{split}.txt.gz", text)
    data = load_preset("conll2003", tmp_path)
    assert data.kind == "tokens"
    bio = ["B-PER", "I-PER", "B-PER", "I-PER", "O", "B-ORG", "B-LOC", "B-LOC", "B-ORG"]
    for part in (data.train, data.validation, data.test):
        assert rows(part) == [([f"w{i}" for i in range(9)], bio), (["x"], ["B-PER"])]


def test_sighan15(tmp_path: Path) -> None:
    folder = tmp_path / "sighan_csc/simplified"
    for name, pair in {
        "train13": "措折\t挫折",
        "train14": "书贵\t书柜",
        "train15": "烦脑\t烦恼",
        "test13": "甲\t乙",
        "test14": "丙\t丙",
        "test15": "丁\t戊",
    }.items():
        pack(folder / f"{name}.tsv.gz", f"error\tcorrect\n{pair}\n")
    data = load_preset("sighan15", tmp_path)
    assert data.kind == "tokens"
    expected = [(["措", "折"], ["挫", "折"]), (["书", "贵"], ["书", "柜"]), (["烦", "脑"], ["烦", "恼"])]
    assert both(data) == sorted(expected, key=str)
    assert rows(data.test) == [(["丁"], ["戊"])]
    assert set(label_names(data)) == set("措折挫书贵柜烦脑恼甲乙丙丁戊")
    pack(folder / "test15.tsv.gz", "error\tcorrect\n甲乙\t甲\n")
    with pytest.raises(InputError, match=r"test15\.tsv\.gz:2: expected two texts of one length, found 2 and 1"):
        load_preset("sighan15", tmp_path)


def test_mnist(tmp_path: Path) -> None:
    digits = [i % 2 for i in range(60)]
    pixels = np.arange(60 * 6).astype(np.uint8).reshape(60, 2, 3)
    for part in ("train", "t10k"):
        pack(tmp_path / f"mnist/{part}-images-idx3-ubyte.gz", struct.pack(">4i", 0x803, 60, 2, 3) + pixels.tobytes())
        pack(tmp_path / f"mnist/{part}-labels-idx1-ubyte.gz", struct.pack(">2i", 0x801, 60) + bytes(digits))
    data = load_preset("mnist", tmp_path)
    assert data.kind == "image"
    assert data.test is not None
    np.testing.assert_array_equal(np.stack(data.test.inputs), pixels)
    assert data.test.labels == [str(digit) for digit in digits]
    assert data.validation is not None
    assert sorted(data.validation.labels) == ["0", "0", "0", "1", "1"]  # one in twelve
    assert len(data.train.inputs) == 55
    for damaged in (struct.pack(">4i", 0x803, 61, 2, 3) + pixels.tobytes(), b"\0" * 8):
        pack(tmp_path / "mnist/t10k-images-idx3-ubyte.gz", damaged)
        with pytest.raises(InputError, match=r"t10k-images-idx3-ubyte\.gz: not an IDX file"):
            load_preset("mnist", tmp_path)


def test_eurosat(tmp_path: Path) -> None:
    folder = tmp_path / "eurosat_rgb_small"
    archive(folder / "images.tar.xz", {"Sea/Sea_1.jpg": b"1", "Sea/Sea_2.jpg": b"2", "Crop/Crop_1.jpg": b"3"})
    table = "file\tlabel\tclass\tsplit\nCrop/Crop_1.jpg\t0\tCrop\ttest\nSea/Sea_1.jpg\t1\tSea\ttrain\n"
    pack(folder / "splits.tsv", table + "Sea/Sea_2.jpg\t1\tSea\tvalidation\n")
    data = load_preset("eurosat", tmp_path)
    assert data.kind == "image"
    assert [rows(part) for part in data[2:5]] == [[(b"1", "Sea")], [(b"2", "Sea")], [(b"3", "Crop")]]
    assert [place.rpartition(":")[2] for place in data.train.where] == ["Sea/Sea_1.jpg"]
    pack(folder / "splits.tsv", table + "Sea/Sea_3.jpg\t1\tSea\tvalidation\n")
    with pytest.raises(InputError, match=r"splits\.tsv:4: no file Sea/Sea_3\.jpg in .*images\.tar\.xz"):
        load_preset("eurosat", tmp_path)


def test_cifar10(tmp_path: Path) -> None:
    files = {f"{name}/{i:04}.jpg": f"{name}{i}".encode() for i in range(10) for name in ("cat", "dog")}
    for part in ("train", "test"):
        archive(tmp_path / f"cifar10_jpg/{part}.tar.xz", {f"{part}/{name}": file for name, file in files.items()})
    data = load_preset("cifar10", tmp_path)
    assert data.kind == "image"
    assert both(data) == rows(data.test) == sorted(((file, name[:3]) for name, file in files.items()), key=str)
    assert data.validation is not None
    assert sorted(data.validation.labels) == ["cat", "dog"]
    (tmp_path / "cifar10_jpg/test.tar.xz").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"test\.tar\.xz: damaged \.xz file"):
        load_preset("cifar10", tmp_path)


def test_fsdd(tmp_path: Path) -> None:
    files = {f"recordings/{digit}_theo_{i}.wav": wav(digit * 16384, i) for digit in (0, 1) for i in range(15)}
    archive(tmp_path / "fsdd/recordings.tar.xz", files)
    data = load_preset("fsdd", tmp_path)
    assert data.kind == "audio"
    assert data.test is not None
    place = tmp_path / "fsdd" / "recordings.tar.xz"
    assert data.test.where == [f"{place}:recordings/{digit}_theo_{i}.wav" for digit in (0, 1) for i in range(5)]
    assert data.test.labels == ["0"] * 5 + ["1"] * 5
    samples, rate = data.test.inputs[-1]
    assert (samples.dtype, rate) == (np.float32, 8000)
    assert samples.tolist() == [0.5, 4 / 32768]
    assert len(both(data)) == 20
    archive(tmp_path / "fsdd/recordings.tar.xz", {"recordings/0_theo_0.wav": b"no sound"})
    with pytest.raises(InputError, match=r"recordings/0_theo_0\.wav: not a \.wav file"):
        load_preset("fsdd", tmp_path)
