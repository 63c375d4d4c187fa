"""The linear layer with its loss in one: against float64 logits, in every way it can be called.

On a GPU the Triton kernels run there, else interpreted. Buffers are made small, so that there are several chunks of
classes and several groups of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from softsieve import LinearASCrossEntropyLoss, LinearASStats, as_cross_entropy, linear_as_cross_entropy
from softsieve.kernels import linear as kernel
from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.kernels.linear_types import Chunk, Layer, Options, Saved, Targets
from softsieve.reference import losses as reference
from tests.helpers import IGNORED, default_dtype, distance_to_margin, spy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
# How far from the margin a class must be that rounding cannot decide; products are rounded to these dtypes.
UNDECIDED = {torch.float64: 1e-8, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter is wrong for bf16


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BUFFER", 1 << 14)
    monkeypatch.setattr(kernel, "WORK", 1 << 14)
    monkeypatch.setattr(kernel, "ROWS", 1 << 10)
    if HAS_TRITON:  # logits that are held have tests of their own
        monkeypatch.setattr("softsieve.kernels.linear_held.MEMORY", 0)


class Case(NamedTuple):
    """Numbers of the given dtype in float64, and labels."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    target: Tensor

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, weight and bias to differentiate by, and the target, on the device."""
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in self[:3]]
        return leaves[0], leaves[1], leaves[2], self.target.to(DEVICE)


def make_case(
    rows: int = 20, size: int = 24, classes: int = 300, *, dtype: torch.dtype = torch.float32,
    ignored: float = 0.2, seed: int = 0,
) -> Case:  # fmt: skip
    """Rows of all kinds: the label's weight is in the hidden state, more or less of it."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(n, size, generator=generator, dtype=torch.float64) * scale
        for n, scale in ((rows, 1.5), (classes, size**-0.5))
    )
    bias = torch.randn(classes, generator=generator, dtype=torch.float64) * 0.3
    target = torch.randint(classes, (rows,), generator=generator)
    lift = torch.rand(rows, 1, generator=generator, dtype=torch.float64) * 14 - 3
    lift[::3] += 10
    hidden += lift * weight[target] / weight[target].square().sum(-1, keepdim=True)
    third, label = slice(None, None, 3), target[::3]  # these have a rival just below the label
    rival = (label + 1) % classes
    apart = weight[label] - weight[rival]
    gap = (hidden[third] * apart).sum(-1) + bias[label] - bias[rival] - 0.1
    hidden[third] -= (gap / apart.square().sum(-1).clamp_min(1e-9))[:, None] * apart
    target[torch.rand(rows, generator=generator) < ignored] = IGNORED
    hidden, weight, bias = (x.to(dtype).double() for x in (hidden, weight, bias))
    return Case(hidden, weight, bias, target)


def true_logits(case: Case, *, biased: bool = True, softcap: float | None = None) -> Tensor:
    logits = F.linear(case.hidden, case.weight, case.bias if biased else None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def column(delta: Any) -> Any:
    return delta.double().cpu().unsqueeze(-1) if isinstance(delta, Tensor) else delta


def decided(case: Case, dtype: torch.dtype, delta: Any = 0.1, *, least: float = 0.3, **options: Any) -> Case:
    """The case with those rows ignored that rounding could decide either way."""
    logits = true_logits(case, **options)
    clear = (distance_to_margin(logits, case.target, column(delta)) > UNDECIDED[dtype]).all(-1)
    assert clear.double().mean() >= least
    return case._replace(target=case.target.where(clear, IGNORED))


def truth(case: Case, *, biased: bool = True, upstream: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Loss and gradients of hidden states, weight and bias, in float64 from all logits."""
    hidden, weight, bias = leaves = [x.clone().requires_grad_() for x in case[:3]]
    exact: dict[str, Any] = {name: x.double().cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    loss = reference.linear_as_cross_entropy(hidden, weight, case.target, bias=bias if biased else None, **exact)
    return loss.detach(), *torch.autograd.grad(loss, leaves if biased else leaves[:2], upstream)


def check(
    case: Case,
    dtype: torch.dtype,
    backend: str,
    *,
    upstream: Tensor | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Loss and gradients of this backend against the truth."""
    hidden, weight, bias, target = case.arguments(dtype)
    biased = options.pop("biased", True)
    leaves = (hidden, weight, bias) if biased else (hidden, weight)
    on_device: dict[str, Any] = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    loss = linear_as_cross_entropy(hidden, weight, target, bias=bias if biased else None, backend=backend, **on_device)
    assert loss.dtype == dtype
    grads = torch.autograd.grad(loss, leaves, None if upstream is None else upstream.to(loss))
    expected = truth(case, biased=biased, upstream=upstream, **options)
    for name, ours, true in zip(("loss", "hidden", "weight", "bias"), (loss, *grads), expected, strict=False):
        near(ours, true, dtype, name, tolerance)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.shape == leaf.shape
        assert grad.dtype == leaf.dtype


def near(ours: Tensor, true: Tensor, dtype: torch.dtype, name: str = "", tolerance: float | None = None) -> None:
    """Within the dtype's tolerance of the largest."""
    error = (ours.detach().double().cpu() - true).abs().max()
    assert error <= (tolerance or TOLERANCE[dtype]) * true.abs().max() + 1e-7, (
        f"{name}: off by {error:g} of {true.abs().max():g}"
    )


# -- values and gradients ----------------------------------------------------------------------------------------------


def test_the_reference_is_the_formula() -> None:
    """Row by row, in Python's own numbers."""
    case = make_case(rows=12, size=5, classes=7)
    class_weight, row_weight = torch.rand(7, dtype=torch.float64), torch.rand(12, dtype=torch.float64)
    losses, shares = [0.0] * 12, [0.0] * 12
    for row, label in enumerate(case.target.tolist()):
        if label != IGNORED:
            logits = [4 * math.tanh(x / 4) for x in (case.weight @ case.hidden[row] + case.bias).tolist()]
            total = sum(map(math.exp, logits))
            kept = sum(math.exp(x) for x in logits if (math.exp(logits[label]) - math.exp(x)) / total <= 0.2)
            shares[row] = float(class_weight[label] * row_weight[row])
            losses[row] = shares[row] * (math.log(kept) - logits[label])
    expected = {"none": losses, "sum": sum(losses), "mean": sum(losses) / sum(shares)}
    for reduction, value in expected.items():
        found = reference.linear_as_cross_entropy(
            *case[:2],
            case.target,
            bias=case.bias,
            delta=0.2,
            softcap=4.0,
            reduction=reduction,
            class_weight=class_weight,
            row_weight=row_weight,
        )
        assert found.tolist() == pytest.approx(value, rel=1e-12)
    assert 0 < sum(loss > 0 for loss in losses) < 12


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 2), (2, 3, 127), (23, 24, 300), (40, 40, 270)])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradients(backend: str, dtype: torch.dtype, delta: float, shape: tuple[int, int, int]) -> None:
    case = make_case(*shape, dtype=dtype, ignored=0)
    check(decided(case, dtype, delta, least=0.2 if shape[0] > 20 else 0), dtype, backend, delta=delta)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_reductions_with_any_gradient_from_above(backend: str, dtype: torch.dtype, reduction: str) -> None:
    case = decided(make_case(dtype=dtype), dtype)
    upstream = torch.randn(20 if reduction == "none" else (), dtype=torch.float64).to(dtype).double()
    check(case, dtype, backend, reduction=reduction, upstream=upstream)
    check(decided(case, dtype, biased=False), dtype, backend, reduction=reduction, upstream=upstream, biased=False)


