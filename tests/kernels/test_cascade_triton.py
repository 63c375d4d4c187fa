"""The cascade of a GPU against its reference: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from softsieve.heads.cascade import index as cascade
from softsieve.heads.cascade import packed as packing
from softsieve.heads.cascade.basis import Moments
from softsieve.heads.cascade.fit import TIERS
from softsieve.heads.cascade.gpu import GpuCascade
from softsieve.heads.engine import Layer, Options, Promise
from softsieve.kernels import cascade_triton as kernels
from softsieve.kernels.cascade_triton import ARRIVALS, CHOICE, DRIFTED, EXPENSIVE, Fields, Plan
from softsieve.reference import heads as reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
STATES = {0: "answered", DRIFTED: "drifted", EXPENSIVE: "expensive"}


class Asked:
    """A random head, and some queries asked of it by the kernels."""

    def __init__(
        self,
        n: int,
        d: int,
        *,
        batch: int = 1,
        biased: bool = False,
        beta: float = 1.0,
        dtype: torch.dtype = torch.float32,
        first: int = 0,
        tier: int = -1,
        bits: int = 8,
        spread: float = 6.0,
        seed: int = 0,
        weight: Tensor | None = None,
        **plan: Any,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        decay = torch.arange(1, d + 1) ** -0.7
        self.weight = (torch.randn(n, d, generator=g) * decay).to(dtype) if weight is None else weight
        self.bias = torch.randn(n, generator=g).to(dtype) if biased else None
        queries = torch.randn(500 + batch, d, generator=g) * decay * spread
        self.x, self.beta = queries[500:].to(dtype), beta
        moments = Moments(d)
        moments.update(queries[:500] * beta)
        self.index = cascade.build(self.weight, self.bias, moments)
        tiers = cascade.lengths(d)[1]
        steps = self.index.tier_steps.tolist()
        self.packed = None
        if bits == 4:
            self.packed = packing.pack(self.index.records, tiers[:TIERS], self.index.unit, steps)
        self.plan = Plan(
            k=1,
            first=first,
            length=tiers[first],
            step=steps[first] if self.packed is None else self.packed.steps[first],
            tier=tier,
            tier_length=tiers[tier] if tier >= 0 else 0,
            tier_step=steps[tier] if tier >= 0 else 0.0,
            width=3.0,
            correction=0.5,
            floor=math.log(0.15),
            doubt=0.5,
            tolerance=0.5,
            low=0.0,
            high=1e30,
            signal=0.0,
            toward_low=-2.0,
            toward_high=2.0,
            survivors=1e30,
            flat=1e30,
            interval=2.0,
            least=0.05,
            most=0.3,
            capacity=1024,
            packed=0 if self.packed is None else packing.size_of(tiers[first]),
        )._replace(**plan)
        self.totals = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        self.arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=DEVICE)

    def ask(self, *, dense: torch.dtype | None = torch.float32) -> tuple[Fields, Tensor | None]:
        on_device = cascade.Index(*(value.to(DEVICE) for value in self.index))
        bias = None if self.bias is None else self.bias.to(DEVICE)
        engine = GpuCascade(Layer(self.weight.to(DEVICE), bias, Options(self.beta)), on_device)
        out = None
        if dense is not None:
            out = torch.full((len(self.x), len(self.weight)), math.nan, dtype=dense, device=DEVICE)
        answers = kernels.ask(
            engine._arrays,
            self.plan,
            self.x.to(DEVICE),
            scale=self.beta,
            beta=self.beta,
            totals=self.totals,
            arrivals=self.arrivals,
            dense=out,
        )
        fields = kernels.fields(*(value.cpu() for value in answers))
        return fields, None if out is None else out.cpu()

    def truth(self, number: int) -> reference.CascadeAnswer:
        plan, index = self.plan, self.index
        used = [plan.first] if plan.tier < 0 else [plan.first, plan.tier]
        spreads = index.records.view(torch.uint8)[:, used].float() * index.tier_steps[used]
        coarse = None
        if self.packed is not None:
            spreads[:, 0] = self.packed.spreads[plan.first].float() * self.packed.steps[plan.first]
            coarse = packing.unpack(self.packed.codes, plan.length)
        return reference.short_cascade(
            self.weight,
            self.x[number],
            self.bias,
            beta=self.beta,
            index=reference.CascadeIndex(
                centre=index.centre,
                projection=index.project,
                codes=index.records[:, cascade.SPREADS :],
                lengths=[length for length in (plan.length, plan.tier_length) if length],
                deviations=spreads.T,
                probes=index.probes,
                mean=index.mean,
                coarse=coarse,
            ),
            plan=reference.CascadePlan(
                k=plan.k,
                width=plan.width,
                correction=plan.correction,
                floor=plan.floor,
                doubt=plan.doubt,
                tolerance=plan.tolerance,
                usual=reference.Usual(
                    plan.low, plan.high, plan.signal, plan.toward_low, plan.toward_high, plan.survivors, plan.flat
                ),
                upper=plan.upper,
                capacity=plan.capacity,
            ),
        )

    def check(self) -> list[str]:
        """Every query against the reference, but for decisions by less than rounding; the states."""
        answers, dense = self.ask()
        assert dense is not None
        assert not self.arrivals.any()
        states = []
        # Estimates have queries of some 16 bits; beside these, codes of four bits are three times as large.
        rounding = 3 if self.packed else 1
        for number in range(len(self.x)):
            truth = self.truth(number)
            states.append(STATES[int(answers.state[number])])
            if truth.closest < 5e-4:
                continue
            assert states[-1] == truth.state
            exact = reference.logits(self.weight, self.x[number], self.bias, beta=self.beta)
            k = self.plan.k
            if truth.state == "answered":
                assert int(answers.finalists[number]) == len(truth.finalists)
                log_z, half, logits = truth.log_z, truth.half, truth.dense
                promised = min(max(half * self.plan.interval, self.plan.least), self.plan.most)
            else:
                log_z, half, promised, logits = float(exact.logsumexp(0)), 0.0, 0.0, exact
            best, rows = exact.topk(k)
            if truth.state == "answered":
                best, rows = truth.logits, truth.indices
            assert answers.indices[number].tolist() == rows.tolist()
            close: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-4}
            torch.testing.assert_close(answers.logits[number].double(), best, **close)
            assert math.isclose(float(answers.log_z[number]), log_z, abs_tol=rounding * 2e-4)
            torch.testing.assert_close(answers.probs[number].double(), (best - log_z).exp(), rtol=1e-3, atol=1e-7)
            ends = torch.tensor([log_z - promised, log_z + promised], dtype=torch.float64)
            torch.testing.assert_close(answers.interval[number].double(), ends, rtol=1e-5, atol=1e-3)
            assert math.isclose(float(answers.half[number]), half, rel_tol=1e-2, abs_tol=1e-4)
            torch.testing.assert_close(dense[number].double(), logits, rtol=1e-4, atol=rounding * 1e-2)
        wrong = sum(state != "answered" for state in states)
        assert self.totals.tolist() == [len(self.x), wrong]
        return states


@pytest.mark.parametrize("tier", [-1, 1])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize(("batch", "biased", "beta"), [(1, False, 1.0), (3, True, 0.7), (9, False, -1.3)])
def test_agrees_with_the_reference(tier: int, k: int, batch: int, biased: bool, beta: float) -> None:
    asked = Asked(1300, 300, batch=batch, biased=biased, beta=beta, tier=tier, k=k)
    assert "answered" in asked.check()


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if GPU else [])])
def test_narrow_weights(dtype: torch.dtype) -> None:
    assert "answered" in Asked(1500, 300, batch=2, tier=1, k=2, dtype=dtype).check()


@pytest.mark.parametrize("n", [70, 255, 256, 257, CHOICE, CHOICE + 1])
def test_numbers_of_rows(n: int) -> None:
    """Around blocks and parts; k as large as there are groups of rows for it."""
    Asked(n, 130, batch=2, k=2, width=1.0).check()


@pytest.mark.parametrize("d", [2, 7, 16, 32, 111, 257])
def test_sizes(d: int) -> None:
    """Also those without tiers of whole cache lines, and with rows that are not aligned."""
    Asked(700, d, batch=2, biased=True, k=3, spread=20.0).check()


@pytest.mark.parametrize(("first", "tier"), [(1, -1), (0, 2), (1, 2), (2, -1)])
def test_longer_tiers(first: int, tier: int) -> None:
    assert "answered" in Asked(900, 520, first=first, tier=tier, k=2, batch=2).check()


@pytest.mark.parametrize(("first", "tier"), [(1, -1), (1, 2), (2, -1)])
@pytest.mark.parametrize(("batch", "biased", "k"), [(1, False, 1), (2, True, 3), (17, False, 1)])
def test_previews_of_four_bits(first: int, tier: int, batch: int, biased: bool, k: int) -> None:
    asked = Asked(900, 520, first=first, tier=tier, bits=4, k=k, batch=batch, biased=biased, beta=0.8)
    assert "answered" in asked.check()


def test_more_survivors_than_the_buffer_holds() -> None:
    states = Asked(1300, 300, batch=9, k=2, capacity=16, width=18.0).check()
    assert {"expensive", "answered"} == set(states)


def test_a_wider_interval_than_is_allowed() -> None:
    assert set(Asked(700, 300, batch=2, tier=1, tolerance=1e-6).check()) == {"expensive"}


@pytest.mark.parametrize("limits", [{"low": 5.0}, {"high": 0.01}])
@pytest.mark.parametrize("k", [0, 3])
def test_queries_from_elsewhere_are_answered_exactly(limits: dict[str, Any], k: int) -> None:
    assert set(Asked(1300, 300, batch=3, k=k, biased=True, beta=0.5, **limits).check()) == {"drifted"}


@pytest.mark.parametrize("fallbacks", [0, 1, 4, 9])
@pytest.mark.parametrize("k", [1, 3])
def test_nobody_one_several_and_all_of_a_batch_fall_back(k: int, fallbacks: int) -> None:
    asked = Asked(900, 200, batch=9, k=k, biased=True)
    errors = asked.ask(dense=None)[0].scale.sort().values
    high = 1e30 if fallbacks == 0 else 0.0 if fallbacks == 9 else float(errors[-fallbacks - 1 :][:2].mean())
    asked.plan = asked.plan._replace(high=high)
    asked.totals.zero_()
    states = asked.check()
    assert states.count("drifted") == fallbacks


def test_a_query_of_zeros() -> None:
    asked = Asked(600, 300, k=2, biased=True)
    asked.x.zero_()
    asked.check()


@pytest.mark.parametrize("limits", [{}, {"low": 1e9}])
def test_ties_go_by_their_rows(limits: dict[str, Any]) -> None:
    """In the answer of the cascade and in the exact one, within a block and across blocks."""
    weight = (torch.randn(30, 64) * 8).round().div(8).repeat(40, 1)
    asked = Asked(1200, 64, weight=weight, k=6, width=6.0, capacity=2048, **limits)
    asked.x = (asked.x * 8).round() / 8  # sums are exact, in whatever order the interpreter makes them
    answers, _ = asked.ask(dense=None)
    best = int((weight[:30].double() @ asked.x[0].double()).argmax())
    assert answers.indices[0].tolist() == [best + 30 * number for number in range(6)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_stays_one(bad: float) -> None:
    asked = Asked(600, 64, batch=2, k=2)
    asked.x[0, 3] = bad
    answers, _ = asked.ask(dense=None)
    assert answers.state.tolist()[0] == DRIFTED
    assert not answers.log_z[0].isfinite()
    assert answers.log_z[1].isfinite()
    assert ((answers.indices >= 0) & (answers.indices < 600)).all()


def test_what_is_read_is_counted() -> None:
    asked = Asked(800, 300, batch=2, tier=1, k=2, biased=True)
    answers, _ = asked.ask(dense=None)
    assert (answers.state == 0).all()
    probes, size = 64, 300
    for number in range(2):
        survivors, finalists = int(answers.survivors[number]), int(answers.finalists[number])
        codes = (800 + probes) * 56 + (survivors + probes) * 120
        assert int(answers.coordinates[number]) == (probes + finalists) * size + codes + survivors
        read = (
            (probes + finalists) * size * 4 + codes + 800 + 2 * probes + survivors + 120 * 300 * 2 + 4 * 300 + 4 * 800
        )
        assert int(answers.bytes_read[number]) == read
    whole, _ = Asked(800, 300, batch=2, tier=1, k=2, biased=True, low=1e9).ask(dense=None)
    assert (whole.coordinates == 800 * size).all()
    assert (whole.bytes_read >= 800 * size * 4).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_logits_in_another_dtype(dtype: torch.dtype) -> None:
    asked = Asked(700, 300, k=2, tier=1)
    _, wide = asked.ask()
    _, dense = asked.ask(dense=dtype)
    assert wide is not None
    assert dense is not None
    torch.testing.assert_close(dense.float(), wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("biased", [False, True])
def test_rows_above_a_threshold(biased: bool) -> None:
    """By upper ends that hold: all of them, and fallbacks by the exact product."""
    asked = Asked(1500, 96, batch=4, biased=biased, beta=0.7)
    bias = None if asked.bias is None else asked.bias.to(DEVICE)
    layer = Layer(asked.weight.to(DEVICE), bias, Options(asked.beta))
    engine = GpuCascade(layer, cascade.Index(*(value.to(DEVICE) for value in asked.index)))
    fit = engine.start(2, Promise(0.3, 0.1), 500)._replace(width=4.0, doubt=0.3, interval=2.0, envelope=12.0)
    x = (asked.x * asked.beta).to(DEVICE)
    for high in (100.0, 1e-6):
        engine.calibrations = {2: fit._replace(high=high)}
        for threshold in (-1e9, 2.0, 6.0, 1e9):
            found = engine.above(x, threshold, Promise(0.3, 0.1))
            right = reference.above(asked.weight, asked.x, threshold, asked.bias, beta=asked.beta)
            answer = found.ordered((4,))
            assert [rows.tolist() for rows, _ in answer.per_query()] == [rows for rows, _ in right]
            assert answer.exact.all() == (high < 1 or threshold < 0)
            assert answer.bytes_read.min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [1.0, 0.7])
def test_no_estimate_becomes_one_of_the_largest(beta: float, dtype: torch.dtype) -> None:
    """When logits are rounded, where numbers are far from 0 and near each other; fallbacks stay as they are."""
    k, promise, g = 2, Promise(0.3, 0.1), torch.Generator().manual_seed(0)
    scale = torch.arange(1, 97) ** -0.7
    weight, x = torch.randn(1500, 96, generator=g) * scale, torch.randn(508, 96, generator=g) * scale * 6 * beta
    bias = torch.full((1500,), 1000.0 if dtype == torch.bfloat16 else 8000.0)
    moments = Moments(96)
    moments.update(x[:500])
    index = cascade.Index(*(value.to(DEVICE) for value in cascade.build(weight, bias, moments)))
    engine = GpuCascade(Layer(weight.to(DEVICE), bias.to(DEVICE), Options(beta)), index)
    fit = engine.start(k, promise, 500)._replace(width=4.0, doubt=0.3, interval=2.0)
    queries = x[500:].to(DEVICE)
    for high in (100.0, 1e-6):
        engine.calibrations = {k: fit._replace(high=high)}
        wide, found = engine.logits(queries, promise), engine.logits(queries, promise, dtype)
        plain, rounded = ((one.logits / beta).to(dtype) for one in (wide, found))
        top = wide.logits.topk(k)
        assert torch.equal(found.logits.gather(-1, top.indices), top.values)
        many = [(one >= one.gather(-1, top.indices[:, -1:])).sum(-1) for one in (plain, rounded)]
        assert int(many[0].max()) > k  # the fault, and ties of exact logits
        if high < 1:
            assert torch.equal(wide.logits, found.logits)
        else:
            assert not int(found.exactly)
            assert many[1].tolist() == [k] * len(queries)


def test_the_last_to_arrive_leaves_zeros() -> None:
    """Twice with the same counters, also where everything is read."""
    asked = Asked(600, 64, batch=3, k=1, capacity=16, width=50.0)
    first, _ = asked.ask(dense=None)
    second, _ = asked.ask(dense=None)
    assert set(first.state.tolist()) == {0, EXPENSIVE}
    for before, after in zip(first, second, strict=True):
        torch.testing.assert_close(before, after)
    assert asked.totals.tolist() == [6, 2 * int((first.state != 0).sum())]


def test_the_kernels_compile() -> None:
    """For a GPU that is not there: what the interpreter lets pass, the compiler may not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_cascade.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout.count("\n") == 16
