"""Updates of rows: stochastic rounding is unbiased, and the Triton kernels do what torch does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from softsieve.kernels import updates
from softsieve.kernels.updates import SGD, AdamW, round_randomly, update

RULES: dict[str, SGD | AdamW] = {
    "sgd": SGD(0.1, 0.0, 0.0),
    "momentum": SGD(0.1, 0.9, 0.01),
    "adamw": AdamW(0.1, 0.9, 0.99, 1e-8, 0.01, 0.19, 0.02),
}


def states_of(rule: SGD | AdamW, like: Tensor) -> list[Tensor]:
    count = 2 if isinstance(rule, AdamW) else int(rule.momentum > 0)
    return [torch.rand(like.shape) for _ in range(count)]


def rounded(values: Tensor, seed: int = 0) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_randomly(values.clone(), out, torch.Generator().manual_seed(seed))
    return out.float()


def test_rounding_is_right_on_average() -> None:
    torch.manual_seed(1)
    exact = torch.randn(50) * torch.logspace(-6, 6, 50)
    many = rounded(exact.repeat(20000, 1), seed=2)
    below = (exact.view(torch.int32) & -65536).view(torch.float32)
    above = ((exact.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((many == below) | (many == above)).all()
    share = ((exact - below) / (above - below)).double()
    found = (many == above).double().mean(0)
    assert ((found - share).abs() < 5 * (share * (1 - share) / 20000).sqrt() + 1e-9).all()


def test_numbers_of_bfloat16_and_infinities_stay() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, math.inf, -math.inf, 2.0**-130])
    assert torch.equal(rounded(values), values)
    assert rounded(torch.tensor([math.nan])).isnan()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_results_do_not_depend_on_blocks(rule: SGD | AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    value, grad = torch.randn(37, 5), torch.randn(37, 5)
    states = states_of(rule, value)
    others = [state.clone() for state in states]
    other = value.clone()
    update(value, grad, states, rule)
    monkeypatch.setitem(updates.AT_ONCE, "cpu", 12)
    update(other, grad, others, rule)
    assert torch.equal(value, other)
    assert all(map(torch.equal, states, others))


def test_a_seed_decides() -> None:
    value, grad = torch.randn(100, 7).bfloat16(), torch.randn(100, 7)
    found = []
    for seed in (3, 3, 4):
        own = value.clone()
        update(own, grad, [], RULES["sgd"], seed)
        found.append(own)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


triton = pytest.importorskip("triton", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_triton_does_what_torch_does(rule: SGD | AdamW, stochastic: bool) -> None:
    from softsieve.kernels import updates_triton

    value, grad = torch.randn(300, 7), torch.randn(300, 7)
    if stochastic:
        value = value.bfloat16()
    states = [state.to(DEVICE) for state in states_of(rule, value)]
    exact, own_states = value.double(), [state.double().cpu() for state in states]
    update(exact, grad.double(), own_states, rule)
    own = value.to(DEVICE).clone()
    updates_triton.update(own, grad.to(DEVICE), states, rule, 5 if stochastic else None)
    error = (own.cpu().double() - exact) / exact.abs()
    for ours, theirs in zip(states, own_states, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-5, atol=1e-6)
    if not stochastic:
        torch.testing.assert_close(own.cpu().double(), exact, rtol=1e-5, atol=1e-6)
        return
    assert error.abs().max() < 2**-7
    assert error.abs().max() > 2**-8.5  # else it is rounded to the nearest
    spread = float(error.std()) / error.numel() ** 0.5
    assert abs(float(error.mean())) < 5 * spread


def test_noise_of_triton_is_right_on_average_and_of_each_place_and_seed() -> None:
    """Every bit is up half of the time, and says nothing of the same number's in other steps, or of a neighbour's."""
    from softsieve.kernels import updates_triton

    exact, count, seeds = 1.0 + 2**-7 * 0.3, 4096, [7, 8, 7 + 2**32, 2**62, 2**62 + 1]  # 0.3 of the way to the next
    grad = torch.full((count,), -exact, device=DEVICE)
    up = []
    for seed in seeds:
        value = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
        updates_triton.update(value, grad, [], SGD(1.0, 0.0, 0.0), seed)
        assert set(value.tolist()) == {1.0, 1.0 + 2**-7}
        up.append((value > 1).double().cpu())
    many = torch.stack(up)
    deviation = (0.3 * 0.7) ** 0.5
    assert (abs(many.mean(1) - 0.3) < 4.5 * deviation / count**0.5).all()
    neighbours = torch.cat([torch.stack([row.roll(shift) for shift in range(1, 4)]) for row in many])
    correlations = torch.corrcoef(torch.cat([many, neighbours]))
    assert (correlations - torch.eye(len(correlations))).abs().max() < 5 / count**0.5


@pytest.mark.parametrize("shape", [(5, 3, 2), (300, 129, 33), (130, 16, 257), (70, 128, 64), (129, 7, 150)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_product_is_used_where_it_is_made(shape: tuple[int, int, int], stochastic: bool) -> None:
    from softsieve.kernels import updates_triton

    classes, rows, size = shape
    gradient, hidden = torch.randn(rows, classes), torch.randn(rows, size)
    value = torch.randn(classes, size)
    value = value.bfloat16() if stochastic else value
    expected = value.double() - 0.3 * gradient.double().T @ hidden.double()
    own = value.to(DEVICE)
    updates_triton.sgd_product(own, gradient.to(DEVICE), hidden.to(DEVICE), 0.3, 5 if stochastic else None)
    if not stochastic:
        torch.testing.assert_close(own.cpu().double(), expected, rtol=1e-4, atol=1e-4)
        return
    error = (own.cpu().double() - expected).abs()
    assert (error <= expected.abs() * 2**-7 + 1e-4).all()
    assert (error > expected.abs() * 2**-8.5 + 1e-4).any()  # else it is rounded to the nearest


def test_a_product_of_nothing_is_rounded_as_often_up_as_it_should() -> None:
    """Two numbers share their random bits, half of them each."""
    from softsieve.kernels import updates_triton

    exact, size, classes = 1.0 + 2**-7 * 0.3, 256, 64  # 0.3 of the way to the next number of bfloat16
    value = torch.zeros(classes, size, dtype=torch.bfloat16, device=DEVICE)
    gradient, hidden = torch.full((1, classes), -exact, device=DEVICE), torch.ones(1, size, device=DEVICE)
    updates_triton.sgd_product(value, gradient, hidden, 1.0, 11)
    assert set(value.flatten().tolist()) == {1.0, 1.0 + 2**-7}
    up = (value > 1).double().cpu()
    even, odd = up[:, ::2].flatten(), up[:, 1::2].flatten()
    for half in (even, odd):
        assert abs(float(half.mean()) - 0.3) < 4.5 * (0.21 / half.numel()) ** 0.5
    assert abs(float(torch.corrcoef(torch.stack([even, odd]))[0, 1])) < 4.5 / even.numel() ** 0.5
