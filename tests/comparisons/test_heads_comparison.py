"""Operating points: answers judged as they deserve, and costs as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve import extras
from softsieve.comparisons import head_methods as suite
from softsieve.comparisons.head_methods import Answer, Layer, Plan, Point
from softsieve.comparisons.heads import Truth, measure
from softsieve.data.synthetic_heads import make_head
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax, QuantisedWeight, TopK
from softsieve.integrations.hidden_states import Corpus, Head
from softsieve.reference.answers import is_right

LOGITS = torch.tensor([1.0, 3.0, 3.0, 2.0, -1.0])
P = LOGITS.double().softmax(-1)
N, D = 400, 24


def layer_of(weight: Tensor, bias: Tensor | None = None) -> Layer:
    return Layer(weight, weight.float(), bias)


@pytest.fixture(scope="module")
def made() -> tuple[Layer, Tensor]:
    weight, _, queries = make_head(N, D, rank=8, calibration=10, test=40)
    return layer_of(weight, torch.randn(N, generator=torch.Generator().manual_seed(1))), queries


def right_share(point: Point, layer: Layer, queries: Tensor, k: int) -> tuple[float, list[Answer]]:
    """Of the top k, and the answers."""
    truth = Truth(layer, queries, k=k, eps=0.3)
    answers = [point.ask(x, k) for x in queries]
    zeros = torch.zeros(k)
    return sum(truth.judge(i, a.indices, zeros)[0] for i, a in enumerate(answers)) / len(answers), answers


# -- judging


@pytest.mark.parametrize(
    ("indices", "factors", "expected"),
    [
        ([1], [1.0], (True, True)),
        ([2], [1.0], (True, True)),  # tied with row 1
        ([2], [1.29], (True, True)),
        ([2], [0.71], (True, True)),
        ([2], [1.31], (True, False)),
        ([2], [0.69], (True, False)),
        ([3], [1.0], (False, False)),
        ([-1], [1.0], (False, False)),  # row -1 is the last to torch, and nothing to faiss
        ([1, 2], [1.0, 1.0], (True, True)),
        ([2, 1], [1.0, 1.0], (True, True)),
        ([1, 1], [1.0, 1.0], (False, False)),
        ([1, 3], [1.0, 1.0], (False, False)),
        ([2, 1, 3], [1.0, 1.0, 1.31], (True, False)),
        ([1, 2, 0], [1.0, 1.0, 1.0], (False, False)),
    ],
)
def test_answers_are_judged_by_value(indices: list[int], factors: list[float], expected: tuple[bool, bool]) -> None:
    truth = Truth(layer_of(torch.eye(5)), torch.stack([torch.randn(5), LOGITS]), k=3, eps=0.3)
    found = torch.tensor(indices)
    assert truth.judge(1, found, P[found] * torch.tensor(factors, dtype=torch.float64)) == expected


def test_the_last_row_is_right_where_it_is_and_minus_one_is_not() -> None:
    truth = Truth(layer_of(torch.eye(5)), LOGITS.flip(0)[[1, 0, 4, 2, 3]][None], k=1, eps=0.3)
    assert truth.judge(0, torch.tensor([4]), P[1:2]) == (True, True)
    assert truth.judge(0, torch.tensor([-1]), P[1:2]) == (False, False)


def test_the_judgement_is_that_of_the_experiments(made: tuple[Layer, Tensor]) -> None:
    layer, queries = made
    g = torch.Generator().manual_seed(0)
    exact = queries.double() @ layer.weight.double().T + layer.bias
    truth = Truth(layer, queries, k=3, eps=0.3)
    verdicts = []
    for number, logits in enumerate(exact):
        top = logits.topk(5).indices
        indices = top[torch.randperm(3 if number % 2 else 5, generator=g)[:3]]
        probs = logits.softmax(-1)[indices] * (1 + 0.4 * (2 * torch.rand(3, generator=g) - 1))
        verdicts.append(truth.judge(number, indices, probs)[1])
        assert verdicts[-1] == bool(is_right(indices, probs, logits, eps=0.3))
    assert 0 < sum(verdicts) < len(verdicts)


# -- methods


@pytest.mark.parametrize("k", [1, 8, N])
def test_the_exact_product_is_right_and_reads_everything(made: tuple[Layer, Tensor], k: int) -> None:
    layer, queries = made
    (point,) = suite.RIVALS["exact fp32"](layer)
    truth = Truth(layer, queries, k=k, eps=1e-4)
    for number, x in enumerate(queries):
        answer = point.ask(x, k)
        assert answer.probs is not None
        assert truth.judge(number, answer.indices, answer.probs) == (True, True)
        assert (answer.bytes_read, answer.exact) == (4 * N * D, True)


def test_bfloat16_reads_half_and_is_nearly_right(made: tuple[Layer, Tensor]) -> None:
    (point,) = suite.RIVALS["exact bf16"](made[0])
    share, answers = right_share(point, *made, 1)
    assert share >= 0.8
    assert {a.bytes_read for a in answers} == {2 * N * D}


def test_a_preview_of_all_rows_is_exact_and_one_of_few_reads_less(made: tuple[Layer, Tensor]) -> None:
    layer, queries = made
    points = {point.setting: point for point in suite.RIVALS["SVD preview"](layer)}
    assert len(points) == len(suite.PREVIEW_SHARES) * len(suite.PREVIEW_ROWS)
    share, answers = right_share(points["rank d/4, 1024 rows"], layer, queries, 8)
    assert share == 1
    assert {a.bytes_read for a in answers} == {4 * (N * D + (N + D) * (D // 4))}
    less, answers = right_share(points["rank d/16, 64 rows"], layer, queries, 8)
    assert less < 1
    assert {a.bytes_read for a in answers} == {4 * (64 * D + (N + D) * (D // 16))}


def test_a_preview_fitted_to_the_queries_beats_one_that_is_not() -> None:
    """Queries in a direction in which rows hardly differ: the SVD of the weight alone leaves it out."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 16, generator=g) * torch.tensor([10.0] * 8 + [1.0] * 8)
    queries = 0.01 * torch.randn(200, 16, generator=g)
    queries[:, 8] += 1 - 2.0 * (torch.arange(200) % 2)  # far from 0, where the rest would decide
    layer = layer_of(weight)
    (plain,), (fitted,) = (
        [p for p in points if p.setting == "rank d/8, 64 rows"]
        for points in (
            suite.RIVALS["SVD preview"](layer),
            suite.FITTED["SVD preview, fitted"](layer, queries[:100], Plan([1], 0.3, [0.1], 0)),
        )
    )
    assert right_share(fitted, layer, queries[100:], 1)[0] > 0.95 > 0.6 > right_share(plain, layer, queries[100:], 1)[0]


