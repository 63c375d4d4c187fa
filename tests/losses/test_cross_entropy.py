"""as_cross_entropy and as_keep_mask against the reference, F.cross_entropy and the paper's own promises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.measure import peak_bytes
from softsieve import ASCrossEntropyLoss, as_cross_entropy, as_keep_mask, reference
from softsieve.kernels import cross_entropy_torch as kernel
from tests.helpers import IGNORED, default_dtype, distance_to_margin, make

INF, NAN = float("inf"), float("nan")
SHAPES = [(1, 1), (1, 2), (3, 4), (252, 7), (123, 507), (33, 1031)]
DELTAS = [0.0, 1e-7, 0.05, 0.1, 0.5, 0.9, 1.0]
REDUCTIONS = ["none", "mean", "sum"]


def grad_of(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    x = logits.detach().clone().requires_grad_()
    out = loss(x)
    upstream = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad(out, x, upstream)[0]


@pytest.fixture(params=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many blocks":
        monkeypatch.setattr(kernel, "BLOCK", 700)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_agrees_with_the_reference(shape: tuple[int, int], delta: float, weighted: bool, reduction: str) -> None:
    logits, target = make(*shape)
    options: dict[str, Any] = {"delta": delta, "reduction": reduction}
    options["weight"] = torch.rand(shape[1], dtype=torch.float64) + 0.1 if weighted else None
    ours, truth = as_cross_entropy(logits, target, **options), reference.as_cross_entropy(logits, target, **options)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(
        grad_of(lambda x: as_cross_entropy(x, target, **options), logits),
        grad_of(lambda x: reference.as_cross_entropy(x, target, **options), logits),
        rtol=1e-9,
        atol=1e-13,
    )


def test_inputs_hold_every_kind_of_row() -> None:
    """The comparison above means something only if dense, sparse, solved and ignored rows are all in it."""
    logits, target = make(123, 507)
    _, stats = as_cross_entropy(logits, target, delta=0.1, return_stats=True)
    sparse = ~stats.dense & ~stats.solved & (target != IGNORED)
    assert min(stats.dense.sum(), stats.solved.sum(), sparse.sum(), (target == IGNORED).sum()) >= 5


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mask_and_stats_agree_with_the_reference(shape: tuple[int, int], delta: float, dtype: torch.dtype) -> None:
    logits, target = make(*shape)
    logits = logits.to(dtype)
    truth = reference.as_keep_mask(logits.double(), target, delta=delta)
    clear = distance_to_margin(logits, target, delta) > (1e-12 if dtype == torch.float64 else 1e-6)
    mask = as_keep_mask(logits, target, delta=delta)
    assert clear.float().mean() > 0.5
    assert torch.equal(mask[clear], truth[clear])
    _, stats = as_cross_entropy(logits, target, delta=delta, return_stats=True)
    assert torch.equal(stats.kept, mask.sum(-1))
    assert torch.equal(stats.solved, mask.sum(-1) == 1)
    solved, _, dense, lse, margin = reference.as_stats(logits.double(), target, delta=delta)
    rows = clear.all(-1)
    assert torch.equal(stats.solved[rows], solved[rows])
    assert torch.equal(stats.dense[rows], dense[rows])
    torch.testing.assert_close(stats.lse.double(), lse, rtol=1e-6, atol=1e-6)
    assert stats.margin.dtype == stats.lse.dtype
    torch.testing.assert_close(stats.margin.double(), margin, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)
    if shape[1] > 1:  # an only class is solved at delta 1, too
        assert torch.equal(stats.margin[rows] > delta, solved[rows])


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_delta_one_is_cross_entropy_to_the_last_bit(
    shape: tuple[int, int], dtype: torch.dtype, reduction: str, weighted: bool
) -> None:
    logits, target = make(*shape)
    logits = logits.to(dtype)
    weight = torch.rand(shape[1], dtype=dtype) if weighted else None

    def ours(x: Tensor) -> Tensor:
        return as_cross_entropy(x, target, delta=1, reduction=reduction, weight=weight)

    def theirs(x: Tensor) -> Tensor:
        return F.cross_entropy(x, target, reduction=reduction, weight=weight)

    assert torch.equal(ours(logits), theirs(logits))
    torch.testing.assert_close(grad_of(ours, logits), grad_of(theirs, logits))


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.6, 1.0])
def test_gradcheck_twice(delta: float) -> None:
    logits, target = make(9, 5)
    assert distance_to_margin(logits, target, delta).min() > 1e-4  # finite differences must not cross the margin
    logits.requires_grad_()
    weight = torch.rand(5, dtype=torch.float64)
    for reduction in REDUCTIONS:

        def loss(x: Tensor, reduction: str = reduction) -> Tensor:
            return as_cross_entropy(x, target, delta=delta, reduction=reduction, weight=weight)

        assert torch.autograd.gradcheck(loss, (logits,))
        assert torch.autograd.gradgradcheck(loss, (logits,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("delta", [0.1, 1.0])
@pytest.mark.parametrize("shape", [(252, 7), (123, 507), (33, 5003)])
def test_half_precision_is_no_worse_than_the_same_written_plainly(
    dtype: torch.dtype, delta: float, shape: tuple[int, int]
) -> None:
    logits, target = make(*shape)
    logits = logits.to(dtype)
    # the plain version decides in 16 bits; give it the right mask, so that only its arithmetic is judged
    keep = reference.as_keep_mask(logits.double(), target, delta=delta) | (target == IGNORED).unsqueeze(-1)

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x.masked_fill(~keep, -INF), target, reduction=reduction)

    for reduction in REDUCTIONS:
        truth, true_grad = plain(logits.double()), grad_of(plain, logits.double())
        ours = as_cross_entropy(logits, target, delta=delta, reduction=reduction)
        assert ours.dtype == dtype
        error, plain_error = (ours - truth).abs().max(), (plain(logits) - truth).abs().max()
        assert error <= plain_error + torch.finfo(dtype).eps * truth.abs().max() / 2

        def run(x: Tensor, reduction: str = reduction) -> Tensor:
            return as_cross_entropy(x, target, delta=delta, reduction=reduction)

        error = (grad_of(run, logits) - true_grad).abs().max()
        plain_error = (grad_of(plain, logits) - true_grad).abs().max()
        assert error <= plain_error + torch.finfo(dtype).eps * true_grad.abs().max() / 2


logit_rows = st.integers(1, 6).flatmap(
    lambda classes: st.lists(
        st.lists(st.floats(-30, 30, width=32), min_size=classes, max_size=classes), min_size=1, max_size=5
    )
)


@given(rows=logit_rows, delta=st.floats(0, 1), shift=st.floats(-50, 50), data=st.data())
def test_invariants(rows: list[list[float]], delta: float, shift: float, data: st.DataObject) -> None:
    logits = torch.tensor(rows, dtype=torch.float64)
    n, c = logits.shape
    target = torch.tensor(data.draw(st.lists(st.integers(0, c - 1), min_size=n, max_size=n)))
    order = torch.tensor(data.draw(st.permutations(range(c))))

    def loss(x: Tensor, t: Tensor = target, d: float = delta) -> Tensor:
        return as_cross_entropy(x, t, delta=d, reduction="none")

    row_loss = loss(logits)
    clear = (distance_to_margin(logits, target, delta) > 1e-9).all(-1)
    # shift and permutation change nothing
    torch.testing.assert_close(loss(logits + shift)[clear], row_loss[clear], rtol=1e-9, atol=1e-9)
    moved = loss(logits[:, order], order.argsort()[target])
    torch.testing.assert_close(moved[clear], row_loss[clear], rtol=1e-9, atol=1e-12)
    # between 0 and cross-entropy, and monotone in delta
    assert (row_loss >= 0).all()
    assert (row_loss <= F.cross_entropy(logits, target, reduction="none")).all()
    wider = data.draw(st.floats(delta, 1))
    assert (loss(logits, d=wider) - row_loss >= -1e-12 * row_loss).all()
    # the target is always kept, and a solved row is exactly 0 in loss and gradient
    keep = as_keep_mask(logits, target, delta=delta)
    assert keep.gather(1, target.unsqueeze(1)).all()
    solved = keep.sum(1) == 1
    grad = grad_of(loss, logits)
    assert (row_loss[solved] == 0).all()
    assert (grad[solved] == 0).all()
    assert (grad[~keep] == 0).all()


@given(st.floats(0, 1), st.integers(2, 50), st.floats(-100, 100))
def test_ties_with_the_target_are_kept(delta: float, classes: int, value: float) -> None:
    logits = torch.full((1, classes), value, dtype=torch.float32)
    assert as_keep_mask(logits, torch.tensor([0]), delta=delta).all()


def test_worked_example_of_the_paper() -> None:
    logits = torch.tensor([[1.2, 1.5, 1.0, -0.35], [2.5, 3.5, 0.4, 0.3]])
    mask = as_keep_mask(logits, torch.tensor([1, 2]), delta=0.10)
    assert mask.tolist() == [[False, True, False, False], [True, True, True, True]]


def test_solved_rows_are_exactly_zero_whatever_comes_from_above() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    target = torch.tensor([0, 2])
    grad = grad_of(lambda x: as_cross_entropy(x, target, reduction="none") * torch.tensor([INF, 1.0]), logits)
    assert grad[0].tolist() == [0, 0, 0]
    assert (grad[1] != 0).all()


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 2, 255])
def test_ignore_index_of_any_value(ignore_index: int) -> None:
    logits, target = make(40, 5, ignored=0)
    target[::3] = ignore_index
    counted = target != ignore_index
    loss, stats = as_cross_entropy(logits, target, ignore_index=ignore_index, return_stats=True)
    torch.testing.assert_close(loss, as_cross_entropy(logits[counted], target[counted]))
    grad = grad_of(lambda x: as_cross_entropy(x, target, ignore_index=ignore_index), logits)
    assert (grad[~counted] == 0).all()
    assert not torch.cat([s[~counted].double() for s in stats]).any()
    assert not as_keep_mask(logits, target, ignore_index=ignore_index)[~counted].any()


@pytest.mark.parametrize(
    ("row", "margin"),
    [
        ([5.0], 1.0),
        ([2.0, 2.0, -INF], 0.0),
        ([-INF, 0.0, 0.0], -0.5),
        ([3.0, -INF, -INF], 1.0),
        ([1e4, 1e4 + 1, -1e9], -0.46211716),
        ([0.0, 5000.0, 4999.0], -0.73105858),  # log p of the target has no digits left for that of the other
        ([0.0, NAN], NAN),
        ([INF, 0.0], NAN),
    ],
)
@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
def test_margins(row: list[float], margin: float, delta: float) -> None:
    logits, target = torch.tensor([row, row], requires_grad=True), torch.tensor([0, IGNORED])
    _, stats = as_cross_entropy(logits, target, delta=delta, return_stats=True)
    torch.testing.assert_close(stats.margin, torch.tensor([margin, 0]), rtol=1e-6, atol=0, equal_nan=True)
    assert not stats.margin.requires_grad
    assert margin != 0 or stats.margin[0] == 0  # a tie has exactly none
    if margin == margin:
        truth = reference.as_stats(logits, target, delta=delta)[-1]
        torch.testing.assert_close(stats.margin, truth, rtol=1e-6, atol=0)


@given(
    st.lists(st.floats(-60, 60), min_size=1, max_size=6),
    st.floats(0, 1),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_margins_are_of_minus_1_to_1_and_tell_what_is_solved(
    row: list[float], delta: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([row], dtype=dtype)
    _, stats = as_cross_entropy(logits, torch.tensor([0]), delta=delta, return_stats=True)
    assert -1 <= stats.margin <= 1
    if len(row) > 1 and abs(float(stats.margin) - delta) > 1e-5:
        assert (stats.margin > delta) == stats.solved


def test_far_from_zero_the_threshold_decides_and_not_the_margin() -> None:
    logits, target = torch.randn(4000, 3) + 1e5, torch.zeros(4000, dtype=torch.long)  # multiples of 1/128
    _, stats = as_cross_entropy(logits, target, return_stats=True)
    assert ((stats.margin > 0.1) != stats.solved).any()
    assert torch.equal(stats.kept, as_keep_mask(logits, target).sum(-1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, torch.zeros(4)])
def test_all_ignored_is_zero_with_a_graph(reduction: str, weight: Tensor | None) -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = as_cross_entropy(logits, torch.full((3,), -100), reduction=reduction, weight=weight)
    assert (loss == 0).all()
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert (grad == 0).all()


def test_ignored_rows_may_hold_anything() -> None:
    logits = torch.tensor([[NAN, INF, -INF], [0.0, 1.0, 2.0]])
    target = torch.tensor([-100, 2])
    loss, stats = as_cross_entropy(logits, target, return_stats=True)
    assert torch.equal(loss, as_cross_entropy(logits[1:], target[1:]))
    assert stats.lse[0] == 0
    assert (grad_of(lambda x: as_cross_entropy(x, target), logits)[0] == 0).all()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
def test_nan_and_inf_are_never_a_silent_zero(bad: float, place: int, delta: float) -> None:
    logits, target = torch.zeros(2, 3), torch.tensor([0, 0])
    logits[0, place] = bad
    rows = as_cross_entropy(logits, target, delta=delta, reduction="none")
    assert rows[0].isnan()
    assert rows[1].isfinite()
    assert as_cross_entropy(logits, target, delta=delta).isnan()
    grad = grad_of(lambda x: as_cross_entropy(x, target, delta=delta), logits)
    assert grad[0].isnan().any()
    assert grad[1].isfinite().all()


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.9, 1.0])
def test_minus_inf_of_other_classes_is_masked_decoding(delta: float) -> None:
    logits, target = make(30, 8, ignored=0)
    forbidden = torch.rand(30, 8) < 0.4
    forbidden[torch.arange(30), target] = False
    loss = as_cross_entropy(logits.masked_fill(forbidden, -INF), target, delta=delta, reduction="none")
    rows = [
        as_cross_entropy(x[~f].unsqueeze(0), (~f)[:t].sum().unsqueeze(0), delta=delta)
        for x, f, t in zip(logits, forbidden, target, strict=True)
    ]
    torch.testing.assert_close(loss, torch.stack(rows))
    grad = grad_of(lambda x: as_cross_entropy(x.masked_fill(forbidden, -INF), target, delta=delta), logits)
    assert grad.isfinite().all()


def test_minus_inf_of_the_target_is_an_infinite_loss_with_a_finite_gradient() -> None:
    logits, target = torch.tensor([[-INF, 1.0, 2.0]]), torch.tensor([0])
    loss, stats = as_cross_entropy(logits, target, return_stats=True)
    assert loss == INF
    torch.testing.assert_close(stats.lse, logits.logsumexp(-1))
    torch.testing.assert_close(
        grad_of(lambda x: as_cross_entropy(x, target), logits), grad_of(lambda x: F.cross_entropy(x, target), logits)
    )


@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
def test_a_loss_beyond_all_numbers_has_a_finite_gradient(delta: float) -> None:
    logits, target = torch.tensor([[-3e38, 3e38, 0.0]]), torch.tensor([0])
    assert as_cross_entropy(logits, target, delta=delta) == INF
    assert grad_of(lambda x: as_cross_entropy(x, target, delta=delta, reduction="sum"), logits).tolist() == [
        [-0.5, 0.5, 0]
    ]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_weight_of_a_class_that_does_not_occur_may_be_anything(reduction: str) -> None:
    logits, target = torch.randn(2, 3), torch.tensor([1, -100])
    weights = torch.tensor([INF, 2.0, NAN]), torch.tensor([1.0, 2.0, 1.0])
    odd, plain = (as_cross_entropy(logits, target, weight=w, reduction=reduction) for w in weights)
    assert torch.equal(odd, plain)


@pytest.mark.parametrize("delta", [Fraction(1, 4), np.float32(0.25)])
def test_any_real_number_is_a_margin(delta: Any) -> None:
    logits, target = make(20, 5)
    assert torch.equal(as_cross_entropy(logits, target, delta=delta), as_cross_entropy(logits, target, delta=0.25))


def test_huge_logits_keep_their_digits() -> None:
    logits = torch.tensor([[1e4, 1e4 + 1, 1e4 - 2], [-1e9, 3.0, 1.0]])
    target = torch.tensor([0, 0])
    loss, stats = as_cross_entropy(logits, target, reduction="none", return_stats=True)
    torch.testing.assert_close(loss, reference.as_cross_entropy(logits, target, reduction="none"))
    torch.testing.assert_close(stats.lse, logits.logsumexp(-1))


def test_a_target_too_unlikely_to_be_written_down_is_still_behind() -> None:
    logits, target = torch.tensor([[0.0, 200.0, -1.0]]), torch.tensor([0])  # exp(-200) is 0 in fp32
    assert as_keep_mask(logits, target, delta=0.0).tolist() == [[True, True, False]]
    assert as_keep_mask(logits, target, delta=1e-30).all()
    assert as_cross_entropy(logits, target, delta=0.0) == 200


@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("strided", [False, True])
def test_any_leading_shape_and_stride(leading: tuple[int, ...], strided: bool) -> None:
    logits = torch.randn(*leading, 5)
    if strided:
        logits = torch.randn(5, *leading).movedim(0, -1)
    target = torch.randint(5, leading)
    flat_logits, flat_target = logits.reshape(-1, 5), target.reshape(-1)
    loss, stats = as_cross_entropy(logits, target, reduction="none", return_stats=True)
    assert loss.shape == target.shape
    assert torch.equal(loss.reshape(-1), as_cross_entropy(flat_logits, flat_target, reduction="none"))
    assert all(s.shape == target.shape for s in stats)
    mask = as_keep_mask(logits, target)
    assert torch.equal(mask.reshape(-1, 5), as_keep_mask(flat_logits, flat_target))
    grad = grad_of(lambda x: as_cross_entropy(x, target), logits)
    torch.testing.assert_close(grad.reshape(-1, 5), grad_of(lambda x: as_cross_entropy(x, flat_target), flat_logits))


@pytest.mark.parametrize("shape", [(2, 5, 5), (5, 5, 5), (2, 3, 3, 3)])
def test_a_shape_that_cross_entropy_reads_otherwise_is_told(shape: tuple[int, ...]) -> None:
    logits, target = torch.randn(shape), torch.randint(shape[-1], shape[:-1])
    F.cross_entropy(logits, target)  # takes the second dimension for classes, and does not complain either
    words = r"logits: expected classes in the last dimension, .* F.cross_entropy"
    with pytest.warns(UserWarning, match=words) as told:
        loss = as_cross_entropy(logits, target, delta=1)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=words):
        ASCrossEntropyLoss()(logits, target)
    with pytest.warns(UserWarning, match=words):
        mask = as_keep_mask(logits, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, labels = logits.flatten(0, -2), target.flatten()
        assert torch.equal(loss, as_cross_entropy(rows, labels, delta=1))
        assert torch.equal(mask.flatten(0, -2), as_keep_mask(rows, labels))
        theirs = as_cross_entropy(logits.movedim(1, -1).flatten(0, -2), labels, delta=1)
    torch.testing.assert_close(theirs, F.cross_entropy(logits, target))


@pytest.mark.parametrize("shape", [(5,), (5, 5), (1, 1, 1), (2, 4, 5), (5, 5, 4), (2, 3, 5, 5), (2, 5, 3, 5)])
def test_a_shape_that_cross_entropy_cannot_read_otherwise_is_not_told(shape: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_cross_entropy(torch.randn(shape), torch.randint(shape[-1], shape[:-1]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integer_dtype(dtype: torch.dtype) -> None:
    logits, target = make(20, 5, ignored=0)
    assert torch.equal(as_cross_entropy(logits, target.to(dtype)), as_cross_entropy(logits, target))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(default: torch.dtype, dtype: torch.dtype) -> None:
    logits, target = make(40, 6)
    weight = torch.rand(6)

    def found() -> list[Tensor]:
        x = logits.to(dtype).requires_grad_()
        loss, stats = as_cross_entropy(x, target, weight=weight, return_stats=True)
        (grad,) = torch.autograd.grad(loss, x)
        return [loss, grad, *stats]

    plain = found()
    with default_dtype(default):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found(), plain, strict=True))


def test_inputs_are_never_changed() -> None:
    logits, target = make(50, 6)
    before, labels = logits.clone(), target.clone()
    grad_of(lambda x: as_cross_entropy(x, target), logits)
    as_cross_entropy(logits, target)
    assert torch.equal(logits, before)
    assert torch.equal(target, labels)


def test_no_temporary_of_the_size_of_the_logits() -> None:
    """Peak of forward + backward: the gradient, and blocks that do not grow with the number of rows."""
    logits, target = torch.randn(20_000, 400, requires_grad=True), torch.randint(400, (20_000,))

    def call() -> None:
        as_cross_entropy(logits, target, return_stats=True)[0].backward()  # type: ignore[no-untyped-call]

    call()
    logits.grad = None
    size = logits.numel() * 4
    per_row = 20_000 * 8 * 20
    assert peak_bytes(call) < size + 3 * kernel.BLOCK * 4 + per_row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_loss_is_fp32_as_that_of_cross_entropy(dtype: torch.dtype) -> None:
    logits, target = make(40, 30)
    half = logits.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        ours, theirs = as_cross_entropy(half, target, delta=1), F.cross_entropy(half, target)
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours, theirs)
    ours.backward()  # type: ignore[no-untyped-call]
    assert half.grad is not None
    assert half.grad.dtype == dtype


CLASSES = 4
GOOD_LOGITS, GOOD_TARGET = torch.zeros(3, CLASSES), torch.tensor([0, 1, 2])
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": [[1.0]]}, TypeError, "logits: expected a torch.Tensor, found list"),
    (
        {"logits": torch.zeros(3, 4, dtype=torch.long)},
        TypeError,
        "logits: expected a floating-point dtype, found torch.i",
    ),
    ({"logits": torch.zeros(())}, ValueError, r"logits: expected a non-empty tensor .* found shape \(\)"),
    ({"logits": torch.zeros(0, 4)}, ValueError, r"logits: expected a non-empty .* found shape \(0, 4\)"),
    ({"logits": torch.zeros(3, 0)}, ValueError, r"logits: expected a non-empty .* found shape \(3, 0\)"),
    ({"target": [0, 1, 2]}, TypeError, "target: expected a torch.Tensor, found list"),
    ({"target": torch.tensor([0, 1])}, ValueError, r"target: expected shape \(3,\) .* found \(2,\)"),
    ({"target": torch.zeros(3, 4, dtype=torch.long)}, ValueError, r"target: expected shape \(3,\) .* found \(3, 4\)"),
    ({"target": torch.zeros(3)}, TypeError, "target: expected integer class labels .* found torch.float32"),
    ({"target": torch.tensor([True, False, True])}, TypeError, "target: expected integer .* found torch.bool"),
    ({"target": torch.tensor([0, 4, 1])}, ValueError, r"target: .* \[0, 4\) or ignore_index=-100, found 4 in row 1"),
    ({"target": torch.tensor([0, 1, -1])}, ValueError, "target: .* found -1 in row 2"),
    ({"delta": -0.1}, ValueError, r"delta: expected a number in \[0, 1\], found -0.1"),
    ({"delta": 1.1}, ValueError, r"delta: expected a number in \[0, 1\], found 1.1"),
    ({"delta": NAN}, ValueError, r"delta: expected a number in \[0, 1\], found nan"),
    ({"delta": "0.1"}, TypeError, "delta: expected a number, found str"),
    ({"delta": None}, TypeError, "delta: expected a number, found NoneType"),
    ({"delta": True}, TypeError, "delta: expected a number, found bool"),
    ({"ignore_index": 0.5}, TypeError, "ignore_index: expected an int, found float"),
    ({"ignore_index": None}, TypeError, "ignore_index: expected an int, found NoneType"),
    ({"ignore_index": 2**70}, ValueError, r"ignore_index: expected an int in \[.*\], found 1180591620717411303424"),
    ({"logits": torch.eye(3, 4).to_sparse()}, TypeError, "logits: expected a dense tensor, found torch.sparse_coo"),
]
BAD_LOSS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reduction": "avg"}, ValueError, "reduction: expected one of 'none', 'mean', 'sum', found 'avg'"),
    ({"reduction": None}, ValueError, "reduction: expected one of 'none', 'mean', 'sum', found None"),
    ({"reduction": torch.tensor([1, 2])}, ValueError, "reduction: expected one of"),
    ({"weight": [1.0] * 4}, TypeError, "weight: expected a torch.Tensor, found list"),
    ({"weight": torch.ones(4, requires_grad=True)}, ValueError, "weight: expected constants, found a tensor that req"),
    ({"weight": torch.ones(4, dtype=torch.long)}, TypeError, "weight: expected a floating-point dtype"),
    ({"weight": torch.ones(3)}, ValueError, r"weight: expected shape \(4,\), one a class, found \(3,\)"),
    ({"weight": torch.ones(4, device="meta")}, ValueError, "weight: expected device cpu.* found meta"),
]


@pytest.mark.parametrize(("change", "error", "message"), [*BAD, *BAD_LOSS])
def test_bad_input_is_refused_at_the_door(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": GOOD_LOGITS, "target": GOOD_TARGET, **change}
    with pytest.raises(error, match=message):
        as_cross_entropy(arguments.pop("logits"), arguments.pop("target"), **arguments)


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_the_mask_refuses_the_same(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": GOOD_LOGITS, "target": GOOD_TARGET, **change}
    with pytest.raises(error, match=message):
        as_keep_mask(arguments.pop("logits"), arguments.pop("target"), **arguments)
