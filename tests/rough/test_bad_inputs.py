"""Whatever the public names are given: a right answer, or an error that names the argument. Nothing in between.

`ENTRIES` has every public name with valid arguments and the kind of each; `values` what may be wrong with an argument
of a kind. A public name without an entry fails `test_every_public_name_has_an_entry`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import as_sm
import softsieve
import softsieve.reference
from softsieve import AdaptiveSoftmax, ASSpeed, DeltaSchedule, HeadAdamW, HeadSGD, SieveLinear, SolvedSampler
from softsieve.heads import QuantisedWeight
from softsieve.integrations.distributed import ShardedAdaptiveSoftmax
from softsieve.losses import make_objective
from softsieve.losses.objectives import MULTI_LABEL, SINGLE_LABEL
from softsieve.tasks.read import read_data, read_inputs
from softsieve.tasks.rows import LabelRows, Rows
from softsieve.training import InfoBatchSampler, SelectiveBackpropSampler, SeTaSampler
from softsieve.training.settings import Settings

N, D, ROWS = 40, 8, 6  # classes, features, rows
DOCUMENTED = (
    "softsieve",
    "softsieve.losses",
    "softsieve.heads",
    "softsieve.training",
    "softsieve.training.settings",
    "softsieve.tasks.rows",
    "softsieve.integrations.transformers",
    "softsieve.integrations.lightning",
    "softsieve.integrations.distributed",
    "softsieve.tasks.read",
    "softsieve.report",
    "as_sm",
)


class Entry(NamedTuple):
    """A public name: how it is called, with what, and of which kind that is."""

    call: Callable[..., Any]
    valid: Callable[[], dict[str, Any]]
    kinds: dict[str, str]
    also: tuple[str, ...] = ()  # other names that a message may give to an argument
    raises: tuple[type[Exception], ...] = ()  # documented, besides ValueError and TypeError


# -- what may be wrong -------------------------------------------------------------------------------------------------

NOTHING: list[Any] = [None, "x", b"x", object(), [], {}, 1j, lambda: 0]
NUMBERS: list[Any] = [
    True,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    -0.0,
    1,
    2,
    1e308,
    5e-324,
    10**400,
    Fraction(1, 3),
    Decimal("0.1"),
    np.float32(0.1),
    np.int64(1),
    np.array(0.1),
    np.array([0.1, 0.2]),
    torch.tensor(0.1),
    torch.tensor([0.1, 0.2]),
    torch.tensor(1),
]
WHOLES: list[Any] = [
    True,
    False,
    1.0,
    0.5,
    math.nan,
    -1,
    0,
    1,
    7,
    N + 1,
    2**63,
    -(2**63) - 1,
    10**30,
    np.int64(1),
    np.array(1),
    torch.tensor(1),
    "3",
    [1],
]


def _tensors(like: Tensor, huge: float = 3e38) -> Iterator[Any]:
    """Tensors that are unlike a valid one, and what are no tensors."""
    yield from NOTHING
    yield from (3, 0.5, like.tolist(), like.numpy(), np.float64(1))
    for dtype in (
        torch.bool,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.complex64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
    ):
        yield like.to(dtype)
    yield from (
        like[0],
        like[None],
        like[..., None],
        like[:0],
        like[..., :0],
        like.flatten(),
        like.sum(),
        like.new_empty(0),
        like.new_empty(0, 3),
    )
    yield from (like[..., :-1], like[1:], torch.cat([like, like]))
    yield like.to("meta")
    if like.dtype != torch.bool:
        yield like.to_sparse()
    yield like.repeat_interleave(2, -1)[..., ::2]  # of another stride
    yield like.expand(2, *like.shape)
    if like.is_floating_point():
        for value in (math.nan, math.inf, -math.inf, huge, -huge, 0.0, 1e-45):
            wrong = like.clone()
            wrong.view(-1)[-1] = value
            yield wrong
        yield torch.full_like(like, huge)
        yield torch.full_like(like, math.nan)
        yield like.clone().requires_grad_()
        yield torch.nn.Parameter(like.clone())
        if huge > 1e18:
            yield like.double() * 1e305
    else:
        for number in (-1, 1, N, N + 1, 2**31, -(2**63), 2**63 - 1, -100):
            if like.dtype != torch.bool:
                wrong = like.clone().long()
                wrong.view(-1)[-1] = number
                yield wrong


GENERATORS: list[Any] = [0, "x", object(), np.random.default_rng(0), torch.Generator]
PATHS: list[Any] = [
    None,
    3,
    0.5,
    b"\0",
    "\0",
    "",
    ".",
    "/",
    "/nowhere/at all",
    "x" * 5000,
    [],
    object(),
    Path("/proc/self/mem"),
]


def values(kind: str, valid: Any) -> list[Any]:
    """What an argument of this kind is given instead."""
    if kind == "tensor":
        return list(_tensors(valid))
    if kind == "factor":  # what products and sums are made of, which overflow as torch's do
        return list(_tensors(valid, huge=1e18))
    if kind == "number":
        return [*NOTHING, *NUMBERS]
    if kind == "whole":
        return [*NOTHING, *WHOLES, 2**31, 2**63 - 1]
    if kind == "size":  # of something that is allocated: large ones are legitimate, and there may be memory for them
        return [*NOTHING, *WHOLES]
    if kind == "choice":
        return [*NOTHING, True, 0, "", "MEAN", "mean ", ["mean"], ("mean",)]
    if kind == "flag":
        return [None, 0, 1, "yes", "", [], 2.0, np.bool_(True), torch.tensor(True)]
    if kind == "generator":
        return GENERATORS
    if kind == "path":
        return PATHS
    if kind == "paths":
        return [
            *NOTHING,
            3,
            "nowhere",
            Path("nowhere"),
            [None],
            [3],
            ["nowhere"],
            [Path("/nowhere")],
            [["x"]],
            {"a": 1},
        ]
    if kind == "words":
        return [*NOTHING, 0, 1.5, True, ["a"], "", "no such column"]
    if kind == "object":
        return [*NOTHING[1:], 3, {"delta": 0.1}]
    if kind == "mapping":
        return [*NOTHING, 3, [1], {"x": 1}, {1: 2}, "steps"]
    if kind == "rows":
        return [
            *NOTHING,
            [-1],
            [N],
            [0.5],
            ["a"],
            [True],
            [[0]],
            torch.tensor([0.5]),
            torch.tensor(3),
            torch.tensor([], dtype=torch.long),
            3,
            [2**63],
            range(0),
            {0},
        ]
    if kind == "ks":
        return [*NOTHING, *WHOLES, [], [1, "a"], [0, 1], [N + 1], (1, 2), torch.tensor([1])]
    raise AssertionError(kind)


# -- the public names --------------------------------------------------------------------------------------------------


def _made(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _logits() -> dict[str, Any]:
    return {"logits": 2 * _made(ROWS, N), "target": torch.arange(ROWS)}


def _flags() -> dict[str, Any]:
    return {"logits": 2 * _made(ROWS, N), "target": (_made(ROWS, N) > 1).long()}


LOSS = {"delta": "number", "ignore_index": "whole", "reduction": "choice"}
MULTILABEL = {"delta": "number", "against": "choice", "reduction": "choice", "return_stats": "flag"}
LOGITS = {"logits": "tensor", "target": "tensor"}
LINEAR = {
    "hidden": "factor", "weight": "factor", "target": "tensor", "bias": "factor", **LOSS,
    "class_weight": "factor", "row_weight": "factor", "softcap": "number",
    "backend": "choice", "screening": "choice", "return_stats": "flag",
}  # fmt: skip
LABELS = {"ignore_index": "whole", "backend": "choice", **MULTILABEL}
HEAD = {
    "weight": "tensor", "bias": "factor", "eps": "number", "delta": "number", "beta": "number",
    "method": "choice", "guarantee": "choice", "noise": "number", "read_chosen": "flag", "rotate": "flag",
    "seed": "whole",
}  # fmt: skip


def _linear() -> dict[str, Any]:
    return {
        "hidden": _made(ROWS, D), "weight": _made(N, D), "target": torch.arange(ROWS), "bias": _made(N),
        "class_weight": _made(N).abs(), "row_weight": _made(ROWS).abs(), "return_stats": True,
    }  # fmt: skip


def _linear_labels() -> dict[str, Any]:
    labels = torch.stack([torch.arange(ROWS), torch.full((ROWS,), N - 1)], 1)
    return {"hidden": _made(ROWS, D), "weight": _made(N, D), "labels": labels, "bias": _made(N), "return_stats": True}


def _module(make: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A module made with some of the arguments and called with the others."""

    def call(**args: Any) -> Any:
        inputs = {name: args.pop(name) for name in names}
        return make(**args)(*inputs.values())

    return call


