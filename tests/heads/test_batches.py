"""Several queries at a time on a CPU: one pass over the preview for all, and the answers of each by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.data.synthetic_heads import make_head
from softsieve.heads import DriftWarning, QuantisedWeight, TopK
from softsieve.heads.cascade import cpu, crossover
from softsieve.heads.cascade.cpu import CpuCascade, plan_of
from softsieve.heads.cascade.index import by_columns, lengths, long_previews
from softsieve.heads.engine import Promise
from softsieve.kernels import cascade_numba

pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
N, D, K = 1300, 256, 3  # of 256 coordinates a tier of 56 is a preview, too


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calibrations do not measure how long a batch takes, and batches share a pass however small they are."""
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 0)
    monkeypatch.setattr(cpu, "_WORK", 0)
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def quantised(weight: Tensor) -> QuantisedWeight:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    return QuantisedWeight((weight / scales).round().to(torch.int8), scales)


def fitted(kind: str, **options: Any) -> tuple[AdaptiveSoftmax, Tensor]:
    """A calibrated head whose queries are of two kinds, and other queries, one of them from elsewhere."""
    weight, x, others = make_head(N, D, rank=D // 4, calibration=400, test=24, seed=1)
    bias = torch.randn(N, generator=generator()) if kind == "bias" else None
    dtype = getattr(torch, kind, torch.float32)
    own = quantised(weight.float()) if kind == "quantised" else weight.to(dtype)
    head = AdaptiveSoftmax(own, bias, eps=0.3, delta=0.1, method="cascade", **options)
    head.build(x[:200])
    head.calibrate(x[200:], [0, K], generator=generator())
    others = others.clone()
    others[5] *= -20
    return head, others


def one_by_one(head: AdaptiveSoftmax, x: Tensor, k: int) -> TopK:
    answers = [head.topk(query[None], k) for query in x]
    return TopK(*(torch.cat(parts) for parts in zip(*answers, strict=True)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64", "bias", "quantised"])
def test_a_batch_has_the_answers_of_its_queries(kind: str, threads: int) -> None:
    """To the last bit, in groups or not, and whichever thread takes a query; what falls back does so by itself."""
    head, x = fitted(kind)
    numba.set_num_threads(threads)
    alone = one_by_one(head, x, K)
    assert alone.exact.sum() >= 1
    assert not alone.exact.all()
    answered = ~alone.exact  # an exact product of several queries may round otherwise
    compiled = list(cascade_numba.ask.signatures)
    for batch in (2, 7, 24):
        together = head.topk(x[:batch], K)
        assert cascade_numba.ask.signatures == compiled  # they call by its address what answers one query
        for field, one in zip(together, alone, strict=True):
            assert torch.equal(field[answered[:batch]], one[:batch][answered[:batch]])
        torch.testing.assert_close(together.logits, alone.logits[:batch], rtol=1e-5, atol=1e-5)
        assert torch.equal(together.exact, alone.exact[:batch])


def test_all_logits_and_partition_functions_of_a_batch() -> None:
    head, x = fitted("float32", beta=0.8)
    for ask in (head.logits, lambda x: head.log_partition(x).log_z):
        together = ask(x)
        alone = torch.cat([ask(query[None]) for query in x])
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


def test_a_batch_takes_the_kernel_for_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query does not, nor do queries of a small layer; groups are as large as there is memory for."""
    head, x = fitted("float32")
    engine: Any = head._engine
    sizes = []
    answer = CpuCascade._answer_together

    def noted(self: CpuCascade, arrays: Any, plan: Any, some: Any, *more: Any) -> None:
        sizes.append(len(some))
        answer(self, arrays, plan, some, *more)

    monkeypatch.setattr(CpuCascade, "_answer_together", noted)
    monkeypatch.setattr(cpu, "_GROUP", 10)
    numba.set_num_threads(1)
    head.topk(x, K)
    assert sizes == [10, 10, 4]
    head.topk(x[0], K)
    monkeypatch.setattr(cpu, "_WORK", 24 * N * engine.lengths[engine.calibrations[K].first])
    head.topk(x, K)
    assert sizes == [10, 10, 4]


def test_a_changed_weight_is_noticed_in_a_batch() -> None:
    head, x = fitted("float32")
    head.weight.data.mul_(1.5)
    with pytest.raises(RuntimeError, match="weight"):
        head.topk(x, K)


def test_a_batch_warns_of_drift_once() -> None:
    head, x = fitted("float32")
    with pytest.warns(DriftWarning, match="1 of 6") as caught:
        head.topk(x[:6], K)
    assert len(caught) == 1


# -- tiers as previews -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 64, 224, 256, 576, 640, 1536, 4096])
def test_long_previews_are_tiers(size: int) -> None:
    previews, tiers = lengths(size)
    longer = long_previews(size)
    assert set(longer) <= set(tiers)
    assert all(previews[-1] < length <= size / 4 for length in longer)
    assert bool(longer) == (size >= 224)


def test_columns_of_long_previews_are_the_codes_of_the_records() -> None:
    head, _ = fitted("float32")
    engine: Any = head._engine
    columns = by_columns(engine.index, 56)
    codes = columns.transpose(1, 2).reshape(-1, 56)
    assert torch.equal(codes[:N], engine.index.records[:, 8:64])
    assert not codes[N:].any()
    short = engine.index.columns.shape[1]
    assert torch.equal(columns[:, :short], engine.index.columns)


def test_long_previews_answer_and_travel_in_files(tmp_path: Path) -> None:
    """Their columns are made when a plan asks for them, also after the head was loaded."""
    head, x = fitted("float32")
    engine: Any = head._engine
    last = engine.previews - 1
    assert engine.lengths[last] == 56
    fit = engine.calibrations[K]._replace(first=0, second=last, limit=20.0, width=6.0, most=math.inf)
    fit = fit._replace(low=0.0, high=math.inf, signal=0.0, toward_low=-2.0, toward_high=2.0, flat=math.inf)
    engine.calibrations = {K: fit}
    head.save(tmp_path / "head.safetensors")
    loaded: Any = AdaptiveSoftmax.load(tmp_path / "head.safetensors")
    assert loaded._engine._arrays.columns.shape[1] < 56
    exact = AdaptiveSoftmax(head.weight, method="exact").topk(x, K)
    for one in (head, loaded):
        answer = one.topk(x, K)
        torch.testing.assert_close(answer.logits, exact.logits, rtol=1e-5, atol=1e-5)
        assert not answer.exact.all()
    assert loaded._engine._arrays.columns.shape[1] == 56


def test_calibration_chooses_from_all_previews() -> None:
    """The setting that is chosen is one of them, and promises what it should."""
    head, _ = fitted("float32")
    engine: Any = head._engine
    assert [setting["first"] for setting in engine.settings()] == list(range(len(engine.lengths)))
    start = engine.start(K, Promise(0.3, 0.1), 100)
    plans = [plan_of(start._replace(first=number, second=number)) for number in range(engine.previews)]
    assert engine._arrays_for(plans).columns.shape[1] == max(engine.lengths)
    assert np.array_equal(engine._arrays.previews, engine.lengths)