def test_faiss_is_right_with_a_bias_when_it_looks_at_all_rows(made: tuple[Layer, Tensor]) -> None:
    pytest.importorskip("faiss")
    layer, queries = made
    truth = Truth(layer, queries, k=8, eps=0.01)
    for method, setting in {
        "flat": "",
        "HNSW": "efSearch 2048",
        "HNSW, L2": "efSearch 2048",
        "IVF": "nprobe 32",
    }.items():
        points = {point.setting: point for point in suite.RIVALS[f"faiss {method}"](layer)}
        share, answers = right_share(points[setting], layer, queries, 8)
        assert share >= (1.0 if method == "flat" else 0.9)
        assert all(a.probs is None for a in answers)
        if method == "flat":
            estimate = points[setting].estimate
            assert estimate is not None
            assert all(
                truth.judge(i, a.indices, estimate(x, 8))[1]
                for i, (a, x) in enumerate(zip(answers, queries, strict=True))
            )


def test_bytes_of_faiss_are_those_of_the_rows_it_looks_at(made: tuple[Layer, Tensor]) -> None:
    pytest.importorskip("faiss")
    layer, queries = made
    row = 4 * (D + 1)  # the bias is one more coordinate
    (flat,) = suite.RIVALS["faiss flat"](layer)
    assert flat.ask(queries[0], 1).bytes_read == N * row
    assert flat.ask(queries[0], 1).exact
    assert flat.index_mb * 1e6 >= N * row
    lists = int(4 * N**0.5)
    for method, fewest in (("faiss IVF", lists), ("faiss HNSW", 1), ("faiss HNSW, L2", 1)):
        points = list(suite.RIVALS[method](layer))
        means = []
        for point in points:
            answers = [point.ask(x, 1) for x in queries]
            assert all(a.bytes_read >= fewest * row and not a.exact for a in answers)
            means.append(sum(a.bytes_read for a in answers) / len(answers))
        assert means == sorted(means)
        assert means[0] < 0.7 * N * row
        assert means[-1] <= (N + lists) * 4 * (D + 2)


