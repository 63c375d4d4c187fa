"""Drawing classes: how often each comes, from logits and from heads; and the logits that heads draw from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.data.synthetic_heads import make_head
from softsieve.heads.cascade.cpu import CpuCascade
from softsieve.heads.cascade.fit import CascadeCalibration
from softsieve.heads.sampling import draw, draw_below
from softsieve.reference.heads import topk_softmax
from tests.heads.instances import spectral

pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")
DRAWS = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_often(drawn: Tensor, probability: Tensor) -> bool:
    """Whether classes come as often as they should: chi-square at one in ten thousand, the rare ones taken together."""
    counts = torch.bincount(drawn, minlength=len(probability)).double()
    if bool(counts[probability == 0].any()):
        return False
    often = probability * len(drawn) >= 5
    kept = [torch.cat([v[often], v[~often].sum()[None]]) for v in (counts, probability.double() * len(drawn))]
    filled = kept[1] > 0
    if int(filled.sum()) == 1:
        return bool(kept[0][filled] == len(drawn))
    expected = kept[1][filled] * (len(drawn) / kept[1][filled].sum())
    return bool(chisquare(kept[0][filled], expected).pvalue > 1e-4)


def nucleus(probability: Tensor, top_p: float) -> Tensor:
    """The fewest largest that have this much together, made a distribution."""
    kept, total = torch.zeros_like(probability), 0.0
    for index in probability.argsort(descending=True).tolist():
        if total >= top_p:
            break
        kept[index] = probability[index]
        total += float(probability[index])
    return kept / kept.sum()


# -- from logits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [None, 1.0, 0.9, 0.5, 1e-9])
def test_draw(temperature: float, top_p: float | None) -> None:
    logits = 2 * torch.randn(40, generator=generator())
    found = draw(logits.expand(DRAWS, -1), temperature, top_p, generator(1))
    probability = (logits.double() / temperature).softmax(-1)
    assert as_often(found, nucleus(probability, 1.0 if top_p is None else top_p))
    assert not as_often(found, (logits.double() / temperature * 0.8).softmax(-1))


def test_rows_are_drawn_by_themselves() -> None:
    logits = torch.full((2, 3, 5), -torch.inf)
    wanted = torch.tensor([[0, 3, 4], [2, 2, 1]])
    logits.scatter_(-1, wanted[..., None], 1.0)
    for top_p in (None, 0.5):
        assert torch.equal(draw(logits, 1.0, top_p, None), wanted)
    assert draw(logits[0, 0], 1.0, None, None).shape == ()
    assert draw(logits, 1.0, 0.5, None).dtype == torch.int64


@pytest.mark.parametrize("top_p", [1e-30, 1e-3, 0.3])
def test_at_least_one(top_p: float) -> None:
    logits = torch.tensor([0.0, 0.5, -1.0]).expand(100, -1)
    assert draw(logits, 1.0, top_p, None).eq(1).all()


def test_the_last_of_a_nucleus() -> None:
    """Those before it have less than top_p, with it they have at least that."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log().expand(2000, -1)
    for top_p, classes in ((0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.76, 3), (0.99, {0, 1, 2, 3})):
        found = set(draw(logits, 1.0, top_p, generator()).tolist())
        assert found == classes or len(found) == classes


# -- from heads --------------------------------------------------------------------------------------------------------


def head(method: str, **options: Any) -> tuple[AdaptiveSoftmax, Tensor]:
    """A head and a query that it answers from a part of the weight, if it can, and for which its promise holds."""
    weight, x, _ = make_head(500, 64, rank=8, calibration=420, test=1)
    made = AdaptiveSoftmax(weight.float(), delta=0.1, method=method, **options)
    if method == "exact":
        return made, x[0]
    made.build(x[:150])
    made.calibrate(x[150:400], [1, 12], generator=generator())
    if method == "auto":
        for k, fit in list(made.calibrations.items()):
            assert isinstance(fit, CascadeCalibration)
            made.calibrations[k] = fit._replace(batch=DRAWS)
    new = x[400:]
    truth = topk_softmax(made.weight, new, 500)
    fine = ~made.topk(new, 12).exact & (truth.probs[:, 0] < 0.5) & bounded(made, new, 12)
    for k in (1, 12):
        fine &= (made.topk(new, k).indices == truth.indices[:, :k]).all(-1)
    return made, new[fine][0]


