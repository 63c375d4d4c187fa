"""Raw inputs to tensors: what is read, what is cut, what is refused."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softsieve.errors import InputError
from softsieve.tasks.encode import (
    MOST_IDS,
    AudioEncoder,
    ImageEncoder,
    TextEncoder,
    TokensEncoder,
    built_in,
    hashed,
    padded,
    text_ids,
    word_ids,
)
from softsieve.tasks.examples import Examples
from softsieve.tasks.models import BUCKETS


def examples(*inputs: Any) -> Examples:
    return Examples(list(inputs), [], [f"place-{i}" for i in range(len(inputs))])


# Text


def test_hashes_are_the_same_everywhere() -> None:
    """A saved model is of no use where words fall into other buckets."""
    code = "from softsieve.tasks.encode import hashed; print(hashed('word'), hashed('été'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.split() == [str(hashed("word")), str(hashed("été"))] == ["31991", "30328"]


def test_features_of_a_text() -> None:
    found = text_ids("Ab cde", 128)
    words = ["ab", "cde"]
    pairs = ["< ab", "ab cde", "cde >"]
    pieces = ["#<ab", "#ab>", "#<ab>", "#<cd", "#cde", "#de>", "#<cde", "#cde>", "#<cde>"]
    assert found == [hashed(feature) for feature in words + pairs + pieces]
    assert all(0 < i < BUCKETS for i in found)


def test_scripts_without_spaces_are_read_by_character() -> None:
    assert text_ids("今天x好", 128)[:4] == [hashed(c) for c in "今天x好"]


def test_a_long_text_loses_pieces_before_words() -> None:
    text = " ".join(f"word{i}" for i in range(300))
    found = text_ids(text, 128)
    assert len(found) == MOST_IDS[0]
    assert found[127] == hashed("word127")
    assert found[128 + 128] == hashed("word127 >")


def test_texts_are_padded_at_the_end() -> None:
    inputs, lengths, sequences, words, texts = TextEncoder(128).encode(examples("ab", "", "ab cde"))
    assert not texts
    assert inputs["ids"].dtype == torch.int32
    assert inputs["ids"].shape == (3, 14)
    assert lengths is not None
    assert lengths.tolist() == [6, 1, 14]  # of "": the pair of beginning and end
    assert (inputs["ids"] != 0).sum(1).tolist() == [6, 1, 14]
    assert sequences == ("ids",)
    assert words is None


def test_padded_takes_empty_lists() -> None:
    out, lengths = padded([[], []], shape=(4,))
    assert out.shape == (2, 1, 4)
    assert lengths.tolist() == [1, 1]


# Tokens


def test_words_are_cut_at_max_length_and_said_to_be() -> None:
    encoded = TokensEncoder(4).encode(examples(list("abcdef"), ["a", "b"]))
    assert encoded.inputs["ids"].shape == (2, 4, 4)
    assert encoded.lengths is not None
    assert encoded.lengths.tolist() == [4, 2]
    assert encoded.sequences == ("ids", "target")
    assert encoded.words is not None
    assert encoded.words.tolist() == [[0, 1, 2, 3, -1, -1], [0, 1, -1, -1, -1, -1]]
    assert encoded.inputs["ids"][1, 1].tolist() == word_ids("b")
    assert encoded.inputs["ids"][1, 2:].eq(0).all()


def test_features_of_a_word() -> None:
    word, start, end, shape = word_ids("McDonald97")
    assert word == word_ids("mcdonald97")[0]
    assert start == word_ids("McDuck")[1]
    assert end == word_ids("ald97")[2] != word_ids("98")[2]
    assert shape == hashed("@XxXxxdd")


# Images


def png(array: Any, kind: str = "PNG") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def test_images_of_every_form(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    (tmp_path / "a.png").write_bytes(png(pixels))
    grey = pixels[..., 0]
    encoded = ImageEncoder(size=12, mirror=1).encode(examples(tmp_path / "a.png", png(pixels), pixels, grey))
    found = encoded.inputs["pixels"]
    assert found.dtype == torch.uint8
    assert found.shape == (4, 3, 12, 12)
    for image in found[:3]:
        assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1))
    assert torch.equal(found[3], torch.from_numpy(grey).expand(3, 12, 12))
    assert encoded.lengths is None


def test_sixteen_bits_a_pixel_keep_their_upper_ones() -> None:
    deep = np.full((8, 8), 200 * 256, np.uint16)
    assert ImageEncoder(size=8, mirror=0).encode(examples(png(deep))).inputs["pixels"].eq(200).all()


def test_images_are_resized_to_the_median_side() -> None:
    images = [np.zeros((h, w), np.uint8) for h, w in ((10, 20), (20, 20), (20, 30))]
    encoder = ImageEncoder.fit(examples(*images))
    assert (encoder.size, encoder.mirror) == (20, 0)
    assert encoder.encode(examples(*images)).inputs["pixels"].shape == (3, 3, 20, 20)
    assert ImageEncoder.fit(examples(np.zeros((300, 200), np.uint8))).size == 64
    assert ImageEncoder.fit(examples(np.zeros((3, 3), np.uint8))).size == 8


def test_only_colour_images_are_mirrored() -> None:
    grey = np.zeros((8, 8), np.uint8)
    colour = np.zeros((8, 8, 3), np.uint8)
    colour[2, 3, 0] = 200
    assert ImageEncoder.fit(examples(grey, grey)).mirror == 0
    assert ImageEncoder.fit(examples(grey, colour)).mirror == 1


@pytest.mark.parametrize("workers", [0, 3])
def test_an_unreadable_image_is_named(workers: int, tmp_path: Path) -> None:
    (tmp_path / "cut.jpg").write_bytes(png(np.zeros((64, 64, 3), np.uint8), "JPEG")[:300])
    fine = np.zeros((8, 8), np.uint8)
    for bad in (b"no image", tmp_path / "cut.jpg", tmp_path / "none.png", np.zeros((8, 8), np.float64)):
        with pytest.raises(InputError, match=r"^place-1: unreadable image [^\n]+$"):
            ImageEncoder(size=8, mirror=0).encode(examples(fine, bad, fine), workers=workers)
    with pytest.raises(InputError, match=r"^place-0: unreadable image"):
        ImageEncoder.fit(examples(b"no image"))


def test_threads_keep_the_order() -> None:
    images = [np.full((8, 8), i, np.uint8) for i in range(50)]
    found = ImageEncoder(size=8, mirror=0).encode(examples(*images), workers=4).inputs["pixels"]
    assert found[:, 0, 0, 0].tolist() == list(range(50))


# Sounds


def tone(frequency: float, seconds: float, rate: int) -> Any:
    return np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate).astype(np.float32)


def test_sounds_come_out_at_eight_kilohertz_and_full_volume(tmp_path: Path) -> None:
    import soundfile

    rate = 44100
    stereo = np.stack([tone(440, 0.5, rate), tone(440, 0.5, rate)], 1) * 0.1
    soundfile.write(tmp_path / "a.wav", stereo, rate, subtype="FLOAT")
    forms = (tmp_path / "a.wav", (tone(440, 0.5, 8000) * 0.3, 8000), (tmp_path / "a.wav").read_bytes())
    samples = AudioEncoder(samples=4000).encode(examples(*forms)).inputs["samples"]
    assert samples.dtype == torch.int16
    assert samples.shape == (3, 4000)
    assert samples.abs().amax(1).tolist() == [32767, 32767, 32767]
    assert torch.equal(samples[0], samples[2])
    difference = (samples[0].float() - samples[1].float())[200:-200].abs().max() / 32767
    assert difference < 0.02  # away from the ends, where a filter sees silence


def test_sounds_are_cut_or_filled_up_with_silence() -> None:
    sounds = [(tone(440, seconds, 8000), 8000) for seconds in (0.1, 0.5)]
    samples = AudioEncoder(samples=2000).encode(examples(*sounds)).inputs["samples"]
    assert samples[0, 800:].eq(0).all()
    assert samples[1, 1000:].abs().max() > 30000


def test_the_window_fits_almost_all_sounds() -> None:
    sounds = [(np.ones(3000 + i, np.float32), 8000) for i in range(101)]
    assert AudioEncoder.fit(examples(*sounds)).samples == 3099
    assert AudioEncoder.fit(examples((np.ones(10, np.float32), 8000))).samples == 2000
    assert AudioEncoder.fit(examples((np.ones(99999, np.float32), 8000))).samples == 40000


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Path("none.wav"), "unreadable sound"),
        (b"no sound", "unreadable sound"),
        ((np.zeros(0, np.float32), 8000), "found 0 samples at 8000 Hz"),
        ((np.zeros(9, np.float32), 0), "found 9 samples at 0 Hz"),
        ((np.full(9, np.nan, np.float32), 8000), "not finite"),
    ],
)
def test_an_unreadable_sound_is_named(bad: Any, complaint: str) -> None:
    fine = (tone(440, 0.5, 8000), 8000)
    with pytest.raises(InputError, match=f"^place-1: [^\n]*{complaint}[^\n]*$"):
        AudioEncoder(samples=2000).encode(examples(fine, bad))


def test_silence_is_silence() -> None:
    samples = AudioEncoder(samples=2000).encode(examples((np.zeros(3000, np.float32), 8000))).inputs["samples"]
    assert samples.eq(0).all()


def test_a_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(
        InputError, match=r"reading sounds needs the package soundfile: pip install 'softsieve\[train\]'"
    ):
        AudioEncoder(samples=2000).encode(examples(Path("a.wav")))


def test_many_classes_and_several_labels_have_wider_texts() -> None:
    sizes = [("text", 1000), ("text", 1001), ("multilabel", 64), ("multilabel", 65)]
    made = [built_in(kind, examples("ab"), 16, classes) for kind, classes in sizes]
    assert [encoder.body().features for encoder in made] == [64, 256, 64, 256]