@pytest.mark.parametrize("which", ["class_weight", "row_weight", "both"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights(backend: str, reduction: str, which: str) -> None:
    case = decided(make_case(), torch.float32)
    weights: dict[str, Any] = {"class_weight": torch.rand(300) + 0.1, "row_weight": torch.rand(20) + 0.1}
    weights["class_weight"][::3] = 0
    weights["row_weight"][::4] = 0
    weights = {name: value for name, value in weights.items() if which in (name, "both")}
    upstream = torch.randn(20, dtype=torch.float64) if reduction == "none" else None
    check(case, torch.float32, backend, reduction=reduction, upstream=upstream, **weights)
    nothing: dict[str, Any] = {name: torch.zeros_like(value) for name, value in weights.items()}
    check(case, torch.float32, backend, reduction=reduction, upstream=upstream, **nothing)  # 0, not 0 / 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ["class_weight", "row_weight", "delta", "bias"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_bias_and_delta_may_have_another_dtype(backend: str, name: str, dtype: torch.dtype) -> None:
    case = decided(make_case(), torch.float32)
    hidden, weight, bias, target = case.arguments(torch.float32)
    size = 20 if name in ("row_weight", "delta") else 300
    values = (torch.rand(size) * 0.3 + 0.2).half().to(DEVICE)  # the same numbers in every dtype
    grads = []
    for kind in (torch.float32, dtype):
        options: dict[str, Any] = {"bias": bias, name: values.to(kind)}
        loss = linear_as_cross_entropy(hidden, weight, target, backend=backend, reduction="none", **options)
        assert loss.dtype == torch.float32
        grads.append((loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, weight))))
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("delta", [0.1, 0.6])
@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap(backend: str, delta: float) -> None:
    case = make_case(rows=12, ignored=0)
    for softcap in (0.5, 4.0, 30.0):
        check(
            decided(case, torch.float32, delta, softcap=softcap), torch.float32, backend, delta=delta, softcap=softcap
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_softcap_far_above_all_logits_changes_nothing(backend: str) -> None:
    check(decided(make_case(), torch.float32), torch.float32, backend, softcap=1e5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_margin_for_each_row(backend: str) -> None:
    case = make_case()
    delta = torch.rand(20)
    delta[:3] = torch.tensor([0.0, 1.0, 0.5])
    case = decided(case, torch.float32, delta)
    check(case, torch.float32, backend, delta=delta)
    check(case._replace(target=case.target.where(case.target >= 0, 0)), torch.float32, backend, delta=torch.ones(20))


@pytest.mark.parametrize("backend", BACKENDS)
def test_delta_1_is_cross_entropy(backend: str) -> None:
    case = make_case()
    hidden, weight, bias, target = case.arguments(torch.float32)
    ours = linear_as_cross_entropy(hidden, weight, target, bias=bias, delta=1.0, backend=backend)
    plain = F.cross_entropy(F.linear(hidden, weight, bias), target)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight, bias)) for x in (ours, plain)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# -- labels that are ignored -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [-100, -1, 7, 299, 300, 12345, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_ignore_index(backend: str, ignore_index: int) -> None:
    case = decided(make_case(rows=20), torch.float32)
    target = case.target.where(case.target != ignore_index, 8).where(case.target >= 0, ignore_index)
    assert 0 < (target == ignore_index).sum() < 20
    hidden, weight, bias, _ = case.arguments(torch.float32)
    loss, stats = linear_as_cross_entropy(
        hidden, weight, target.to(DEVICE), bias=bias, ignore_index=ignore_index, backend=backend, return_stats=True
    )
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    true = truth(case._replace(target=target), ignore_index=ignore_index)
    for a, b in zip((loss, *grads), true, strict=True):
        near(a, b, torch.float32)
    for value in (*stats, grads[0]):
        assert not value[target.to(DEVICE) == ignore_index].any()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_ignored(backend: str, reduction: str) -> None:
    hidden, weight, bias, target = make_case(rows=5).arguments(torch.float32)
    with torch.no_grad():
        hidden[1, 2] = NAN  # also this is not read
    loss, stats = linear_as_cross_entropy(
        hidden, weight, torch.full_like(target, IGNORED), bias=bias, backend=backend, reduction=reduction,
        row_weight=torch.rand(5, device=DEVICE), return_stats=True,
    )  # fmt: skip
    for value in (loss, *stats, *torch.autograd.grad(loss.sum(), (hidden, weight, bias))):
        assert not value.any()


# -- kinds of rows -----------------------------------------------------------------------------------------------------

RIVALS = {  # besides class 0, the label; of 1200 classes in tiles of 128
    "solved": [],
    "listed": [5, 300, 1199],
    "as many as are listed": [*range(130, 146)],
    "more than are listed": [*range(130, 147)],
    "as many tiles as are visited": [*range(128, 1152, 128)],
    "more tiles than are visited": [*range(127, 1152, 128)],
    "all in the label's tile": [*range(1, 12)],
}
WIDE = ["more than are listed", "more tiles than are visited"]
DELTA = 0.05