def _own(optimizer: Any) -> Any:
    """True stands for an optimizer."""
    return HeadSGD(0.1) if optimizer is True else optimizer


def _backward(found: Any) -> Any:
    """A loss, alone or with statistics, whose backward pass went through."""
    loss = found[0] if isinstance(found, tuple) else found
    loss.sum().backward()
    return found


def _served(queries: Any, **args: Any) -> SieveLinear:
    layer = SieveLinear(D, N)
    layer.serve(queries, delta=0.3, **args)
    return layer


@cache
def _content(method: str) -> bytes:
    """The file of a calibrated head."""
    spread = torch.arange(1, D + 1) ** -0.5
    head = AdaptiveSoftmax(_made(600, D) * spread, _made(600), method=method, delta=0.2)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        if method != "exact":
            head.calibrate(_made(300, D) * spread, [1, 5], generator=torch.Generator().manual_seed(0))
        head.save(Path(folder) / "head")
        return (Path(folder) / "head").read_bytes()


def _head(method: str) -> AdaptiveSoftmax:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head"
        path.write_bytes(_content(method))
        return AdaptiveSoftmax.load(path)


def _ask(method: str, name: str) -> Callable[..., Any]:
    @cache
    def head() -> AdaptiveSoftmax:
        return _head(method)

    return lambda **args: getattr(head(), name)(**args)


def _query() -> dict[str, Any]:
    return {"x": _made(3, D)}


def _saved(path: Any) -> None:
    head = AdaptiveSoftmax(torch.eye(3))
    before = {entry.name for entry in Path.cwd().iterdir()}
    head.save(path)
    for entry in Path.cwd().iterdir():
        if entry.name not in before:
            entry.unlink()


