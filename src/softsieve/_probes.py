"""Tiny calls of all that may work here or not, made in a process of its own: some of them can end it.

``python -m softsieve._probes NAME...`` tries them in turn and writes a line of JSON before and after each.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import softsieve
from softsieve import reference
from softsieve.errors import first_line
from softsieve.extras import EXTRAS, install
from softsieve.reference.heads import topk_softmax

DELTA = 0.1
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative errors that rounding may make


class NotHere(Exception):  # noqa: N818
    """There is nothing to try, and how that could be changed."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class Wrong(Exception):  # noqa: N818
    """It gives another result than it should."""


# -- what computes -----------------------------------------------------------------------------------------------------


def bf16_products() -> str:
    """Matrix products in bf16, which end the process where oneDNN takes a processor for another."""
    for rows, size, classes in ((1, 8, 16), (64, 64, 64), (33, 100, 257)):
        left, right = _numbers(rows, size).bfloat16(), _numbers(classes, size).bfloat16()
        product, _ = _with_gradient(lambda x, y: F.linear(y, x).float(), right, left)
        _compare("products", product.bfloat16(), left.double() @ right.double().T)
    return "agree with float64"


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise NotHere("no CUDA device that this torch can use")


def _need_triton(device: str) -> None:
    """On a GPU, where the kernels are in Triton."""
    if device == "cpu":
        return
    _need_gpu()
    if find_spec("triton") is None:
        raise NotHere("the package triton is not installed", "pip install triton")


def losses(device: str) -> str:
    _need_triton(device)
    logits, target = _numbers(8, 50, device=device), torch.arange(8, device=device)
    return _finite(_with_gradient(softsieve.as_cross_entropy, logits, target)[1])


def linear_loss(device: str, backend: str) -> str:
    _need_triton(device)
    hidden, weight = _numbers(8, 32, device=device), _numbers(500, 32, device=device)
    target = torch.arange(8, device=device)
    return _finite(_with_gradient(softsieve.linear_as_cross_entropy, hidden, weight, target, backend=backend)[1])


def cascade(device: str) -> str:
    _need_triton(device)
    head, queries = _head("cascade", device)
    worked = _finite(head.topk(queries[:8]).probs)
    if device != "cpu":
        return worked
    import numba

    return f"{worked}; threads of {numba.threading_layer()}"  # type: ignore[attr-defined]


def processes(backend: str) -> str:
    """A group of one process: what fails is mostly finding a network device for it."""
    import torch.distributed as dist

    if not dist.is_available():
        raise NotHere("this torch has no torch.distributed")
    if backend == "nccl":
        _need_gpu()
    if not dist.is_backend_available(backend):
        raise NotHere(f"this torch has no {'NCCL' if backend == 'nccl' else 'Gloo'}")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        value = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(value)
        return _finite(value)
    finally:
        dist.destroy_process_group()


# -- what is installed besides -----------------------------------------------------------------------------------------


def extra(name: str, call: Callable[[], object]) -> str:
    """Look whether all packages of an extra are there and, if so, make a call that needs them."""
    gives, packages = EXTRAS[name]
    absent = [package for package, module in packages.items() if find_spec(module) is None]
    if absent:
        raise NotHere(f"would give {gives}; not installed: {', '.join(absent)}", install(name))
    call()
    return gives


def _train() -> None:
    import accelerate
    import transformers
    from sklearn.metrics import f1_score

    from softsieve.training import loop  # noqa: F401

    accelerate.Accelerator(cpu=True)
    f1_score([0, 1], [0, 1])
    transformers.BertConfig(hidden_size=8)


def _rivals() -> None:
    import faiss

    from softsieve.losses import make_objective

    logits, target = _numbers(4, 6), torch.arange(4)
    for name in ("sparsemax", "entmax-1.5"):
        _finite(make_objective(name)(logits, target).loss)
    index = faiss.IndexFlatIP(6)
    index.add(logits.numpy())
    if index.search(logits.numpy(), 1)[1].shape != (4, 1):
        raise Wrong("faiss: expected one neighbour a query")


def _quantised() -> None:
    import gguf
    import torchao  # noqa: F401

    codes = gguf.quantize(_numbers(2, 32).numpy(), gguf.GGMLQuantizationType.Q8_0)
    if gguf.dequantize(codes, gguf.GGMLQuantizationType.Q8_0).shape != (2, 32):
        raise Wrong("gguf: expected as many numbers as it was given")


