"""The public class: what it answers, whatever it is given, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax, TopK
from softsieve.heads import Calibration
from softsieve.reference.heads import topk_softmax
from tests.heads.instances import gaussian, peaked, right

N, D = 60, 257


def made(seed: int = 0, count: int = 7, n: int = N, d: int = D) -> tuple[Tensor, Tensor]:
    return peaked(n, d, count, torch.Generator().manual_seed(seed))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "auto"])
@pytest.mark.parametrize("k", [1, 5, N])
def test_exact(method: str, k: int) -> None:
    weight, x = made()
    bias = torch.randn(N, generator=seeded(1))
    answer = AdaptiveSoftmax(weight, bias, beta=0.7, method=method).topk(x, k)
    truth = topk_softmax(weight, x, k, bias, beta=0.7)
    torch.testing.assert_close(answer.probs, truth.probs.float(), rtol=1e-4, atol=1e-30)
    torch.testing.assert_close(answer.logits, truth.logits.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answer.log_z, truth.log_z.float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(answer.indices, truth.indices)
    assert answer.exact.all()
    assert answer.coordinates.eq(N * D).all()
    assert answer.bytes_read.eq(4 * N * D).all()


# -- coordinates -------------------------------------------------------------------------------------------------------


def heads(weight: Tensor, sample: Tensor, *ks: int, **options: Any) -> dict[str, AdaptiveSoftmax]:
    """One with each kind of interval."""
    noise = float((weight.abs().max() * sample.abs().max() * weight.shape[1]) ** 2)
    chosen = {"method": "coordinates", **options}
    found = {
        "computed": AdaptiveSoftmax(weight, guarantee="pac", **chosen),
        "declared": AdaptiveSoftmax(weight, guarantee="pac", noise=noise, **chosen),
        "calibrated": AdaptiveSoftmax(weight, guarantee="calibrated", **chosen),
    }
    for k in ks:
        found["calibrated"].calibrate(sample, k, generator=seeded())
    return found


@pytest.mark.parametrize("name", ["computed", "declared", "calibrated"])
def test_bias_and_beta(name: str) -> None:
    weight, x = made(count=40)
    bias = 3 * torch.randn(N, generator=seeded(1))
    head = AdaptiveSoftmax(
        weight,
        bias,
        beta=1.7,
        eps=0.2,
        delta=0.05,
        method="coordinates",
        guarantee="calibrated" if name == "calibrated" else "pac",
        noise=1e4 if name == "declared" else None,
    )
    if name == "calibrated":
        head.calibrate(x[10:], 3, generator=seeded())
    answer = head.topk(x[:10], 3, generator=seeded())
    assert right(answer, weight, x[:10], 0.2, bias, 1.7).sum() >= (8 if name == "calibrated" else 10)
    truth = topk_softmax(weight, x[:10], 3, bias, beta=1.7)
    same = answer.indices == truth.indices
    torch.testing.assert_close(answer.logits[same], truth.logits.float()[same], rtol=1e-4, atol=1e-3)  # chosen are read


def test_reads_less_where_little_decides() -> None:
    """Large d and clear winners: a few percent of the weight, for every kind of interval that can know it."""
    weight, x = made(count=40, n=100, d=20_000)
    for name, head in heads(weight, x[10:], 1, delta=0.1).items():
        answer = head.topk(x[:10], generator=seeded())
        assert right(answer, weight, x[:10], 0.3).sum() >= (8 if name == "calibrated" else 10)
        share = float(answer.coordinates.double().mean()) / weight.numel()
        assert share < {"computed": 0.6, "declared": 1.01, "calibrated": 0.25}[name], (name, share)
        assert not answer.exact.any() or name == "declared"


def test_declared_noise_reads_nothing_more_as_d_grows() -> None:
    """The paper's first synthetic set: rows of d pulls with variance 0.1."""
    read = {}
    for d in (4_000, 64_000):
        g = seeded()
        weight = torch.randn(100, d, generator=g) / (10**0.5 * d)
        weight[0] += 1 / d
        head = AdaptiveSoftmax(weight, delta=0.1, method="coordinates", guarantee="pac", noise=0.1, read_chosen=False)
        answer = head.topk(torch.ones(5, d), generator=g)
        assert answer.indices.eq(0).all()
        read[d] = float(answer.coordinates.double().mean())
    assert read[64_000] <= 1.2 * read[4_000]
    assert 64_000 * 100 / read[64_000] > 100