def _sampler(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **args: call(SolvedSampler(N), **args)


@cache
def _table() -> Path:
    folder = Path(tempfile.mkdtemp())
    path = folder / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"film {i},{'ab'[i % 2]}\n" for i in range(20)))
    return path


HEADS: dict[str, Entry] = {}
for _method in ("exact", "coordinates", "cascade"):
    _asking = {"x": "tensor", "generator": "generator"}
    _uncalibrated = (RuntimeError,)
    HEADS |= {
        f"AdaptiveSoftmax.topk, {_method}": Entry(
            _ask(_method, "topk"), _query, {**_asking, "k": "whole"}, raises=_uncalibrated
        ),
        f"AdaptiveSoftmax.log_partition, {_method}": Entry(
            _ask(_method, "log_partition"), _query, _asking, raises=_uncalibrated
        ),
        f"AdaptiveSoftmax.logits, {_method}": Entry(_ask(_method, "logits"), _query, {"x": "tensor"}),
        f"AdaptiveSoftmax.exact_logits, {_method}": Entry(_ask(_method, "exact_logits"), _query, {"x": "tensor"}),
        f"AdaptiveSoftmax.above, {_method}": Entry(
            _ask(_method, "above"), _query, {"x": "tensor", "threshold": "number"}, raises=_uncalibrated
        ),
        f"AdaptiveSoftmax.sample, {_method}": Entry(
            _ask(_method, "sample"),
            _query,
            {**_asking, "temperature": "number", "top_k": "whole", "top_p": "number"},
            raises=_uncalibrated,
        ),
        f"AdaptiveSoftmax.coverage, {_method}": Entry(
            _ask(_method, "coverage"),
            lambda: {"queries": _made(4, D)},
            {"queries": "tensor", "k": "whole"},
            raises=_uncalibrated,
        ),
    }

