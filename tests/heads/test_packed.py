"""Previews of four bits: what their codes stand for, and how far off they say they are."""

from __future__ import annotations

import pytest
import torch

from softsieve.heads.cascade import index as indexes
from softsieve.heads.cascade import packed as packing
from softsieve.heads.cascade.basis import Moments


def built(n: int, d: int) -> tuple[torch.Tensor, indexes.Index]:
    g = torch.Generator().manual_seed(0)
    scale = torch.arange(1, d + 1) ** -0.7
    weight = torch.randn(n, d, generator=g) * scale
    moments = Moments(d)
    moments.update(torch.randn(400, d, generator=g) * scale)
    return weight, indexes.build(weight, None, moments)


@pytest.mark.parametrize(("d", "tiers"), [(300, [56, 120]), (520, [56, 120, 248])])
@pytest.mark.parametrize("n", [1, 700])
def test_codes_are_the_nearest_of_four_bits(n: int, d: int, tiers: list[int]) -> None:
    _, index = built(n, d)
    packed = packing.pack(index.records, tiers, index.unit, index.tier_steps.tolist())
    assert packed.codes.shape == (n, packing.size_of(tiers[-1]))
    for length in tiers[1:]:
        found = packing.unpack(packed.codes, length)
        codes = index.records[:, indexes.SPREADS : indexes.SPREADS + length].float()
        assert torch.equal(found[:, : packing.LEADING], codes[:, : packing.LEADING].clamp(max=packing.MOST))
        error = (found - codes)[:, packing.LEADING :]
        reached = codes[:, packing.LEADING :].abs() <= 7 * packing.STEP
        assert error[reached].abs().max() <= packing.STEP / 2
        assert len(set((found / packing.STEP)[:, packing.LEADING :].flatten().tolist())) <= 16


def test_spreads_are_the_errors() -> None:
    """Of the turned rows, within what a step of them and the errors of codes of eight bits leave open."""
    weight, index = built(700, 300)
    tiers = [56, 120]
    packed = packing.pack(index.records, tiers, index.unit, index.tier_steps.tolist())
    turned = (weight - index.centre) @ index.expand
    for tier, length in enumerate(tiers[1:], 1):
        estimated = torch.zeros_like(turned)
        estimated[:, :length] = packing.unpack(packed.codes, length) * index.unit[:length]
        error = (turned - estimated).norm(dim=-1)
        found = packed.spreads[tier].float() * packed.steps[tier]
        assert ((found - error).abs() <= packed.steps[tier] + 0.1 * error).all()
        assert (found / error - 1).median().abs() < 0.02
        narrow = index.records[:, tier].view(torch.uint8).float() * index.tier_steps[tier]
        assert (found >= narrow - packed.steps[tier] - index.tier_steps[tier]).all()
        assert found.mean() < 1.3 * narrow.mean()


def test_rows_of_zeros_and_one_tier() -> None:
    _, index = built(40, 64)
    records = torch.zeros_like(index.records)
    records[:, :1] = 1
    packed = packing.pack(records, [30], index.unit, [1.0])
    assert (packing.unpack(packed.codes, 30) == 0).all()
    assert (packed.spreads >= 1).all()


def test_leading_codes_of_all_sizes() -> None:
    records = torch.zeros(255, indexes.SPREADS + 120, dtype=torch.int8)
    records[:, : indexes.SPREADS] = 1
    records[:, indexes.SPREADS] = torch.arange(-127, 128)
    packed = packing.pack(records, [56, 120], torch.ones(120), [1.0, 1.0])
    assert packing.unpack(packed.codes, 120)[:, 0].tolist() == [min(code, packing.MOST) for code in range(-127, 128)]
    found = packed.spreads[1].float() * packed.steps[1]
    assert torch.allclose(found[[0, 246, 254]], torch.tensor([1.0, 1.0, 65**0.5]), atol=1.01 * packed.steps[1])
