"""How calibration on a GPU chooses: by what answers take in the mean, fallbacks included. Needs no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from softsieve.heads.cascade import calibration, fit, index
from softsieve.heads.cascade.basis import Moments
from softsieve.heads.cascade.calibration import Trial, Truth
from softsieve.heads.cascade.fit import CAPACITY
from softsieve.heads.cascade.gpu import _FALLBACK, GpuCascade
from softsieve.heads.engine import Layer, Options, Promise


@pytest.fixture(scope="module")
def engine() -> GpuCascade:
    g = torch.Generator().manual_seed(0)
    weight, queries = torch.randn(3000, 260, generator=g), torch.randn(400, 260, generator=g)
    moments = Moments(260)
    moments.update(queries)
    return GpuCascade(Layer(weight, None, Options()), index.build(weight, None, moments))


def trial(fallback: list[int], **fields: Any) -> Trial:
    count = len(fallback)
    zeros = torch.zeros(count, dtype=torch.float64)
    some: dict[str, Any] = {
        "fallback": torch.tensor(fallback),
        "indices": torch.zeros(count, 1, dtype=torch.int64),
        "logits": torch.zeros(count, 1),
        "log_z": zeros,
        "half": zeros,
        "coordinates": zeros.long(),
        "bytes_read": zeros.long() + 1000,
        "scale": zeros,
        "survivors": zeros.long(),
        "signal": zeros,
        "toward": zeros,
        "flat": zeros,
    }
    return Trial(**some | fields)


def test_a_fallback_costs_passes_over_the_weight(engine: GpuCascade) -> None:
    start = engine.start(1, Promise(0.3, 0.01), 1000)
    none, one = (engine.cost(start, trial([0] * 9 + [state])) for state in (0, 3))
    assert math.isclose(one - none, _FALLBACK / 10)
    assert engine.cost(start._replace(tier=1), trial([0] * 10)) > none
    assert engine.cost(start, trial([0] * 10, survivors=torch.full((10,), 500))) > none


@pytest.mark.parametrize(("slack", "wide"), [(0.0, 0), (0.1, 1), (10.0, 4)])
def test_the_widest_that_takes_hardly_more(
    engine: GpuCascade, monkeypatch: pytest.MonkeyPatch, slack: float, wide: int
) -> None:
    start = engine.start(1, Promise(0.3, 0.1), 100)._replace(width=4.0)
    costs, widths = [2.0, 1.5, 1.2, 1.05, 1.0], [6.0, 5.5, 5.0, 4.5, 4.0]

    class Sample:
        queries = torch.zeros(10, 1)
        engine: Any

        def read(self, trial: Trial) -> float:
            return 0.5

    sample: Any = Sample()
    sample.engine = engine
    monkeypatch.setattr(engine, "slack", slack, raising=False)
    monkeypatch.setattr(engine, "cost", lambda fit, trial: costs[widths.index(fit.width)], raising=False)
    monkeypatch.setattr(calibration, "_tried_widths", lambda shape: widths)
    answers = [(trial([0] * 10), number) for number in range(5)]
    monkeypatch.setattr(calibration, "_while_right", lambda sample, fits, wrong, errors: (answers, wrong))
    best, found = calibration._decide(sample, start, 9, lambda *_: None)
    assert best.width == widths[4 - wide]
    assert found is answers[4 - wide][0]


def test_room_for_twice_as_many_survivors(engine: GpuCascade) -> None:
    start = engine.start(1, Promise(0.3, 0.01), 1000)
    for most, room in ((3, 1024), (512, 1024), (600, 2048), (4096, 8192), (100_000, CAPACITY)):
        assert engine.roomy(start, trial([0, 0], survivors=torch.tensor([1, most]))).capacity == room


def test_some_previews_and_floors_are_compared(engine: GpuCascade) -> None:
    start = engine.start(1, Promise(0.3, 0.01), 1000)
    trials = [(start._replace(width=float(number)), trial([3] * (number % 5) + [0] * 20)) for number in range(10)]
    chosen = engine.choose(start, trials)
    assert [one.width % 5 for one in chosen] == sorted(one.width % 5 for one in chosen)
    variants = engine.variants(chosen[0]._replace(width=4.0))
    assert len({(one.width, one.floor) for one in variants}) == len(variants)
    assert min(one.width for one in variants) > 4
    assert engine.plan(variants[-1]).floor == math.log(variants[-1].floor * 0.15)


def test_intervals_that_are_too_wide_count_as_fallbacks(engine: GpuCascade, monkeypatch: pytest.MonkeyPatch) -> None:
    """What corrected sums are off by is known only after a trial that lets any of them pass."""
    start = engine.start(1, Promise(0.3, 0.01), 1000)
    off, half = torch.full((20,), 0.2, dtype=torch.float64), torch.full((20,), 0.1, dtype=torch.float64)
    half[:4] = 0.5
    asked = trial([0] * 20, half=half)
    monkeypatch.setattr(engine, "trials", lambda *_, **__: [asked])
    exact = Truth(torch.zeros(20, 1), off)
    sample = calibration._Sample(engine, torch.zeros(20, 260), exact)
    shaped, cost = calibration._doubt(sample, exact, start)
    assert math.isclose(shaped.doubt, 2.0, rel_tol=1e-3)
    assert math.isclose(cost, engine.cost(start, trial([3] * 4 + [0] * 16)))


def test_files_have_the_floor_where_it_is_another(engine: GpuCascade) -> None:
    start = engine.start(1, Promise(0.3, 0.01), 1000)._replace(width=5.0, high=3.0)
    sizes = {"k": 1, "rows": 3000, "previews": 5, "tiers": 3}
    for one in (start, start._replace(floor=0.25)):
        fields = fit.to_file(one)
        assert ("floor" in fields) == (one.floor != 1)
        assert fit.from_file(fields, **sizes) == one
    for bad in (0, -1.0):
        with pytest.raises(ValueError, match=r"floor|another head"):
            fit.from_file(fit.to_file(start) | {"floor": bad}, **sizes)


def test_files_have_the_bits_where_they_are_others(engine: GpuCascade) -> None:
    start = engine.start(1, Promise(0.3, 0.01), 1000)._replace(width=5.0, first=1)
    sizes = {"k": 1, "rows": 3000, "previews": 8, "tiers": 6}
    assert "bits" not in fit.to_file(start)
    packed = start._replace(bits=4)
    assert fit.from_file(fit.to_file(packed), **sizes) == packed
    for bad in ({"bits": 5}, {"bits": 0}, {"first": 0, "second": 0}, {"first": fit.TIERS, "second": fit.TIERS}):
        with pytest.raises(ValueError, match="another head"):
            fit.from_file(fit.to_file(packed) | bad, **sizes)
    with pytest.raises(TypeError, match="bits"):
        fit.from_file(fit.to_file(packed) | {"bits": 4.0}, **sizes)
