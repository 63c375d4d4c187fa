"""A head whose cascade runs on a GPU: what it promises, no waiting for the device, CUDA graphs, files and devices."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.data.synthetic_heads import SyntheticHead, make_head
from softsieve.heads import GpuCascadeCalibration, WeightChanged
from softsieve.heads.cascade.gpu import GpuCascade

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KS = [1, 8, 0]


@pytest.fixture(scope="module")
def made() -> SyntheticHead:
    return make_head(20000, 320, rank=24, calibration=3000, test=1500, device="cuda")


@pytest.fixture(scope="module")
def head(made: SyntheticHead) -> AdaptiveSoftmax:
    found = AdaptiveSoftmax(made.weight, method="cascade")
    found.calibrate(made.calibration, KS, generator=torch.Generator().manual_seed(0))
    return found


@pytest.fixture
def _no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def exact(made: SyntheticHead, x: Tensor) -> Tensor:
    return x.double() @ made.weight.double().T


@pytest.mark.parametrize("k", [1, 3, 8])
def test_answers_are_right_as_often_as_promised(made: SyntheticHead, head: AdaptiveSoftmax, k: int) -> None:
    found, logits = head.topk(made.test, k), exact(made, made.test)
    best = logits.topk(k)
    same = (found.logits.double() - best.values).abs().amax(-1) < 1e-3
    p = logits.softmax(-1).gather(-1, found.indices)
    close = ((found.probs.double() - p).abs() <= 0.3 * p).all(-1)
    assert (same & close).double().mean() > 0.98
    assert head.coverage(made.test, k).right > 0.98
    assert found.bytes_read.double().mean() < 0.6 * made.weight.numel() * 2
    assert not found.exact.all()


def test_the_sum_of_exponentials(made: SyntheticHead, head: AdaptiveSoftmax) -> None:
    found, truth = head.log_partition(made.test), exact(made, made.test).logsumexp(-1)
    assert ((found.log_z.double() - truth).expm1().abs() <= 0.3).double().mean() > 0.98
    low, high = found.log_z_interval.double().unbind(-1)
    assert ((low - 1e-4 <= truth) & (truth <= high + 1e-4)).double().mean() > 0.98


def test_all_logits(made: SyntheticHead, head: AdaptiveSoftmax) -> None:
    found, truth = head.logits(made.test[:200]).double(), exact(made, made.test[:200])
    assert (found.argmax(-1) == truth.argmax(-1)).double().mean() > 0.97
    assert (found.logsumexp(-1) - truth.logsumexp(-1)).abs().median() < 0.1


@pytest.mark.parametrize("batch", [1, 2, 8, 17, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_batch_gives_the_same_answers(
    made: SyntheticHead, head: AdaptiveSoftmax, batch: int, dtype: torch.dtype
) -> None:
    x = made.test[:batch].to(dtype)
    alone = [head.topk(query, 8) for query in x]
    for _ in range(3):  # launches one by one, then recorded, then replayed
        together = head.topk(x, 8)
        assert torch.equal(together.indices, torch.stack([one.indices for one in alone]))
        torch.testing.assert_close(together.log_z, torch.stack([one.log_z for one in alone]), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_no_sync")
@pytest.mark.parametrize("batch", [1, 8])
def test_nothing_waits_for_the_device(made: SyntheticHead, head: AdaptiveSoftmax, batch: int) -> None:
    torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):  # recording a graph waits
        head.topk(made.test[:batch], 8)
        head.logits(made.test[:batch])
    torch.cuda.set_sync_debug_mode("error")
    head.topk(made.test[:batch], 8)
    head.logits(made.test[:batch])
    head.topk(made.test[:batch], 3)


@pytest.mark.parametrize("batch", [1, 5])
def test_as_a_part_of_the_callers_graph(made: SyntheticHead, head: AdaptiveSoftmax, batch: int) -> None:
    static = made.test[:batch].clone()
    head.topk(static, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = head.topk(static, 8)
    for start in range(0, 40, batch):
        x = made.test[start : start + batch]
        static.copy_(x)
        graph.replay()
        truth = head.topk(x, 8)
        assert torch.equal(recorded.indices, truth.indices)
        torch.testing.assert_close(recorded.log_z, truth.log_z)


def test_the_exact_product_when_it_cannot_be_answered(made: SyntheticHead, head: AdaptiveSoftmax) -> None:
    """Queries from elsewhere, within a batch of others: counted, and right."""
    x = made.test[:6].clone()
    x[1] = 40 * torch.randn(320, device="cuda")
    x[4] = 0
    before = head._engine.counts()  # type: ignore[union-attr]
    found, truth = head.topk(x, 8), exact(made, x)
    assert found.exact[1]
    torch.testing.assert_close(found.logits.double(), truth.topk(8).values, rtol=1e-4, atol=1e-3)
    assert torch.equal(found.indices[1], truth[1].topk(8).indices)
    torch.testing.assert_close(
        found.log_z[found.exact].double(), truth.logsumexp(-1)[found.exact], rtol=1e-4, atol=1e-3
    )
    after = head._engine.counts()  # type: ignore[union-attr]
    assert (after[0] - before[0], after[1] - before[1]) == (6, int(found.exact.sum()))
    assert (found.log_z_interval[found.exact].diff() == 0).all()


@pytest.mark.parametrize("k", [1, 8])
def test_any_number_of_fallbacks_in_one_graph(made: SyntheticHead, head: AdaptiveSoftmax, k: int) -> None:
    """Nobody, some and all of a batch: each time the same launches, right answers and no waiting."""
    batch = 24
    static = made.test[:batch].bfloat16()
    head.topk(static, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = head.topk(static, k)
    usual = (~head.topk(made.test[:400].bfloat16(), k).exact).nonzero()[:batch, 0]
    for count in (0, 1, 5, 17, batch, 0):
        x = made.test[usual].bfloat16()
        x[:count] = 40 * torch.randn(count, 320, device="cuda")
        static.copy_(x)
        graph.replay()
        logits = exact(made, x)
        assert recorded.exact.tolist() == [True] * count + [False] * (batch - count)
        torch.testing.assert_close(
            recorded.logits[:count].double(), logits[:count].topk(k).values, rtol=1e-4, atol=1e-3
        )
        torch.testing.assert_close(recorded.log_z[:count].double(), logits[:count].logsumexp(-1), rtol=1e-4, atol=1e-3)
        same = (recorded.logits.double() - logits.topk(k).values).abs().amax(-1) < 1e-2
        assert same.double().mean() > 0.9


@pytest.mark.parametrize("batch", [1, 8, 33, 64, 65])
@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exact_head_makes_its_answer_in_one_pass(
    made: SyntheticHead, batch: int, k: int, dtype: torch.dtype
) -> None:
    bias = torch.randn(20000, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    x = made.test[:batch].to(dtype)
    head = AdaptiveSoftmax(made.weight, bias, beta=0.8, method="exact")
    logits = 0.8 * (exact(made, x) + bias.double())
    best, log_z = logits.topk(k).values, logits.logsumexp(-1)
    found = head.topk(x, k) if k else head.log_partition(x)
    torch.testing.assert_close(found.log_z.double(), log_z, rtol=1e-5, atol=1e-4)
    if k:
        torch.testing.assert_close(found.logits.double(), best, rtol=1e-5, atol=1e-4)  # type: ignore[union-attr]
        torch.testing.assert_close(found.probs.double(), (best - log_z[:, None]).exp(), rtol=1e-3, atol=1e-6)  # type: ignore[union-attr]
    assert found.exact.all()


def test_streams_and_threads(made: SyntheticHead, head: AdaptiveSoftmax) -> None:
    truth = [head.topk(made.test[i : i + 2], 1).indices.clone() for i in range(0, 80, 2)]
    wrong: list[int] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for i in range(40):
                found = head.topk(made.test[2 * i : 2 * i + 2], 1).indices
                stream.synchronize()
                if not torch.equal(found, truth[i]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_same_file_serves_both(made: SyntheticHead, head: AdaptiveSoftmax, tmp_path: Path) -> None:
    head.save(tmp_path / "gpu.safetensors")
    there = AdaptiveSoftmax.load(tmp_path / "gpu.safetensors")
    assert there.weight.is_cpu
    assert not there.calibrations
    with pytest.raises(RuntimeError, match="another kind of device"):
        there.topk(made.test[:1].cpu())
    there.calibrate(made.calibration.cpu(), 1, generator=torch.Generator().manual_seed(0))
    assert there.coverage(made.test[:200].cpu()).right > 0.95
    there.save(tmp_path / "both.safetensors")
    back = AdaptiveSoftmax.load(tmp_path / "both.safetensors").to("cuda")
    assert sorted(back.calibrations) == sorted(KS)
    assert torch.equal(back.topk(made.test[:50]).indices, head.topk(made.test[:50]).indices)
    assert sorted(back.to("cpu").calibrations) == [1]
    assert back.index is not None
    assert head.index is not None
    for one, other in zip(back.index, head.index, strict=True):
        assert torch.equal(one, other)


def test_an_index_of_the_cpu_is_one_for_the_gpu(made: SyntheticHead) -> None:
    there = AdaptiveSoftmax(made.weight.cpu(), method="cascade")
    there.build(made.calibration.cpu())
    here = there.to("cuda")
    with pytest.raises(RuntimeError, match="not calibrated"):
        here.topk(made.test[:1])
    fit: Any = here.calibrate(made.calibration, 1)
    assert isinstance(fit, GpuCascadeCalibration)
    assert fit.capacity > 0
    assert isinstance(here._engine, GpuCascade)
    assert here.coverage(made.test, 1).right > 0.98


def test_a_bias_and_a_temperature(made: SyntheticHead) -> None:
    g = torch.Generator("cuda").manual_seed(1)
    bias = torch.randn(20000, device="cuda", generator=g)
    found = AdaptiveSoftmax(made.weight.float(), bias, beta=0.8, method="cascade")
    found.calibrate(made.calibration, 2)
    truth = 0.8 * (exact(made, made.test) + bias.double())
    answer = found.topk(made.test, 2)
    assert ((answer.logits.double() - truth.topk(2).values).abs().amax(-1) < 1e-3).double().mean() > 0.98


def test_a_weight_that_has_changed(made: SyntheticHead) -> None:
    weight = made.weight.clone()
    found = AdaptiveSoftmax(weight, method="cascade")
    found.calibrate(made.calibration, 1)
    weight[7] += 1
    with pytest.raises(WeightChanged, match="rows 7"):
        found.topk(made.test[:1])
    found.update_rows([7])
    truth = made.test[:200].double() @ weight.double().T
    assert (found.topk(made.test[:200]).indices[:, 0] == truth.argmax(-1)).double().mean() > 0.97


def test_a_fused_step_is_noticed(made: SyntheticHead) -> None:
    """Torch does not count what it changes."""
    weight = torch.nn.Parameter(made.weight.clone())
    head = AdaptiveSoftmax(weight, method="cascade")
    head.calibrate(made.calibration, generator=torch.Generator().manual_seed(0))
    weight.grad = torch.zeros_like(weight)
    weight.grad[:5] = 1
    torch.optim.SGD([weight], lr=10.0, fused=True).step()
    with pytest.raises(WeightChanged, match="rows 0, 1, 2, 3, 4 have changed"):
        head.topk(made.test[:3])
    with pytest.raises(WeightChanged):
        head.to("cpu")
    with pytest.raises(WeightChanged):
        copy.deepcopy(head).topk(made.test[:3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_modes_and_copies(made: SyntheticHead, head: AdaptiveSoftmax, dtype: torch.dtype) -> None:
    x = made.test[:9].float()
    right = [*head.topk(x, 8), *head.log_partition(x), head.logits(x)]
    for other in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        for _ in range(3):  # the second call records a graph, the third replays it
            with torch.autocast("cuda", dtype), torch.inference_mode():
                found = [*other.topk(x, 8), *other.log_partition(x), other.logits(x)]
            for one, another in zip(found, right, strict=True):
                torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(other.topk(x, 8).logits, right[2], rtol=1e-5, atol=1e-5)
    exact_head = AdaptiveSoftmax(made.weight, method="exact")
    with torch.autocast("cuda", dtype):
        found = [*exact_head.topk(x, 8)]
    torch.testing.assert_close(found, [*exact_head.topk(x, 8)])


def test_auto_takes_what_is_faster(made: SyntheticHead) -> None:
    found = AdaptiveSoftmax(made.weight)
    fit: Any = found.calibrate(made.calibration, 1)
    answer = found.topk(made.test[:100])
    assert answer.exact.all() == (fit.batch < 100)


def test_what_it_does_not_do(made: SyntheticHead) -> None:
    for weight, what in ((made.weight.double(), "float64"), (made.weight.T.contiguous().T, "stored by columns")):
        with pytest.raises(ValueError, match=what):
            AdaptiveSoftmax(weight, method="cascade")
    with pytest.raises(ValueError, match="pac"):
        AdaptiveSoftmax(made.weight, method="cascade", guarantee="pac")
    with pytest.raises(ValueError, match="k: expected"):
        AdaptiveSoftmax(made.weight).calibrate(made.calibration, 65)


# -- what all logits say -----------------------------------------------------------------------------------------------


def heavy(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries of very different lengths: estimates of some rows are far from their logits."""
    g = torch.Generator("cuda").manual_seed(seed)
    scale = torch.arange(1, 65, device="cuda") ** -0.5

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    return random(5000, 64) * scale, random(count, 64) * scale * 8 * torch.exp(0.5 * random(count, 1))


