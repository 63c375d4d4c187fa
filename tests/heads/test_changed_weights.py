"""Weights that change after something was derived from them: no head answers, saves or passes on what was true then."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softsieve import AdaptiveSoftmax
from softsieve.heads import WeightChanged, watching
from softsieve.heads.cascade import crossover
from softsieve.heads.cascade.cpu import SAMPLES, CpuCascade

pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")

N, D, K = 300, 32, 3
COUNT = {"auto": 200, "cascade": 200, "coordinates": 20}  # sample queries
KINDS: dict[str, dict[str, Any]] = {
    "cascade": {"method": "cascade"},
    "auto": {"method": "auto"},
    "coordinates": {"method": "coordinates"},
    "coordinates, rotated": {"method": "coordinates", "rotate": True},
    "data-free cascade": {"method": "cascade", "guarantee": "pac"},
    "data-free coordinates": {"method": "coordinates", "guarantee": "pac"},
    "data-free coordinates, rotated": {"method": "coordinates", "guarantee": "pac", "rotate": True},
}
FITTED = [kind for kind, options in KINDS.items() if "guarantee" not in options]
DATA_FREE = [kind for kind in KINDS if kind not in FITTED]


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cascade is taken to be faster for all batches here."""
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def queries(count: int, seed: int) -> Tensor:
    return torch.randn(count, D, generator=generator(seed)) * torch.arange(1, D + 1) ** -0.5


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    """A weight and a bias, always the same numbers."""
    return nn.Parameter(torch.randn(N, D, generator=generator(1))), nn.Parameter(torch.randn(N, generator=generator(2)))


@lru_cache
def saved(kind: str, bias: bool) -> Path:
    """A file of a head without its weight, fitted once for all tests."""
    weight, shift = parameters()
    head = AdaptiveSoftmax(weight, shift if bias else None, delta=0.1, **KINDS[kind])
    if kind in FITTED:
        head.calibrate(queries(COUNT[head.method], 3), K, generator=generator())
    path = Path(mkdtemp(), "head.safetensors")
    head.save(path, weight=False)
    return path


def made(kind: str, *, bias: bool = False) -> tuple[AdaptiveSoftmax, nn.Parameter, nn.Parameter]:
    """A head of parameters, asked once, so that all it derives from them is there."""
    weight, shift = parameters()
    head = AdaptiveSoftmax.load(saved(kind, bias), weight=weight, bias=shift if bias else None)
    right(head)
    return head, weight, shift


def right(head: AdaptiveSoftmax) -> bool:
    """Whether nearly all answers are, by the weight as it is."""
    x = queries(20, 4)
    exact = x @ head.weight.T + (0 if head.bias is None else head.bias)
    answer = head.topk(x, K, generator=generator())
    wrong = (exact.gather(-1, answer.indices) < exact.topk(K).values - 1e-3).any(-1)
    return int(wrong.sum()) <= 5


def refuses(head: AdaptiveSoftmax) -> None:
    for ask in (lambda x: head.topk(x, K), lambda x: head.coverage(x, K)):
        with pytest.raises(WeightChanged):
            ask(queries(3, 5))


# -- ways to change a weight -------------------------------------------------------------------------------------------