ENTRIES: dict[str, Entry] = {
    "as_keep_mask": Entry(softsieve.as_keep_mask, _logits, {**LOGITS, "delta": "number", "ignore_index": "whole"}),
    "as_cross_entropy": Entry(
        softsieve.as_cross_entropy,
        lambda: {**_logits(), "weight": _made(N).abs(), "return_stats": True},
        {**LOGITS, **LOSS, "weight": "factor", "return_stats": "flag"},
    ),
    "as_multilabel_loss": Entry(
        softsieve.as_multilabel_loss, lambda: {**_flags(), "return_stats": True}, {**LOGITS, **MULTILABEL}
    ),
    "linear_as_cross_entropy": Entry(softsieve.linear_as_cross_entropy, _linear, LINEAR, also=("hidden, weight",)),
    "linear_as_cross_entropy, screened": Entry(
        partial(softsieve.linear_as_cross_entropy, screening="fp8"),
        _linear,
        {name: kind for name, kind in LINEAR.items() if name != "screening"},
        also=("hidden, weight", "screening"),
    ),
    "linear_as_cross_entropy, reference": Entry(
        partial(softsieve.linear_as_cross_entropy, backend="reference"),
        _linear,
        {name: kind for name, kind in LINEAR.items() if name != "backend"},
    ),
    "linear_as_multilabel_loss": Entry(
        softsieve.linear_as_multilabel_loss,
        _linear_labels,
        {"hidden": "factor", "weight": "factor", "labels": "tensor", "bias": "factor", "memory": "size", **LABELS},
        also=("hidden, weight",),
    ),
    "ASCrossEntropyLoss": Entry(
        _module(softsieve.ASCrossEntropyLoss, ("logits", "target")),
        lambda: {**_logits(), "weight": _made(N).abs()},
        {**LOGITS, **LOSS, "weight": "factor", "return_stats": "flag"},
    ),
    "ASMultiLabelLoss": Entry(
        _module(softsieve.ASMultiLabelLoss, ("logits", "target")), _flags, {**LOGITS, **MULTILABEL}
    ),
    "LinearASCrossEntropyLoss": Entry(
        _module(softsieve.LinearASCrossEntropyLoss, ("hidden", "target")),
        lambda: {"hidden": _made(ROWS, D), "target": torch.arange(ROWS), "in_features": D, "num_classes": N},
        {
            "hidden": "factor",
            "target": "tensor",
            "in_features": "size",
            "num_classes": "size",
            **LOSS,
            "bias": "flag",
            "class_weight": "factor",
            "softcap": "number",
            "memory": "size",
            "backend": "choice",
            "screening": "choice",
            "return_stats": "flag",
        },
        also=("weight",),
    ),
    "LinearASMultiLabelLoss": Entry(
        _module(softsieve.LinearASMultiLabelLoss, ("hidden", "labels")),
        lambda: {"hidden": _made(ROWS, D), "labels": torch.arange(ROWS)[:, None], "in_features": D, "num_classes": N},
        {
            "hidden": "factor",
            "labels": "tensor",
            "in_features": "size",
            "num_classes": "size",
            "bias": "flag",
            "memory": "size",
            **LABELS,
        },
        also=("weight",),
    ),
    "SieveLinear": Entry(
        lambda hidden, target, in_features=D, num_classes=N, bias=True, optimizer=True, **args: _backward(
            SieveLinear(in_features, num_classes, bias, optimizer=_own(optimizer)).loss(hidden, target, **args)
        ),
        lambda: {"hidden": _made(ROWS, D), "target": torch.arange(ROWS)},
        {
            "hidden": "factor",
            "target": "tensor",
            **LOSS,
            "backend": "choice",
            "return_stats": "flag",
            "in_features": "size",
            "num_classes": "size",
            "bias": "flag",
            "optimizer": "words",
        },
        also=("labels", "weight"),
    ),
    "SieveLinear, labels": Entry(
        lambda hidden, labels, **args: _backward(
            SieveLinear(D, N, optimizer=HeadAdamW(0.1)).loss(hidden, labels, **args)
        ),
        lambda: {"hidden": _made(ROWS, D), "labels": torch.arange(2 * ROWS).view(ROWS, 2)},
        {"hidden": "factor", "labels": "tensor", **LOSS, "backend": "choice", "return_stats": "flag"},
        also=("target", "weight"),
    ),
    "SieveLinear, serving": Entry(
        lambda queries, x, k_asked, **args: _served(queries, **args).topk(x, k_asked),
        lambda: {"queries": _made(60, D), "x": _made(2, D), "k_asked": 1},
        {
            "queries": "tensor",
            "x": "tensor",
            "k_asked": "whole",
            "k": "ks",
            "method": "choice",
            "generator": "generator",
        },
        also=("k", "calibrate"),
        raises=(RuntimeError,),
    ),
    "HeadSGD": Entry(
        HeadSGD,
        lambda: {"lr": 0.1},
        {**dict.fromkeys(("lr", "momentum", "weight_decay"), "number"), "stochastic": "flag", "seed": "whole"},
    ),
    "HeadAdamW": Entry(
        HeadAdamW,
        dict,
        {
            **dict.fromkeys(("lr", "eps", "weight_decay"), "number"),
            "betas": "ks",
            "stochastic": "flag",
            "seed": "whole",
        },
    ),
    "DeltaSchedule": Entry(
        lambda step, **args: DeltaSchedule(**args)(step),
        lambda: {"step": 3, "ratio": 0.5, "total_steps": 10},
        {
            "step": "number",
            "final": "number",
            "initial": "number",
            "ratio": "number",
            "total_steps": "number",
            "shape": "choice",
        },
    ),
    "ASSpeed": Entry(
        lambda solved, total, **args: ASSpeed(**args).update(solved, total),
        lambda: {"solved": 3, "total": 8},
        {"solved": "whole", "total": "whole", "lam": "number", "max_steps": "whole"},
    ),
    "ASSpeed.load_state_dict": Entry(
        lambda state: ASSpeed().load_state_dict(state),
        lambda: {"state": {"steps": 1}},
        {"state": "mapping"},
        also=("steps",),
    ),
    "SolvedSampler": Entry(
        lambda **args: list(SolvedSampler(**args))[:3],
        lambda: {"num_samples": 5},
        {
            "num_samples": "size",
            "margin": "number",
            "delta": "number",
            "tolerance": "number",
            "recheck": "number",
            "screen_above": "number",
            "seed": "whole",
            "num_replicas": "size",
            "rank": "whole",
        },
    ),
    "SolvedSampler.update": Entry(
        _sampler(lambda sampler, **args: sampler.update(**args)),
        lambda: {"indices": torch.arange(ROWS), "margins": torch.arange(ROWS) / ROWS},
        {"indices": "tensor", "margins": "tensor", "delta": "number"},
    ),
    "SolvedSampler.screened": Entry(
        _sampler(lambda sampler, **args: sampler.screened(**args)),
        lambda: {"indices": torch.arange(ROWS), "margins": torch.arange(ROWS) > 2},
        {"indices": "tensor", "margins": "tensor", "delta": "number"},
    ),
    "SolvedSampler.worth_screening": Entry(
        _sampler(lambda sampler, **args: sampler.worth_screening(**args)),
        lambda: {"indices": torch.arange(ROWS)},
        {"indices": "tensor"},
    ),
    "SolvedSampler.load_state_dict": Entry(
        _sampler(lambda sampler, **args: sampler.load_state_dict(**args)),
        lambda: {"state": SolvedSampler(N).state_dict()},
        {"state": "mapping"},
    ),
    "InfoBatchSampler": Entry(
        lambda **args: InfoBatchSampler(**args).next_epoch(),
        lambda: {"num_samples": 5, "epochs": 3},
        {"num_samples": "size", "epochs": "whole", "prune": "number", "anneal": "number", "seed": "whole"},
    ),
    "InfoBatchSampler.update": Entry(
        lambda **args: InfoBatchSampler(N, epochs=3).update(**args),
        lambda: {"indices": torch.arange(ROWS), "loss": _made(ROWS)},
        {"indices": "tensor", "loss": "tensor"},
    ),
    "InfoBatchSampler.load_state_dict": Entry(
        lambda state: InfoBatchSampler(N, epochs=3).load_state_dict(state),
        lambda: {"state": InfoBatchSampler(N, epochs=3).state_dict()},
        {"state": "mapping"},
    ),
    "SeTaSampler": Entry(
        lambda **args: SeTaSampler(**args).next_epoch(),
        lambda: {"num_samples": 5, "epochs": 3},
        {
            "num_samples": "size",
            **dict.fromkeys(("epochs", "groups", "seed"), "whole"),
            **dict.fromkeys(("prune", "window", "anneal"), "number"),
        },
    ),
    "SelectiveBackpropSampler": Entry(
        lambda **args: SelectiveBackpropSampler(**args).next_epoch(),
        lambda: {"num_samples": 5},
        {"num_samples": "size", "beta": "number", "history": "whole", "seed": "whole"},
    ),
    "SelectiveBackpropSampler.choose": Entry(
        lambda **args: SelectiveBackpropSampler(N).choose(**args),
        lambda: {"loss": _made(ROWS)},
        {"loss": "tensor"},
    ),
    "SelectiveBackpropSampler.update": Entry(
        lambda **args: SelectiveBackpropSampler(N).update(**args),
        lambda: {"indices": torch.arange(ROWS), "loss": _made(ROWS)},
        {"indices": "tensor", "loss": "tensor"},
    ),
    "SelectiveBackpropSampler.load_state_dict": Entry(
        lambda state: SelectiveBackpropSampler(N).load_state_dict(state),
        lambda: {"state": SelectiveBackpropSampler(N).state_dict()},
        {"state": "mapping"},
    ),
    "QuantisedWeight": Entry(
        QuantisedWeight,
        lambda: {"codes": torch.ones(N, D, dtype=torch.int8), "scales": _made(N, 1), "minimums": _made(N, 1)},
        {"codes": "tensor", "scales": "tensor", "minimums": "tensor"},
    ),
    "AdaptiveSoftmax": Entry(
        lambda x, **args: AdaptiveSoftmax(**args).logits(x),
        lambda: {"weight": _made(N, D), "bias": _made(N), "x": _made(2, D), "method": "exact"},
        {**HEAD, "x": "tensor"},
    ),
    "AdaptiveSoftmax, pac coordinates": Entry(
        lambda x, **args: AdaptiveSoftmax(**args).topk(x),
        lambda: {
            "weight": _made(N, D),
            "bias": _made(N),
            "x": _made(2, D),
            "method": "coordinates",
            "guarantee": "pac",
        },
        {**HEAD, "x": "tensor"},
        raises=(RuntimeError,),
    ),
    "AdaptiveSoftmax, pac cascade": Entry(
        lambda x, **args: AdaptiveSoftmax(**args).topk(x),
        lambda: {"weight": _made(N, D), "bias": _made(N), "x": _made(2, D), "method": "cascade", "guarantee": "pac"},
        {**HEAD, "x": "tensor"},
        raises=(RuntimeError,),
    ),
    **HEADS,
    "AdaptiveSoftmax.build": Entry(
        lambda queries: AdaptiveSoftmax(_made(N, D)).build(queries),
        lambda: {"queries": _made(30, D)},
        {"queries": "tensor"},
    ),
    "AdaptiveSoftmax.calibrate, cascade": Entry(
        lambda **args: AdaptiveSoftmax(_made(N, D), delta=0.3).calibrate(**args),
        lambda: {"queries": _made(30, D)},
        {"queries": "tensor", "k": "ks", "threshold": "number", "generator": "generator"},
    ),
    "AdaptiveSoftmax.calibrate, coordinates": Entry(
        lambda **args: AdaptiveSoftmax(_made(N, D), delta=0.3, method="coordinates").calibrate(**args),
        lambda: {"queries": _made(30, D)},
        {"queries": "tensor", "k": "ks", "generator": "generator"},
    ),
    "AdaptiveSoftmax.update_rows": Entry(
        lambda rows: _head("cascade").update_rows(rows), lambda: {"rows": [3]}, {"rows": "rows"}
    ),
    "AdaptiveSoftmax.to": Entry(
        lambda device: AdaptiveSoftmax(_made(N, D)).to(device), lambda: {"device": "cpu"}, {"device": "words"}
    ),
    "AdaptiveSoftmax.estimates": Entry(_ask("cascade", "estimates"), lambda: {"batch": 1}, {"batch": "whole"}),
    "AdaptiveSoftmax.save": Entry(_saved, lambda: {"path": "head.safetensors"}, {"path": "path"}),
    "AdaptiveSoftmax.load": Entry(
        AdaptiveSoftmax.load, lambda: {"path": "nowhere"}, {"path": "path", "weight": "words", "bias": "words"}
    ),
    "ShardedAdaptiveSoftmax": Entry(
        lambda x, k, **args: ShardedAdaptiveSoftmax(**args).topk(x, k),
        lambda: {"weight": _made(N, D), "bias": _made(N), "x": _made(2, D), "method": "exact", "k": 2},
        {**{name: kind for name, kind in HEAD.items() if name != "read_chosen"}, "x": "tensor", "k": "whole"},
    ),
    **{
        f"make_objective, {name}": Entry(
            lambda logits, target, objective=name, **args: make_objective(objective, **args)(logits, target),
            _logits,
            {**LOGITS, "reduction": "choice", "ignore_index": "whole", **more},
        )
        for name, more in {
            "softmax": {},
            "t-softmax": {"temperature": "number"},
            "sparse-softmax": {"k": "whole"},
            "sparsemax": {},
            "entmax-1.5": {},
            "label-smoothing": {"smoothing": "number"},
            "am-softmax": {"scale": "number", "margin": "number"},
            "as-softmax": {"delta": "number"},
        }.items()
    },
    **{
        f"make_objective, multi-label {name}": Entry(
            lambda logits, target, objective=name, **args: make_objective(objective, multilabel=True, **args)(
                logits, target
            ),
            _flags,
            {**LOGITS, "reduction": "choice"},
        )
        for name in MULTI_LABEL
    },
    "make_objective": Entry(make_objective, lambda: {"name": "softmax"}, {"name": "choice", "multilabel": "flag"}),
    "AS_Softmax": Entry(
        _module(as_sm.AS_Softmax, ("logits", "labels")),
        lambda: {"logits": _made(ROWS, N), "labels": torch.arange(ROWS), "delta": 0.1},
        {"logits": "tensor", "labels": "tensor", "delta": "number"},
        also=("target",),
    ),
    "Multi_label_AS_Softmax": Entry(
        _module(as_sm.Multi_label_AS_Softmax, ("logits", "labels")),
        lambda: {"logits": _made(ROWS, N), "labels": (_made(ROWS, N) > 1).long(), "delta": 0.1},
        {"logits": "tensor", "labels": "tensor", "delta": "number"},
        also=("target",),
    ),
    "compute_accumulation_step": Entry(
        as_sm.compute_accumulation_step,
        lambda: {"logits": _made(ROWS, N), "lamb": 1.0},
        {"logits": "tensor", "lamb": "number", "speedup": "flag"},
    ),
    "Settings": Entry(
        Settings,
        dict,
        {
            **dict.fromkeys(
                ("epochs", "batch_size", "eval_batch_size", "speed_steps", "eval_steps", "save_steps"), "whole"
            ),
            **dict.fromkeys(("save_total_limit", "logging_steps", "patience", "seed", "skip_after"), "whole"),
            **dict.fromkeys(("learning_rate", "weight_decay", "warmup_ratio", "max_grad_norm", "delta"), "number"),
            **dict.fromkeys(
                ("initial_delta", "delta_ratio", "speed_lambda", "tolerance", "recheck", "screen_above"), "number"
            ),
            "skip_margin": "number",
            "many_classes": "whole",
            **dict.fromkeys(("head_step", "head_dtype"), "choice"),
            "head_rate": "number",
            **dict.fromkeys(("loss", "delta_shape", "skip", "precision"), "choice"),
            **dict.fromkeys(("merge", "graphs", "compiled"), "flag"),
        },
        also=("final", "initial", "ratio", "shape", "lam", "max_steps", "name"),
    ),
    "Classifier": Entry(
        lambda **args: softsieve.Classifier(**args)._check(),  # what `fit` does first
        dict,
        {
            **dict.fromkeys(("epochs", "batch_size", "patience", "max_length", "seed"), "whole"),
            **dict.fromkeys(("delta", "learning_rate", "validation_share"), "number"),
            **dict.fromkeys(("kind", "loss", "skip", "precision"), "choice"),
            **dict.fromkeys(("model", "text_column", "label_column", "device"), "words"),
        },
        also=("final", "name"),
    ),
    "Classifier, fit": Entry(
        lambda **args: softsieve.Classifier(epochs=1, validation_share=0).fit(args.pop("X"), **args),
        lambda: {"X": ["a", "b"], "y": [0, 1]},
        {"X": "object", "y": "object", "validation": "object"},
    ),
    "Classifier.load": Entry(softsieve.Classifier.load, lambda: {"folder": "nowhere"}, {"folder": "path"}, ("task",)),
    "Rows": Entry(
        lambda inputs, target: Rows({"features": inputs}, target).batch(torch.tensor([0, 1])),
        lambda: {"inputs": _made(ROWS, D), "target": torch.arange(ROWS)},
        {"inputs": "tensor", "target": "tensor"},
        also=("features",),
    ),
    "LabelRows": Entry(
        lambda inputs, target: LabelRows({"features": inputs}, target).batch(torch.tensor([0, 1])),
        lambda: {"inputs": _made(ROWS, D), "target": torch.arange(ROWS)[:, None]},
        {"inputs": "tensor", "target": "tensor"},
        also=("features",),
    ),
    "read_data": Entry(
        read_data,
        lambda: {"source": _table()},
        {
            "source": "path",
            "validation": "path",
            "test": "path",
            "kind": "choice",
            "text_column": "words",
            "label_column": "words",
            "validation_share": "number",
            "seed": "whole",
            "on_error": "choice",
            "delimiter": "words",
            "encoding": "words",
            "workers": "whole",
        },
    ),
    "read_inputs": Entry(
        read_inputs,
        lambda: {"source": _table(), "kind": "text"},
        {
            "source": "path",
            "kind": "choice",
            "text_column": "words",
            "label_column": "words",
            "on_error": "choice",
            "delimiter": "words",
            "encoding": "words",
            "workers": "whole",
        },
    ),
    "write_report": Entry(
        lambda **args: importlib.import_module("softsieve.report").write_report(**args),
        lambda: {"runs": [Path("nowhere.json")], "out": Path("page.html")},
        {"runs": "paths", "out": "path"},
        also=("nowhere",),
    ),
    "ASOptions": Entry(
        lambda **args: _imported("transformers").ASOptions(**args),
        dict,
        {
            "delta": "number",
            "initial_delta": "number",
            "ratio": "number",
            "speed": "words",
            "skip": "mapping",
            "against": "choice",
        },
        also=("final", "initial"),
    ),
    "ASTrainer": Entry(
        lambda **args: _imported("transformers").ASTrainer(**args), dict, {"as_options": "object"}, also=("model",)
    ),
    "accelerate_head": Entry(
        lambda **args: _imported("transformers").accelerate_head(**args), lambda: {"model": None}, {"model": "words"}
    ),
    "accelerate_loss": Entry(
        lambda **args: _imported("transformers").accelerate_loss(**args), lambda: {"model": None}, {"model": "words"}
    ),
    "restore_loss": Entry(
        lambda **args: _imported("transformers").restore_loss(**args), lambda: {"model": None}, {"model": "words"}
    ),
    "token_log_probs": Entry(
        lambda **args: _imported("transformers").token_log_probs(**args),
        lambda: {"model": None, "input_ids": torch.zeros(1, 4, dtype=torch.long)},
        {"model": "words"},
    ),
    "ASLossCallback": Entry(
        lambda **args: _imported("transformers").ASLossCallback(**args),
        dict,
        {"delta": "number", "initial_delta": "number", "ratio": "number"},
        also=("final", "initial"),
    ),
    "TokenWeightsCollator": Entry(
        lambda **args: _imported("transformers").TokenWeightsCollator(**args),
        lambda: {"collator": list},
        {"collator": "words"},
    ),
    "restore_head": Entry(
        lambda **args: _imported("transformers").restore_head(**args), lambda: {"model": None}, {"model": "words"}
    ),
    "collect_queries": Entry(
        lambda **args: _imported("transformers").collect_queries(**args),
        lambda: {"model": None, "tokenizer": None, "text": "a text"},
        {"model": "words", "tokenizer": "words", "count": "whole", "window": "whole", "batch_size": "whole"},
    ),
    "DeltaCallback": Entry(
        lambda **args: _imported("lightning").DeltaCallback(**args),
        dict,
        {"delta": "number", "initial_delta": "number", "ratio": "number"},
        also=("final", "initial"),
    ),
    "SpeedCallback": Entry(
        lambda **args: _imported("lightning").SpeedCallback(**args), lambda: {"speed": ASSpeed()}, {"speed": "words"}
    ),
    "SkipCallback": Entry(
        lambda **args: _imported("lightning").SkipCallback(**args),
        lambda: {"num_samples": 4},
        {
            "num_samples": "size",
            **dict.fromkeys(("margin", "delta", "tolerance", "recheck"), "number"),
            "seed": "whole",
        },
    ),
}
RESULTS = "made by the library, not by its callers"
EXEMPT = {
    **dict.fromkeys(
        ("ASStats", "LinearASStats", "MultiLabelStats", "TopK", "Above", "LogPartition", "Coverage"), RESULTS
    ),
    **dict.fromkeys(
        ("Calibration", "CascadeCalibration", "GpuCascadeCalibration", "DriftWarning", "WeightChanged", "Batch"),
        RESULTS,
    ),
    "AdaptiveHead": "made by accelerate_head",
    **dict.fromkeys(("CausalLoss", "DeferredLogits", "LazyLogits"), "made by accelerate_loss"),
    "ASTrainerMixin": "ASTrainer is it",
    "hold_out": "the readers call it with what they have checked",
    "with_validation": "the readers call it with what they have checked",
    "make_table": "the readers call it with what they have checked",
    "line_inputs": "the readers call it with what they have checked",
    "read_lines": "the command predict calls it with what it has read",
    "AdaptiveSoftmax.estimated": "says that nothing is checked",
}


