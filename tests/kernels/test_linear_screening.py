"""Rows that are solved by a product in 8 bits: the rounding, its bound, and losses with and without it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve import LinearASCrossEntropyLoss, linear_as_cross_entropy
from softsieve.kernels import linear, linear_screening, linear_screening_torch
from softsieve.kernels.cross_entropy import HAS_TRITON
from softsieve.kernels.linear_screening import Quantised, make_quantised
from softsieve.kernels.linear_types import SLACK, Layer, Options, Scan, Targets
from tests.helpers import IGNORED
from tests.losses.test_linear import DEVICE, make_case

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter is wrong for bf16


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "BUFFER", 1 << 13)
    if HAS_TRITON:  # nothing is held, however small the layer
        monkeypatch.setattr("softsieve.kernels.linear_held.choose", lambda *_: 0)


def kernels(backend: str) -> Any:
    return linear_screening._kernels(backend)


def rounded(x: Tensor, backend: str, *, seed: int = 1, grown: bool = False, profile: Tensor | None = None) -> Quantised:
    made = make_quantised(len(x), x.shape[1], x)
    weights = torch.ones(x.shape[1], device=x.device) if profile is None else profile
    kernels(backend).quantise(x, weights, made, 0, seed, grown=grown)
    return made


def values(made: Quantised, columns: int) -> Tensor:
    return made.values[:, :columns].float() * made.scale[:, None]


# -- rounding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_to_a_neighbour_with_the_right_mean(backend: str) -> None:
    x = torch.full((1, 40_000), 0.317, device=DEVICE)
    x[0, 0] = 1.0
    made = values(rounded(x, backend), 40_000)[0, 1:]
    below, above = 20 / 64, 22 / 64
    assert sorted(set(made.tolist())) == pytest.approx([below, above])
    deviation = math.sqrt((0.317 - below) * (above - 0.317) / 40_000)
    assert float(made.mean()) == pytest.approx(0.317, abs=4 * deviation)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [1, 16, 70])
def test_small_and_odd_rows(backend: str, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(9, columns, generator=generator) * torch.logspace(-4, 1, columns)
    x[1], x[2, 0], x[3, 0], x[4] = 0, math.nan, math.inf, 1e-30
    x[5] = 448 / 512 * torch.arange(columns) / columns
    x = x.to(DEVICE)
    made = rounded(x, backend)
    assert made.scale.isnan().tolist() == [False, False, True, True, *[False] * 5]
    assert made.values.shape[1] % 16 == 0
    whole = [0, 1, 4, 5, 6, 7, 8]
    assert not made.values[:, columns:].float()[whole].any()
    error = (values(made, columns) - x)[whole].abs() / made.scale[whole, None]
    step = 2.0 ** ((x[whole].abs() / made.scale[whole, None]).log2().floor().clamp(min=-6) - 3)
    assert (error <= step * 1.001).all()
    assert ((values(made, columns) * x)[whole] >= 0).all()


@needs_triton
@pytest.mark.parametrize("grown", [False, True])
def test_both_know_the_same_of_a_row(grown: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(20, 70, generator=generator) * torch.logspace(-4, 1, 70)).to(DEVICE)
    profile = torch.rand(70, generator=generator).to(DEVICE) + 0.5
    one, other = (rounded(x, backend, grown=grown, profile=profile) for backend in ("torch", "triton"))
    for name in ("scale", "norm", "error"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=0)


# -- the bound ---------------------------------------------------------------------------------------------------------


def data(kind: str, generator: torch.Generator, rows: int, columns: int, classes: int) -> tuple[Tensor, Tensor]:
    hidden, weight = (torch.randn(n, columns, generator=generator) for n in (rows, classes))
    if kind == "large columns":
        hidden[:, :3] *= 60
    elif kind == "two values":  # roundings to the nearest would all go the same way
        hidden = torch.where(torch.rand(rows, columns, generator=generator) < 0.5, 1.0, 0.9)
        weight = weight.abs()
    elif kind == "sparse":
        hidden *= torch.rand(rows, columns, generator=generator) < 0.1
    return hidden, weight * columns**-0.5


def reach(hidden: Tensor, weight: Tensor, backend: str, missed: float, seed: int) -> tuple[Tensor, Tensor]:
    """How far the logits of each row may be off, by the bound, and how far they are; `products of rounded values`."""
    profile = hidden.square().mean(0)
    profile = (profile / profile.mean()).clamp_(min=1e-6)
    states = rounded(hidden, backend, seed=2 * seed, grown=True, profile=profile.reciprocal())
    classes = rounded(weight, backend, seed=2 * seed + 1, profile=profile)
    proxy = states.error * classes.norm.amax() + states.norm * classes.error.amax()
    columns = hidden.shape[1]
    error = hidden.double() @ weight.double().t() - (
        values(states, columns).double() @ values(classes, columns).double().t()
    )
    return (proxy * 2 * math.log(4 * len(weight) / missed)).sqrt(), error


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "large columns", "two values", "sparse"])
def test_the_bound_holds_at_its_rate(backend: str, kind: str) -> None:
    """Of rows with a chance of a half of a larger error, by the bound, none has one; and it is no more than it must."""
    generator, beyond, ratio = torch.Generator().manual_seed(0), 0, 0.0
    rows, draws = (6, 2) if DEVICE == "cpu" and backend == "triton" else (100, 20)
    for draw in range(draws):
        hidden, weight = (x.to(DEVICE) for x in data(kind, generator, rows, 96, 60 if rows < 10 else 200))
        most, error = reach(hidden, weight, backend, 0.5, draw)
        beyond += int((error.amax(1) > most).sum())
        ratio += float((error.amax(1) / most).mean()) / draws
    assert beyond <= 0.5 * draws * rows
    assert beyond == 0
    assert 0.15 < ratio < 0.7


def test_rounding_to_the_nearest_would_not_hold() -> None:
    """The bound is for roundings at random: with values whose nearest neighbours are all above, errors add up."""
    hidden, weight = data("two values", torch.Generator().manual_seed(0), 20, 4096, 50)
    most, error = reach(hidden, weight, "torch", 1e-6, 0)
    assert (error.abs().amax(1) < most).all()
    scale = hidden.abs().amax(1, keepdim=True) / 448
    nearest = (hidden / scale).to(torch.float8_e4m3fn).float() * scale
    assert (((hidden - nearest) @ weight.t()).abs().amax(1) > most).all()


# -- the loss ----------------------------------------------------------------------------------------------------------

ROWS, CLASSES = 32, 200
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"delta": 0.0},
    {"delta": 1.0},
    {"delta": torch.linspace(0, 1, ROWS)},
    {"class_weight": torch.linspace(0.5, 2, CLASSES)},
    {"row_weight": torch.linspace(0.1, 3, ROWS), "reduction": "sum"},
    {"row_weight": torch.zeros(ROWS)},
    {"biased": True},
    {"biased": True, "softcap": 20.0},
    {"memory": 1 << 30},
]


def make_layer(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Labels that lead by more or less, up to far more than the error."""
    case = make_case(ROWS, 24, CLASSES, dtype=dtype)
    own = case.weight[case.target.clamp(min=0)]
    case.hidden[::2] += 12 * (own / own.square().sum(-1, keepdim=True))[::2]
    return case.arguments(dtype)


