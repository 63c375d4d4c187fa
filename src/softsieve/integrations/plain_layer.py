"""Output layers that an adaptive head can stand for: their weight is in memory, as it is, row by row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.integrations.hidden_states import inputs_of, layer_of, output_layer

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PACKED = ("qweight", "weight_packed", "W_q", "_packed_params")  # names that packages give to quantised weights


def plain_layer(model: Any) -> Any:
    """The output layer of a model.

    Raises:
        InputError: when there is none, or its weight is quantised, sharded or elsewhere.
    """
    instead = describe_instead(layer_of(model))
    if instead is not None:
        raise InputError(f"model: expected an output layer whose rows can be read one by one, found {instead}")
    return output_layer(model)


def describe_instead(layer: Any) -> str | None:
    """What there is instead of a plain weight; None when that is there."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        packed = next((name for name in _PACKED if hasattr(layer, name)), None)
        return f"{type(layer).__name__} without a weight" if packed is None else f"a quantised weight ({packed})"
    kind = type(weight).__name__
    if kind == "DTensor":
        return "a weight that is sharded over devices (DTensor)"
    if weight.device.type == "meta":
        return "a weight that is not in memory (device meta), as sharded and offloaded models have it"
    if weight.ndim != 2:
        return f"a weight of shape {tuple(weight.shape)}, as sharded models have it"
    if weight.dtype not in _PLAIN:
        return f"a quantised weight ({weight.dtype})"
    if type(weight) not in (Tensor, nn.Parameter):
        return f"a weight of another kind ({kind}), as quantised and sharded models have it"
    if getattr(weight, "quant_state", None) is not None:
        return "a quantised weight (quant_state)"
    return None


@torch.no_grad()
def check_linear(model: Any, layer: Any, ids: Tensor) -> None:
    """Refuse a layer that does more than its weight and bias say, as one with an adapter does.

    Raises:
        InputError: naming the layer.
    """
    states = inputs_of(layer, model, ids[None])
    output, expected = layer(states), F.linear(states, layer.weight, getattr(layer, "bias", None))
    rounding = 4 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    if output.shape != expected.shape or not torch.allclose(output, expected, rtol=0, atol=rounding):
        raise InputError(
            "model: expected an output layer that is x @ weight.T + bias, "
            f"found {type(layer).__name__}, which does something else: merge an adapter first"
        )