def _imported(name: str) -> Any:
    return importlib.import_module(f"softsieve.integrations.{name}")


# -- what may come of it -----------------------------------------------------------------------------------------------


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.device.type != "meta" and value.layout == torch.strided:
            yield value.detach()
    elif isinstance(value, float):
        yield torch.tensor(value)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _floats(one)
    elif isinstance(value, dict):
        yield from _floats(list(value.values()))


def complaint(entry: Entry, args: dict[str, Any]) -> str | None:
    """What is to be said against what came of a call; None if nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = entry.call(**args)
    except (ValueError, TypeError) as error:
        return None if _named(str(error), entry, args) else f"{type(error).__name__} that names no argument: {error}"
    except entry.raises as error:
        return None if "calibrated" in str(error) else f"{type(error).__name__}: {error}"
    except Exception as error:  # anything else comes from the depths
        return f"{type(error).__name__}: {error}"
    finite = all(bool(value.double().isfinite().all()) for value in _floats(args))
    if finite and any(bool(value.double().isnan().any()) for value in _floats(result)):
        return "NaN from finite numbers"
    return None


def _named(message: str, entry: Entry, args: dict[str, Any]) -> bool:
    """Whether a message names an argument: of two that do not fit each other, either; a file also by its path."""
    given = [str(Path(value)) for value in args.values() if isinstance(value, str | Path)]
    return any(re.search(rf"\b{name}\b", message) for name in (*args, *entry.also)) or any(
        message.startswith(name) or f"{name!r}" in message for name in given
    )


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:80]
    text = f"{value.dtype} {tuple(value.shape)} on {value.device}"
    plain = value.device.type != "meta" and value.layout == torch.strided
    return f"{text}, last {value.flatten()[-1:].tolist()}" if plain else text


def _like(entry: Entry, name: str) -> Any:
    """A valid argument to make others from; of those that are left out, one number a class."""
    valid = entry.valid().get(name)
    return _made(N) if valid is None and entry.kinds[name] in ("tensor", "factor") else valid


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _public() -> Iterator[str]:
    for name in DOCUMENTED:
        module = importlib.import_module(name)
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name]
        yield from getattr(module, "__all__", [key for key in own if not key.startswith("_")])
    for name, value in vars(AdaptiveSoftmax).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod)):
            yield f"AdaptiveSoftmax.{name}"


def test_every_public_name_has_an_entry() -> None:
    known = {name.split(",")[0] for name in ENTRIES} | set(EXEMPT)
    known |= {"softsieve", *(name for name in vars(softsieve) if inspect.ismodule(getattr(softsieve, name)))}
    assert sorted(set(_public()) - known) == []
    assert set(EXEMPT) & {name.split(",")[0] for name in ENTRIES} == set()
    single = {name.removeprefix("make_objective, ") for name in ENTRIES if name.startswith("make_objective, ")}
    assert set(SINGLE_LABEL) <= single


@pytest.mark.parametrize("name", ENTRIES)
def test_valid_arguments_are_taken(name: str) -> None:
    if name.startswith(
        (
            *("write_report", "accelerate_", "restore_", "collect_queries", "token_log_probs", "ASTrainer"),
            *("AdaptiveSoftmax.load", "Classifier.load"),
        )
    ):
        pytest.skip("takes a model, or a file")
    entry = ENTRIES[name]
    assert set(entry.valid()) <= set(entry.kinds)
    assert complaint(entry, entry.valid()) is None
    if not entry.raises:
        entry.call(**entry.valid())


@pytest.mark.parametrize("name", ENTRIES)
def test_each_bad_argument_is_refused_by_name_or_answered_rightly(name: str) -> None:
    entry = ENTRIES[name]
    against = []
    for argument, kind in entry.kinds.items():
        for value in values(kind, _like(entry, argument)):
            found = complaint(entry, {**entry.valid(), argument: value})
            if found is not None:
                against.append(f"{argument} = {_shown(value)}: {found}")
    assert against == []


@pytest.mark.parametrize("name", ENTRIES)
@given(data=st.data())
@settings(max_examples=40)
def test_several_bad_arguments_at_once(name: str, data: st.DataObject) -> None:
    entry = ENTRIES[name]
    chosen = data.draw(st.lists(st.sampled_from(sorted(entry.kinds)), min_size=1, max_size=3, unique=True))
    args = entry.valid()
    for argument in chosen:
        args[argument] = data.draw(_strategy(entry.kinds[argument], _like(entry, argument)), argument)
    found = complaint(entry, args)
    assert found is None, {argument: _shown(args[argument]) for argument in chosen}


def _strategy(kind: str, valid: Any) -> st.SearchStrategy[Any]:
    """Values of the table, and any numbers and texts of the kind."""
    known = st.sampled_from(values(kind, valid))
    if kind == "number":
        return known | st.floats() | st.integers() | st.fractions()
    if kind == "whole":
        return known | st.integers(-(2**70), 2**70)
    if kind in ("choice", "words"):
        return known | st.text(max_size=5)
    return known


# -- answers to what is valid, if odd ----------------------------------------------------------------------------------


@given(
    shape=st.sampled_from([(1, 1), (1, N), (ROWS, 2), (2, 3, N), (ROWS, N)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 30.0, 1e4]),
    labels=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]),
    strided=st.booleans(),
    delta=st.sampled_from([0, 0.1, 1, Fraction(1, 3), np.float32(0.5)]),
)
@settings(max_examples=60)
def test_odd_but_valid_logits_give_the_loss_of_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float, labels: torch.dtype, strided: bool, delta: Any
) -> None:
    logits = (_made(*shape) * scale).to(dtype)
    if strided:
        logits = logits.repeat_interleave(2, -1)[..., ::2]
    target = torch.arange(logits[..., 0].numel()).reshape(shape[:-1]) % shape[-1]
    found = softsieve.as_cross_entropy(logits, target.to(labels), delta=delta, reduction="none")
    truth = softsieve.reference.as_cross_entropy(logits.double(), target, delta=float(delta), reduction="none")
    rounding = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 1e-2)
    # A class as far as a rounding from the margin may go either way.
    p = logits.double().softmax(-1)
    near = (
        ((p.gather(-1, target[..., None]) - p - float(delta)).abs() < 1e-5)
        .scatter(-1, target[..., None], False)
        .any(-1)
    )
    wrong = (found.double() - truth).abs() > rounding * (1 + truth.abs())
    assert not bool((wrong & ~near).any())


def test_a_tensor_that_is_like_another_in_memory_is_not_written_to() -> None:
    """Bad calls leave their arguments as they were."""
    for entry in (ENTRIES["as_cross_entropy"], ENTRIES["linear_as_cross_entropy"], ENTRIES["AdaptiveSoftmax"]):
        args = entry.valid()
        before = {name: value.clone() for name, value in args.items() if isinstance(value, Tensor)}
        for argument in entry.kinds:
            complaint(entry, {**args, argument: object()})
        assert all(torch.equal(args[name], value) for name, value in before.items())