def test_a_search_that_finds_too_little_is_wrong_and_not_an_error() -> None:
    pytest.importorskip("faiss")
    layer = layer_of(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    point = next(iter(suite.RIVALS["faiss IVF"](layer)))
    x = torch.randn(4)
    answer = point.ask(x, 60)
    assert int(answer.indices.min()) == -1
    assert point.estimate is not None
    assert point.estimate(x, 60).shape == (60,)
    assert Truth(layer, x[None], k=60, eps=0.3).judge(0, answer.indices, point.estimate(x, 60)) == (False, False)


def test_without_faiss_its_methods_are_left_out_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    monkeypatch.setattr(extras, "import_module", missing)
    assert [name for name in suite.METHODS if name not in suite.available()] == [
        name for name in suite.METHODS if "faiss" in name or "torchao" in name
    ]
    with pytest.raises(InputError, match=r"int8, torchao needs the package torchao.*'softsieve\[quantised\]'"):
        list(suite.RIVALS["int8, torchao"](layer_of(torch.eye(4))))
    with pytest.raises(InputError, match=r"faiss flat needs the package faiss: pip install 'softsieve\[rivals\]'"):
        list(suite.RIVALS["faiss flat"](layer_of(torch.eye(4))))


def test_memory_of_a_head_counts_every_array_once() -> None:
    weight = torch.randn(50, 40)
    head = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac")
    head.bias = weight[:, 0]  # the same memory
    assert suite._bytes_in_memory([head, head, weight.numpy()]) == weight.nbytes


# -- measuring


def small_head(**fields: Any) -> Head:
    weight, calibration, test = make_head(200, 16, rank=6, calibration=60, test=30)
    corpus = Corpus(calibration.half(), test.half())
    return Head(**{"weight": weight, "bias": None, "beta": 1.0, "softcap": None, "corpora": {"a": corpus}} | fields)


def test_all_methods_are_measured_on_all_queries() -> None:
    results = measure(
        small_head(), name="h", methods=["coordinates"], ks=[1, 3], deltas=[0.1], test_queries=20, calibration=40
    )
    assert [(r.method, r.k) for r in results] == [
        (method, k) for k in (1, 3) for method in ("exact fp32", "exact bf16", "coordinates")
    ]
    for r in results:
        assert (r.head, r.corpus, r.queries, r.eps) == ("h", "a", 20, 0.3)
        assert 0 < r.ms_p20 <= r.ms <= r.ms_p80 <= r.ms_p99
        assert r.ms_p20 < r.ms_mean
        assert r.ms_cold is r.cold_ratio is None
        assert 0 <= r.success <= r.topk_right <= 1
        assert r.bytes_ratio == pytest.approx(200 * 16 * 2 / r.bytes_mean)
        assert r.delta == (0.1 if r.method == "coordinates" else None)
    for single, half, ours in (results[:3], results[3:]):
        assert single.success == single.exact_share == 1
        assert (single.bytes_ratio, half.bytes_ratio) == (0.5, 1)
        assert max(single.time_ratio, half.time_ratio) == 1
        assert ours.time_ratio == pytest.approx(min(single.ms, half.ms) / ours.ms)
        assert ours.success >= 0.7
        assert ours.index_mb > 0 < ours.build_s


def test_the_inverse_temperature_is_in_queries_and_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(layer: Layer) -> list[Point]:
        assert layer.bias is not None
        seen.append(layer.bias)

        def ask(x: Tensor, k: int) -> Answer:
            seen.append(x)
            return Answer(torch.arange(k), None, 1.0)

        return [Point("exact bf16", "", ask)]

    monkeypatch.setitem(suite.RIVALS, "exact bf16", spy)
    bias = torch.randn(200, generator=torch.Generator().manual_seed(0))
    head = small_head(bias=bias, beta=0.5)
    exact, _ = measure(head, name="h", methods=[], ks=[1])
    assert exact.success == 1
    assert torch.equal(seen[0], bias / 2)
    assert torch.equal(torch.stack(seen[2:]), head.corpora["a"].test.float() / 2)  # the first to warm up


def test_the_cascade_has_a_point_for_every_delta_and_one_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, float, int, object]] = []

    class Stand(AdaptiveSoftmax):
        def calibrate(self, queries: Tensor, k: object = 1, **more: Any) -> Any:
            calls.append((self.method, self.delta, len(queries), k))

        def topk(self, x: Tensor, k: int = 1, **more: Any) -> TopK:
            return AdaptiveSoftmax(self.weight, method="exact").topk(x, k)

    monkeypatch.setattr(suite, "AdaptiveSoftmax", Stand)
    methods = ["cascade", "cascade, pac", "coordinates"]
    results = measure(small_head(), name="h", methods=methods, ks=[1, 2], deltas=[0.1, 0.2])
    assert [(r.method, r.setting, r.delta, r.success) for r in results[2 : len(results) // 2]] == [
        ("cascade", "delta 0.1", 0.1, 1),
        ("cascade", "delta 0.2", 0.2, 1),
        ("cascade, pac", "delta 0.1", 0.1, 1),
        ("coordinates", "delta 0.1", 0.1, 1),
    ]
    assert calls == [
        ("cascade", 0.1, 60, [1, 2]),
        ("cascade", 0.2, 60, [1, 2]),
        ("coordinates", 0.1, 26, [1, 2]),
    ]


@pytest.mark.parametrize(("pooled", "expected"), [(False, [60, 60]), (True, [120])])
def test_methods_are_fitted_to_each_text_or_to_all_at_once(
    monkeypatch: pytest.MonkeyPatch, pooled: bool, expected: list[int]
) -> None:
    seen: list[int] = []

    def fit(layer: Layer, sample: Tensor, plan: suite.Plan) -> Iterator[Point]:
        seen.append(len(sample))
        yield from suite.RIVALS["exact fp32"](layer)

    monkeypatch.setitem(suite.FITTED, "cascade", fit)
    corpus = small_head().corpora["a"]
    head = small_head(corpora={"a": corpus, "b": corpus})
    results = measure(head, name="h", methods=["cascade"], ks=[1], pooled=pooled)
    assert seen == expected
    assert [result.corpus for result in results] == ["a"] * 3 + ["b"] * 3


def test_the_cascade_reads_less_and_is_right() -> None:
    weight, calibration, test = make_head(4000, 64, rank=8, calibration=400, test=60)
    head = small_head(weight=weight, corpora={"a": Corpus(calibration, test)})
    *_, ours = measure(head, name="h", methods=["cascade"], ks=[1], deltas=[0.1])
    assert ours.success >= 0.8
    assert ours.bytes_ratio > 1.5
    assert 0 < ours.index_mb < 2 * weight.nbytes / 1e6


def test_a_point_without_probabilities_has_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(layer: Layer) -> list[Point]:
        return [Point("exact bf16", "", lambda x, k: Answer(F(x, layer.full).topk(k).indices, None, 1.0))]

    F = torch.nn.functional.linear  # noqa: N806
    monkeypatch.setitem(suite.RIVALS, "exact bf16", silent)
    _, found = measure(small_head(), name="h", methods=[], ks=[1])
    assert (found.success, found.topk_right) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpora": ["b"]}, "corpus: expected one of 'a', found 'b'"),
        ({"methods": ["magic"]}, "method: expected one of 'exact fp32'"),
        ({"exact": ["exact fp8"]}, "exact: expected one of 'exact fp32', 'exact bf16', found 'exact fp8'"),
        ({"exact": []}, "exact: expected one of"),
        ({"ks": [201]}, "k: expected 1 to 200, found 201"),
        ({"ks": []}, "ks: expected at least one"),
        ({"deltas": []}, "deltas: expected at least one"),
    ],
)
def test_what_there_is_not_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure(small_head(), name="h", **options)
    with pytest.raises(InputError, match="expected tensors NAME"):
        measure(small_head(corpora={}), name="h")


