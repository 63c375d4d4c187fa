"""Which language models `accelerate_loss` can serve, and a few tokens to see that it does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softsieve.errors import InputError
from softsieve.integrations.causal_layer import check_layer, check_product
from softsieve.integrations.hidden_states import layer_of

_PROBED = 8  # tokens over which the loss is compared with the model's own
_KNOWN = ("accelerate", "softsieve", "torch", "transformers", "trl")  # packages that may have wrapped forward


def check_model(model: Any) -> Any:
    """The output layer of a model, refused unless its loss can do without logits."""
    layer = layer_of(model)
    if "labels" not in inspect.signature(model.forward).parameters:
        raise InputError(f"model: expected one whose forward takes labels, found {type(model).__name__}")
    other = _patched_by(model)
    if other is not None:
        raise InputError(f"model: expected its own forward and loss, found one of {other}: load the model without it")
    mapped = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}  # "0" is "cuda:0"
    for devices in (mapped, {str(weight.device) for weight in (*_embedding(model), *layer.parameters())}):
        if len(devices) > 1:
            raise InputError(f"model: expected one device, found its layers on {', '.join(sorted(devices))}")
    if is_sharded(layer):
        if not _by_fsdp(model):
            raise InputError(
                "model: expected the whole weight of the output layer on each device, found it sharded by tensor "
                "parallelism (DTensor)"
            )
        return layer
    check_layer(layer)
    check_product(layer, layer.forward)
    return layer


def _embedding(model: Any) -> list[Tensor]:
    """The weight of the input embeddings, where there is one."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        weight = None
    return [weight] if isinstance(weight, Tensor) else []


def is_sharded(layer: Any) -> bool:
    """Whether processes have parts of its parameters."""
    return any(type(value).__name__ == "DTensor" for value in layer.parameters())


def _by_fsdp(model: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _patched_by(model: Any) -> str | None:
    """The package that has put its own forward into a model or its class, or its own loss into torch."""
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    places = [(vars(owner)["forward"], owner.__module__), (vars(model).get("forward"), type(model).__module__)]
    places.append((F.cross_entropy, F.__name__))  # of all models in the process
    for function, home in places:
        module = getattr(function, "__module__", None) or type(function).__module__
        package = str(module).partition(".")[0]
        if function is not None and module != home and package not in _KNOWN:
            return package
    return None


def probe(model: Any) -> dict[str, Tensor]:
    """A batch of a few tokens."""
    (weight,) = _embedding(model) or [torch.empty(0, 1)]
    tokens = torch.arange(min(_PROBED, len(weight)), device=weight.device)[None]
    return {"input_ids": tokens, "labels": tokens}


@torch.no_grad()
def own_loss(model: Any) -> float | None:
    """The model's own loss of a few tokens; None when it takes more than tokens, or is sharded."""
    inputs = probe(model)
    if getattr(model, "main_input_name", "input_ids") != "input_ids" or inputs["input_ids"].numel() < 2:
        return None
    if is_sharded(model) or any(value.is_meta for value in model.parameters()):
        return None
    with evaluating(model):
        try:
            loss = getattr(model(**inputs, return_dict=True), "loss", None)
        except Exception:  # whatever a model says that wants a picture, too
            return None
    if loss is None:
        raise InputError(f"model: expected one that returns a loss for labels, found {type(model).__name__}")
    return float(loss)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode, with the random state as it was."""
    training = {module: module.training for module in model.modules()}
    places = sorted({value.device.index for value in model.parameters() if value.is_cuda})
    try:
        with torch.random.fork_rng(places):
            model.eval()
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
