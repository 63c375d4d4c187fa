"""Heads that version 0.1 saved: `tests/heads/data`.

They were made there, of `spectral` below, by::

    for name, bias in (("plain", None), ("bias", torch.randn(600, generator=generator(3)))):
        head = AdaptiveSoftmax(spectral(600, 1), bias, delta=0.1, method="cascade")
        head.calibrate(4 * spectral(500, 2), [1, 8], generator=generator(0))
        head.save(f"cascade-{name}-0.1.safetensors")
    head = AdaptiveSoftmax(spectral(600, 1), delta=0.1, method="coordinates")
    head.calibrate(4 * spectral(100, 2), [1, 8], generator=generator(0))
    head.save("coordinates-0.1.safetensors")
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads import WeightChanged
from softsieve.heads.cascade.cpu import CpuCascade
from softsieve.heads.cascade.fit import CascadeCalibration
from softsieve.heads.cascade.index import is_coded
from tests.heads.instances import right
from tests.heads.test_sampling import as_often

pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")

DATA, EPS = Path(__file__).parent / "data", 0.3
CASCADES = ["cascade-plain-0.1", "cascade-bias-0.1"]
ALL = [*CASCADES, "coordinates-0.1"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spectral(count: int, seed: int) -> Tensor:
    """Rows, or a quarter of queries, that are the smaller the later the coordinate."""
    return torch.randn(count, 32, generator=generator(seed)) / torch.arange(1, 33)


def load(name: str) -> AdaptiveSoftmax:
    return AdaptiveSoftmax.load(DATA / f"{name}.safetensors")


def judge(head: AdaptiveSoftmax, k: int) -> None:
    """New queries are answered right as often as promised."""
    x = 4 * spectral(400, 10 + k)
    answer = head.topk(x, k, generator=generator(0) if head.method == "coordinates" else None)
    assert float(right(answer, head.weight, x, EPS, head.bias).double().mean()) >= 0.9
    assert float(answer.exact.double().mean()) < 0.1
    if head.method == "cascade":
        found = head.coverage(x, k)
        assert found.right >= 0.9
        assert found.read < 0.4


@pytest.mark.parametrize("k", [1, 5, 8])
@pytest.mark.parametrize("name", CASCADES)
def test_answers(name: str, k: int) -> None:
    judge(load(name), k)


@pytest.mark.parametrize("k", [1, 8])
def test_answers_of_coordinates(k: int) -> None:
    judge(load("coordinates-0.1"), k)


@pytest.mark.parametrize("name", CASCADES)
def test_what_was_not_known_counts_as_usual(name: str) -> None:
    head = load(name)
    assert head.index is not None
    assert not head.index.mean.any()
    for fit in head.calibrations.values():
        assert isinstance(fit, CascadeCalibration)
        assert math.isfinite(fit.width)
        assert (fit.signal, fit.toward_low, fit.toward_high) == (0.0, -2.0, 2.0)
        assert fit.most == fit.flat == fit.envelope == math.inf
    assert is_coded(head.index, head.weight) == (head.bias is not None)
    assert isinstance(head._engine, CpuCascade)
    assert not len(head._engine._arrays.base)  # a bias that is coded does not count twice


@pytest.mark.parametrize("name", CASCADES)
def test_logits(name: str) -> None:
    head, x = load(name), 4 * spectral(200, 5)
    found, answer = head.logits(x), head.topk(x, 8)
    assert torch.equal(found.argmax(-1), answer.indices[:, 0])
    torch.testing.assert_close(found.double().logsumexp(-1), answer.log_z.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_saved_again(name: str, tmp_path: Path) -> None:
    """Everything comes back, and answers alike."""
    head = load(name)
    head.save(tmp_path / "head")
    again = AdaptiveSoftmax.load(tmp_path / "head")
    one, other = head._state(), again._state()
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(value, other[0][key]) for key, value in one[0].items())
    x = 4 * spectral(50, 5)
    answers = [h.topk(x, 8, generator=generator(0)) for h in (head, again)]
    assert all(map(torch.equal, *answers))


@pytest.mark.parametrize("name", CASCADES)
def test_updated_rows(name: str) -> None:
    """In the basis that there is, with the bias where it was coded."""
    head = load(name)
    head.weight[[3, 500]] = spectral(2, 8)
    if head.bias is not None:
        head.bias[7] = 40.0
    with pytest.raises(WeightChanged, match="rows 3, "):
        head.topk(4 * spectral(1, 5), 8)
    head.update_rows([3, 7, 500])
    judge(head, 8)
    if head.bias is not None:
        best = head.topk(4 * spectral(100, 6), 8).indices[:, 0]
        assert float(best.eq(7).double().mean()) >= 0.9


@pytest.mark.parametrize("name", ALL)
def test_sample(name: str) -> None:
    head, x = load(name), 4 * spectral(1, 5)[0]
    truth = head.weight.double() @ x.double() + (0.0 if head.bias is None else head.bias.double())
    drawn = head.sample(x.expand(5000, -1), 1.5, generator=generator(0))
    assert as_often(drawn, (truth / 1.5).softmax(-1))
    assert set(head.sample(x.expand(500, -1), top_k=8, generator=generator(0)).tolist()) <= set(
        truth.topk(8).indices.tolist()
    )


@pytest.mark.parametrize("name", CASCADES)
def test_calibrated_again(name: str) -> None:
    """The same index learns what is usual, and draws without the exact product."""
    head = load(name)
    fit = head.calibrate(4 * spectral(300, 9), 8, generator=generator(0))
    assert fit.width < math.inf
    assert fit.signal > 0
    assert fit.most < math.inf
    assert fit.envelope < math.inf
    judge(head, 8)
    test = 4 * spectral(1, 5)[0]
    truth = head.weight.double() @ test.double() + (0.0 if head.bias is None else head.bias.double())
    drawn = head.sample(test.expand(5000, -1), generator=generator(0))
    assert as_often(drawn, truth.softmax(-1))


@pytest.mark.parametrize("name", CASCADES)
def test_built_again(name: str) -> None:
    head = load(name)
    head.build(4 * spectral(300, 4))
    assert head.index is not None
    assert not is_coded(head.index, head.weight)
    head.calibrate(4 * spectral(300, 9), 8, generator=generator(0))
    judge(head, 8)