# -- made-up heads


@pytest.mark.parametrize(("n", "d", "rank"), [(500, 96, 8), (2000, 60, 24), (300, 33, 1)])
def test_queries_have_the_rank_that_is_asked_for_and_a_softmax_of_all_kinds(n: int, d: int, rank: int) -> None:
    weight, calibration, test = make_head(n, d, rank=rank, calibration=2000, test=100)
    assert (weight.shape, weight.dtype, calibration.shape, test.shape) == ((n, d), torch.bfloat16, (2000, d), (100, d))
    energy = torch.linalg.eigvalsh(calibration.double().T @ calibration.double())
    assert energy.sum().square() / energy.square().sum() == pytest.approx(rank, rel=0.2)
    largest = (calibration @ weight.float().T).softmax(-1).amax(-1)
    assert largest.quantile(0.1) < 0.2 < largest.median() < 0.6 < 0.9 < largest.max()
    spectrum = torch.linalg.svdvals(weight.float())
    assert spectrum[0] > 2 * spectrum[-1]


def test_a_made_up_head_depends_on_the_seed_alone() -> None:
    first, again, other = (make_head(50, 8, rank=4, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.test, other.test)
    with pytest.raises(ValueError, match="rank: expected 1 to d = 8, found 9"):
        make_head(50, 8, rank=9)


# -- quantised weights


def test_int8_of_torch_is_nearly_right(made: tuple[Layer, Tensor]) -> None:
    """Its logits are near the exact ones, with the bias, and not the same: queries have 8 bits, too."""
    layer, queries = made
    (point,) = suite.RIVALS["int8, torch"](layer)
    share, answers = right_share(point, layer, queries, 1)
    assert share > 0.7
    exact = torch.nn.functional.linear(queries, layer.full, layer.bias).softmax(-1)
    probs = torch.stack([answer.probs[0] for answer in answers if answer.probs is not None])
    error = (probs - exact.gather(-1, torch.stack([answer.indices for answer in answers]))[:, 0]).abs()
    assert 0 < float(error.max()) < 0.2
    assert answers[0].bytes_read == N * D


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("bits", "least"), [(8, 0.8), (4, 0.3)])
def test_weights_of_torchao(bits: int, least: float) -> None:
    pytest.importorskip("torchao")
    weight, _, queries = make_head(N, 32, rank=8, calibration=10, test=40)
    layer = layer_of(weight, torch.randn(N, generator=torch.Generator().manual_seed(1)))
    (point,) = suite.RIVALS[f"int{bits}, torchao"](layer)
    share, answers = right_share(point, layer, queries, 1)
    assert share > least
    assert answers[0].bytes_read == N * 32 * bits / 8