def _export() -> None:
    import numpy as np
    import onnxruntime
    import onnxscript  # noqa: F401
    from onnx import TensorProto, helper

    value, same = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [value], [same])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    if session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() != [1, 1]:
        raise Wrong("onnxruntime: expected what it was given")


def _serve() -> None:
    import fastapi
    import uvicorn

    uvicorn.Config(fastapi.FastAPI(), log_config=None).load()


def _report() -> None:
    import jinja2

    graphs = import_module("plotly.graph_objects")
    if jinja2.Template("{{ 1 + 1 }}").render() != "2":
        raise Wrong("jinja2: expected 1 + 1 to be 2")
    graphs.Figure(data=[{"type": "scatter", "y": [1, 2]}]).to_json()


# -- numbers -----------------------------------------------------------------------------------------------------------


def cross_entropy_numbers(device: str) -> str:
    """Loss and gradient against the definition in float64."""
    target = torch.arange(60) % 40
    errors = []
    for dtype in CLOSE:
        logits = (3 * _numbers(60, 40)).to(dtype)
        logits[torch.arange(0, 60, 2), target[::2]] += 9  # solved, mostly
        ours = _with_gradient(softsieve.as_cross_entropy, logits.to(device), target.to(device), delta=DELTA)
        truth = _with_gradient(reference.as_cross_entropy, logits.double(), target, delta=DELTA)
        errors.append(_worst("as_cross_entropy", ours, truth))
    return "errors: " + ", ".join(errors)


def delta_one_numbers(device: str) -> str:
    """With delta = 1 it is cross-entropy."""
    target = (torch.arange(60) % 40).to(device)
    same = True
    for dtype in (torch.float32, torch.float64):
        logits = (3 * _numbers(60, 40)).to(device, dtype)
        ours = _with_gradient(softsieve.as_cross_entropy, logits, target, delta=1.0)
        truth = _with_gradient(F.cross_entropy, logits, target)
        _worst("delta = 1", ours, truth)
        same &= torch.equal(ours[0], truth[0])
    return "losses have the same bits" if same else "the same to rounding"


def multilabel_numbers(device: str) -> str:
    logits, target = 2 * _numbers(30, 12).double(), _numbers(30, 12) > 1
    ours = _with_gradient(softsieve.as_multilabel_loss, logits.to(device), target.to(device), delta=DELTA)
    truth = _with_gradient(reference.as_multilabel_loss, logits, target.long(), delta=DELTA)
    return f"error: {_worst('as_multilabel_loss', ours, truth)}"


def linear_numbers(device: str) -> str:
    """Against the loss of the logits, which it does not make."""
    target = (torch.arange(48) * 7 % 300).to(device)
    errors = []
    for dtype in CLOSE:
        hidden, weight = _numbers(48, 16).to(device, dtype), _numbers(300, 16).flip(0).to(device, dtype)
        hidden[::2] = weight[target[::2]]
        ours = _with_gradient(softsieve.linear_as_cross_entropy, hidden, weight, target, delta=DELTA)
        truth = _with_gradient(
            lambda x, w: softsieve.as_cross_entropy(F.linear(x, w), target, delta=DELTA), hidden, weight
        )
        errors.append(_worst("linear loss", ours, truth))
    return "differences: " + ", ".join(errors)


def head_numbers(device: str) -> str:
    """Top 1 of queries that were not calibrated with, against the exact answer, failures by what delta allows."""
    counts = []
    for method in ("exact", "coordinates", "cascade"):
        if method == "cascade" and device != "cpu" and find_spec("triton") is None:
            continue
        head, queries = _head(method, device)
        answer = head.topk(queries, generator=torch.Generator(device).manual_seed(1))
        truth = topk_softmax(head.weight.double(), queries.double(), 1)
        close = (answer.probs - truth.probs).abs() <= head.eps * truth.probs + 1e-5
        right, count = int(((answer.indices == truth.indices) & close).sum()), len(queries)
        allowed = 0 if method == "exact" else head.delta * count + 4 * math.sqrt(head.delta * count)
        if count - right > allowed:
            raise Wrong(f"{method}: {count - right} of {count} answers are wrong, delta = {head.delta:g} was promised")
        counts.append(f"{method} {right} of {count}")
    return f"right: {', '.join(counts)}"


