"""Language models whose output layer is quantised: by torchao, or in the file that they were made of."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax, QuantisedWeight, WeightChanged
from softsieve.integrations.adaptive_head import INDEX, accelerate_head, restore_head
from softsieve.integrations.quantised_layer import check_same, read_torchao
from softsieve.reference.heads import dequantise
from tests.integrations.test_adaptive_head import PROMPT, WORDS, make, queries_of, steps

pytestmark = pytest.mark.filterwarnings("ignore:x.* unlike those of the calibration")


def quantised_model() -> tuple[Any, QuantisedWeight]:
    """A model whose output layer is what rows of 8 bits stand for, as one that was loaded from a GGUF file."""
    model = make(tied=False)
    own = model.get_output_embeddings().weight
    parts = own.detach().view(WORDS, 2, 16)
    scales = (parts.abs().amax(-1) / 127).half()
    codes = (parts / scales.float()[..., None]).round().clamp(-127, 127).view(WORDS, 32).to(torch.int8)
    weight = QuantisedWeight(codes, scales)
    with torch.no_grad():
        own.copy_(weight.float())
    return model, weight


def accelerated(model: Any, weight: QuantisedWeight | None = None) -> Any:
    generator = torch.Generator().manual_seed(0)
    module = accelerate_head(model, queries_of(model), delta=0.05, k=3, weight=weight, generator=generator)
    fit: Any = module.head.calibrations[3]
    module.head.calibrations[3] = fit._replace(batch=64)
    return module


def test_rows_of_a_file_are_read_instead_of_the_model_s() -> None:
    model, weight = quantised_model()
    exact = copy.deepcopy(model)
    module = accelerated(model, weight)
    assert module.head.weight.codes.data_ptr() == weight.codes.data_ptr()
    ids = torch.randint(WORDS, (4, 40), generator=torch.Generator().manual_seed(2))
    right, found = steps(exact, ids), steps(model, ids)
    best, order = found.topk(3)
    same = (right.gather(-1, order) - best).abs().amax(-1) <= 1e-4
    top = (right.topk(3).values - best).abs().amax(-1) <= 1e-4
    assert float((same & top).double().mean()) >= 0.9
    assert module.exactly < module.answered == ids.numel()
    with torch.no_grad():  # a fallback's product is with the rows, and counts their bytes
        before = module.bytes_read
        hidden = queries_of(exact)[:2]
        torch.testing.assert_close(module._exact(hidden, 2), hidden @ weight.float().T, rtol=1e-4, atol=1e-4)
        assert module.bytes_read - before == weight.nbytes
    greedy = {"max_new_tokens": 12, "do_sample": False}
    assert model.generate(PROMPT, **greedy).shape == (1, 16)
    again = copy.deepcopy(model)
    assert torch.equal(steps(again, ids).argmax(-1), found.argmax(-1))
    restore_head(model)
    assert not isinstance(model.get_output_embeddings(), type(module))


def test_its_index_is_saved_and_refused_for_the_weight_before(tmp_path: Path) -> None:
    model, weight = quantised_model()
    accelerated(model, weight).save_index(tmp_path)
    restore_head(model)
    with pytest.raises(InputError, match=r"weight: expected 8 bits in groups of 16 .* found float32"):
        accelerate_head(model, index=tmp_path / INDEX)
    module = accelerate_head(model, index=tmp_path / INDEX, weight=weight)
    assert isinstance(module.head.weight, QuantisedWeight)


def test_a_model_that_moves_is_noticed() -> None:
    model, weight = quantised_model()
    accelerated(model, weight)
    model.double()
    with torch.no_grad(), pytest.raises(WeightChanged, match="not where it was"):
        steps(model, PROMPT)


def test_a_weight_that_the_model_was_not_made_of() -> None:
    model, weight = quantised_model()
    own = model.get_output_embeddings().weight.detach()
    check_same(weight, own)
    check_same(weight, own.bfloat16())
    with pytest.raises(InputError, match=r"weight: expected shape \(3000, 32\), as the model has it, found 8 bits"):
        check_same(weight[:10], own)
    weight.codes[17] = 100
    with pytest.raises(InputError, match="found another: row 17 differs"):
        accelerate_head(model, queries_of(model), weight=weight)


class Int8Tensor:
    """What `read_torchao` looks at, without the package."""

    __module__ = "torchao.quantization"

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor, **fields: Any) -> None:
        self.qdata, self.scale, self.zero_point = codes, scales, zeros
        self.block_size = [1, codes.shape[1] // scales.shape[1]]
        self.__dict__ |= fields


def test_fields_of_torchao() -> None:
    codes, scales = torch.randint(-8, 8, (20, 32)).to(torch.int8), torch.rand(20, 4)
    none: Any = torch.zeros(20, 4, dtype=torch.int8)
    same: Any = read_torchao(Int8Tensor(codes, scales, none))  # type: ignore[arg-type]
    assert same.codes.data_ptr() == codes.data_ptr()
    torch.testing.assert_close(same.double(), dequantise(codes, scales))
    some = none + 3
    moved: Any = read_torchao(Int8Tensor(codes, scales, some))  # type: ignore[arg-type]
    torch.testing.assert_close(moved.double(), dequantise(codes - 3, scales))
    packed: Any = read_torchao(Int8Tensor(codes, scales, none, target_dtype="torch.int4"))  # type: ignore[arg-type]
    assert packed.codes.shape == (20, 16)
    torch.testing.assert_close(packed.double(), dequantise(codes, scales))
    for fields, message in (
        ({"act_quant_kwargs": "per row"}, "of quantised weights alone, found activations, too"),
        ({"block_size": [2, 8]}, r"found Int8Tensor in blocks of \(2, 8\)"),
    ):
        with pytest.raises(InputError, match=message):
            read_torchao(Int8Tensor(codes, scales, none, **fields))  # type: ignore[arg-type]
    assert read_torchao(nn.Parameter(torch.ones(2, 2))) is None
    with pytest.raises(TypeError, match="weight: expected a tensor or a QuantisedWeight, found torchao's Int8Tensor"):
        AdaptiveSoftmax(Int8Tensor(codes, scales, none))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_that_torchao_quantised(bits: int) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = make(tied=False)
    group = torchao.PerGroup(16)
    config = (
        torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)  # type: ignore[attr-defined]
        if bits == 4
        else torchao.Int8WeightOnlyConfig()
    )
    torchao.quantize_(model, config)
    exact = copy.deepcopy(model)
    module = accelerated(model)
    assert isinstance(module.head.weight, QuantisedWeight)
    assert module.head.weight.nbytes <= WORDS * (32 * bits // 8 + 8)
    ids = torch.randint(WORDS, (4, 30), generator=torch.Generator().manual_seed(2))
    right, found = steps(exact, ids), steps(model, ids)
    chosen = right.gather(-1, found.argmax(-1, keepdim=True))[..., 0]
    assert float(((right.amax(-1) - chosen).abs() <= 1e-3).double().mean()) >= 0.9
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, exact(ids).logits)  # prompts


@pytest.mark.filterwarnings("ignore")
def test_torchao_s_other_tensors_are_named() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = make(tied=False)
    torchao.quantize_(model, torchao.Float8WeightOnlyConfig())
    with pytest.raises(InputError, match=r"read one by one, found a weight of another kind \(Float8Tensor\)"):
        accelerate_head(model, torch.ones(3, 32))