def rows_of_all_kinds() -> tuple[Case, list[str]]:
    """The label has a logit of 20, its rivals just under that, all others 0; two rows of each kind, and two dense."""
    kinds = [kind for kind in (*RIVALS, "dense") for _ in range(2)]
    weight = torch.zeros(1200, len(RIVALS) + 2, dtype=torch.float64)
    weight[0, 0], weight[77, -1] = 1, 1
    hidden = torch.zeros(len(kinds), weight.shape[1], dtype=torch.float64)
    hidden[:, 0] = 20
    for column_, (kind, rivals) in enumerate(RIVALS.items(), 1):
        weight[rivals, column_] = 1
        hidden[[row for row, k in enumerate(kinds) if k == kind], column_] = 19.875
    hidden[-2:, -1] = 25
    return Case(
        hidden, weight, torch.zeros(1200, dtype=torch.float64), torch.zeros(len(kinds), dtype=torch.long)
    ), kinds


def forward(case: Case, dtype: torch.dtype, backend: str, **options: Any) -> Saved:
    """What the kernels save."""
    hidden, weight, _, target = (x.detach() for x in case.arguments(dtype))
    delta = torch.tensor(options.get("delta", DELTA), device=DEVICE)
    return kernel.forward(Layer(hidden, weight, None, 0.0), Targets(target, delta), Options(backend=backend))[1]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_which_rows_are_listed(dtype: torch.dtype) -> None:
    from softsieve.kernels import linear_triton

    assert (linear_triton.TILE, linear_triton.LISTED, linear_triton.VISITED) == (128, 16, 8)  # what RIVALS are made for
    case, kinds = rows_of_all_kinds()
    saved = forward(case, dtype, "triton")
    assert saved.listed.tolist() == [kind not in (*WIDE, "dense") for kind in kinds]
    assert saved.counts.tolist() == [6, sum(len(RIVALS[k]) + 1 for k in kinds if k not in (*WIDE, "dense", "solved"))]
    for row, kind in enumerate(kinds):
        if saved.listed[row]:
            classes = saved.classes[row]
            assert sorted(classes[classes >= 0].tolist()) == RIVALS[kind]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_all_kinds(backend: str, dtype: torch.dtype) -> None:
    case, kinds = rows_of_all_kinds()
    hidden, weight, _, target = case.arguments(dtype)
    loss, stats = linear_as_cross_entropy(
        hidden, weight, target, delta=DELTA, backend=backend, reduction="none", return_stats=True
    )
    assert stats.kept.tolist() == [1200 if kind == "dense" else 1 + len(RIVALS[kind]) for kind in kinds]
    assert stats.solved.tolist() == [kind == "solved" for kind in kinds]
    assert stats.dense.tolist() == [kind == "dense" for kind in kinds]
    assert stats.right.tolist() == [kind != "dense" for kind in kinds]
    grad = torch.autograd.grad(loss.sum(), hidden)[0]
    solved = stats.solved
    assert not loss[solved].any()
    assert not grad[solved].any()
    assert (loss[~solved] > 0).all()
    assert grad[~solved].any(-1).all()
    check(case, dtype, backend, delta=DELTA, biased=False)
    for kind in set(kinds):  # each alone: then no other kind writes what this one should
        alone = torch.tensor([k == kind for k in kinds])
        check(case._replace(target=case.target.where(alone, IGNORED)), dtype, backend, delta=DELTA, biased=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_solved_rows_have_exactly_no_gradient(backend: str) -> None:
    case, kinds = rows_of_all_kinds()
    solved = torch.tensor([kind == "solved" for kind in kinds])
    case = case._replace(hidden=case.hidden[solved], target=case.target[solved])
    hidden, weight, bias, target = case.arguments(torch.float32)
    loss = linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend)
    assert loss == 0
    for grad in torch.autograd.grad(loss, (hidden, weight, bias)):
        assert not grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_label_is_kept_also_where_backward_rounds_its_logit_down(backend: str) -> None:
    # With delta = 0 the threshold is the label's logit, and a product with fewer rows may round it otherwise.
    products = torch.tensor([[1.0, 2.0, 3.0]], device=DEVICE)
    q = products[0, 1:].softmax(-1).tolist()
    lse, above = products[:, 1:].logsumexp(-1), torch.nextafter(products[:, 1], products[:, 2])
    zero, one = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.ones(1, device=DEVICE)
    saved = Saved(above, zero + 2, lse, torch.zeros_like(lse), *[one] * 8)
    kernel.load_backend(backend).differentiate(Chunk(products, None, 0.0, 0), zero, zero + 1, one, saved)
    torch.testing.assert_close(products, torch.tensor([[0, q[0] - 1, q[1]]], device=DEVICE))


