"""The linear layer with the multi-label loss in one: against float64 logits and flags, in every way it can be called.

On a GPU the Triton kernels run there, else interpreted. Buffers are made small, so that there are several chunks of
classes and several groups of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from softsieve import LinearASMultiLabelLoss, MultiLabelStats, as_multilabel_loss, linear_as_multilabel_loss
from softsieve.kernels import linear as kernel
from softsieve.kernels import linear_multilabel
from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.kernels.linear_types import Chunk, Layer, Options, SavedSides, Targets
from softsieve.reference import losses as reference
from tests.helpers import IGNORED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
# How far from its cut a logit must be that rounding cannot decide; products are rounded to these dtypes.
UNDECIDED = {torch.float64: 1e-8, torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter is wrong for bf16


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BUFFER", 1 << 14)
    monkeypatch.setattr(kernel, "WORK", 1 << 14)
    monkeypatch.setattr(kernel, "ROWS", 1 << 10)


class Case(NamedTuple):
    """Numbers of the given dtype in float64, and class numbers."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, weight and bias to differentiate by, and the labels, on the device."""
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in self[:3]]
        return leaves[0], leaves[1], leaves[2], self.labels.to(DEVICE)

    def rows(self, wanted: Tensor) -> Case:
        return self._replace(hidden=self.hidden[wanted], labels=self.labels[wanted])


