"""The registry: every loss of the paper's tables by name, each against its definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve import as_cross_entropy, as_multilabel_loss
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL, MultiLabelASSoftmax, Outcome, make_objective
from tests.helpers import IGNORED, default_dtype, make

INF = float("inf")
AVAILABLE = [name for name in SINGLE_LABEL if find_spec("entmax") or name not in ("sparsemax", "entmax-1.5")]


def test_the_registry_holds_the_rows_of_the_paper() -> None:
    assert list(SINGLE_LABEL) == [
        "softmax",
        "t-softmax",
        "sparse-softmax",
        "sparsemax",
        "entmax-1.5",
        "label-smoothing",
        "am-softmax",
        "as-softmax",
    ]
    assert list(MULTI_LABEL) == ["softmax", "bce", "focal-bce", "asymmetric", "as-softmax"]


def sparse_softmax(x: Tensor, t: int, k: int) -> Tensor:
    kept = set(x.topk(min(k, len(x))).indices.tolist()) | {t}
    return x[sorted(kept)].logsumexp(0) - x[t]


def fenchel_young(x: Tensor, t: int, alpha: float) -> Tensor:
    """max over the simplex of <p, x> + H(p), minus x_t, with p found by bisection on the threshold."""
    low, high = x.max() * (alpha - 1) - 1, x.max() * (alpha - 1)
    for _ in range(200):
        tau = (low + high) / 2
        p = ((alpha - 1) * x - tau).clamp_min(0) ** (1 / (alpha - 1))
        low, high = (tau, high) if p.sum() > 1 else (low, tau)
    entropy = (p - p**alpha).sum() / (alpha * (alpha - 1))
    return (p * x).sum() + entropy - x[t]


ROW_COSTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda x, t: x.logsumexp(0) - x[t],
    "t-softmax": lambda x, t: (x / 2).logsumexp(0) - x[t] / 2,
    "sparse-softmax": lambda x, t: sparse_softmax(x, t, 10),
    "sparsemax": lambda x, t: fenchel_young(x, t, 2.0),
    "entmax-1.5": lambda x, t: fenchel_young(x, t, 1.5),
    "label-smoothing": lambda x, t: x.logsumexp(0) - 0.9 * x[t] - 0.1 * x.mean(),
    "am-softmax": lambda x, t: (x - 10.5 * F.one_hot(torch.tensor(t), len(x))).logsumexp(0) - x[t] + 10.5,
    "as-softmax": lambda x, t: as_cross_entropy(x, torch.tensor(t)),
}


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("classes", [2, 7, 40])
def test_every_row_costs_what_its_definition_says(name: str, classes: int) -> None:
    logits, target = make(25, classes, ignored=0)
    rows = make_objective(name, reduction="none")(logits, target).loss
    truth = torch.stack([ROW_COSTS[name](x, t) for x, t in zip(logits, target.tolist(), strict=True)])
    torch.testing.assert_close(rows, truth, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", AVAILABLE)
def test_ignored_rows_add_nothing(name: str) -> None:
    logits, target = make(30, 9)
    counted = target != IGNORED
    rows = make_objective(name, reduction="none")(logits, target).loss
    assert not rows[~counted].any()
    mean = make_objective(name)(logits, target).loss
    torch.testing.assert_close(mean, rows[counted].mean())
    torch.testing.assert_close(make_objective(name, reduction="sum")(logits, target).loss, rows.sum())
    moved = target.where(counted, 1000)
    torch.testing.assert_close(make_objective(name, ignore_index=1000)(logits, moved).loss, mean)
    x = logits.clone().requires_grad_()
    make_objective(name)(x, target).loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert not x.grad[~counted].any()
    assert x.grad[counted].any()


@pytest.mark.parametrize("name", AVAILABLE)
def test_leading_shapes(name: str) -> None:
    logits, target = make(24, 9)
    flat = make_objective(name, reduction="none")(logits, target).loss
    folded = make_objective(name, reduction="none")(logits.view(2, 12, 9), target.view(2, 12)).loss
    torch.testing.assert_close(folded, flat.view(2, 12))


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_shape_that_cross_entropy_reads_otherwise_is_told(name: str) -> None:
    logits, target = make(18, 9, ignored=0)
    with pytest.warns(UserWarning, match="logits: expected classes in the last dimension"):
        make_objective(name)(logits.view(2, 9, 9), target.view(2, 9))


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(name: str, default: torch.dtype) -> None:
    logits, target = make(24, 9)
    plain = make_objective(name)(logits.float(), target).loss
    with default_dtype(default):
        assert torch.equal(make_objective(name)(logits.float(), target).loss, plain)


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_objective_learns(name: str) -> None:
    """Head and loss together separate what is separable."""
    features = torch.randn(200, 8)
    target = (features @ torch.randn(8, 4)).argmax(-1)
    objective = make_objective(name)
    head = objective.head(8, 4)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        objective(head(features), target).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert (head(features).argmax(-1) == target).float().mean() > 0.9


def test_the_cosine_head_is_scale_times_cosine() -> None:
    head = make_objective("am-softmax", scale=5.0).head(6, 3)
    features = torch.randn(4, 6)
    truth = 5 * F.cosine_similarity(features.unsqueeze(1), head.weight.unsqueeze(0), dim=-1)  # type: ignore[operator]
    torch.testing.assert_close(head(features), truth)


def test_as_softmax_says_what_is_solved() -> None:
    logits, target = make(30, 9)
    _, solved, margin = make_objective("as-softmax")(logits, target)
    rows, stats = as_cross_entropy(logits, target, reduction="none", return_stats=True)
    assert solved is not None
    assert margin is not None
    assert torch.equal(solved, (rows == 0) & (target != IGNORED))
    assert torch.equal(margin, stats.margin)
    assert make_objective("softmax")(logits, target)[1:] == (None, None)


def test_delta_may_change() -> None:
    logits, target = make(30, 9)
    objective = make_objective("as-softmax", delta=0.1)
    objective.delta = 1.0  # type: ignore[attr-defined]
    assert torch.equal(objective(logits, target).loss, as_cross_entropy(logits, target, delta=1.0))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multilabel_objectives(reduction: str) -> None:
    logits, target = torch.randn(9, 5) * 4, torch.randint(2, (9, 5))
    plain = make_objective("softmax", multilabel=True, reduction=reduction)(logits, target)
    assert isinstance(plain, Outcome)
    torch.testing.assert_close(plain.loss, as_multilabel_loss(logits, target, delta=1.0, reduction=reduction))
    assert plain[1:] == (None, None)
    logits += 6 * (2 * target - 1) * torch.linspace(0, 1, 9)[:, None]
    for options in ({"delta": 0.5, "against": "threshold"}, {"delta": 0.02, "against": "labels"}):
        made = make_objective("as-softmax", multilabel=True, reduction=reduction, **options)
        ours = made(logits, target)
        loss, stats = as_multilabel_loss(logits, target, reduction=reduction, return_stats=True, **options)  # type: ignore[call-overload]
        assert torch.equal(ours.loss, loss)
        assert ours.solved is not None
        assert ours.margin is not None
        assert torch.equal(ours.solved, stats.solved)
        assert torch.equal(ours.margin, stats.margin)
        assert stats.solved.any()
        assert not stats.solved.all()
    assert make_objective("as-softmax", multilabel=True) == MultiLabelASSoftmax(delta=0.7, against="threshold")


def by_class(x: float, y: int, *, gamma: tuple[float, float], clip: float = 0.0) -> float:
    """Of one class, as the papers write it; gamma of a negative and of a positive."""
    p = 1 / (1 + math.exp(-x))
    right = p if y else min(1, 1 - p + clip)
    return float(-((1 - right) ** gamma[y]) * math.log(max(right, 1e-8)))


@pytest.mark.parametrize(
    ("name", "options", "formula"),
    [
        ("bce", {}, {"gamma": (0, 0)}),
        ("focal-bce", {}, {"gamma": (2, 2)}),
        ("focal-bce", {"gamma": 0.5}, {"gamma": (0.5, 0.5)}),
        ("asymmetric", {}, {"gamma": (4, 1), "clip": 0.05}),
        ("asymmetric", {"gamma_negative": 2, "gamma_positive": 0, "clip": 0}, {"gamma": (2, 0)}),
    ],
)
def test_rivals_for_many_labels(name: str, options: dict[str, Any], formula: dict[str, Any]) -> None:
    logits, target = torch.randn(9, 5, dtype=torch.float64) * 3, torch.randint(2, (9, 5))
    rows = [
        sum(by_class(x, y, **formula) for x, y in zip(*row, strict=True))
        for row in zip(logits.tolist(), target.tolist(), strict=True)
    ]
    expected = torch.tensor(rows, dtype=torch.float64)
    for reduction, value in {"none": expected, "sum": expected.sum(), "mean": expected.mean()}.items():
        made = make_objective(name, multilabel=True, reduction=reduction, **options)
        for flags in (target, target.bool(), target.float()):
            torch.testing.assert_close(made(logits, flags).loss, value, rtol=1e-9, atol=1e-12)
        assert made(logits, target)[1:] == (None, None)
    loss = make_objective(name, multilabel=True, **options)
    assert torch.autograd.gradcheck(lambda x: loss(x, target).loss, logits.requires_grad_())
    far = torch.tensor([[90.0, -90.0], [-90.0, 90.0]], requires_grad=True)  # right and wrong beyond doubt
    loss(far, torch.tensor([[1, 0], [1, 0]])).loss.backward()  # type: ignore[no-untyped-call]
    assert far.grad is not None
    assert far.grad.isfinite().all()
    with pytest.raises(ValueError, match="target: expected only 0 and 1, found 2"):
        loss(logits, target + 1)


def test_a_missing_package_is_missed_when_the_objective_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softsieve.losses.objectives.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"sparsemax_loss comes from the package entmax: pip install"):
        make_objective("sparsemax")


def test_bad_names_options_and_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name: expected one of 'softmax', .* found 'hinge'"):
        make_objective("hinge")
    with pytest.raises(ValueError, match=r"name: expected one of 'softmax', 'bce', .* found 'sparsemax'"):
        make_objective("sparsemax", multilabel=True)
    with pytest.raises(TypeError, match="softmax: expected options among reduction, ignore_index, found 'delta'"):
        make_objective("softmax", delta=0.1)
    with pytest.raises(TypeError, match="expected options among reduction, found 'ignore_index'"):
        make_objective("softmax", multilabel=True, ignore_index=0)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("t-softmax", {"temperature": 0}),
        ("sparse-softmax", {"k": 0}),
        ("t-softmax", {"temperature": float("nan")}),
        ("label-smoothing", {"smoothing": 2}),
        ("am-softmax", {"scale": -1}),
        ("am-softmax", {"margin": 3}),
        ("as-softmax", {"delta": 2}),
        ("softmax", {"reduction": "max"}),
    ]
    for name, option in bad:
        with pytest.raises(ValueError, match=next(iter(option))):
            make_objective(name, **option)
    with pytest.raises(ValueError, match="against: expected one of 'labels', 'threshold', found 'all'"):
        make_objective("as-softmax", multilabel=True, against="all")
    with pytest.raises(ValueError, match="target: expected class labels"):
        make_objective("softmax")(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_labels_a_margin_apart_on_one_side_of_0_are_not_solved() -> None:
    logits = torch.tensor([[9.0, 5.0, 1.0], [-1.0, -5.0, -9.0], [5.0, -5.0, -9.0]])
    target = torch.tensor([[1, 0, 0]] * 3)
    options = {"multilabel": True, "reduction": "none", "against": "labels", "delta": 0.1}
    loss, solved, _ = make_objective("as-softmax", **options)(logits, target)  # type: ignore[arg-type]
    assert solved is not None
    assert loss.tolist() == [0, 0, 0]
    assert solved.tolist() == [False, False, True]