def file_numbers(device: str) -> str:
    """A head that was saved and loaded answers as before."""
    _need_triton(device)
    head, queries = _head("cascade", device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        head.save(path)
        again = softsieve.AdaptiveSoftmax.load(path).to(device)
    before, after = (one.topk(queries[:20]) for one in (head, again))
    for name in ("indices", "probs"):
        if not torch.equal(getattr(before, name), getattr(after, name)):
            raise Wrong(f"{name}: other answers than before it was saved")
    return "the same answers"


# -- helpers -----------------------------------------------------------------------------------------------------------


def _numbers(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def _finite(value: Tensor) -> str:
    if not bool(value.isfinite().all()):
        raise Wrong("expected finite numbers, found NaN or infinity")
    return "a tiny call worked"


def _compare(what: str, ours: Tensor, truth: Tensor) -> float:
    """The largest error, relative to the largest number; refused when rounding cannot explain it."""
    exact = truth.double().cpu()
    error = float((ours.double().cpu() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
    if not error <= CLOSE[ours.dtype]:
        raise Wrong(f"{what}: {error:.1e} off, expected at most {CLOSE[ours.dtype]:.0e}")
    return error


def _worst(what: str, ours: Sequence[Tensor], truth: Sequence[Tensor]) -> str:
    """The larger error of a loss and its gradient, with the dtype."""
    dtype = str(ours[0].dtype).removeprefix("torch.")
    return f"{dtype} {max(_compare(f'{what}, {dtype}', *pair) for pair in zip(ours, truth, strict=True)):.0e}"


def _with_gradient(loss: Callable[..., Any], x: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    value: Tensor = loss(leaf, *others, **options)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def _head(method: str, device: str) -> tuple[Any, Tensor]:
    """A small head, calibrated if it has to be, and queries to ask."""
    scale = torch.arange(1, 33) ** -0.5
    weight, states = (_numbers(2000, 32) * scale).to(device), (_numbers(1200, 32) * scale * 3).to(device)
    head = softsieve.AdaptiveSoftmax(weight, delta=DELTA, method=method)
    if method != "exact":
        sample = states[: 300 if method == "coordinates" else 1000]
        where = device if method == "coordinates" else "cpu"
        head.calibrate(sample, generator=torch.Generator(where).manual_seed(0))
    return head, states[1000:]


BACKENDS: dict[str, Callable[[], str]] = {
    "bf16 products on the CPU": bf16_products,
    "losses, torch on the CPU": partial(losses, "cpu"),
    "losses, Triton": partial(losses, "cuda"),
    "linear loss, torch on the CPU": partial(linear_loss, "cpu", "torch"),
    "linear loss, Triton": partial(linear_loss, "cuda", "triton"),
    "cascade, numba on the CPU": partial(cascade, "cpu"),
    "cascade, Triton": partial(cascade, "cuda"),
    "several processes, Gloo": partial(processes, "gloo"),
    "several processes, NCCL": partial(processes, "nccl"),
}
NUMBERS: dict[str, Callable[[str], str]] = {
    "cross-entropy against its definition": cross_entropy_numbers,
    "delta = 1 against F.cross_entropy": delta_one_numbers,
    "multi-label loss against its definition": multilabel_numbers,
    "linear loss against that of the logits": linear_numbers,
    "adaptive head against exact answers": head_numbers,
    "adaptive head saved and loaded": file_numbers,
}
PACKAGES: dict[str, Callable[[], str]] = {
    "train": partial(extra, "train", _train),
    "lightning": partial(extra, "lightning", partial(import_module, "softsieve.integrations.lightning")),
    "rivals": partial(extra, "rivals", _rivals),
    "quantised": partial(extra, "quantised", _quantised),
    "export": partial(extra, "export", _export),
    "serve": partial(extra, "serve", _serve),
    "report": partial(extra, "report", _report),
}


def probes() -> dict[str, Callable[[], str]]:
    """All there is to try, by name."""
    devices = ("cpu", "cuda")
    numbers = {f"{name}, {device}": partial(call, device) for device in devices for name, call in NUMBERS.items()}
    return {**BACKENDS, **numbers, **PACKAGES}


def attempt(call: Callable[[], str]) -> dict[str, str]:
    """What comes of a call: its state, what there is to say, and what to do about it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"state": "works", "detail": call(), "remedy": ""}
    except NotHere as error:
        return {"state": "not here", "detail": str(error), "remedy": error.remedy}
    except Exception as error:  # anything may be wrong with what is installed, and the next one is tried all the same
        return {"state": "broken", "detail": f"{type(error).__name__}: {first_line(error)}", "remedy": ""}


def main(names: list[str]) -> None:
    """Try what is named, and tell a parent by lines of JSON."""
    known = probes()
    for name in names:
        print(json.dumps({"begin": name}), flush=True)  # noqa: T201
        print(json.dumps({"name": name, **attempt(known[name])}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