def bounded(made: AdaptiveSoftmax, x: Tensor, k: int) -> Tensor:
    """Whether no logit is above its upper end, and there are some that are below; (batch,)."""
    engine, fit = made._engine, made.calibrations[k]
    assert isinstance(engine, CpuCascade)
    assert isinstance(fit, CascadeCalibration)
    ends, answered, _ = engine.ends(x, fit)
    exact = x @ made.weight.T
    right: Tensor = answered & (exact <= ends + 1e-4).all(-1) & (ends > exact + 0.1).any(-1)
    return right


@pytest.fixture(scope="module")
def cascade() -> tuple[AdaptiveSoftmax, Tensor]:
    return head("cascade")


@pytest.fixture(scope="module")
def auto() -> tuple[AdaptiveSoftmax, Tensor]:
    """As if the cascade were faster for all batches."""
    return head("auto")


SETTINGS = [
    (temperature, top_k, top_p)
    for temperature in (0.7, 1.0, 1.5)
    for top_k, top_p in (
        (None, None),
        (None, 1.0),
        (None, 0.9),
        (12, None),
        (12, 1.0),
        (12, 0.9),
        (5, None),
        (1, None),
        (None, 1e-6),
        (500, 0.5),
    )
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_sample_exactly(temperature: float, top_k: int | None, top_p: float | None) -> None:
    made, x = head("exact")
    found = made.sample(x.expand(DRAWS, -1), temperature, top_k, top_p, generator=generator())
    assert as_often(found, expected(topk_softmax(made.weight, x, 500).logits, made, x, temperature, top_k, top_p))


def expected(
    logits: Tensor, made: AdaptiveSoftmax, x: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """The exact distribution over all rows."""
    rows = topk_softmax(made.weight, x, 500).indices
    kept = (logits / temperature)[: top_k or 500].softmax(-1)
    kept = nucleus(kept, top_p or 1.0)
    return torch.zeros(500, dtype=torch.float64).index_put((rows[: len(kept)],), kept)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [s for s in SETTINGS if not s[1] or s[1] <= 12])
def test_sample_of_a_cascade(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    cascade: tuple[AdaptiveSoftmax, Tensor],
    auto: tuple[AdaptiveSoftmax, Tensor],
) -> None:
    """Exact in distribution, though most of what it draws from is only estimated; the same with ``"auto"``."""
    made, x = cascade
    options = temperature, top_k, top_p
    one, other = (h.sample(x.expand(300, -1), *options, generator=generator(7)) for h in (made, auto[0]))
    assert torch.equal(one, other)
    truth = topk_softmax(made.weight, x, 500)
    assert torch.equal(made.topk(x, 12).indices, truth.indices[:12])
    found = made.sample(x.expand(DRAWS, -1), temperature, top_k, top_p, generator=generator())
    wanted = expected(truth.logits, made, x, temperature, top_k, top_p)
    assert as_often(found, wanted)
    estimated = (made.logits(x).double() / temperature).softmax(-1)
    assert top_k or top_p == 1e-6 or not as_often(found, nucleus(estimated, top_p or 1.0))  # logits would not do


@pytest.fixture(scope="module")
def greedy() -> tuple[AdaptiveSoftmax, Tensor]:
    """A head for k = 1 alone, and queries that it has not seen. Not to be changed."""
    weight, x = spectral(2000, 64, 1400, generator())
    made = AdaptiveSoftmax(weight, delta=0.05, method="cascade")
    made.calibrate(x[:1000] / 4, 1, generator=generator())
    return made, x[1000:] / 4


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, None), (1.0, 1.0), (1.5, None)])
def test_calibrated_for_one_it_draws_from_all(
    temperature: float, top_p: float | None, greedy: tuple[AdaptiveSoftmax, Tensor]
) -> None:
    made, x = greedy
    truth = (x.double() @ made.weight.double().T / temperature).softmax(-1)
    chosen = (bounded(made, x, 1) & (truth.amax(-1) < 0.3)).nonzero()[:2, 0]
    assert len(chosen) == 2
    for number in chosen.tolist():
        drawn = made.sample(x[number].expand(DRAWS, -1), temperature, None, top_p, generator=generator(number))
        assert as_often(drawn, truth[number])
    logits = (made.logits(x[chosen]).double() / temperature).softmax(-1)
    assert float((logits - truth[chosen]).abs().sum(-1).max()) / 2 > 0.02  # total variation of what was drawn from once


