"""Exact answers of some queries of a batch in one pass over the weight, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve.kernels import exact_triton as kernels
from softsieve.kernels.exact_triton import FEW, OTHER

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ROWS = OTHER.rows
WIDE = [torch.bfloat16] if GPU else []  # the interpreter's products of these are wrong


def head(
    n: int, d: int, batch: int, dtype: torch.dtype, *, biased: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(n + d + batch)
    weight, x = torch.randn(n, d, generator=g), torch.randn(batch, d, generator=g)
    bias = torch.randn(n, generator=g).to(DEVICE) if biased else None
    return weight.to(DEVICE, dtype), x.to(DEVICE), bias


def check(whole: Tensor, numbers: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, k: int, scale: float) -> None:
    logits = scale * (x.double() @ weight.double().T) + (0 if bias is None else bias.double())
    best, rows = logits.topk(k)
    close: Any = {"rtol": 1e-5, "atol": 1e-4}
    assert torch.equal(whole[:, :k], rows)
    torch.testing.assert_close(numbers[:, k : 2 * k].double(), best, **close)
    log_z = logits.logsumexp(-1)
    for place in range(3):
        torch.testing.assert_close(numbers[:, 2 * k + place].double(), log_z, **close)
    torch.testing.assert_close(numbers[:, :k].double(), (best - log_z[:, None]).exp(), rtol=1e-3, atol=1e-6)
    assert (numbers[:, 2 * k + 3] == 0).all()
    assert (whole[:, k] == weight.numel()).all()


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize(("batch", "biased"), [(1, False), (3, True), (FEW, False), (FEW + 1, True)])
def test_all_queries(k: int, batch: int, biased: bool) -> None:
    weight, x, bias = head(700, 100, batch, torch.float32, biased=biased)
    check(*kernels.ask(x, weight, bias, k=k, scale=0.7), x, weight, bias, k, 0.7)


@pytest.mark.parametrize("n", [1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS + 3])
@pytest.mark.parametrize("d", [1, 63, 64, 65])
def test_sizes(n: int, d: int) -> None:
    weight, x, _ = head(n, d, 2, torch.float32)
    check(*kernels.ask(x, weight, None, k=1, scale=1.0), x, weight, None, 1, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, *WIDE])
@pytest.mark.parametrize("narrow", [False, True])
def test_narrow_weights(dtype: torch.dtype, narrow: bool) -> None:
    """With queries of the same dtype, and with float32 ones that are multiplied as exactly as if the weight were."""
    weight, x, _ = head(600, 200, 20, dtype)
    x = x.to(dtype) if narrow else x
    check(*kernels.ask(x, weight, None, k=3, scale=1.0), x, weight, None, 3, 1.0)


@pytest.mark.parametrize("asked", [[], [4], [0, 7, 8, 19], list(range(20))])
@pytest.mark.parametrize("k", [1, 4])
def test_only_those_that_need_it(asked: list[int], k: int) -> None:
    """What others have already is left as it is, whoever of a batch needs it: nobody, one, several, all."""
    weight, x, _ = head(500, 96, 20, torch.float32)
    states = torch.zeros(20, dtype=torch.int32, device=DEVICE)
    states[asked] = 3
    whole = torch.full((20, k + 5), -7, dtype=torch.int64, device=DEVICE)
    numbers = torch.full((20, 2 * k + 8), math.nan, device=DEVICE)
    dense = torch.full((20, 500), math.nan, device=DEVICE)
    count = torch.tensor([len(asked)], dtype=torch.int32, device=DEVICE)
    kept = kernels.partials(weight, 20, k)
    kernels.answer(x, weight, None, states, count, kept, whole, numbers, k=k, scale=1.0, dense=dense)
    needs = states != 0
    check(whole[needs], numbers[needs], x[needs], weight, None, k, 1.0)
    torch.testing.assert_close(dense[needs].double(), x[needs].double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    assert (whole[~needs] == -7).all()
    assert numbers[~needs].isnan().all()
    assert dense[~needs].isnan().all()


@pytest.mark.parametrize("k", [1, 6])
def test_of_tied_rows_the_first(k: int) -> None:
    g = torch.Generator().manual_seed(0)
    weight = (torch.randn(30, 64, generator=g) * 8).round().div(8).repeat(20, 1).to(DEVICE)
    x = (torch.randn(3, 64, generator=g) * 8).round().div(8).to(DEVICE)  # sums are exact
    whole, _ = kernels.ask(x, weight, None, k=k, scale=1.0)
    first = (weight[:30] @ x.T).argmax(0)
    assert torch.equal(whole[:, :k], first[:, None] + 30 * torch.arange(k, device=DEVICE))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_stays_one(bad: float, k: int) -> None:
    weight, x, _ = head(300, 64, 2, torch.float32)
    x[0, 3] = bad
    whole, numbers = kernels.ask(x, weight, None, k=k, scale=1.0)
    assert not numbers[0, 2 * k].isfinite()
    check(whole[1:], numbers[1:], x[1:], weight, None, k, 1.0)
    assert ((whole[:, :k] >= 0) & (whole[:, :k] < 300)).all()


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_queries_share_one_pass() -> None:
    """For 64 queries it takes little more than for one, and nearly nothing for none."""
    weight, x, _ = head(131072, 1024, 64, torch.bfloat16)
    x = x.bfloat16()
    kept = kernels.partials(weight, 64, 1)
    whole = torch.zeros(64, 6, dtype=torch.int64, device=DEVICE)
    numbers = torch.zeros(64, 10, device=DEVICE)
    taken = {}
    for asked in (0, 1, 5, 64):
        states = (torch.arange(64, device=DEVICE) < asked).int()
        count = states.sum(0, dtype=torch.int32)[None]
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            begin.record()
            kernels.answer(x, weight, None, states, count, kept, whole, numbers, k=1, scale=1.0)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        taken[asked] = sorted(times)[6]
    assert taken[5] < 1.2 * taken[1]
    assert taken[64] < 1.6 * taken[1]
    assert taken[0] < 0.3 * taken[1]
