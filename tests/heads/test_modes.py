"""Every public method of every kind of head gives the same in all modes of torch, and so do copies of the head."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve.heads import DriftWarning
from softsieve.heads.cascade import crossover
from softsieve.heads.modes import own_modes
from softsieve.integrations.distributed import ShardedAdaptiveSoftmax
from tests.helpers import default_dtype

pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")

N, D, K = 300, 32, 3
KINDS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "auto": {"method": "auto"},
    "cascade": {"method": "cascade"},
    "data-free cascade": {"method": "cascade", "guarantee": "pac"},
    "coordinates": {"method": "coordinates", "eps": 0.9},
    "data-free coordinates": {"method": "coordinates", "guarantee": "pac"},
    "rotated coordinates": {"method": "coordinates", "guarantee": "pac", "rotate": True},
    "declared noise": {"method": "coordinates", "guarantee": "pac", "noise": 1.0},
}
FITTED = {"auto": 100, "cascade": 100, "coordinates": 15}  # sample queries


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float16 by default": lambda: default_dtype(torch.float16),
    "inference mode": torch.inference_mode,
}


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cascade is taken to be faster for all batches here."""
    monkeypatch.setattr(crossover, "measured_batch", lambda *_: 64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float32)


def queries(count: int, seed: int) -> Tensor:
    return numbers(count, D, seed=seed) * torch.arange(1, D + 1, dtype=torch.float32) ** -0.5


def unfitted(kind: str) -> AdaptiveSoftmax:
    return AdaptiveSoftmax(numbers(N, D, seed=1), numbers(N, seed=2), **{"delta": 0.1, "beta": 0.9, **KINDS[kind]})


def fit(kind: str, head: AdaptiveSoftmax) -> None:
    if kind in ("auto", "cascade"):
        head.build(part for part in torch.split(queries(100, 3), 50))
    if kind in FITTED:
        head.calibrate(queries(FITTED[kind], 4), [0, K], generator=generator())


@lru_cache
def saved(kind: str) -> Path:
    """A head that was made in no mode, fitted once for all tests."""
    head = unfitted(kind)
    fit(kind, head)
    path = Path(mkdtemp(), "head.safetensors")
    head.save(path)
    return path


def made(kind: str) -> AdaptiveSoftmax:
    return AdaptiveSoftmax.load(saved(kind))


def first_answers(head: AdaptiveSoftmax) -> list[Any]:
    """The last query is unlike those of the calibration: a cascade answers it exactly."""
    return [*head.topk(torch.cat([queries(5, 5), 100 * queries(1, 6)]), K, generator=generator())]


def answers(head: AdaptiveSoftmax) -> list[Any]:
    """Of every method that asks, those of `first_answers` first."""
    torch.manual_seed(0)
    x = torch.cat([queries(5, 5), 100 * queries(1, 6)])
    return [
        *first_answers(head),
        *head.topk(x.double().reshape(2, 3, D), K, generator=generator()),
        *head.log_partition(x, generator=generator()),
        head.logits(x),
        head.sample(x, top_k=K, generator=generator()),
        head.sample(x, 0.7, top_p=0.9, generator=generator()) if head.method != "coordinates" else None,
        head.coverage(queries(3, 7), K),
        head.estimates(),
    ]


@lru_cache
def expected(kind: str) -> list[Any]:
    """Answers in no mode."""
    return answers(made(kind))