def note_screened(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What screening says of the rows that count, call by call."""
    noted: list[Tensor] = []
    screen = linear_screening._screen

    def noting(*args: Any) -> Any:
        solved, saved = screen(*args)
        noted.append(solved)
        return solved, saved

    monkeypatch.setattr(linear_screening, "_screen", noting)
    return noted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradients_are_those_without(
    backend: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = note_screened(monkeypatch)
    hidden, weight, bias, target = make_layer(dtype)
    options = dict(options)
    biased = options.pop("biased", False)
    leaves = [hidden, weight, bias][: 2 + biased]
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    shared: dict[str, Any] = {"backend": backend, "return_stats": True, "bias": bias if biased else None, **options}
    loss, stats = linear_as_cross_entropy(hidden, weight, target, **shared)
    screened, known = linear_as_cross_entropy(hidden, weight, target, screening="fp8", **shared)
    torch.testing.assert_close(screened, loss, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=1e-6)
    upstream = torch.linspace(0, 2, len(loss), device=DEVICE).to(loss.dtype) if loss.ndim else torch.ones_like(loss)
    grads, ours = (torch.autograd.grad(value, leaves, upstream) for value in (loss, screened))
    for grad, own in zip(grads, ours, strict=True):
        if backend == "triton" and dtype == torch.float16 and DEVICE == "cpu":  # a GPU has other kernels for fewer rows
            assert torch.equal(own, grad)
        coarse = 0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(own, grad, rtol=max(1e-5, coarse), atol=1e-6 + coarse * float(grad.abs().max()))
    for name in ("solved", "kept", "dense", "right"):
        assert torch.equal(getattr(known, name), getattr(stats, name))
    wide = 0.3 if options.get("softcap") is None else 0.6
    torch.testing.assert_close(known.lse, stats.lse, rtol=0, atol=wide)
    torch.testing.assert_close(known.margin, stats.margin, rtol=0, atol=0.1)
    (solved,) = noted
    assert len(solved) == int((target != IGNORED).sum())
    if not options and backend == "triton":
        assert 0.3 < float(solved.float().mean()) < float(stats.solved.float().mean()) / 0.8
    if isinstance(options.get("delta"), float) and options["delta"] == 1:
        assert not solved.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_called_solved_is_solved(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, for rows as close to the margin as they come."""
    noted = note_screened(monkeypatch)
    count = 0
    for seed in range(2 if DEVICE == "cpu" and backend == "triton" else 20):
        case = make_case(30, 24, CLASSES, ignored=0.0, seed=seed)
        own = case.weight[case.target]
        case.hidden[:] += 6 * own / own.square().sum(-1, keepdim=True)
        hidden, weight, _, target = case.arguments(torch.float32)
        linear_as_cross_entropy(hidden, weight, target, backend=backend, screening="fp8", delta=0.3)
        p = F.linear(case.hidden.float().double(), case.weight.float().double()).softmax(-1)
        label = p.gather(1, case.target[:, None]).squeeze(1)
        rival = p.scatter(1, case.target[:, None], 0).amax(1)
        assert (label - rival > 0.3)[noted[-1].cpu()].all()
        count += int(noted[-1].sum())
    assert count > (5 if backend == "triton" else 100)


class Edge(NamedTuple):
    """A layer whose rows' leads are known in float64."""

    hidden: Tensor
    weight: Tensor
    label: Tensor
    bias: Tensor | None = None
    cap: float = 0.0

    def leads(self) -> Tensor:
        x = F.linear(self.hidden.double(), self.weight.double(), None if self.bias is None else self.bias.double())
        p = (self.cap * torch.tanh(x / self.cap) if self.cap else x).softmax(-1)
        own = p.gather(1, self.label[:, None]).squeeze(1)
        return own - p.scatter(1, self.label[:, None], 0).amax(1)

    def screened(self, backend: str, delta: Tensor) -> Tensor:
        """Which rows are called solved."""
        bias = None if self.bias is None else self.bias.to(DEVICE)
        layer = Layer(self.hidden.to(DEVICE), self.weight.to(DEVICE), bias, self.cap)
        targets = Targets(self.label.to(DEVICE), delta.float().to(DEVICE))
        return linear_screening._screen(layer, targets, Options(backend=backend, cap=self.cap))[0].cpu()


def make_edge(kind: str, seed: int) -> Edge:
    """Data with which a product in 8 bits, or in 16, is as far off as it can be."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns, classes = 24, 48, 150
    hidden, weight = (torch.randn(n, columns, generator=generator) for n in (rows, classes))
    weight *= columns**-0.5
    label, bias, cap = torch.arange(rows), None, 0.0
    if kind == "subnormal":  # in 8 bits
        hidden *= 2.0 ** -torch.arange(columns).mul(0.5).floor()
    elif kind == "large columns":  # that cancel
        hidden[:, 0], hidden[:, 1] = 20.0, -20.0
        weight[:, 1] = weight[:, 0]
    elif kind == "zeros":
        weight[40:] = 0
        hidden *= torch.rand(rows, columns, generator=generator) < 0.3
        hidden[:3] = 0
    elif kind == "biased":  # the product is large where the logit is not
        hidden[:, 0], weight[:, 0], bias = 4.0, 2.0, torch.full((classes,), -8.0)
    elif kind == "masked":
        bias = torch.zeros(classes)
        bias[rows + 10 :] = -math.inf
    elif kind == "capped":
        cap = 20.0
    hidden[:, 2:] += (torch.linspace(0, 1, rows).square()[:, None] * 60 * weight[:rows])[:, 2:]
    if kind == "tiny and huge":
        weight, hidden = weight * 2.0**-40, hidden * 2.0**40
    elif kind == "ties":
        weight[rows:] = weight[:1]
    elif kind == "on the grid":  # nothing is rounded but the product, and that for all classes alike
        hidden = (torch.arange(300) < torch.arange(rows)[:, None] + 257).float()
        weight = torch.full((200, 300), -(2.0**-5))
        weight[0], label = 0, torch.zeros(rows, dtype=torch.long)
    return Edge(hidden, weight, label, bias, cap)


EDGES = ["plain", "subnormal", "tiny and huge", "large columns", "zeros", "ties", "biased", "masked", "capped"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*EDGES, "on the grid"])
def test_no_row_at_its_edge_is_called_solved(kind: str, backend: str) -> None:
    """The margin of each row is what it leads by, and a little more."""
    interpreted = DEVICE == "cpu" and backend == "triton"
    for seed in range(1 if interpreted else 20):
        edge = make_edge(kind, seed)
        leads = edge.leads()
        for more in (1e-5, 1e-3)[: 1 if interpreted else 2]:
            assert not edge.screened(backend, (leads + more).clamp(0, 1)).any()
    assert edge.screened(backend, torch.zeros(len(leads)))[leads > 0].any()  # ahead by any margin at all


@pytest.mark.parametrize("around", [-12.0, -3.0, 0.0, 5.0])
@pytest.mark.parametrize("offset", [0.0, 40.0])
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_rounding_of_products_is_allowed_for(around: float, offset: float, spread: float) -> None:
    """At worst all logits but the label's have been rounded down, and the label's up, by parts of their products."""
    generator = torch.Generator().manual_seed(0)
    rows, classes = 50, 300
    x = around + spread * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.linspace(-8, 8, rows)
    bias = offset * torch.linspace(1, -1, classes)
    off = 0.95 * torch.finfo(torch.bfloat16).eps * (1 + (x - bias).abs())
    scanned, exact = (x - off).float(), (x + off)[:, 0].float()
    top = scanned.amax(1)
    state = Scan(top, (scanned - top[:, None]).exp().sum(1), scanned[:, 0], scanned[:, 1:].amax(1))
    none, much = torch.zeros(rows), torch.full((rows,), 1e9)
    layer = Layer(torch.zeros(rows, 4), torch.zeros(classes, 4), bias if offset else None, 0.0)
    known = Quantised(none, none, much, none)
    (_, total, lowest, _), allowance, lse, margin = linear_screening._allow(
        state, exact, known, torch.tensor([1.0, 0.0]), layer
    )
    assert (lowest <= x[:, 0]).all()
    over_own = (x.logsumexp(1) - x[:, 0]).exp()
    assert (total * (1 + 1e-6) >= over_own).all()
    assert (total.log() <= over_own.log() + 2 * SLACK * (2 + x.abs().amax(1) + offset) + 1e-4).all()
    assert (x[:, 1:] <= scanned[:, 1:] + allowance[:, None] + SLACK * x[:, 1:].abs()).all()
    p = x.softmax(1)
    torch.testing.assert_close(lse.double(), x.logsumexp(1), rtol=0, atol=float(off.amax()))
    torch.testing.assert_close(margin.double(), p[:, 0] - p[:, 1:].amax(1), rtol=0, atol=2 * float(off.amax()))


def test_no_row_is_called_solved_for_a_sum_that_lost_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, each with less than float32 can add to the label's 1."""
    hidden, weight = torch.ones(2, 1), torch.zeros(70_000, 1)
    weight[0] = 22
    edge = Edge(hidden, weight, torch.zeros(2, dtype=torch.long))
    monkeypatch.setattr(linear_screening, "classes_at_a_time", lambda *_: 128)
    assert not edge.screened("torch", edge.leads() + 1e-6).any()
    assert edge.screened("torch", torch.zeros(2)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_solved_none_solved_and_none_that_count(backend: str) -> None:
    weight = (30 * torch.eye(20, 32, device=DEVICE)).requires_grad_()
    hidden = torch.eye(20, 32, device=DEVICE, requires_grad=True)
    labels = torch.arange(20, device=DEVICE)
    for target, right in ((labels, 20), (labels.roll(1), 0), (torch.full_like(labels, IGNORED), 0)):
        for reduction in ("mean", "sum", "none"):
            loss, stats = linear_as_cross_entropy(
                hidden, weight, target, backend=backend, screening="fp8", return_stats=True, reduction=reduction
            )
            assert loss.shape == ((20,) if reduction == "none" else ())
            assert int(stats.solved.sum()) == int(stats.right.sum()) == right
            grads = torch.autograd.grad(loss.sum(), [hidden, weight])
            assert all(bool(grad.any()) == bool(loss.any()) for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["hidden", "weight"])
def test_a_nan_stays_one(backend: str, place: str) -> None:
    hidden, weight, _, target = (x.detach() for x in make_layer())
    broken = {"hidden": hidden, "weight": weight}[place]
    broken[7, 3] = math.nan
    target[7] = 5
    loss = linear_as_cross_entropy(hidden, weight, target, backend=backend, screening="fp8", reduction="none")
    plain = linear_as_cross_entropy(hidden, weight, target, backend=backend, reduction="none")
    torch.testing.assert_close(loss, plain, equal_nan=True)
    assert bool(loss.isnan().any())


def test_labels_out_of_range_are_refused() -> None:
    hidden, weight, _, target = make_layer()
    target[3] = CLASSES
    with pytest.raises(ValueError, match=r"target: expected class labels in \[0, 200\)"):
        linear_as_cross_entropy(hidden.cpu(), weight.cpu(), target.cpu(), backend="torch", screening="fp8")


def test_memory_is_kept() -> None:
    """Buffers are as large as is allowed, and no larger; the weight has no copy."""
    made: list[int] = []
    hidden, weight, _, target = (x.detach() for x in make_layer())

    def noting(rows: int, columns: int, like: Tensor) -> Quantised:
        made.append(rows)
        return make_quantised(rows, columns, like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_screening, "make_quantised", noting)
        linear_as_cross_entropy(hidden, weight, target, backend="torch", screening="fp8")
    assert made[0] <= ROWS
    assert made[1] <= 128 < len(weight)


@pytest.mark.compiles
def test_inside_a_compiled_graph() -> None:
    hidden, weight, _, target = make_layer()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_as_cross_entropy(hidden, weight, target, screening="fp8", backend="torch")

    loss = step(hidden, weight)
    plain = linear_as_cross_entropy(hidden, weight, target, backend="torch")
    torch.testing.assert_close(loss, plain)
    for one, other in zip(*(torch.autograd.grad(x, [hidden, weight]) for x in (loss, plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_module_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = note_screened(monkeypatch)
    hidden, weight, _, target = (x.detach().cpu() for x in make_layer())
    criterion = LinearASCrossEntropyLoss(24, CLASSES, screening="fp8", backend="torch")
    with torch.no_grad():
        criterion.weight.copy_(weight)
    torch.testing.assert_close(criterion(hidden, target), linear_as_cross_entropy(hidden, weight, target))
    assert len(noted) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_refused() -> None:
    hidden, weight, _, target = (x.detach().cpu() for x in make_layer())
    for wrong in ("int8", "FP8", True, 8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="screening: expected one of 'fp8', found"):
            linear_as_cross_entropy(hidden, weight, target, screening=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="screening: expected one of 'fp8', found"):
            LinearASCrossEntropyLoss(24, CLASSES, screening=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="screening: 'fp8' cannot serve: these are float64"):
        linear_as_cross_entropy(hidden.double(), weight.double(), target, screening="fp8")
    with pytest.raises(ValueError, match="screening: 'fp8' cannot serve: backend='reference' holds all logits"):
        linear_as_cross_entropy(hidden, weight, target, screening="fp8", backend="reference")


def test_a_gpu_that_has_no_such_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from softsieve.losses.linear import check_screening

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))

    class States:
        dtype, device, is_cuda = torch.bfloat16, torch.device("cuda"), True

    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 9\.0, and this one has 8\.0"):
        check_screening("fp8", States(), Options(backend="triton"))  # type: ignore[arg-type]


def test_what_rounds_in_16_bits_is_less_than_the_slack() -> None:
    assert 2 * torch.finfo(torch.bfloat16).eps / 2 <= SLACK
    assert torch.finfo(torch.float8_e4m3fn).max == linear_screening_torch.LARGEST