def make_case(
    rows: int = 24, size: int = 24, classes: int = 300, labels: int = 4, *, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:  # fmt: skip
    """Rows of all kinds: all logits are pulled down, those of the labels up, more or less."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = min(labels, classes)
    numbers = torch.rand(rows, classes, generator=generator).topk(labels).indices
    padded = torch.rand(rows, labels, generator=generator) < 0.4
    padded[:, labels // 2] = False
    weight, bias = normal(classes, size), normal(classes) * 0.3
    weight[:, 0] = 1  # the first feature moves all logits
    hidden = normal(rows, size) * size**-0.5 * 1.5
    lift = torch.rand(rows, labels, generator=generator, dtype=torch.float64) * 30 * ~padded
    hidden += (lift[:, :, None] * weight[numbers] / weight[numbers].square().sum(-1, keepdim=True)).sum(1)
    hidden[:, 0] -= torch.linspace(1, 16, rows, dtype=torch.float64)[torch.randperm(rows, generator=generator)]
    numbers[padded] = IGNORED
    hidden, weight, bias = (x.to(dtype).double() for x in (hidden, weight, bias))
    return Case(hidden, weight, bias, numbers)


def distance_to_cut(case: Case, delta: Any, *, biased: bool = True) -> Tensor:
    """How far every class is from being decided the other way, relative to its logit, (rows, classes)."""
    logits = F.linear(case.hidden, case.weight, case.bias if biased else None)
    positive = reference.flags_of(case.labels, len(case.weight)) == 1
    delta = torch.as_tensor(delta, dtype=torch.float64, device="cpu").expand(len(logits)).unsqueeze(-1)
    distance = torch.full_like(logits, INF)
    for side, z in ((~positive, logits), (positive, -logits)):
        q0 = torch.cat([torch.zeros(len(z), 1).double(), z.masked_fill(~side, -INF)], -1).softmax(-1)[:, :1]
        cut = torch.log1p(-(delta / q0).clamp(max=1))
        away = (z - cut).abs().minimum((1 - delta / q0).abs() * 30) / z.abs().clamp_min(1)
        distance = torch.where(side, away, distance)
    return distance


def decided(case: Case, dtype: torch.dtype, delta: Any = 0.5, *, least: float = 0.3, biased: bool = True) -> Case:
    """The case without the rows that rounding could decide either way."""
    clear = (distance_to_cut(case, delta, biased=biased) > UNDECIDED[dtype]).all(-1)
    assert clear.double().mean() >= least
    return case.rows(clear)


def truth(case: Case, *, biased: bool = True, upstream: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Loss and gradients of hidden states, weight and bias, in float64 from all logits."""
    hidden, weight, bias = leaves = [x.clone().requires_grad_() for x in case[:3]]
    exact: dict[str, Any] = {name: x.double().cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    loss = reference.linear_as_multilabel_loss(hidden, weight, case.labels, bias=bias if biased else None, **exact)
    return loss.detach(), *torch.autograd.grad(loss, leaves if biased else leaves[:2], upstream)


def near(ours: Tensor, true: Tensor, dtype: torch.dtype, name: str = "") -> None:
    """Within the dtype's tolerance of the largest."""
    error = (ours.detach().double().cpu() - true).abs().max()
    assert error <= TOLERANCE[dtype] * true.abs().max() + 1e-7, f"{name}: off by {error:g} of {true.abs().max():g}"


def check(case: Case, dtype: torch.dtype, backend: str, *, upstream: Tensor | None = None, **options: Any) -> None:
    """Loss, statistics and gradients of this backend against the truth."""
    hidden, weight, bias, labels = case.arguments(dtype)
    biased, memory = options.pop("biased", True), options.pop("memory", None)
    leaves = (hidden, weight, bias) if biased else (hidden, weight)
    on_device: dict[str, Any] = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    loss, stats = linear_as_multilabel_loss(
        hidden, weight, labels, bias=bias if biased else None, backend=backend, memory=memory, return_stats=True,
        **on_device,
    )  # fmt: skip
    assert loss.dtype == dtype
    grads = torch.autograd.grad(loss, leaves, None if upstream is None else upstream.to(loss))
    expected = truth(case, biased=biased, upstream=upstream, **options)
    for name, ours, true in zip(("loss", "hidden", "weight", "bias"), (loss, *grads), expected, strict=False):
        near(ours, true, dtype, name)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
    options.pop("reduction", None)
    exact: dict[str, Any] = {name: x.double().cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    solved, kept, margin = reference.linear_as_multilabel_stats(
        *case[:2], case.labels, bias=case.bias if biased else None, **exact
    )
    assert isinstance(stats, MultiLabelStats)
    assert torch.equal(stats.solved.cpu(), solved)
    assert torch.equal(stats.kept.cpu(), kept)
    near(stats.margin, margin, dtype, "margin")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of matrices, and the bytes of the largest tensor that is not of a shape that may be."""

    def __init__(self, besides: tuple[int, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.besides, self.products, self.largest = besides, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm)
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor) and value.shape != self.besides:
                self.largest = max(self.largest, value.nbytes)
        return out


# -- values and gradients ----------------------------------------------------------------------------------------------


def test_the_reference_is_that_of_flags() -> None:
    case = make_case(rows=9, size=5, classes=7)
    flags = torch.zeros(9, 7)
    for row, numbers in enumerate(case.labels.tolist()):
        flags[row, [number for number in numbers if number != IGNORED]] = 1
    assert torch.equal(reference.flags_of(case.labels, 7), flags.long())
    logits = F.linear(case.hidden, case.weight, case.bias)
    for reduction in ("none", "mean", "sum"):
        options: dict[str, Any] = {"delta": 0.3, "reduction": reduction}
        ours = reference.linear_as_multilabel_loss(*case[:2], case.labels, bias=case.bias, **options)
        torch.testing.assert_close(ours, reference.as_multilabel_loss(logits, flags, against="threshold", **options))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 5, 2, 2), (2, 3, 127, 1), (23, 24, 300, 5), (29, 20, 270, 17)])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradients(backend: str, dtype: torch.dtype, delta: float, shape: tuple[int, int, int, int]) -> None:
    case = make_case(*shape, dtype=dtype)
    case = decided(case, dtype, delta, least=0.1 if shape[0] > 20 else 0)
    if len(case.hidden):
        check(case, dtype, backend, delta=delta)


@needs_triton
def test_more_labels_than_a_launch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with thousands of labels each would not fit beside its logits; chunks of these take any number."""
    from softsieve.kernels import linear_multilabel_triton

    case = decided(make_case(16, 24, 300, 5, dtype=torch.float16), torch.float16, least=0.1)
    scanned: list[int] = []

    def scan_layer(layer: Layer, label: Tensor, own: Tensor) -> Any:
        scanned.append(label.shape[1])
        return scan(layer, label, own)

    scan = linear_multilabel_triton.scan_layer
    monkeypatch.setattr(linear_multilabel_triton, "scan_layer", scan_layer)
    for filled in (linear_multilabel.MOST_COMPARED, linear_multilabel.MOST_COMPARED + 1, 1000):
        wide = F.pad(case.labels, (0, filled - 5), value=IGNORED)
        check(case._replace(labels=wide), torch.float16, "triton")
    assert scanned == [linear_multilabel.MOST_COMPARED]


@pytest.mark.parametrize("delta", [0.2, 0.5])
def test_float64(delta: float) -> None:
    check(make_case(dtype=torch.float64), torch.float64, "torch", delta=delta)
    check(make_case(dtype=torch.float64), torch.float64, "reference", delta=delta)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reductions_with_any_gradient_from_above(backend: str, reduction: str) -> None:
    for biased in (True, False):
        case = decided(make_case(), torch.float32, biased=biased)
        upstream = torch.randn(len(case.hidden) if reduction == "none" else (), dtype=torch.float64).float().double()
        check(case, torch.float32, backend, reduction=reduction, upstream=upstream, biased=biased)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_margin_for_each_row(backend: str) -> None:
    case = make_case()
    delta = torch.rand(24)
    delta[:3] = torch.tensor([0.0, 1.0, 0.5])
    clear = (distance_to_cut(case, delta) > UNDECIDED[torch.float32]).all(-1)
    assert clear.sum() > 12
    check(case.rows(clear), torch.float32, backend, delta=delta[clear])


@pytest.mark.parametrize("backend", BACKENDS)
def test_delta_1_is_the_plain_loss(backend: str) -> None:
    hidden, weight, bias, labels = make_case().arguments(torch.float32)
    ours = linear_as_multilabel_loss(hidden, weight, labels, bias=bias, delta=1.0, backend=backend)
    logits = F.linear(hidden, weight, bias)
    flags = reference.flags_of(labels, 300) == 1
    zero = torch.zeros_like(logits[:, :1])
    plain = [
        torch.cat([zero, z.masked_fill(~side, -INF)], -1).logsumexp(-1)
        for side, z in ((~flags, logits), (flags, -logits))
    ]
    loss = (plain[0] + plain[1]).mean()
    torch.testing.assert_close(ours, loss)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight, bias)) for x in (ours, loss)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_gradcheck() -> None:
    case = make_case(rows=5, size=4, classes=9, labels=3)
    leaves = [x.clone().requires_grad_() for x in case[:3]]
    for delta in (0.1, 0.5, 1.0):
        assert gradcheck(
            lambda h, w, b, d=delta: linear_as_multilabel_loss(h, w, case.labels, bias=b, delta=d, backend="torch"),
            leaves,
        )


# -- kinds of rows -----------------------------------------------------------------------------------------------------

KEPT = {  # negatives that are kept, of 1200 classes in tiles of 128; class 0, 130 and 1199 apply to all
    "solved": [],
    "listed": [5, 300, 1198],
    "beside a label": [129, 131],
    "as many as are listed": [*range(140, 156)],
    "more than are listed": [*range(140, 157)],
    "more tiles than are visited": [*range(127, 1152, 128)],
}
WIDE = ["more than are listed", "more tiles than are visited"]
SIDES = ["labels right", "labels wrong"]
DELTA = 0.001


def rows_of_all_kinds() -> tuple[Case, list[tuple[str, str]]]:
    """Kept negatives have a logit of 1/4, others of -30; labels one of 9 or, if wrong, of -1/4."""
    kinds = [(kind, side) for kind in (*KEPT, "dense") for side in SIDES]
    own = [0, 130, 1199]
    weight = torch.zeros(1200, len(KEPT) + 3, dtype=torch.float64)
    weight[:, 0] = 1
    weight[own, 1] = 1
    hidden = torch.zeros(len(kinds), weight.shape[1], dtype=torch.float64)
    hidden[:, 0] = -30
    for row, (kind, side) in enumerate(kinds):
        hidden[row, 1] = 39 if side == "labels right" else 29.75
        if kind == "dense":
            hidden[row, -1] = 38
        else:
            hidden[row, 2 + list(KEPT).index(kind)] = 30.25
    for column, classes in enumerate(KEPT.values(), 2):
        weight[classes, column] = 1
    weight[77, -1] = 1
    bias = torch.zeros(1200, dtype=torch.float64)
    return Case(hidden, weight, bias, torch.tensor([[130, IGNORED, 0, 1199]] * len(kinds))), kinds


def expected_kept(kind: str, side: str) -> int:
    negatives = 1197 if kind == "dense" else len(KEPT[kind])
    return negatives + 3 * (side == "labels wrong")


def forward(case: Case, dtype: torch.dtype, backend: str, delta: float) -> SavedSides:
    """What the kernels save."""
    hidden, weight, _, labels = (x.detach() for x in case.arguments(dtype))
    targets = Targets(labels, torch.tensor(delta, device=DEVICE))
    return linear_multilabel.forward(Layer(hidden, weight, None, 0.0), targets, Options(backend=backend))[3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_all_kinds(backend: str, dtype: torch.dtype) -> None:
    case, kinds = rows_of_all_kinds()
    hidden, weight, _, labels = case.arguments(dtype)
    loss, stats = linear_as_multilabel_loss(
        hidden, weight, labels, delta=DELTA, backend=backend, reduction="none", return_stats=True
    )
    assert stats.kept.tolist() == [expected_kept(*kind) for kind in kinds]
    assert stats.solved.tolist() == [kind == ("solved", "labels right") for kind in kinds]
    grad = torch.autograd.grad(loss.sum(), hidden)[0]
    assert not loss[stats.solved].any()
    assert not grad[stats.solved].any()
    assert grad[~stats.solved].any(-1).all()
    check(case, dtype, backend, delta=DELTA, biased=False)
    for row in range(len(kinds)):  # each alone: then no other kind writes what this one should
        alone = torch.tensor([row])
        check(case.rows(alone), dtype, backend, delta=DELTA, biased=False)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_which_rows_are_listed(dtype: torch.dtype) -> None:
    from softsieve.kernels import linear_triton

    assert (linear_triton.TILE, linear_triton.LISTED, linear_triton.VISITED) == (128, 16, 8)  # what KEPT is made for
    case, kinds = rows_of_all_kinds()
    saved = forward(case, dtype, "triton", DELTA)
    assert saved.listed.tolist() == [kind not in (*WIDE, "dense") for kind, _ in kinds]
    assert saved.unlisted == sum(kind in (*WIDE, "dense") for kind, _ in kinds)
    for row, (kind, _) in enumerate(kinds):
        if saved.listed[row]:
            classes = saved.classes[row]
            assert sorted(classes[classes >= 0].tolist()) == KEPT[kind]  # no label, though its tile is visited


def test_rows_with_solved_negatives_are_listed_in_plain_torch_too() -> None:
    case, kinds = rows_of_all_kinds()
    saved = forward(case, torch.float32, "torch", DELTA)
    assert saved.listed.tolist() == [kind == "solved" for kind, _ in kinds]


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_rows_with_unsolved_negatives_are_multiplied_again(backend: str) -> None:
    case, kinds = rows_of_all_kinds()
    wide = [kind in (*WIDE, "dense") if backend == "triton" else kind != "solved" for kind, _ in kinds]
    hidden, weight, _, labels = case.arguments(torch.float32)
    for wanted in (torch.tensor(wide), ~torch.tensor(wide)):
        part = hidden.detach()[wanted.to(DEVICE)].requires_grad_()
        loss = linear_as_multilabel_loss(part, weight, labels[wanted.to(DEVICE)], delta=DELTA, backend=backend)
        with Watch() as seen:
            torch.autograd.grad(loss, (part, weight))
        assert bool(seen.products) == wanted.equal(torch.tensor(wide))


# -- what may be asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [-1, 7, 299, 300, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_ignore_index(backend: str, ignore_index: int) -> None:
    case = make_case(rows=12)
    usable = (case.labels != ignore_index).all(-1)
    case = decided(case.rows(usable), torch.float32)
    hidden, weight, bias, labels = case.arguments(torch.float32)
    loss = linear_as_multilabel_loss(
        hidden, weight, labels.where(labels != IGNORED, ignore_index), bias=bias, ignore_index=ignore_index,
        backend=backend,
    )  # fmt: skip
    for a, b in zip((loss, *torch.autograd.grad(loss, (hidden, weight, bias))), truth(case), strict=True):
        near(a, b, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_the_order_of_labels_change_nothing(backend: str) -> None:
    hidden, weight, bias, labels = make_case(rows=8).arguments(torch.float32)

    def found(numbers: Tensor) -> list[Tensor]:
        loss, stats = linear_as_multilabel_loss(
            hidden, weight, numbers, bias=bias, backend=backend, reduction="none", return_stats=True
        )
        return [loss.detach(), stats.kept, *torch.autograd.grad(loss.sum(), (hidden, weight, bias))]

    for other in (
        labels.flip(-1),
        F.pad(labels, (3, 9), value=IGNORED),
        labels.to(torch.int32),
        labels.to(torch.int16),
    ):
        for a, b in zip(found(other), found(labels), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_shapes_and_strides(backend: str, dtype: torch.dtype) -> None:
    hidden, weight, bias, labels = make_case(dtype=dtype).arguments(dtype)
    options: dict[str, Any] = {"backend": backend, "reduction": "none", "return_stats": True}
    flat, stats = linear_as_multilabel_loss(hidden, weight, labels, bias=bias, **options)
    folded, folded_stats = linear_as_multilabel_loss(
        hidden.view(2, 3, 4, 24), weight, labels.view(2, 3, 4, 4), bias=bias, **options
    )
    assert torch.equal(folded.flatten(), flat)
    for a, b in zip(folded_stats, stats, strict=True):
        assert torch.equal(a, b.view(2, 3, 4))
    strided = [x.detach().repeat_interleave(2, 0)[::2].requires_grad_() for x in (hidden, weight, bias)]
    turned = labels.T.contiguous().T
    loss, _ = linear_as_multilabel_loss(strided[0], strided[1], turned, bias=strided[2], **options)
    assert torch.equal(loss, flat)
    for a, b in zip(
        torch.autograd.grad(loss.sum(), strided), torch.autograd.grad(flat.sum(), (hidden, weight, bias)), strict=True
    ):
        assert torch.equal(a, b)
    alone, stats = linear_as_multilabel_loss(hidden[3], weight, labels[3], bias=bias, **options)
    assert alone.shape == stats.margin.shape == ()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_some(backend: str, frozen: str) -> None:
    leaves = dict(zip(("hidden", "weight", "bias"), make_case().arguments(torch.float32)[:3], strict=True))
    labels = make_case().labels.to(DEVICE)
    loss = linear_as_multilabel_loss(leaves["hidden"], leaves["weight"], labels, bias=leaves["bias"], backend=backend)
    whole = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    some = {name: leaf.detach().requires_grad_(name != frozen) for name, leaf in leaves.items()}
    loss = linear_as_multilabel_loss(some["hidden"], some["weight"], labels, bias=some["bias"], backend=backend)
    wanted = [name for name in some if name != frozen]
    for name, grad in zip(wanted, torch.autograd.grad(loss, [some[name] for name in wanted]), strict=True):
        assert torch.equal(grad, whole[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    hidden, weight, bias, labels = make_case().arguments(torch.float32)
    with torch.autocast(DEVICE, dtype=dtype):
        loss, stats = linear_as_multilabel_loss(hidden, weight, labels, bias=bias, return_stats=True)
    assert loss.dtype == stats.margin.dtype == torch.float32
    plain = linear_as_multilabel_loss(
        hidden.to(dtype), weight.to(dtype), labels, bias=bias.detach(), reduction="none"
    ).float()
    torch.testing.assert_close(loss, plain.mean(), rtol=2e-2, atol=0)
    for grad, leaf in zip(torch.autograd.grad(loss, (hidden, weight, bias)), (hidden, weight, bias), strict=True):
        assert grad.dtype == leaf.dtype
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_worse_than_the_same_with_logits(backend: str) -> None:
    for dtype in (torch.float16, *[torch.bfloat16] * (backend == "torch" or DEVICE == "cuda")):
        case = decided(make_case(dtype=dtype), dtype, least=0.1)
        hidden, weight, _, labels = case.arguments(dtype)
        true = truth(case, biased=False, reduction="sum")
        flags = reference.flags_of(labels, len(weight))
        results = []
        for loss in (
            linear_as_multilabel_loss(hidden, weight, labels, reduction="sum", backend=backend),
            as_multilabel_loss(F.linear(hidden, weight), flags, delta=0.5, against="threshold", reduction="sum"),
        ):
            results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
        for ours, plain, exact in zip(*results, true, strict=True):
            slack = torch.finfo(dtype).eps * exact.abs().max()
            assert (ours.cpu() - exact).abs().max() <= (plain.cpu() - exact).abs().max() + slack


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_matrix_of_all_classes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "WORK", 1 << 16)
    rows, classes = 24, 5000
    case = make_case(rows, 2, classes)
    hidden, weight, bias, labels = case.arguments(torch.float32)
    with Watch(besides=weight.shape) as seen:
        loss = linear_as_multilabel_loss(hidden, weight, labels, bias=bias, backend=backend)
        torch.autograd.grad(loss, (hidden, weight, bias))
    assert seen.largest < rows * classes * 4 / 2  # bytes of half the logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_every_time(backend: str) -> None:
    hidden, weight, bias, labels = make_case(dtype=torch.float16).arguments(torch.float16)

    def found() -> tuple[Tensor, ...]:
        loss = linear_as_multilabel_loss(hidden, weight, labels, bias=bias, backend=backend)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))

    assert all(torch.equal(a, b) for a, b in zip(found(), found(), strict=True))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite(backend: str, place: int, bad: float) -> None:
    """As in the loss of logits; the label is class 0."""
    hidden, weight = torch.eye(2, device=DEVICE), torch.tensor([[9.0, 9], [-9, -9], [-9, -9]], device=DEVICE)
    bias = torch.zeros(3, device=DEVICE)
    bias[place] = bad
    labels = torch.zeros(2, 1, dtype=torch.long, device=DEVICE)
    loss, stats = linear_as_multilabel_loss(
        hidden, weight, labels, bias=bias, reduction="none", backend=backend, return_stats=True
    )
    flags = reference.flags_of(labels, 3)
    logits = F.linear(hidden, weight, bias)
    if bad == -INF and place == 0:
        assert (loss == INF).all() or loss.isnan().all()
        assert not stats.solved.any()
        return
    true, true_stats = as_multilabel_loss(
        logits, flags, delta=0.5, against="threshold", reduction="none", return_stats=True
    )
    torch.testing.assert_close(loss, true, equal_nan=True)
    torch.testing.assert_close(stats.margin, true_stats.margin, equal_nan=True)
    assert torch.equal(stats.solved, true_stats.solved)


@pytest.mark.parametrize("size", [100.0, 3e4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_finite_logit_overflows(backend: str, size: float) -> None:
    hidden = torch.tensor([[size]], device=DEVICE, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], device=DEVICE)
    labels = torch.tensor([[2]], device=DEVICE)
    loss = linear_as_multilabel_loss(hidden, weight, labels, delta=0.1, backend=backend)
    torch.testing.assert_close(loss, torch.tensor(size, device=DEVICE) + torch.tensor(2.0, device=DEVICE).log())
    (grad,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(grad, torch.tensor([[1.0]], device=DEVICE))


# -- properties --------------------------------------------------------------------------------------------------------

ROW = st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=7).filter(
    lambda row: any(own for _, own in row)
)


@settings(deadline=None)
@given(ROW, st.floats(0, 1), st.randoms())
def test_invariants(row: list[tuple[float, bool]], delta: float, random: Any) -> None:
    """With one feature, the weight is the logits."""
    one = torch.ones(1, 1, dtype=torch.float64)

    def found(classes: list[tuple[float, bool]]) -> tuple[Tensor, MultiLabelStats, Tensor]:
        weight = torch.tensor([[x] for x, _ in classes], dtype=torch.float64, requires_grad=True)
        labels = torch.tensor([[number for number, (_, own) in enumerate(classes) if own]])
        loss, stats = linear_as_multilabel_loss(one, weight, labels, delta=delta, return_stats=True)
        return loss.detach(), stats, torch.autograd.grad(loss, weight)[0]

    loss, (solved, kept, margin), grad = found(row)
    assert -1 <= margin <= 1
    assert grad.count_nonzero() <= kept
    assert solved == (kept == 0)
    if solved:
        assert [x > 0 for x, _ in row] == [own for _, own in row]
        assert loss == 0
        assert not grad.any()
    if abs(float(margin) - delta) > 1e-9:
        assert solved == (margin > delta)
    order = list(range(len(row)))
    random.shuffle(order)
    other_loss, other_stats, other_grad = found([row[place] for place in order])
    torch.testing.assert_close(other_loss, loss)
    torch.testing.assert_close(other_grad, grad[order])
    assert other_stats.kept == kept


# -- compiled, twice, as a module --------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_as_one_graph_for_any_delta(backend: str) -> None:
    hidden, weight, bias, labels = make_case(rows=12).arguments(torch.float32)
    counter = CompileCounterWithBackend("aot_eager")

    def function(h: Tensor, w: Tensor, b: Tensor, t: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        loss, stats = linear_as_multilabel_loss(h * 1.5, w, t, bias=b, delta=delta, backend=backend, return_stats=True)
        return loss, stats.kept

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for delta in (1.0, 0.7, 0.4, 0.2):
        results: list[Any] = []
        for call in (compiled, function):
            loss, kept = call(hidden, weight, bias, labels, delta)
            results.append((loss.detach(), kept, *torch.autograd.grad(loss, (hidden, weight, bias))))
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_bad_labels_are_refused_in_compiled_code_too() -> None:
    compiled = torch.compile(lambda h, w, t: linear_as_multilabel_loss(h, w, t), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="labels: expected class numbers in"):
        compiled(torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([[0], [5]]))


def test_the_ops_pass_the_checks_of_torch() -> None:
    case = make_case(rows=6, size=5, classes=9, labels=3)
    hidden, weight, bias = (x.clone().requires_grad_() for x in case[:3])
    delta = torch.tensor(0.4, dtype=torch.float64)
    for reduction in ("none", "mean"):
        arguments = (hidden, weight, bias, case.labels, delta, IGNORED, reduction, "torch", "", 0)
        torch.library.opcheck(torch.ops.softsieve.linear_as_multilabel_loss.default, arguments)
    outputs = [x.detach() for x in torch.ops.softsieve.linear_as_multilabel_loss(*arguments)]
    factor = torch.rand(6, dtype=torch.float64)
    leaves = (hidden.detach(), weight.detach(), bias.detach())
    others = (factor, *leaves, case.labels, outputs[3:], IGNORED, "torch", "", 0, [True, True, True])
    torch.library.opcheck(torch.ops.softsieve.linear_as_multilabel_loss_backward.default, others)


def test_a_second_derivative_is_refused_unless_the_reference_is_asked() -> None:
    hidden, weight, bias, labels = make_case(rows=4, size=3, classes=6).arguments(torch.float32)

    def gradient(backend: str) -> Tensor:
        loss = linear_as_multilabel_loss(hidden, weight, labels, bias=bias, delta=1.0, backend=backend)
        return torch.autograd.grad(loss, hidden, create_graph=True)[0]

    assert torch.autograd.grad(gradient("reference").square().sum(), hidden)[0].any()
    with pytest.raises(NotImplementedError, match="linear_as_multilabel_loss: expected to be differentiated once"):
        torch.autograd.grad(gradient("torch").square().sum(), hidden)


def test_the_module_passes_everything_on() -> None:
    case = make_case(rows=8, size=6, classes=11)
    labels = case.labels.where(case.labels != IGNORED, 11)
    module = LinearASMultiLabelLoss(
        6, 11, 0.3, bias=True, ignore_index=11, reduction="sum", backend="torch", return_stats=True, dtype=torch.float64
    )
    loss, stats = module(case.hidden, labels)
    truth, true_stats = linear_as_multilabel_loss(
        case.hidden, module.weight, labels, bias=module.bias, delta=0.3, ignore_index=11, reduction="sum",
        backend="torch", return_stats=True,
    )  # fmt: skip
    assert torch.equal(loss, truth)
    assert all(torch.equal(a, b) for a, b in zip(stats, true_stats, strict=True))
    assert list(module.state_dict()) == ["weight", "bias"]
    module.delta = 1.5
    with pytest.raises(ValueError, match="delta: expected"):
        module(case.hidden, labels)
    assert repr(LinearASMultiLabelLoss(2, 3)) == (
        "LinearASMultiLabelLoss(in_features=2, num_classes=3, bias=False, delta=0.5, ignore_index=-100, "
        "reduction='mean', backend='auto')"
    )


# -- what is refused ---------------------------------------------------------------------------------------------------

STATES, WEIGHT, LABELS = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([[0, 4], [2, IGNORED]])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": None}, TypeError, "hidden: expected a torch.Tensor, found NoneType"),
        ({"weight": torch.ones(5, 4)}, ValueError, r"hidden, weight: expected shapes"),
        ({"bias": torch.ones(4)}, ValueError, r"bias: expected shape \(5,\)"),
        ({"labels": [[0]]}, TypeError, "labels: expected a torch.Tensor, found list"),
        ({"labels": torch.ones(2, 5, dtype=torch.bool)}, TypeError, "labels: .* found torch.bool: 0/1 flags are for"),
        ({"labels": torch.ones(2, 5)}, TypeError, "labels: expected class numbers, .* found torch.float32: 0/1 flags"),
        (
            {"labels": torch.tensor([[1, 0, 0, 0, 0], [0, 1, 1, 0, 0]])},
            ValueError,
            r"labels: expected class numbers \(rows, labels\).* found 0/1 flags of shape \(2, 5\)",
        ),
        ({"labels": torch.tensor([0, 1])}, ValueError, r"labels: expected shape \(2, labels\) .* found \(2,\)"),
        ({"labels": LABELS[:1]}, ValueError, r"labels: expected shape \(2, labels\) .* found \(1, 2\)"),
        ({"labels": LABELS[:, :0]}, ValueError, r"labels: expected shape \(2, labels\) .* found \(2, 0\)"),
        ({"labels": torch.tensor([[0, 4], [5, 1]])}, ValueError, r"labels: .* in \[0, 5\), .* found 5 in row 1"),
        ({"labels": torch.tensor([[0, -1], [2, 1]])}, ValueError, r"labels: .* in \[0, 5\), .* found -1 in row 0"),
        ({"labels": torch.tensor([[0, 4], [2, 2]])}, ValueError, "labels: .* found 2 twice in row 1"),
        (
            {"labels": torch.tensor([[0, 4], [IGNORED, IGNORED]])},
            ValueError,
            "labels: expected a class number in every row, padded with ignore_index=-100, found none in row 1",
        ),
        ({"delta": 1.5}, ValueError, "delta: expected a number in"),
        ({"delta": torch.tensor([0.5, 2.0])}, ValueError, "delta: expected numbers in"),
        ({"against": "labels"}, ValueError, "against: expected 'threshold', found 'labels', whose margins"),
        ({"against": "all"}, ValueError, "against: expected one of 'labels', 'threshold', found 'all'"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index: expected an int"),
        ({"reduction": "max"}, ValueError, "reduction: expected one of"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of"),
        ({"memory": 10}, ValueError, "memory: expected at least .* bytes, for 128 classes of 2 rows .* found 10"),
        ({"memory": 0.5}, TypeError, "memory: expected"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_bad_input_is_refused(backend: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"hidden": STATES, "weight": WEIGHT, "labels": LABELS, "backend": backend, **change}
    with pytest.raises(error, match=message):
        linear_as_multilabel_loss(**arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_says_how_many_classes_there_are_at_a_time(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    chunks = Layer.chunks

    def noted(self: Layer, budget: int, beside: int = 0) -> Iterator[Chunk]:
        for chunk in chunks(self, budget, beside):
            widths.append(chunk.products.shape[1])
            yield chunk

    monkeypatch.setattr(Layer, "chunks", noted)
    monkeypatch.setattr(kernel, "BUFFER", 67 << 20)
    monkeypatch.setattr(kernel, "WORK", 116 << 20)
    monkeypatch.setattr(kernel, "ROWS", 68 << 20)
    case = decided(make_case(), torch.float32)
    least = kernel.least_memory(len(case.hidden), 4)
    check(case, torch.float32, backend, memory=least, delta=0.5)
    assert widths[0] == 128 < len(case.weight)  # of all rows; of fewer there may be more
    widths.clear()
    check(case, torch.float32, backend, memory=1 << 30, delta=0.5)
    assert widths[0] == len(case.weight)


@pytest.mark.parametrize("make", [lambda **options: LinearASMultiLabelLoss(3, 5, **options)])
def test_the_module_refuses_bad_options(make: Callable[..., Any]) -> None:
    for name, value in {"delta": 2.0, "against": "labels", "reduction": "all", "backend": "gpu"}.items():
        with pytest.raises(ValueError, match=f"{name}: expected"):
            make(**{name: value})


def test_labels_twice_in_a_row_may_be_padding() -> None:
    labels = torch.tensor([[IGNORED, IGNORED, 3], [1, IGNORED, IGNORED]])
    assert linear_as_multilabel_loss(STATES, WEIGHT, labels).isfinite()