@pytest.mark.parametrize("kind", ["heavy", "language"])
@pytest.mark.parametrize("k", [1, 8])
def test_all_logits_agree_with_the_top_k(kind: str, k: int, made: SyntheticHead) -> None:
    if kind == "heavy":
        weight, x = heavy(6000)
    else:
        weight, x = made.weight, torch.cat([made.calibration, made.test]).float()
    head = AdaptiveSoftmax(weight, method="cascade")
    head.calibrate(x[:3000], k, generator=torch.Generator().manual_seed(0))
    x = x[3000:]
    found, logits = head.topk(x, k), head.logits(x)
    assert torch.equal(logits.argmax(-1), found.indices[:, 0])
    rows = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, found.indices, True)
    assert (logits.masked_fill(rows, -torch.inf).amax(-1) <= found.logits[:, -1]).all()
    difference = (logits.logsumexp(-1) - found.log_z).abs()
    assert difference.max() <= -torch.log1p(torch.tensor(-head.eps))
    truth = x.double() @ weight.double().T
    wrong = (truth.gather(-1, logits.argmax(-1, keepdim=True))[:, 0] < truth.amax(-1) - 1e-3).double().mean()
    assert wrong <= 2 * head.delta


def test_queries_from_elsewhere_are_answered_exactly(made: SyntheticHead, head: AdaptiveSoftmax) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    d = made.test.shape[1]
    turned = torch.linalg.qr(torch.randn(d, d, generator=g, device="cuda")).Q
    main = torch.linalg.eigh(made.calibration.T @ made.calibration).eigenvectors.flip(1)
    known = head.topk(made.test)
    assert known.exact.double().mean() < 0.2
    for x in (
        made.test / 10,
        made.test * 10,
        made.test @ turned,
        *(made.test - made.test @ main[:, :m] @ main[:, :m].T for m in (d // 16, d // 8, d // 4)),
    ):
        found, truth = head.topk(x), exact(made, x)
        wrong = (found.logits[:, 0].double() - truth.amax(-1)).abs() > 1e-3 * (1 + truth.amax(-1).abs())
        assert (wrong & ~found.exact).double().mean() <= head.delta


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("top_k", [None, 8])
def test_drawn_as_from_the_exact_softmax(
    made: SyntheticHead, head: AdaptiveSoftmax, temperature: float, top_k: int | None
) -> None:
    from scipy.stats import chisquare

    g = torch.Generator("cuda").manual_seed(0)
    x = made.test[7]
    drawn = torch.cat([head.sample(x.expand(1000, -1), temperature, top_k, generator=g) for _ in range(20)])
    logits = exact(made, x[None])[0] / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    expected = (logits.softmax(-1) * len(drawn)).cpu()
    counts = torch.bincount(drawn, minlength=len(expected)).double().cpu()
    often = expected >= 5
    found, right = (torch.cat([value[often], value[~often].sum()[None]]) for value in (counts, expected))
    some = right > 1e-9
    assert not counts[expected == 0].any()
    assert chisquare(found[some].numpy(), (right[some] * (found.sum() / right.sum())).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(made: SyntheticHead, head: AdaptiveSoftmax, dtype: torch.dtype) -> None:
    x = torch.cat([made.test[:4], 50 * made.test[4:6]])  # the last ones from elsewhere
    exactly = AdaptiveSoftmax(made.weight, method="exact")

    def answers() -> list[Tensor]:
        return [*head.topk(x), head.logits(x), *exactly.topk(x), exactly.logits(x)]

    plain = answers()
    with torch.autocast("cuda", dtype):
        cast = answers()
    torch.testing.assert_close(plain, cast, rtol=1e-6, atol=1e-5)


def test_a_bias_far_from_the_others(made: SyntheticHead) -> None:
    bias = torch.zeros(len(made.weight), device="cuda")
    plain = AdaptiveSoftmax(made.weight, bias.clone(), method="cascade")
    bias[:10] = -100
    low = AdaptiveSoftmax(made.weight, bias, method="cascade")
    reads = []
    for head in (plain, low):
        head.calibrate(made.calibration, generator=torch.Generator().manual_seed(0))
        found = head.coverage(made.test)
        assert found.right >= 0.98
        reads.append(found.read)
    assert reads[1] <= 1.3 * reads[0]