@pytest.mark.parametrize("classes", [127, 128, 129, 255, 385, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_class_counts_as_all_others(backend: str, classes: int) -> None:
    case = make_case(6, 5, classes, ignored=0)
    case.target[:] = classes - 1
    case.hidden[:2] += 6 * case.weight[-1] / case.weight[-1].square().sum()
    check(decided(case, torch.float32), torch.float32, backend)
    case.target[:] = 0
    case.hidden[2:4] = 9 * case.weight[-1] / case.weight[-1].square().sum()  # and as a rival
    check(decided(case, torch.float32), torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_are_kept_and_right(backend: str) -> None:
    weight, hidden = torch.zeros(5, 2, device=DEVICE), torch.ones(1, 2, device=DEVICE)
    weight[1:3] = 8
    loss, stats = linear_as_cross_entropy(
        hidden, weight, torch.tensor([2], device=DEVICE), delta=0.0, backend=backend, return_stats=True
    )
    assert (int(stats.kept), bool(stats.right)) == (2, True)
    assert float(loss) == pytest.approx(math.log(2))


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_statistics(backend: str, delta: float) -> None:
    case = decided(make_case(rows=40), torch.float32, delta)
    logits = true_logits(case)
    hidden, weight, bias, target = case.arguments(torch.float32)
    _, stats = linear_as_cross_entropy(
        hidden, weight, target, bias=bias, delta=delta, backend=backend, return_stats=True
    )
    assert isinstance(stats, LinearASStats)
    expected = reference.as_stats(logits, case.target, delta=delta)
    for name, ours, true in zip(stats._fields, stats, expected, strict=False):
        assert not ours.requires_grad
        assert ours.shape == true.shape
        torch.testing.assert_close(ours.cpu(), true.to(ours.dtype), rtol=1e-5, atol=1e-5, msg=name)
    assert torch.equal(stats.right.cpu(), (logits.argmax(-1) == case.target) & (case.target >= 0))
    assert [s.dtype for s in stats] == [torch.bool, torch.long, torch.bool, torch.float32, torch.float32, torch.bool]
    assert stats.right.any()
    if delta in (0.1, 0.6):
        sparse = (stats.kept > 1) & ~stats.dense
        assert stats.solved.any()
        assert stats.dense.any()
        assert sparse.any() or delta == 0.6


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("softcap", [None, 9.0])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_margins(backend: str, softcap: float | None, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("computes in float32")
    case = decided(make_case(rows=40), dtype, 0.1)
    hidden, weight, bias, target = case.arguments(dtype)
    _, stats = linear_as_cross_entropy(
        hidden.view(8, 5, -1), weight, target.view(8, 5), bias=bias, softcap=softcap, backend=backend,
        return_stats=True,
    )  # fmt: skip
    states, matrix, biases = (x.detach().double() for x in (hidden, weight, bias))
    logits = reference.linear_logits(states, matrix, biases, softcap)
    margin = reference.as_stats(logits, target)[-1]
    assert (margin.amin() < -0.1) & (margin.amax() > 0.1)
    assert (stats.margin.shape, stats.margin.dtype) == ((8, 5), stats.lse.dtype)
    torch.testing.assert_close(stats.margin.flatten().double(), margin, rtol=0, atol=TOLERANCE[dtype])
    if softcap is None:
        assert torch.equal(stats.margin > 0.1, stats.solved)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_an_only_class_has_margin_1(backend: str) -> None:
    hidden, weight = torch.ones(2, 3, device=DEVICE), torch.ones(1, 3, device=DEVICE)
    target = torch.tensor([0, IGNORED], device=DEVICE)
    _, stats = linear_as_cross_entropy(hidden, weight, target, backend=backend, return_stats=True)
    assert stats.margin.tolist() == [1, 0]


# -- shapes and strides ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions(backend: str) -> None:
    case = decided(make_case(rows=6, ignored=0), torch.float32)
    hidden, weight, _, target = case.arguments(torch.float32)
    delta, row_weight = torch.rand(6, device=DEVICE), torch.rand(6, device=DEVICE)
    flat, flat_stats = linear_as_cross_entropy(
        hidden, weight, target, delta=delta, row_weight=row_weight, backend=backend, reduction="none",
        return_stats=True,
    )  # fmt: skip
    loss, stats = linear_as_cross_entropy(
        hidden.view(2, 3, -1), weight, target.view(2, 3).int(), delta=delta.view(2, 3),
        row_weight=row_weight.view(2, 3), backend=backend, reduction="none", return_stats=True,
    )  # fmt: skip
    assert torch.equal(loss, flat.view(2, 3))
    for a, b in zip(stats, flat_stats, strict=True):
        assert torch.equal(a, b.view(2, 3))
    one = linear_as_cross_entropy(
        hidden[0], weight, target[0], delta=delta[0], row_weight=row_weight[0], backend=backend, reduction="none"
    )
    assert one.shape == ()
    torch.testing.assert_close(one, flat[0])


def strided(x: Tensor) -> Tensor:
    """The same numbers, two apart in memory, with others between."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "target", "delta", "class_weight", "row_weight"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_need_not_be_contiguous(backend: str, name: str) -> None:
    case = decided(make_case(rows=9, ignored=0), torch.float32, least=0)._replace(target=make_case(9, ignored=0).target)
    hidden, weight, bias, target = case.arguments(torch.float32)
    options: dict[str, Any] = {"hidden": hidden, "weight": weight, "bias": bias, "target": target}
    options |= {"delta": torch.full((9,), 0.1), "class_weight": torch.rand(300) + 0.1, "row_weight": torch.rand(9)}
    options = {key: value.to(DEVICE) for key, value in options.items()}
    results = []
    for change in (Tensor.clone, strided):
        given_ = options | {name: change(options[name])}
        loss = linear_as_cross_entropy(**given_, reduction="none", backend=backend)
        upstream = change(torch.linspace(-1, 1, 9, device=DEVICE))
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias), upstream)))
    torch.testing.assert_close(results[0], results[1])
    transposed = linear_as_cross_entropy(hidden.t().contiguous().t(), weight.t().contiguous().t(), target, bias=bias,
                                         backend=backend)  # fmt: skip
    torch.testing.assert_close(transposed, linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_margin_expanded_to_all_rows(backend: str) -> None:
    hidden, weight, _, target = make_case(rows=9, ignored=0).arguments(torch.float32)
    one = torch.tensor(0.1, device=DEVICE)
    a, b = (linear_as_cross_entropy(hidden, weight, target, delta=d, backend=backend) for d in (0.1, one.expand(9)))
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_integer_dtypes_of_the_target(backend: str, dtype: torch.dtype) -> None:
    hidden, weight, _, target = make_case(classes=100, ignored=0).arguments(torch.float32)
    target[0] = 120  # ignored; fits all
    a, b = (
        linear_as_cross_entropy(hidden, weight, t, ignore_index=120, backend=backend)
        for t in (target, target.to(dtype))
    )
    assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_changed(backend: str) -> None:
    arguments = make_case().arguments(torch.float32)
    before = [x.detach().clone() for x in arguments]
    hidden, weight, bias, target = arguments
    linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend, softcap=9.0).backward()  # type: ignore[no-untyped-call]
    for a, b in zip(before, arguments, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_size_of_buffers_does_not_matter(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = decided(make_case(40, 24, 600), torch.float32)
    hidden, weight, bias, target = case.arguments(torch.float32)
    results = []
    chunks: list[list[int]] = []
    original = Layer.chunks

    def counted(self: Layer, budget: int) -> Iterator[Chunk]:
        for chunk in original(self, budget):
            chunks[-1].append(chunk.products.shape[1])
            yield chunk

    monkeypatch.setattr(Layer, "chunks", counted)
    for sizes in ((0, 0, 1 << 12), (1 << 30,) * 3):
        for name, size in zip(("BUFFER", "WORK", "ROWS"), sizes, strict=True):
            monkeypatch.setattr(kernel, name, size)
        chunks.append([])
        loss = linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
    assert len(chunks[0]) > 2 * len(chunks[1])
    assert set(chunks[1]) == {600}
    assert set(chunks[0]) == {128, 600 % 128}


# -- what is not differentiated by -------------------------------------------------------------------------------------


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::matmul")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_wanted_gradients_are_made(
    backend: str, wanted: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = decided(make_case(), torch.float32)
    hidden, weight, bias, target = case.arguments(torch.float32)
    leaves = (hidden, weight, bias)
    for leaf, want in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(bool(want))
    combined = spy(monkeypatch, kernel.load_backend(backend), "combine")
    monkeypatch.setattr(kernel, "ROWS", 1 << 30)  # one group of rows
    monkeypatch.setattr(kernel, "WORK", 0)  # chunks of 128 classes
    loss, stats = linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend, return_stats=True)
    near(loss, truth(case)[0], torch.float32)
    assert loss.requires_grad == any(wanted)
    if not any(wanted):
        return
    assert (stats.dense | (stats.kept > 17)).any()  # else there are no products at all
    with Products() as products:  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
    for leaf, want, true in zip(leaves, wanted, truth(case)[1:], strict=True):
        assert (leaf.grad is not None) == bool(want)
        if leaf.grad is not None:
            near(leaf.grad, true, torch.float32)
    assert len(combined) == wanted[0]
    if DEVICE == "cpu":  # elsewhere autograd works in a thread of its own
        assert products.count == 3 * (1 + wanted[0] + wanted[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_solved_rows_are_no_part_of_the_products(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kinds = rows_of_all_kinds()
    calls = spy(monkeypatch, kernel.load_backend(backend), "differentiate")
    hidden, weight, _, target = case.arguments(torch.float32)
    linear_as_cross_entropy(hidden, weight, target, delta=DELTA, backend=backend).backward()  # type: ignore[no-untyped-call]
    by_products = (*WIDE, "dense") if backend == "triton" else [kind for kind in kinds if kind != "solved"]
    assert {row for call in calls for row in call[1].tolist()} == {
        row for row, kind in enumerate(kinds) if kind in by_products
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_graph(backend: str) -> None:
    hidden, weight, _, target = make_case().arguments(torch.float32)
    with torch.no_grad():
        quiet = linear_as_cross_entropy(hidden, weight, target, backend=backend)
    with torch.inference_mode():
        quieter = linear_as_cross_entropy(hidden * 1, weight, target, backend=backend)
    loss = linear_as_cross_entropy(hidden, weight, target, backend=backend)
    assert not quiet.requires_grad
    assert torch.equal(quiet, loss)
    assert torch.equal(quieter, loss)


# -- the same every time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_runs_agree_to_the_bit(backend: str, strict: bool) -> None:
    if strict and DEVICE == "cuda":
        pytest.skip("needs CUBLAS_WORKSPACE_CONFIG from the start")
    hidden, weight, bias, target = make_case(rows=30).arguments(torch.float32)
    results = []
    torch.use_deterministic_algorithms(strict)  # also fills fresh memory with NaN
    try:
        for _ in range(2):
            loss = linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend)
            results.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


# -- special values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_row_that_is_not_finite_is_told_and_hurts_no_other(backend: str, value: float) -> None:
    case = make_case(rows=5, ignored=0)
    hidden, weight, bias, target = case.arguments(torch.float32)
    clean = linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend, reduction="none")
    clean_grad = torch.autograd.grad(clean.sum(), hidden)[0]
    with torch.no_grad():
        hidden[2, 3] = value
    loss, stats = linear_as_cross_entropy(
        hidden, weight, target, bias=bias, backend=backend, reduction="none", return_stats=True
    )
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    others = torch.arange(5, device=DEVICE) != 2
    torch.testing.assert_close(loss[others], clean[others])
    torch.testing.assert_close(grads[0][others], clean_grad[others])
    assert loss[2].isnan()
    assert not stats.solved[2]
    assert grads[0][2].isnan().any()  # so that a scaler of gradients sees it
    assert grads[1].isnan().any()


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_class_that_is_not_finite_is_told(backend: str, delta: float, value: float) -> None:
    hidden, weight, bias, target = make_case(rows=5, ignored=0).arguments(torch.float32)
    with torch.no_grad():
        bias[int(({*range(5)} - {*target.tolist()}).pop())] = value
    loss = linear_as_cross_entropy(hidden, weight, target, bias=bias, delta=delta, backend=backend, reduction="none")
    assert loss.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_classes_that_are_switched_off(backend: str) -> None:
    case = decided(make_case(ignored=0), torch.float32)
    case.bias[(torch.rand(300) < 0.3).index_fill(0, case.target.clamp_min(0), False)] = -INF
    case.bias[128:256] = -INF  # a whole tile, a whole chunk
    case = case._replace(target=case.target.where((case.bias > -INF)[case.target.clamp_min(0)], IGNORED))
    check(decided(case, torch.float32), torch.float32, backend)


@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_that_is_switched_off_has_the_gradient_of_cross_entropy(backend: str, delta: float) -> None:
    case = make_case(rows=1, ignored=0)
    case.bias[case.target] = -INF
    hidden, weight, bias, target = case.arguments(torch.float32)
    loss = linear_as_cross_entropy(hidden, weight, target, bias=bias, delta=delta, backend=backend)
    assert loss == INF
    plain = F.cross_entropy(F.linear(hidden, weight, bias), target)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden), torch.autograd.grad(plain, hidden))


@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_class(backend: str, delta: float) -> None:
    hidden = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    weight = torch.randn(1, 4, device=DEVICE, requires_grad=True)
    target = torch.zeros(3, dtype=torch.long, device=DEVICE)
    loss, stats = linear_as_cross_entropy(hidden, weight, target, delta=delta, backend=backend, return_stats=True)
    assert loss == 0
    assert stats.solved.all()
    assert stats.kept.tolist() == [1, 1, 1]
    assert stats.right.all()
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert not grad.any()


@pytest.mark.parametrize("scale", [1e4, -1e4])
@pytest.mark.parametrize("delta", [0.1, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_logits(backend: str, delta: float, scale: float) -> None:
    case = make_case(rows=20, ignored=0)
    huge = case._replace(bias=(case.bias + scale).float().double())
    wide = case._replace(hidden=(case.hidden * 1e3).float().double())
    for each in (huge, wide):  # the logits themselves are good to 1e-3
        each = decided(each, torch.float16, delta, least=0.2)
        check(each, torch.float32, backend, delta=delta, tolerance=4e-3)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_delta_is_not_rounded(default: torch.dtype) -> None:
    # p_t - p_j is between 0.1 and the float32, and the bfloat16, next to it: masked, so the row is solved.
    gap = 0.1 + 5e-10
    logits = torch.tensor([[(1 + gap) / 2, (1 - gap) / 2]], dtype=torch.float64).log()
    weight, target = torch.eye(2, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    with default_dtype(default):
        assert linear_as_cross_entropy(logits, weight, target, backend="torch") == 0


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_the_default_dtype_changes_nothing(backend: str, default: torch.dtype) -> None:
    hidden, weight, bias, target = make_case().arguments(torch.float32)

    def found() -> list[Tensor]:
        loss, stats = linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend, return_stats=True)
        return [loss, *torch.autograd.grad(loss, (hidden, weight, bias)), *stats]

    plain = found()
    with default_dtype(default):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found(), plain, strict=True))


# -- backends and what is refused --------------------------------------------------------------------------------------


def test_auto_is_torch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    used = spy(monkeypatch, kernel, "load_backend")
    hidden, weight, target = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    linear_as_cross_entropy(hidden, weight, target)
    assert set(used) == {("torch",)}
    if DEVICE == "cuda" and HAS_TRITON:
        used.clear()
        linear_as_cross_entropy(hidden.cuda(), weight.cuda(), target.cuda())
        assert set(used) == {("triton",)}


def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"^backend: 'triton' cannot serve: (it needs tensors on a GPU|the package)"):
        linear_as_cross_entropy(torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2]), backend="triton")


def test_triton_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softsieve.losses.linear.HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"^backend: 'triton' cannot serve: the package triton is not installed"):
        linear_as_cross_entropy(torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2]), backend="triton")


H, W, T = torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": [1.0]}, TypeError, r"^hidden: expected a torch.Tensor, found list"),
        ({"hidden": H.long()}, TypeError, r"^hidden: expected a floating-point dtype, found torch.int64"),
        ({"hidden": H.to_sparse()}, TypeError, r"^hidden: expected a dense tensor"),
        ({"hidden": torch.tensor(1.0)}, ValueError, r"^hidden, weight: expected shapes .* found \(\) and \(5, 4\)"),
        ({"hidden": H[:0]}, ValueError, r"^hidden: expected a non-empty tensor"),
        ({"hidden": torch.ones(3, 6)}, ValueError, r"^hidden, weight: .* found \(3, 6\) and \(5, 4\)"),
        ({"weight": W.double()}, TypeError, r"^weight: expected torch.float32, .* found torch.float64"),
        ({"weight": W.int()}, TypeError, r"^weight: expected a floating-point dtype, found torch.int32"),
        ({"weight": torch.ones(4)}, ValueError, r"^hidden, weight: expected shapes"),
        ({"weight": W[:0]}, ValueError, r"^weight: expected a non-empty tensor"),
        ({"target": [0, 1, 2]}, TypeError, r"^target: expected a torch.Tensor, found list"),
        ({"target": T.float()}, TypeError, r"^target: expected integer class labels .* found torch.float32"),
        ({"target": T.bool()}, TypeError, r"^target: expected integer class labels .* found torch.bool"),
        ({"target": T[:2]}, ValueError, r"^target: expected shape \(3,\) .* found \(2,\)"),
        ({"target": T[None]}, ValueError, r"^target: expected shape \(3,\) .* found \(1, 3\)"),
        ({"target": T + 3}, ValueError, r"^target: expected class labels in \[0, 5\) .* found 5 in row 2"),
        ({"target": T - 1}, ValueError, r"^target: expected class labels in \[0, 5\) .* found -1 in row 0"),
        ({"target": T - 100, "ignore_index": 0}, ValueError, r"^target: .*ignore_index=0, found -100 in row 0"),
        ({"bias": torch.ones(4)}, ValueError, r"^bias: expected shape \(5,\), one a class, found \(4,\)"),
        ({"bias": torch.ones(5, 1)}, ValueError, r"^bias: expected shape \(5,\)"),
        ({"bias": torch.ones(5).int()}, TypeError, r"^bias: expected a floating-point dtype"),
        ({"bias": 1.0}, TypeError, r"^bias: expected a torch.Tensor, found float"),
        ({"delta": -0.1}, ValueError, r"^delta: expected a number in \[0, 1\], found -0.1"),
        ({"delta": 1.1}, ValueError, r"^delta: expected a number in \[0, 1\], found 1.1"),
        ({"delta": NAN}, ValueError, r"^delta: expected a number in \[0, 1\], found nan"),
        ({"delta": "0.1"}, TypeError, r"^delta: expected a number, found str"),
        ({"delta": True}, TypeError, r"^delta: expected a number, found bool"),
        ({"delta": torch.tensor(0.1)}, ValueError, r"^delta: expected shape \(3,\), one a row, found \(\)"),
        ({"delta": torch.tensor([0.1, 0.2])}, ValueError, r"^delta: expected shape \(3,\), one a row, found \(2,\)"),
        ({"delta": torch.tensor([0.1, 0.2, 1.1])}, ValueError, r"^delta: expected numbers in \[0, 1\]"),
        ({"delta": torch.tensor([0.1, -0.2, 0.1])}, ValueError, r"^delta: expected numbers in \[0, 1\]"),
        ({"delta": torch.tensor([0.1, NAN, 0.1])}, ValueError, r"^delta: expected numbers in \[0, 1\]"),
        ({"delta": torch.tensor([0, 1, 0])}, TypeError, r"^delta: expected a floating-point dtype"),
        ({"delta": torch.rand(3, requires_grad=True)}, ValueError, r"^delta: expected constants"),
        ({"ignore_index": 1.0}, TypeError, r"^ignore_index: expected an int, found float"),
        ({"ignore_index": 2**63}, ValueError, r"^ignore_index: expected an int in"),
        ({"reduction": "avg"}, ValueError, r"^reduction: expected one of 'none', 'mean', 'sum', found 'avg'"),
        ({"reduction": None}, ValueError, r"^reduction: expected one of"),
        (
            {"class_weight": torch.ones(4)},
            ValueError,
            r"^class_weight: expected shape \(5,\), one a class, found \(4,\)",
        ),
        ({"class_weight": T}, TypeError, r"^class_weight: expected a floating-point dtype"),
        ({"class_weight": torch.ones(5, requires_grad=True)}, ValueError, r"^class_weight: expected constants"),
        ({"row_weight": torch.ones(4)}, ValueError, r"^row_weight: expected shape \(3,\), one a row, found \(4,\)"),
        ({"row_weight": T}, TypeError, r"^row_weight: expected a floating-point dtype"),
        ({"row_weight": torch.ones(3, requires_grad=True)}, ValueError, r"^row_weight: expected constants"),
        ({"softcap": 0.0}, ValueError, r"^softcap: expected a finite number above 0, found 0"),
        ({"softcap": -1.0}, ValueError, r"^softcap: expected a finite number above 0, found -1"),
        ({"softcap": INF}, ValueError, r"^softcap: expected a finite number above 0, found inf"),
        ({"softcap": "30"}, TypeError, r"^softcap: expected a number, found str"),
        ({"backend": "cuda"}, ValueError, r"^backend: expected one of 'auto', 'reference', 'torch', 'triton', found"),
        ({"backend": None}, ValueError, r"^backend: expected one of"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_as_cross_entropy(**({"hidden": H, "weight": W, "target": T} | change))


@needs_triton
def test_triton_refuses_float64() -> None:
    with pytest.raises(ValueError, match=r"^backend: 'triton' cannot serve: its kernels compute in float32"):
        linear_as_cross_entropy(H.double(), W.double(), T, backend="triton")


SECOND = (
    r"^linear_as_cross_entropy: .* second derivative.* as_cross_entropy\(F.linear\(hidden, weight, bias\), target\)"
)


class Marked(Tensor):
    """A tensor subclass, which goes by the registered ops."""


@pytest.mark.parametrize("kind", [Tensor, Marked])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_refused_not_zero(backend: str, kind: type[Tensor]) -> None:
    hidden, weight, bias, target = make_case(rows=3, ignored=0).arguments(torch.float32)
    hidden = hidden.detach().as_subclass(kind).requires_grad_()

    def loss() -> Tensor:
        return linear_as_cross_entropy(hidden, weight, target, bias=bias, backend=backend)

    for value in (loss(), loss() * 2, loss() * hidden.sum()):
        grads = torch.autograd.grad(value, (hidden, weight, bias), create_graph=True)
        assert all(grad.requires_grad for grad in grads)
        for grad in grads:
            with pytest.raises(NotImplementedError, match=SECOND):
                torch.autograd.grad(grad.square().sum(), hidden, retain_graph=True, allow_unused=True)
    once = torch.autograd.grad(loss(), (hidden, weight, bias))
    again = torch.autograd.grad(loss(), (hidden, weight, bias), create_graph=True)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_as_a_function(backend: str) -> None:
    hidden, weight, bias, target = make_case(rows=3, ignored=0).arguments(torch.float32)

    def loss(x: Tensor) -> Tensor:
        return linear_as_cross_entropy(x, weight, target, bias=bias, backend=backend)

    (expected,) = torch.autograd.grad(loss(hidden), hidden)
    assert torch.equal(torch.func.grad(loss)(hidden.detach()), expected)
    with pytest.raises(NotImplementedError, match=SECOND):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(hidden.detach())
    with pytest.raises(NotImplementedError, match=SECOND):
        torch.autograd.functional.hessian(loss, hidden.detach())  # type: ignore[no-untyped-call]


def test_the_reference_has_second_derivatives() -> None:
    case = make_case(rows=3, size=4, classes=6, ignored=0)

    def curvature(loss: Callable[[Tensor], Tensor]) -> Any:
        return torch.autograd.functional.hessian(loss, case.hidden)  # type: ignore[no-untyped-call]

    found = curvature(lambda x: linear_as_cross_entropy(x, case.weight, case.target, backend="reference"))
    assert found.any()
    torch.testing.assert_close(found, curvature(lambda x: as_cross_entropy(x @ case.weight.T, case.target)))


# -- as a module -------------------------------------------------------------------------------------------------------


def test_module() -> None:
    class_weight = torch.rand(300)
    criterion = LinearASCrossEntropyLoss(
        24, 300, 0.3, bias=True, class_weight=class_weight, ignore_index=7, reduction="sum", softcap=9.0,
        backend="torch", return_stats=True,
    )  # fmt: skip
    case = make_case()
    hidden, target = case.hidden.float(), case.target.where(case.target >= 0, 7)
    loss, stats = criterion(hidden, target)
    again, more = linear_as_cross_entropy(
        hidden, criterion.weight, target, bias=criterion.bias, delta=0.3, class_weight=class_weight, ignore_index=7,
        reduction="sum", softcap=9.0, backend="torch", return_stats=True,
    )  # fmt: skip
    assert torch.equal(loss, again)
    assert torch.equal(stats.kept, more.kept)
    assert repr(criterion) == (
        "LinearASCrossEntropyLoss(in_features=24, num_classes=300, bias=True, delta=0.3, ignore_index=7, "
        "reduction='sum', backend='torch')"
    )
    loss.backward()
    assert criterion.bias is not None
    assert all(p.grad is not None and p.grad.any() for p in criterion.parameters())
    assert len([*criterion.parameters()]) == 2
    assert [*LinearASCrossEntropyLoss(4, 5).state_dict()] == ["weight"]


def test_the_margin_of_a_module_may_change() -> None:
    criterion = LinearASCrossEntropyLoss(24, 300, 1.0)
    case = make_case()
    hidden = case.hidden.float()
    dense = criterion(hidden, case.target)
    torch.testing.assert_close(dense, F.cross_entropy(hidden @ criterion.weight.T, case.target))
    criterion.delta = 0.0
    assert criterion(hidden, case.target) < dense
    criterion.delta = 2.0
    with pytest.raises(ValueError, match=r"^delta: expected a number in \[0, 1\]"):
        criterion(hidden, case.target)


def test_a_tied_weight() -> None:
    embedding = nn.Embedding(50, 8)
    criterion = LinearASCrossEntropyLoss(8, 50)
    criterion.weight = embedding.weight
    tokens = torch.randint(50, (2, 5))
    criterion(embedding(tokens), tokens.roll(1)).backward()
    assert criterion.weight is embedding.weight
    logits = F.linear(embedding(tokens), embedding.weight).double()
    true = reference.as_cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())
    assert embedding.weight.grad is not None
    torch.testing.assert_close(embedding.weight.grad, torch.autograd.grad(true, embedding.weight)[0])


def test_state_of_a_module(tmp_path: Any) -> None:
    a, b = (LinearASCrossEntropyLoss(8, 50, bias=True, class_weight=torch.rand(50)) for _ in range(2))
    hidden, target = torch.randn(6, 8), torch.randint(50, (6,))
    assert a(hidden, target) != b(hidden, target)
    torch.save(a.state_dict(), tmp_path / "state.pt")
    b.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(a(hidden, target), b(hidden, target))
    assert {*a.state_dict()} == {"weight", "bias", "class_weight"}
    b.to(torch.float64)
    assert b.class_weight is not None
    assert b.class_weight.dtype == b.weight.dtype == torch.float64
    assert b(hidden.double(), target).dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 1.5}, r"^delta: "),
        ({"reduction": "avg"}, r"^reduction: "),
        ({"backend": "cuda"}, r"^backend: "),
        ({"softcap": 0.0}, r"^softcap: "),
        ({"ignore_index": 2**63}, r"^ignore_index: "),
        ({"memory": 0}, r"^memory: "),
    ],
)
def test_a_module_refuses_when_it_is_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearASCrossEntropyLoss(4, 5, **change)


def test_a_module_in_half_precision_on_a_device() -> None:
    criterion = LinearASCrossEntropyLoss(4, 5, device=DEVICE, dtype=torch.float16, class_weight=torch.rand(5))
    criterion.to(DEVICE)
    loss = criterion(H.to(DEVICE).half(), T.to(DEVICE))
    assert loss.dtype == torch.float16


# -- inside other parts of torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("backend", ["reference", "torch"] + ["triton"] * (DEVICE == "cuda" and HAS_TRITON))
def test_autocast(backend: str, reduction: str) -> None:
    case = decided(make_case(dtype=torch.bfloat16), torch.bfloat16, delta=0.6)
    hidden, weight, bias, target = case.arguments(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = linear_as_cross_entropy(
            hidden, weight, target, bias=bias, delta=0.6, backend=backend, reduction=reduction
        )
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss.sum(), (hidden, weight, bias))
    upstream = torch.ones(20, dtype=torch.float64) if reduction == "none" else None
    for a, b in zip((loss, *grads), truth(case, delta=0.6, reduction=reduction, upstream=upstream), strict=True):
        near(a, b, torch.bfloat16)
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_autocast_takes_a_weight_of_another_dtype() -> None:
    hidden, weight, _, target = make_case(dtype=torch.bfloat16).arguments(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        a, b = (linear_as_cross_entropy(h, weight, target, backend="torch") for h in (hidden, hidden.bfloat16()))
    assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing(backend: str) -> None:
    hidden, weight, bias, target = make_case().arguments(torch.float32)

    def step(states: Tensor) -> Tensor:
        return linear_as_cross_entropy(states.tanh() * 3, weight, target, bias=bias, backend=backend)

    results = []
    for loss in (step(hidden), checkpoint(step, hidden, use_reentrant=False)):
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none", "softcap": 8.0}, {"weighted": torch.float32}, {"weighted": torch.float64}]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str, options: dict[str, Any]) -> None:
    hidden, weight, bias, target = make_case().arguments(torch.float32)
    if weighted := options.pop("weighted", None):
        options = {
            "class_weight": torch.rand(300, device=DEVICE, dtype=weighted),
            "row_weight": torch.rand(20, device=DEVICE),
        }

    def step(h: Tensor, delta: float) -> Tensor:
        loss, stats = linear_as_cross_entropy(
            h * 2, weight, target, bias=bias, delta=delta, backend=backend, return_stats=True, **options
        )
        total: Tensor = loss.sum() + stats.kept.sum()
        return total

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for delta in (0.1, 0.2, 0.35, 0.5, 0.0, 1.0):
        pairs = []
        for function in (step, compiled):
            loss = function(hidden, delta)
            pairs.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))))
        torch.testing.assert_close(pairs[0], pairs[1])
    assert 1 <= counter.frame_count <= 4  # the first, one for any delta, and 0 and 1, which are always apart


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_module() -> None:
    criterion = LinearASCrossEntropyLoss(24, 300, bias=True, backend="torch").to(DEVICE)
    case = make_case()
    hidden, target = case.hidden.float().to(DEVICE).requires_grad_(), case.target.to(DEVICE)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    for frozen in (False, True):
        criterion.weight.requires_grad_(not frozen)
        leaves = [x for x in (hidden, *criterion.parameters()) if x.requires_grad]
        losses = [module(hidden, target) for module in (criterion, compiled)]
        torch.testing.assert_close(losses[0], losses[1])
        for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
def test_gradcheck(delta: float, reduction: str) -> None:
    case = decided(make_case(6, 3, 150), torch.float64, delta, softcap=6.0, least=0)
    hidden, weight, bias, target = case.arguments(torch.float64)

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_as_cross_entropy(
            h, w, target, bias=b, delta=delta, softcap=6.0, reduction=reduction, backend="torch"
        )

    assert gradcheck(function, (hidden, weight, bias), fast_mode=True)


def test_float64_is_computed_in_float64() -> None:
    check(decided(make_case(), torch.float64), torch.float64, "torch")


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 12),
    size=st.integers(1, 8),
    classes=st.integers(1, 300),
    delta=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    softcap=st.none() | st.floats(0.5, 50),
    biased=st.booleans(),
    weights=st.sets(st.sampled_from(["class_weight", "row_weight"])),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    buffer=st.sampled_from([0, 1 << 12, 1 << 30]),
    seed=st.integers(0, 99),
)
def test_torch_agrees_with_the_reference(
    rows: int, size: int, classes: int, delta: float, reduction: str, softcap: float | None, biased: bool,
    weights: set[str], ignored: float, buffer: int, seed: int,
) -> None:  # fmt: skip
    case = make_case(rows, size, classes, dtype=torch.float64, ignored=ignored, seed=seed)
    case = decided(case, torch.float64, delta, least=0, biased=biased, softcap=softcap)
    hidden, weight, bias, target = case.arguments(torch.float64)
    leaves = (hidden, weight, bias) if biased else (hidden, weight)
    options: dict[str, Any] = {
        "delta": delta,
        "reduction": reduction,
        "softcap": softcap,
        "bias": bias if biased else None,
    }
    for name, length in (("class_weight", classes), ("row_weight", rows)):
        if name in weights:
            options[name] = torch.rand(length, dtype=torch.float64, device=DEVICE)
    results: list[tuple[Tensor, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BUFFER", "WORK", "ROWS"):
            patch.setattr(kernel, name, max(1, buffer))
        for backend in ("torch", "reference"):
            loss, stats = linear_as_cross_entropy(hidden, weight, target, backend=backend, return_stats=True, **options)
            results.append((loss.detach(), *stats, *torch.autograd.grad(loss.sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
