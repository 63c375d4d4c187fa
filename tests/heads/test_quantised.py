"""Quantised weights: the rows they stand for, read as they are, in heads that promise what their rows give."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softsieve.data.synthetic_heads import SyntheticHead, make_head
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax, QuantisedWeight, WeightChanged
from softsieve.heads.cascade.cpu import raw_bits
from softsieve.heads.quantised import describe
from softsieve.heads.reader import FEW, Reader
from softsieve.kernels.cascade_numba import ALONE, exact_rows
from softsieve.reference.heads import dequantise
from tests.heads.instances import right

pytestmark = pytest.mark.filterwarnings("ignore:x.* unlike those of the calibration")

N, D = 1500, 64
NF4 = torch.linspace(-1, 1, 16) ** 3  # levels that are not evenly spaced


def eight_bits(weight: Tensor, group: int, dtype: torch.dtype = torch.float16) -> QuantisedWeight:
    parts = weight.float().view(len(weight), -1, group)
    scales = (parts.abs().amax(-1) / 127).to(dtype)
    codes = (parts / scales.float()[..., None]).round().clamp(-127, 127)
    return QuantisedWeight(codes.view(len(weight), -1).to(torch.int8), scales)


def four_bits(weight: Tensor, group: int, dtype: torch.dtype = torch.float32) -> QuantisedWeight:
    parts = weight.float().view(len(weight), -1, group)
    low, high = parts.amin(-1), parts.amax(-1)
    scales = (high - low) / 15
    digits = ((parts - low[..., None]) / scales[..., None]).round().clamp(0, 15).view(len(weight), -1)
    return QuantisedWeight.from_digits(digits.to(torch.uint8), scales.to(dtype), low.to(dtype))


def random_digits(*shape: int) -> Tensor:
    return torch.randint(16, shape, generator=torch.Generator().manual_seed(0))


KINDS: dict[str, Callable[[Tensor], QuantisedWeight]] = {
    "a scale a row": lambda weight: eight_bits(weight, weight.shape[1], torch.float32),
    "groups of 32": lambda weight: eight_bits(weight, 32),
    "groups of 16, bfloat16": lambda weight: eight_bits(weight, 16, torch.bfloat16),
    "4 bits": lambda weight: four_bits(weight, 32),
}


@pytest.fixture(scope="module")
def made() -> SyntheticHead:
    return make_head(N, D, rank=8, calibration=900, test=200)


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def fitted(request: pytest.FixtureRequest, made: SyntheticHead) -> AdaptiveSoftmax:
    head = AdaptiveSoftmax(request.param(made.weight), method="cascade", delta=0.05)
    head.calibrate(made.calibration, k=[1, 3], generator=torch.Generator().manual_seed(0))
    return head


# -- rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [6, 16, 96])
@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("levels", [None, NF4], ids=["even", "NF4"])
def test_rows_of_4_bits(dtype: torch.dtype, group: int, minimums: bool, levels: Tensor | None) -> None:
    digits, scales = random_digits(50, 96), torch.rand(50, 96 // group).to(dtype)
    least = -torch.rand(50, 96 // group).to(dtype) if minimums else None
    weight = QuantisedWeight.from_digits(digits, scales, least, levels=levels)
    assert (tuple(weight.shape), weight.group, len(weight), weight.numel()) == ((50, 96), group, 50, 50 * 96)
    assert weight.nbytes == 50 * (48 + (96 // group) * scales.itemsize * (2 if minimums else 1))
    torch.testing.assert_close(weight.double(), dequantise(digits, scales, least, levels), rtol=1e-15, atol=1e-15)
    some = torch.tensor([3, 7, 3])
    torch.testing.assert_close(weight[some].float(), weight.float()[some], rtol=0, atol=0)
    torch.testing.assert_close(weight[10:20].float(), weight.float()[10:20], rtol=0, atol=0)


def with_levels(weight: Tensor) -> QuantisedWeight:
    return QuantisedWeight.from_digits(random_digits(*weight.shape), torch.rand(len(weight), 4), levels=NF4)


@pytest.mark.parametrize("kind", [*KINDS.values(), with_levels], ids=[*KINDS, "NF4"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_with_rows(kind: Callable[[Tensor], QuantisedWeight], dtype: Any) -> None:
    """Of some rows in any order, by one thread and by several, and of all."""
    rows, size = 9000, 128
    weight = kind(torch.randn(rows, size, generator=torch.Generator().manual_seed(1)))
    random = np.random.default_rng(0)
    x = random.standard_normal(size).astype(dtype)
    bias = random.standard_normal(rows).astype(dtype)
    truth = weight.double().numpy() @ x.astype(np.float64)
    some = random.integers(0, rows, 8500)
    assert some.size * size > ALONE > 7 * size
    for asked in (some, some[:7], some[:0]):
        for added in (bias, bias[:0]):
            out = np.empty(asked.size, dtype)
            exact_rows(raw_bits(weight), x, asked, added, out)
            expected = truth[asked] + (added[asked] if added.size else 0)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)
    queries = torch.from_numpy(np.stack([x] * (FEW + 1)).astype(np.float32))
    for few in (queries[:2], queries):
        product = Reader(weight).full(few)
        np.testing.assert_allclose(product[-1], truth, rtol=1e-5, atol=1e-4)


CODES = torch.zeros(4, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CODES.float(), torch.ones(4, 1)), "codes: expected int8, or uint8 of two codes a byte, found torch.float32"),
        ((CODES[0], torch.ones(4, 1)), r"codes: expected a non-empty matrix, found shape \(8,\)"),
        ((CODES, torch.ones(4, 3)), r"scales: expected 4 rows of as many as divide 8 into groups, found .*\(4, 3\)"),
        ((CODES, torch.ones(3, 2)), r"scales: expected 4 rows"),
        ((CODES, torch.ones(4, 1).double()), "scales: expected float16, bfloat16 or float32, found torch.float64"),
        ((CODES, torch.full((4, 1), torch.inf)), "scales: expected finite numbers"),
        ((CODES, torch.ones(4, 2), torch.ones(4, 1)), "minimums: expected torch.float32 of shape .*, like the scales"),
        ((CODES.byte(), torch.ones(4, 16)), "scales: expected 4 rows .* groups of even size"),
    ],
)
def test_what_is_no_quantised_weight(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        QuantisedWeight(*arguments)


def test_levels_are_of_4_bits() -> None:
    with pytest.raises(ValueError, match="levels: expected none"):
        QuantisedWeight(CODES, torch.ones(4, 1), levels=NF4)
    with pytest.raises(ValueError, match="levels: expected 16 numbers"):
        QuantisedWeight(CODES.byte(), torch.ones(4, 1), levels=NF4[:8])
    with pytest.raises(ValueError, match="digits: expected whole numbers from 0 to 15"):
        QuantisedWeight.from_digits(torch.tensor([[16, 0]]), torch.ones(1, 1))
    with pytest.raises(ValueError, match="groups of even size, found 2"):
        QuantisedWeight.from_digits(torch.zeros(1, 6).long(), torch.ones(1, 2))


# -- heads


def test_answers_are_about_its_own_rows(fitted: AdaptiveSoftmax, made: SyntheticHead) -> None:
    rows = fitted.weight.double()
    answer = fitted.topk(made.test, k=3)
    assert float(right(answer, rows, made.test, eps=0.3).double().mean()) >= 0.9
    exact = made.test.double() @ rows.T
    torch.testing.assert_close(answer.logits.double(), exact.gather(-1, answer.indices), rtol=1e-5, atol=1e-4)
    assert not bool(answer.exact.all())
    partial = answer.bytes_read[~answer.exact]
    assert int(partial.max()) < 2 * fitted.weight.nbytes
    coverage = fitted.coverage(made.test, k=1)
    assert coverage.right >= 0.9


def test_fallbacks_and_all_logits(fitted: AdaptiveSoftmax, made: SyntheticHead) -> None:
    rows = fitted.weight.double()
    far = 50 * torch.randn(2, D, generator=torch.Generator().manual_seed(3))
    with pytest.warns(UserWarning, match="unlike those of the calibration"):
        answer = fitted.topk(far)
    assert bool(answer.exact.all())
    torch.testing.assert_close(answer.logits.double(), (far.double() @ rows.T).topk(1).values, rtol=1e-5, atol=1e-3)
    exact = fitted.exact_logits(made.test[:5])
    torch.testing.assert_close(exact.double(), made.test[:5].double() @ rows.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head)), lambda h: h.to("cpu")])
def test_copies(fitted: AdaptiveSoftmax, made: SyntheticHead, again: Callable[[Any], Any]) -> None:
    other = again(fitted)
    assert describe(other.weight) == describe(fitted.weight)
    assert torch.equal(other.topk(made.test, 3).indices, fitted.topk(made.test, 3).indices)


def test_files(fitted: AdaptiveSoftmax, made: SyntheticHead, tmp_path: Path) -> None:
    whole, index = tmp_path / "whole.safetensors", tmp_path / "index.safetensors"
    fitted.save(whole)
    fitted.save(index, weight=False)
    expected = fitted.topk(made.test, 3).indices
    assert torch.equal(AdaptiveSoftmax.load(whole).topk(made.test, 3).indices, expected)
    assert torch.equal(AdaptiveSoftmax.load(index, weight=fitted.weight).topk(made.test, 3).indices, expected)
    with pytest.raises(InputError, match=r"weight: expected [48] bits in groups of .* found bfloat16 of shape"):
        AdaptiveSoftmax.load(index, weight=made.weight)
    other = copy.deepcopy(fitted.weight)
    other.scales[7] *= 2
    with pytest.raises(InputError, match=f"found another: 1 of {N} rows differ"):
        AdaptiveSoftmax.load(index, weight=other)


def test_an_index_of_the_weight_before_quantisation(made: SyntheticHead, tmp_path: Path) -> None:
    head = AdaptiveSoftmax(made.weight, delta=0.1)
    head.calibrate(made.calibration, generator=torch.Generator().manual_seed(0))
    head.save(tmp_path / "index.safetensors", weight=False)
    with pytest.raises(InputError, match=r"weight: expected bfloat16 of shape .*, found 8 bits in groups of 32"):
        AdaptiveSoftmax.load(tmp_path / "index.safetensors", weight=eight_bits(made.weight, 32))


def test_other_levels_are_another_weight(tmp_path: Path) -> None:
    digits, scales = random_digits(100, 16), torch.ones(100, 1)
    AdaptiveSoftmax(QuantisedWeight.from_digits(digits, scales)).save(tmp_path / "i.safetensors", weight=False)
    with pytest.raises(InputError, match="100 of 100 rows differ"):
        AdaptiveSoftmax.load(tmp_path / "i.safetensors", weight=QuantisedWeight.from_digits(digits, scales, levels=NF4))


@pytest.mark.parametrize("part", ["codes", "scales", "minimums"])
def test_a_change_is_noticed(made: SyntheticHead, part: str) -> None:
    """What torch counts, and in a row that is always read also what it does not."""
    weight = four_bits(made.weight, 32)
    head = AdaptiveSoftmax(weight, method="cascade", delta=0.1)
    head.calibrate(made.calibration, generator=torch.Generator().manual_seed(0))
    head.topk(made.test)
    value: Tensor = getattr(weight, part)
    value[5] += 1
    with pytest.raises(WeightChanged, match="rows 5 have changed"):
        head.topk(made.test)
    head.update_rows([5])
    head.topk(made.test)
    assert head.index is not None
    value.numpy()[int(head.index.probes[1])] += 1
    with pytest.raises(WeightChanged, match="not the one that the index was built of"):
        head.topk(made.test)


def test_without_sample_queries(made: SyntheticHead) -> None:
    weight = eight_bits(made.weight, 32)
    answer = AdaptiveSoftmax(weight, method="cascade", guarantee="pac").topk(made.test[:20])
    assert bool(right(answer, weight.double(), made.test[:20], eps=0.3).all())


def test_methods_that_need_columns_are_refused() -> None:
    weight = QuantisedWeight(CODES, torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"method: expected .* for a quantised weight, found 'coordinates'"):
        AdaptiveSoftmax(weight, method="coordinates")


def test_auto_and_exact_need_no_index(made: SyntheticHead) -> None:
    weight = eight_bits(made.weight, D)
    for method in ("auto", "exact"):
        answer = AdaptiveSoftmax(weight, method=method).topk(made.test)
        assert bool(right(answer, weight.double(), made.test, eps=1e-3).all())
        assert int(answer.bytes_read[0]) == weight.nbytes
