"""Features of many texts at once: the same numbers as of one at a time, which saved models know."""

from __future__ import annotations

import random

import pytest
import torch

from softsieve.tasks import encode as module
from softsieve.tasks.encode import MOST_IDS, TextEncoder, text_ids
from softsieve.tasks.examples import Examples
from softsieve.tasks.hashing import WORD, HashedTexts, point_kinds
from softsieve.tasks.models import BUCKETS
from softsieve.tasks.rows import LabelRows, Rows
from softsieve.tasks.texts import make_column

LETTERS = "abcABC İΣσς éß日本カ한 \U0001f600\ud83d<>#,.-_'\n\t\u2028\u00a0123ªÅ\u0301"


def some_texts(count: int = 200) -> list[str]:
    draw = random.Random(0)
    fixed = ["", " ", "a", "ab", "word " * 600, "x" * 2000, "ΟΔΟΣ ΟΔΟΣ.", "".join(chr(i) for i in range(0x2FF))]
    return fixed + ["".join(draw.choices(LETTERS, k=draw.choice([1, 5, 40, 700]))) for _ in range(count)]


@pytest.mark.parametrize("max_length", [4, 128, 2**20])
def test_features_are_those_of_one_text_at_a_time(max_length: int) -> None:
    texts = some_texts()
    expected = [text_ids(text, max_length) for text in texts]
    found = HashedTexts(texts, max_length, most=MOST_IDS[0], buckets=BUCKETS)
    assert found.lengths.tolist() == [len(ids) for ids in expected]
    dense = found.dense()
    assert dense.shape == (len(texts), found.longest)
    for ids, row in zip(expected, dense.tolist(), strict=True):
        assert row == ids + [0] * (found.longest - len(ids))
    index = torch.tensor([7, 3, 3])
    assert torch.equal(found.batch(index, 6), dense[index, :6])  # cut


def test_every_character_is_of_the_same_kind() -> None:
    kinds = point_kinds()
    assert len(kinds) == 0x110000
    for point in [*range(0x3000), *range(0x3000, 0x110000, 97)]:
        sign = chr(point)
        words = WORD.findall(sign)
        pairs = WORD.findall(sign * 2)
        assert kinds[point] == (0 if not words else 1 if len(pairs) == 1 else 2)


def test_many_texts_are_encoded_like_few(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text for text in some_texts(40) if "\ud83d" not in text]
    examples = Examples(make_column(texts), ["x"] * len(texts), [""] * len(texts))
    plain = TextEncoder(128).encode(examples)
    monkeypatch.setattr(module, "MANY_TEXTS", 1)
    done: list[float] = []
    kept = TextEncoder(128).encode(examples, progress=lambda what, share: done.append(share))
    assert sum(done) == pytest.approx(2)  # counted, then encoded
    assert torch.equal(plain.inputs["ids"], kept.inputs["ids"])
    assert plain.lengths is not None
    assert kept.lengths is not None
    assert torch.equal(plain.lengths, kept.lengths)
    monkeypatch.setattr(module, "AT_HAND", 1)
    made = TextEncoder(128).encode(examples)
    assert not made.inputs
    target = torch.arange(len(texts))
    options = {"lengths": plain.lengths, "sequences": plain.sequences}
    first = Rows(plain.inputs, target, **options)  # type: ignore[arg-type]
    second = Rows({}, target, texts=made.texts, **options)  # type: ignore[arg-type]
    for index in (torch.tensor([5, 1, 9]), torch.tensor([0])):
        assert torch.equal(first.batch(index).inputs["ids"], second.batch(index).inputs["ids"])
    assert second.to("cpu").texts is made.texts
    labels = LabelRows({}, target[:, None], texts=made.texts, **options).to("cpu")  # type: ignore[arg-type]
    assert torch.equal(labels.batch(torch.tensor([4])).inputs["ids"], first.batch(torch.tensor([4])).inputs["ids"])
    other = Rows({}, target, texts={"ids": HashedTexts(texts[::-1], 128, most=512, buckets=BUCKETS)})
    assert second.fingerprint() == second.to("cpu").fingerprint() != other.fingerprint()