def same(one: list[Any], other: list[Any]) -> bool:
    """In the same dtypes, up to what the place of a weight in memory does to the order of sums."""
    torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-4)  # logits go up to some hundreds
    return True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_asked_in_a_mode(kind: str, mode: str, tmp_path: Path) -> None:
    head, right = made(kind), expected(kind)
    with MODES[mode]():
        found = answers(head)
        assert same(found, right)
        assert not any(value.is_inference() for value in found if isinstance(value, Tensor))
        head.save(tmp_path / "head.safetensors")
        loaded, moved = AdaptiveSoftmax.load(tmp_path / "head.safetensors"), head.to("cpu")
        copied, pickled = copy.deepcopy(head), pickle.loads(pickle.dumps(head))
        assert same(first_answers(copied), right[:8])
    for other in (head, loaded, moved, copied, pickled, AdaptiveSoftmax.load(tmp_path / "head.safetensors")):
        assert same(first_answers(other), right[:8])
        assert other.weight.dtype == torch.float32
        assert not other.weight.is_inference()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_made_in_a_mode(kind: str, mode: str) -> None:
    weight, bias, right = numbers(N, D, seed=1), numbers(N, seed=2), expected(kind)
    with MODES[mode]():
        head = AdaptiveSoftmax(weight, bias, **{"delta": 0.1, "beta": 0.9, **KINDS[kind]})
        if kind in FITTED:
            fit(kind, head)
        assert same(first_answers(head), right[:8])
    assert same(answers(head), right)
    if head.index is not None:
        assert not any(value.is_inference() for value in head.index)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [nullcontext, torch.inference_mode], ids=["plain", "inference"])
def test_rows_that_are_updated_in_a_mode(before: Any, mode: str) -> None:
    """Also those of a head that was fitted in inference mode."""
    heads = []
    for contexts in ((nullcontext, nullcontext), (before, MODES[mode])):
        weight, bias = numbers(N, D, seed=1), numbers(N, seed=2)
        with contexts[0]():
            head = AdaptiveSoftmax(weight, bias, delta=0.1, method="cascade")
            fit("cascade", head)
        with contexts[1]():
            weight[:5] = weight[5:10] * 1.5
            head.update_rows(torch.arange(5))
        heads.append(head)
    assert same(answers(heads[1]), answers(heads[0]))
    assert all(map(torch.equal, heads[0].index or (), heads[1].index or ()))


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind: str) -> None:
    """They are on their own, and copies of copies are copies."""
    head, right = made(kind), expected(kind)
    answers(head)  # all that a head derives is there
    other = pickle.loads(pickle.dumps(copy.deepcopy(head)))
    assert same(answers(other), right)
    assert repr(other) == repr(head)
    assert other.weight.data_ptr() != head.weight.data_ptr()
    assert sorted(other.calibrations) == sorted(head.calibrations)
    other.weight.zero_()
    assert same(answers(head), right)


@pytest.mark.parametrize("mode", MODES)
def test_a_sharded_head(mode: str) -> None:
    """Without a process group it is one head; what it adds computes in its own modes, too."""
    x, found = queries(4, 5), []
    for context in (nullcontext, MODES[mode]):
        head = ShardedAdaptiveSoftmax(numbers(N, D, seed=1), delta=0.1, method="cascade")
        with context():
            head.calibrate(queries(200, 4), [0, K], generator=generator())
            found.append([*head.topk(x, K), *head.log_partition(x)])
    assert same(*found)


def test_queries_of_an_iterable_are_made_in_the_modes_of_the_caller() -> None:
    """Which may run a model under autocast, say."""
    seen = []

    def parts() -> Iterator[Tensor]:
        for _ in range(2):
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
            yield queries(100, 3)

    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        unfitted("cascade").build(parts())
    assert seen == [(True, True)] * 2


def test_the_modes_of_the_caller_stay() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        made("exact").topk(queries(1, 5))
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()
        with own_modes("cpu"):
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
        with pytest.raises(ValueError, match="k: expected"):
            made("exact").topk(queries(1, 5), 0)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("ask", ["topk", "logits", "log_partition"])
def test_warnings_name_the_line_that_asked(ask: str) -> None:
    head = made("cascade")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        getattr(head, ask)(100 * queries(1, 6))
        unfitted("cascade").calibrate(queries(10, 4), generator=generator())
        unfitted("coordinates").calibrate(queries(5, 4), generator=generator())
    assert [one.category for one in found] == [DriftWarning, UserWarning, UserWarning]
    assert [Path(one.filename).name for one in found] == ["test_modes.py"] * 3