def assigned(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[:5] = weight[:5].flip(0) * 3


def stepped(kind: Any, by: str) -> Callable[[nn.Parameter], None]:
    """One step of a fused optimizer, which torch does not count, on five rows that no query compares."""

    def change(weight: nn.Parameter) -> None:
        optimizer, version = kind([weight], lr=10.0, fused=True, weight_decay=0.0), weight._version
        rows = torch.zeros(len(weight), *[1] * (weight.ndim - 1))
        rows[:5] = 1
        if by == "hand":
            weight.grad = (torch.ones_like(weight) * rows).detach()
        else:
            (weight * rows).sum().backward()  # type: ignore[no-untyped-call]
        before = weight.detach().clone()
        optimizer.step()
        assert weight._version == version, "torch counts fused steps now: the test is of another way then"
        assert int((weight != before).reshape(len(weight), -1).any(-1).sum()) == 5

    return change


def negated(weight: nn.Parameter) -> None:
    version = weight._version
    weight.data.copy_(-weight)
    assert weight._version == version


WAYS = {
    "assigned": assigned,
    "SGD": stepped(torch.optim.SGD, "hand"),
    "SGD, backward": stepped(torch.optim.SGD, "backward"),
    "AdamW": stepped(torch.optim.AdamW, "hand"),
    "AdamW, backward": stepped(torch.optim.AdamW, "backward"),
    "negated": negated,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FITTED)
def test_what_was_fitted_is_refused(kind: str, way: str, tmp_path: Path) -> None:
    """By the head, by what is copied from it, and by everything that would carry it on."""
    head, weight, _ = made(kind)
    WAYS[way](weight)
    refuses(head)
    with pytest.raises(WeightChanged):
        head.save(tmp_path / "head.safetensors")
    with pytest.raises(WeightChanged):
        head.save(tmp_path / "head.safetensors", weight=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(WeightChanged):
        head.to("cpu")
    refuses(copy.deepcopy(head))
    refuses(pickle.loads(pickle.dumps(head)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FITTED)
def test_a_change_is_carried_on_by_nobody(kind: str, way: str, tmp_path: Path) -> None:
    """Nor by a head that was not asked since."""
    head, weight, _ = made(kind)
    WAYS[way](weight)
    refuses(copy.deepcopy(head))
    refuses(pickle.loads(pickle.dumps(head)))
    with pytest.raises(WeightChanged):
        head.to("cpu")
    with pytest.raises(WeightChanged):
        head.save(tmp_path / "head.safetensors")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", DATA_FREE)
def test_what_needs_no_fitting_is_made_anew(kind: str, way: str, tmp_path: Path) -> None:
    head, weight, _ = made(kind)
    WAYS[way](weight)
    assert right(head)
    head.save(tmp_path / "head.safetensors")
    for other in (head.to("cpu"), AdaptiveSoftmax.load(tmp_path / "head.safetensors"), copy.deepcopy(head)):
        assert torch.equal(other.weight, weight)
        assert right(other)


def outdone(weight: nn.Parameter) -> None:
    """Row 3, by row 7."""
    with torch.no_grad():
        weight[7] = 2 * weight[3]


def outdone_by_a_step(weight: nn.Parameter) -> None:
    """The same, by a step that torch does not count."""
    weight.grad = torch.zeros_like(weight)
    weight.grad[7] = (weight[7] - 2 * weight[3]).detach()
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


def moved(weight: nn.Parameter) -> None:
    """All rows, and torch does not count it."""
    weight.data.copy_(weight.roll(4, 0) * 2)


@pytest.mark.parametrize("change", [outdone, outdone_by_a_step, moved])
@pytest.mark.parametrize("rotate", [False, True])
def test_coordinates_of_a_weight_that_has_changed(rotate: bool, change: Callable[[nn.Parameter], None]) -> None:
    """With so many coordinates that a part of them decides: what is read must be of the weight as it is."""
    weight = nn.Parameter(torch.randn(50, 4096, generator=generator(1)))
    head = AdaptiveSoftmax(weight, method="coordinates", guarantee="pac", rotate=rotate)
    x = weight[3].detach() * 0.05
    answer = head.topk(x, generator=generator())
    assert (answer.indices.item(), answer.exact.item()) == (3, False)
    change(weight)
    assert head.topk(x, generator=generator()).indices.item() == (weight @ x).argmax().item() == 7


@pytest.mark.parametrize("way", [way for way in WAYS if way != "negated"])
@pytest.mark.parametrize("kind", FITTED)
def test_a_bias_that_changes(kind: str, way: str) -> None:
    head, _, bias = made(kind, bias=True)
    WAYS[way](bias)
    refuses(head)
    with pytest.raises(WeightChanged):
        head.to("cpu")


@pytest.mark.parametrize("kind", FITTED)
def test_a_few_rows_behind_the_back_of_torch_are_not_carried_on(kind: str, tmp_path: Path) -> None:
    """One row that no query compares: whoever saves or moves a head has all compared."""
    head, weight, _ = made(kind)
    weight.data[7] += 1
    with pytest.raises(WeightChanged, match="rows 7 have changed"):
        head.save(tmp_path / "head.safetensors")
    with pytest.raises(WeightChanged, match="rows 7 have changed"):
        head.to("cpu")
    refuses(copy.deepcopy(head))


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_that_is_undone(kind: str) -> None:
    head, weight, _ = made(kind)
    x = queries(20, 6)
    before = head.topk(x, K, generator=generator())
    kept = weight[:5].detach().clone()
    assigned(weight)
    with torch.no_grad():
        weight[:5] = kept
    assert all(map(torch.equal, before, head.topk(x, K, generator=generator())))
    head.to("cpu")


@pytest.mark.parametrize("kind", ["coordinates", "coordinates, rotated"])
def test_coordinates_are_calibrated_again(kind: str) -> None:
    """For the k that is asked for: what was fitted for others was fitted to another weight."""
    head, weight, _ = made(kind)
    head.calibrate(queries(20, 3), 1, generator=generator())
    assert sorted(head.calibrations) == [1, K]
    assigned(weight)
    head.calibrate(queries(20, 3), K, generator=generator())
    assert sorted(head.calibrations) == [K]
    assert right(head)
    with pytest.raises(RuntimeError, match="not calibrated for k = 1"):
        head.topk(queries(3, 5))


def test_an_index_that_two_heads_have(tmp_path: Path) -> None:
    """Rows that one of them codes anew are old for the other."""
    head, weight, _ = made("cascade")
    others = [head.to("cpu"), copy.copy(head)]
    assigned(weight)
    head.update_rows(range(5))
    assert right(head)
    for other in others:
        assert other.weight.data_ptr() == weight.data_ptr()
        refuses(other)
        other.update_rows(range(5))
        assert right(other)


def test_a_file_of_an_index_for_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were written when saving compared nothing."""
    head, weight, _ = made("cascade")
    assigned(weight)
    with monkeypatch.context() as patch:
        patch.setattr(CpuCascade, "check_weight", lambda _: None)
        head.save(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="broken: weight: rows 0, 1, 2, 3, 4 have changed"):
        AdaptiveSoftmax.load(tmp_path / "head.safetensors")


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_steps_of_other_parameters_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head, weight, _ = made("cascade")
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([other], lr=1.0, fused=True)
    other.sum().backward()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(watching, "checksums", None)  # nobody asks
    optimizer.step()
    assert right(head)
    stepped(torch.optim.SGD, "hand")(weight)
    with pytest.raises(TypeError):
        right(head)


def test_a_step_that_changes_nothing_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head, weight, _ = made("cascade")
    torch.optim.SGD([weight], lr=1.0, fused=True).step()  # there is no gradient
    assert right(head)
    monkeypatch.setattr(watching, "checksums", None)
    assert right(head)


def test_a_part_of_the_memory_of_a_parameter() -> None:
    """As shards and tied weights have it."""
    whole = nn.Parameter(torch.randn(2 * N, D, generator=generator(1)))
    head = AdaptiveSoftmax(whole[N:], delta=0.1, method="cascade")
    head.calibrate(queries(200, 3), K, generator=generator())
    rows = [row for row in range(N) if row not in copy.copy(head.index).probes[:SAMPLES]]  # type: ignore[union-attr]
    whole.grad = torch.zeros_like(whole)
    whole.grad[N + rows[0]] = 1
    torch.optim.SGD([whole], lr=10.0, fused=True).step()
    refuses(head)


def test_heads_are_not_kept_because_they_are_watched() -> None:
    head, weight, _ = made("cascade")
    gc.collect()
    before = len(watching._WATCHES)
    del head
    gc.collect()
    assert len(watching._WATCHES) == before - 1
    stepped(torch.optim.SGD, "hand")(weight)


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step(fused: bool) -> None:
    head, weight, _ = made("cascade")
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1), fused=fused)
    weight.grad = torch.zeros_like(weight)
    weight.grad[:5] = 1
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        step()
        refuses(head)
        head.update_rows(range(5))
        assert right(head)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_checksums_are_the_same_by_kernel_and_by_torch(
    dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have them: they may not depend on how they are computed, nor on strides or how many rows come at a time."""
    weight, bias = queries(300, 1).to(dtype), queries(300, 2)[:, 0].to(dtype) if biased else None
    by_torch = watching.checksums(weight, bias)
    monkeypatch.setattr(watching, "CHUNK", 7 * D)
    assert torch.equal(watching.checksums(weight, bias), by_torch)
    apart = torch.stack([weight, -weight], -1).flatten(1)[:, ::2]
    assert torch.equal(watching.checksums(apart, bias), by_torch)
    weight[5, 3] = -weight[5, 3]
    assert (watching.checksums(weight, bias) != by_torch).nonzero().tolist() == [[5]]