@pytest.mark.parametrize(("temperature", "share"), [(0.7, 0.1), (1.0, 0.2), (1.5, 0.5)])
def test_most_draws_take_no_exact_product(
    temperature: float, share: float, greedy: tuple[AdaptiveSoftmax, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x = greedy
    products: list[int] = []
    rows: list[int] = []
    exactly, some = made._layer.logits, made._layer.logits_of

    def count_products(queries: Tensor) -> Tensor:
        products.append(len(queries))
        return exactly(queries)

    def count_rows(queries: Tensor, query: Tensor, row: Tensor) -> Tensor:
        rows.append(len(row))
        return some(queries, query, row)

    monkeypatch.setattr(made._layer, "logits", count_products)
    monkeypatch.setattr(made._layer, "logits_of", count_rows)
    drawn = made.sample(x, temperature, generator=generator())
    assert bool(((drawn >= 0) & (drawn < 2000)).all())
    assert sum(products) <= share * len(x)
    assert sum(rows) < 0.1 * 2000 * len(x)


def test_top_p_alone_takes_the_exact_product(greedy: tuple[AdaptiveSoftmax, Tensor]) -> None:
    """It needs the whole partition function; the draws are those of an exact head."""
    made, x = greedy
    exact = AdaptiveSoftmax(made.weight, method="exact")
    one, other = (h.sample(x, 1.0, None, 0.9, generator=generator()) for h in (made, exact))
    assert torch.equal(one, other)


# -- from upper ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draw_below(temperature: float) -> None:
    """By the logits, wherever the ends are."""
    g = generator()
    logits = 2 * torch.randn(2, 40, generator=g)
    ends = logits + 3 * torch.rand(2, 40, generator=g) * (torch.rand(2, 40, generator=g) < 0.7)
    number = torch.arange(DRAWS) % 2
    found = draw_below(
        ends[number],
        torch.ones(DRAWS, dtype=torch.bool),
        lambda query, row: logits[number[query], row],
        temperature,
        generator=g,
    )
    for one in range(2):
        some = found[number == one]
        some = some[some >= 0]
        assert len(some) > 0.99 * DRAWS / 2
        assert as_often(some, (logits[one].double() / temperature).softmax(-1))
        assert not as_often(some, (ends[one].double() / temperature).softmax(-1))


def test_none_is_drawn_where_none_was_asked_or_accepted() -> None:
    logits = torch.zeros(6, 40)
    asked = torch.tensor([True, False, True, True, False, True])
    ends = logits.clone()
    ends[3:] += 1000
    found = draw_below(ends, asked, lambda query, row: logits[query, row], 1.0, generator=generator())
    assert found.ge(0).tolist() == [True, False, True, False, False, False]
    assert found[~found.ge(0)].eq(-1).all()
    assert found.dtype == torch.int64


def test_seeds(cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    made, x = cascade
    for options in ({}, {"top_k": 12}, {"top_p": 0.9}, {"top_k": 12, "top_p": 0.9}, {"temperature": 3.0}):
        one, same, other = (made.sample(x.expand(200, -1), generator=generator(seed), **options) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
    torch.manual_seed(5)
    one = made.sample(x.expand(200, -1))
    torch.manual_seed(5)
    assert torch.equal(one, made.sample(x.expand(200, -1)))


def test_shapes(cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    made, x = cascade
    for top_k in (None, 3):
        for leading in ((), (1,), (2, 3)):
            found = made.sample(x.expand(*leading, -1), top_k=top_k)
            assert found.shape == leading
            assert found.dtype == torch.int64
    assert made.logits(x.expand(2, 3, -1)).shape == (2, 3, 500)
    assert made.logits(x).shape == (500,)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.2}])
def test_no_temperature_is_greedy(options: dict[str, Any], cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    made, x = cascade
    best = int((made.weight @ x).argmax())
    for number in (0, 0.0):
        assert made.sample(x.expand(50, -1), number, **options).eq(best).all()
    for tiny in (1e-3, 1e-20):
        assert made.sample(x.expand(50, -1), tiny, **options).eq(best).all(), tiny


def test_a_temperature_that_takes_logits_beyond_their_dtype(cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    made, x = cascade
    assert made.sample(x.expand(50, -1), 1e-38).eq(int((made.weight @ x).argmax())).all()


def test_high_temperature_is_uniform(cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    made, x = cascade
    found = made.sample(x.expand(DRAWS, -1), 1e30, 12, generator=generator())
    assert as_often(found, torch.zeros(500).index_fill(0, topk_softmax(made.weight, x, 12).indices, 1 / 12))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"temperature": -1}, ValueError, r"temperature: expected a number in \[0, 1e\+30\], found -1"),
        ({"temperature": math.nan}, ValueError, "temperature: "),
        ({"temperature": math.inf}, ValueError, "temperature: "),
        ({"temperature": "hot"}, TypeError, "temperature: expected a number, found str"),
        ({"temperature": True}, TypeError, "temperature: "),
        ({"top_k": 0}, ValueError, r"top_k: expected an int in \[1, 500\], found 0"),
        ({"top_k": 501}, ValueError, "top_k: "),
        ({"top_k": 2.0}, TypeError, "top_k: expected an int, found float"),
        ({"top_p": 0}, ValueError, r"top_p: expected a number in \(0, 1\], found 0"),
        ({"top_p": 1.01}, ValueError, "top_p: "),
        ({"top_p": math.nan}, ValueError, "top_p: "),
        ({"top_p": "most"}, TypeError, "top_p: "),
        ({"x": torch.zeros(3)}, ValueError, r"x: expected shape \(\.\.\., 64\), found \(3,\)"),
        ({"x": torch.full((64,), math.nan)}, ValueError, "x: expected finite"),
        ({"x": torch.full((64,), 3e38)}, ValueError, r"x: expected logits that torch\.float32 can hold"),
    ],
)
@pytest.mark.parametrize("method", ["exact", "cascade"])
def test_refused(
    arguments: dict[str, Any],
    error: type[Exception],
    says: str,
    method: str,
    cascade: tuple[AdaptiveSoftmax, Tensor],
) -> None:
    made = cascade[0] if method == "cascade" else head("exact")[0]
    with pytest.raises(error, match=says):
        made.sample(**{"x": cascade[1], **arguments})


def test_what_is_not_calibrated(cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    made, x = cascade
    with pytest.raises(RuntimeError, match="not calibrated for k = 13"):
        made.sample(x, top_k=13)
    with pytest.raises(RuntimeError, match="not calibrated for k = 1, found none"):
        AdaptiveSoftmax(made.weight, method="cascade").sample(x)


# -- logits ------------------------------------------------------------------------------------------------------------


def test_logits_are_those_that_the_answer_rests_on(cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    """Exact where rows were read; together the normaliser of `topk`."""
    made, _ = cascade
    _, _, x = make_head(500, 64, rank=8, calibration=420, test=60)
    logits, answer = made.logits(x), made.topk(x, 12)
    torch.testing.assert_close(logits.double().logsumexp(-1), answer.log_z.double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits.gather(-1, answer.indices), answer.logits, rtol=1e-6, atol=1e-6)
    exact = x.double() @ made.weight.double().T
    off = (logits - exact).abs()
    assert float(off[answer.exact].max() if answer.exact.any() else 0.0) < 1e-4
    read = (off < 1e-5).sum(-1)[~answer.exact]
    assert int(read.min()) >= 12
    assert int(read.max()) <= 250  # of more, all would be read
    estimated = off[~answer.exact]
    assert 0.02 < float(estimated[estimated > 1e-5].square().mean().sqrt()) < 2


@pytest.mark.parametrize(
    "options",
    [{"method": "exact"}, {"method": "auto"}, {"method": "coordinates", "guarantee": "pac"}, {"guarantee": "pac"}],
    ids=str,
)
def test_logits_of_other_methods(options: dict[str, Any]) -> None:
    g = generator()
    weight, bias, x = torch.randn(30, 8, generator=g), torch.randn(30, generator=g), torch.randn(4, 8, generator=g)
    found = AdaptiveSoftmax(weight, bias, beta=0.7, **options).logits(x)
    torch.testing.assert_close(found, 0.7 * (x @ weight.T + bias))


def test_logits_of_queries_of_another_kind(cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    """Are exact; the others of the batch stay what they are."""
    made, x = cascade
    both = torch.stack([x, 30 * x, x])
    found = made.logits(both)
    torch.testing.assert_close(found[1], 30 * (made.weight @ x), rtol=1e-5, atol=1e-4)
    assert torch.equal(found[0], made.logits(x))
    assert torch.equal(found[2], found[0])


def test_the_largest_k_decides(cascade: tuple[AdaptiveSoftmax, Tensor]) -> None:
    made, x = cascade
    exact = made.weight.double() @ x.double()
    best = exact.topk(12).indices
    assert float((made.logits(x) - exact)[best].abs().max()) < 1e-4
    other = AdaptiveSoftmax(made.weight, delta=0.1, method="cascade")
    assert made.index is not None
    other._engine = CpuCascade(other._layer, made.index)
    other._engine.calibrations = {1: made.calibrations[1]}
    logits = other.logits(x)
    torch.testing.assert_close(logits.double().logsumexp(-1), other.topk(x, 1).log_z.double(), rtol=0, atol=1e-4)
    assert not torch.equal(logits, made.logits(x))