def test_a_batch_is_its_queries() -> None:
    """The batch draws other coordinates, but every answer keeps its promise, in the shape of the queries."""
    weight, x = made(count=12)
    head = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac")
    answer = head.topk(x.view(3, 4, D), 2, generator=seeded())
    assert answer.indices.shape == answer.probs.shape == answer.logits.shape == (3, 4, 2)
    assert answer.log_z.shape == answer.coordinates.shape == answer.exact.shape == (3, 4)
    assert answer.log_z_interval.shape == (3, 4, 2)
    single = head.topk(x[5], 2, generator=seeded())
    assert single.indices.shape == (2,)
    assert single.log_z.shape == ()
    assert torch.equal(single.indices, answer.indices[1, 1])
    assert head.log_partition(x[5]).log_z.shape == ()


def test_column_and_entry_reads_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are read by columns, few by entries: the same intervals either way, up to rounding."""
    from softsieve.heads.coordinates import algorithm as coordinates

    weight, x = made(count=40, n=1500, d=600)
    head = AdaptiveSoftmax(weight, method="coordinates", delta=0.01)
    with pytest.warns(UserWarning, match="too few"):
        head.calibrate(x[8:], 3, generator=seeded())
    head.calibrations[3] = Calibration(torch.full((5,), 4.0, dtype=torch.float64), 32, 0.01)
    found = []
    for many in (1, 10**9):
        monkeypatch.setattr(coordinates, "MANY_ROWS", many)
        answer = head.topk(x[:8], 3, generator=seeded())
        assert right(answer, weight, x[:8], 0.3).all()
        found.append(answer)
    assert torch.equal(found[0].indices, found[1].indices)
    torch.testing.assert_close(found[0].probs, found[1].probs, rtol=0.3, atol=0)
    assert (found[0].bytes_read != found[1].bytes_read).any()


def test_queries_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from softsieve.heads.coordinates import algorithm as coordinates

    weight, x = made(count=9)
    monkeypatch.setattr(coordinates, "AT_ONCE", 2 * N)
    answer = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac").topk(x, 4, generator=seeded())
    assert answer.indices.shape == (9, 4)
    assert right(answer, weight, x, 0.3).all()


def test_a_generator_decides_what_is_read() -> None:
    weight, x = made(n=200, d=3000)
    for head in heads(weight, x.repeat(4, 1), 1, delta=0.1).values():
        torch.manual_seed(0)
        first, again, other = (head.topk(x, generator=seeded(seed)) for seed in (1, 1, 2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        torch.manual_seed(1)
        assert all(torch.equal(a, b) for a, b in zip(first, head.topk(x, generator=seeded(1)), strict=True))
        if not first.exact.all():
            assert not torch.equal(first.log_z_interval, other.log_z_interval)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", ["exact", "coordinates"])
def test_dtypes(dtype: torch.dtype, method: str) -> None:
    weight, x = (value.to(dtype) for value in made())
    head = AdaptiveSoftmax(weight, method=method, guarantee="pac")
    answer = head.topk(x.float(), 2, generator=seeded())
    assert right(answer, weight, x, 0.3).all()
    assert answer.probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_inputs_stay_as_they_are_and_no_graph_is_made() -> None:
    weight, x = made()
    weight.requires_grad_()
    before = weight.detach().clone(), x.clone()
    head = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac")
    answer = head.topk(x)
    assert not answer.probs.requires_grad
    assert head.weight.data_ptr() == weight.data_ptr()  # no copy
    assert torch.equal(before[0], weight)
    assert torch.equal(before[1], x)


def test_strided_weights() -> None:
    weight, x = made()
    wide = torch.randn(D, 2 * N)
    wide[:, ::2] = weight.T
    answer = AdaptiveSoftmax(wide[:, ::2].T, method="coordinates", guarantee="pac").topk(x, 2)
    assert right(answer, weight, x, 0.3).all()


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 50), (2, 1), (3, 2), (5, 33)])
@pytest.mark.parametrize("method", ["exact", "coordinates"])
def test_small_heads(n: int, d: int, method: str) -> None:
    weight, x = gaussian(n, d, 40, seeded())
    for head in heads(weight, x, 1, n, delta=0.2).values() if method == "coordinates" else [AdaptiveSoftmax(weight)]:
        for k in {1, n}:
            fine = right(head.topk(x[:30], k, generator=seeded()), weight, x[:30], 0.3)
            assert fine.sum() >= (20 if head.calibrations else 30)


def test_rotation_changes_nothing_but_what_is_read() -> None:
    weight, x = made(count=40, n=100, d=1000)
    head = AdaptiveSoftmax(weight, method="coordinates", delta=0.1, rotate=True, seed=3)
    head.calibrate(x[10:], 2, generator=seeded())
    assert right(head.topk(x[:10], 2, generator=seeded()), weight, x[:10], 0.3).sum() >= 8


def test_repr() -> None:
    assert repr(AdaptiveSoftmax(torch.ones(3, 2))) == (
        "AdaptiveSoftmax(3 x 2, eps=0.3, delta=0.01, method='auto', guarantee='calibrated')"
    )


def test_probabilities_of_all_sizes() -> None:
    weight = torch.tensor([[0.0], [-85.0], [-100.0], [-300.0], [-2000.0]], dtype=torch.float64)
    for options in ({}, {"method": "coordinates", "guarantee": "pac"}):
        answer = AdaptiveSoftmax(weight, **options).topk(torch.ones(1, dtype=torch.float64), 5)  # type: ignore[arg-type]
        torch.testing.assert_close(answer.probs, weight[:, 0].softmax(0), rtol=1e-9, atol=0)


def test_a_query_is_answered_as_in_any_other_batch() -> None:
    """Or what was calibrated on many would say nothing of one. The first of a batch draws the same coordinates."""
    g = seeded(3)
    weight = torch.randn(1100, 1024, generator=g)
    flat, near, peak = (scale * torch.randn(1024, generator=g) for scale in (1e-4, 0.05, 0.3))
    for wide in (0.5, 2.0):
        head = AdaptiveSoftmax(weight, method="coordinates", delta=0.1)
        head.calibrations[1] = Calibration(torch.full((6,), wide, dtype=torch.float64), 32, 0.1)
        for asked in (flat, near, peak):
            answers = [head.topk(torch.stack([asked, other]), generator=seeded()) for other in (flat, near, peak)]
            for answer in answers[1:]:
                for one, another in zip(answers[0], answer, strict=True):
                    torch.testing.assert_close(one[0], another[0], rtol=1e-5, atol=1e-5)


def test_zeros_are_not_read() -> None:
    weight, _ = made(n=40, d=600)
    x = torch.zeros(600)
    x[[5, 77, 300]] = torch.tensor([1.0, -2.0, 0.5])
    answer = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac", read_chosen=False).topk(x)
    assert right(TopK(*(value[None] for value in answer)), weight, x[None], 1e-4).all()
    assert int(answer.coordinates) == 40 * 3


@pytest.mark.parametrize("scales", [(1.0, 1e-25), (1e-13, 1e-13), (1e-25, 1e25), (1e20, 0.0), (1e-40, 1.0)])
def test_numbers_of_all_sizes(scales: tuple[float, float]) -> None:
    """Squares that float32 cannot hold make intervals neither NaN nor narrow."""
    for seed in range(10):
        weight, x = gaussian(20, 3000, 1, seeded(seed))
        weight, x = weight * scales[0], x * scales[1]
        head = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac")
        truth = x.double() @ weight.double().T
        answer, total = head.topk(x, generator=seeded(seed)), head.log_partition(x, generator=seeded(seed))
        best = truth.gather(-1, answer.indices)
        assert (truth.max() - best) <= 1e-4 * truth.abs().max() + 1e-44
        assert float(total.log_z) == pytest.approx(float(truth.logsumexp(-1)), abs=0.3)


def test_log_partition_at_the_ends_of_its_interval() -> None:
    """Whatever the truth is within the interval, the sum is within eps of it."""
    weight, x = gaussian(30, 3000, 20, seeded())
    found = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac", eps=0.3).log_partition(x, generator=seeded())
    for end in found.log_z_interval.unbind(-1):
        assert ((found.log_z - end).expm1().abs() <= 0.3 + 1e-4).all()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"eps": 0}, ValueError, "eps: expected a number between 0 and 1, both excluded, found 0"),
        ({"eps": 5e-324}, ValueError, "eps: expected a number between 0 and 1, both excluded, found 4.94066e-324"),
        ({"eps": 1.0}, ValueError, "eps: "),
        ({"eps": float("nan")}, ValueError, "eps: "),
        ({"eps": "0.1"}, TypeError, "eps: expected a number, found str"),
        ({"delta": 0.0}, ValueError, "delta: "),
        ({"delta": 1}, ValueError, "delta: "),
        ({"delta": -0.1}, ValueError, "delta: "),
        ({"beta": float("inf")}, ValueError, "beta: "),
        (
            {"method": "fast"},
            ValueError,
            "method: expected one of 'auto', 'exact', 'coordinates', 'cascade', found 'fast'",
        ),
        ({"guarantee": "none"}, ValueError, "guarantee: "),
        ({"noise": 1.0}, ValueError, "noise: expected None"),
        ({"noise": -1.0, "guarantee": "pac"}, ValueError, "noise: "),
        ({"noise": 1.0, "guarantee": "pac"}, ValueError, "noise: expected method='coordinates'"),
        (
            {"rotate": True},
            ValueError,
            "rotate: expected method='coordinates', which alone uses it, found True and 'auto'",
        ),
        ({"read_chosen": 1}, TypeError, "read_chosen: expected a bool, found int"),
        ({"rotate": None}, TypeError, "rotate: "),
        ({"seed": 1.5}, TypeError, "seed: "),
        ({"bias": torch.zeros(4)}, ValueError, r"bias: expected shape \(5,\), one a row, found \(4,\)"),
        ({"bias": torch.zeros(5, dtype=torch.long)}, TypeError, "bias: expected a floating-point dtype"),
        ({"bias": torch.full((5,), torch.inf)}, ValueError, "bias: expected finite numbers"),
        ({"weight": torch.zeros(5)}, ValueError, r"weight: expected a matrix \(n, d\), found shape \(5,\)"),
        ({"weight": torch.zeros(0, 3)}, ValueError, "weight: expected a non-empty"),
        ({"weight": torch.zeros(5, 3, dtype=torch.int8)}, TypeError, "weight: expected a floating-point dtype"),
        ({"weight": torch.full((5, 3), torch.nan)}, ValueError, "weight: expected finite numbers, found NaN"),
        ({"weight": [[1.0]]}, TypeError, "weight: expected a torch.Tensor, found list"),
        ({"weight": torch.zeros(5, 3).to_sparse()}, TypeError, "weight: expected a dense tensor"),
    ],
)
def test_refused_heads(options: dict[str, Any], error: type[Exception], says: str) -> None:
    weight = options.pop("weight", torch.zeros(5, 3))
    with pytest.raises(error, match=says):
        AdaptiveSoftmax(weight, **options)


@pytest.mark.parametrize(
    ("x", "k", "error", "says"),
    [
        (torch.zeros(4), 1, ValueError, r"x: expected shape \(\.\.\., 3\), found \(4,\)"),
        (torch.tensor(1.0), 1, ValueError, "x: "),
        (torch.zeros(0, 3), 1, ValueError, "x: expected a non-empty"),
        (torch.zeros(3, dtype=torch.long), 1, TypeError, "x: expected a floating-point dtype, found torch.int64"),
        (torch.tensor([0.0, torch.nan, 1.0]), 1, ValueError, "x: expected finite numbers"),
        (torch.tensor([0.0, torch.inf, 1.0]), 1, ValueError, "x: expected finite numbers"),
        (torch.zeros(3, device="meta"), 1, ValueError, "x: expected device cpu"),
        (torch.zeros(3), 0, ValueError, r"k: expected an int in \[1, 5\], found 0"),
        (torch.zeros(3), 6, ValueError, "k: "),
        (torch.zeros(3), 1.0, TypeError, "k: expected an int, found float"),
        (torch.zeros(3), True, TypeError, "k: "),
        ([0.0, 0.0, 0.0], 1, TypeError, "x: expected a torch.Tensor, found list"),
    ],
)
@pytest.mark.parametrize("method", ["exact", "coordinates"])
def test_refused_queries(x: Any, k: Any, error: type[Exception], says: str, method: str) -> None:
    head = AdaptiveSoftmax(torch.zeros(5, 3), method=method, guarantee="pac")
    with pytest.raises(error, match=says):
        head.topk(x, k)


def test_largest_finite_numbers_are_no_infinity() -> None:
    """Their sum is."""
    weight = torch.full((4, 3), 3e38)
    assert AdaptiveSoftmax(weight).topk(torch.full((3,), 1e-38)).probs == pytest.approx(0.25)


@pytest.mark.parametrize(("weight", "x", "beta"), [(1.0, 1e39, 1.0), (1.0, 1e10, 1e30), (1e30, 1e30, 1.0)], ids=str)
def test_logits_beyond_the_dtype(weight: float, x: float, beta: float) -> None:
    head = AdaptiveSoftmax(torch.full((4, 3), weight), beta=beta)
    with pytest.raises(ValueError, match=r"x(:| times beta: expected finite)"):
        head.topk(torch.full((3,), x, dtype=torch.float64))


def test_not_calibrated() -> None:
    head = AdaptiveSoftmax(torch.zeros(5, 300), method="coordinates")
    with pytest.raises(RuntimeError, match="not calibrated for k = 1, found none: call calibrate"):
        head.topk(torch.zeros(300))