def test_a_quantised_head_is_judged_by_its_own_rows() -> None:
    weight, calibration, test = make_head(300, 32, rank=6, calibration=80, test=30)
    scales = (weight.float().abs().amax(-1, keepdim=True) / 7).half()  # so coarse that other rows are the largest
    codes = (weight.float() / scales.float()).round().to(torch.int8)
    head = small_head(weight=QuantisedWeight(codes, scales), corpora={"a": Corpus(calibration, test)})
    results = measure(head, name="h", methods=["exact, own rows", "int8, torch"], ks=[1], test_queries=20, cold=3)
    assert [r.method for r in results] == ["exact fp32", "exact bf16", "exact, own rows", "int8, torch"]
    rows = results[2]
    assert rows.success == rows.exact_share == 1
    assert rows.bytes_mean == head.weight.nbytes == 300 * (32 + 2)
    for r in results:
        assert r.ms_cold is not None
        assert r.ms_cold > 0
        assert r.cold_ratio == pytest.approx(min(one.ms_cold for one in results[:2] if one.ms_cold) / r.ms_cold)
        assert r.mean_ratio == pytest.approx(min(one.ms_mean for one in results[:2]) / r.ms_mean)


def test_a_plain_head_has_no_quantised_rows(made: tuple[Layer, Tensor]) -> None:
    assert list(suite.RIVALS["exact, own rows"](made[0])) == []
