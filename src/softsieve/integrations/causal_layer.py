"""The output layer of a language model as one product, also where PEFT has put a LoRA on it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.integrations.plain_layer import describe_instead

_ROUNDED = 256  # rows of a weight that tell how products are rounded
Parts = tuple[Tensor, Tensor, Tensor | None]  # states, weight and bias


def own_layer(layer: Any) -> Any:
    """The layer itself, or the copy of it that PEFT trains (``modules_to_save``)."""
    copies = getattr(layer, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return layer
    if getattr(layer, "disable_adapters", False):
        return layer.original_module
    names = [name for name in _active(layer) if name in copies]
    return copies[names[0]] if names else layer.original_module


def _active(layer: Any) -> list[str]:
    names = getattr(layer, "active_adapters", None)
    if names is None:
        names = getattr(layer, "active_adapter", [])
    return [names] if isinstance(names, str) else list(names)


def has_lora(layer: Any) -> bool:
    """Whether PEFT has put a LoRA, of whatever kind, on a layer."""
    return isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) and hasattr(layer, "base_layer")


def as_product(layer: Any, hidden: Tensor) -> Parts:
    """States, weight and bias whose product the layer's output is.

    With a LoRA of factors A and B, scaled by s: ``[hidden, s dropout(hidden) A'] [weight, B]'``.
    """
    layer = own_layer(layer)
    base = layer.get_base_layer() if has_lora(layer) else layer
    weight, bias = (_whole(value, hidden.dtype) for value in (base.weight, getattr(base, "bias", None)))
    if not has_lora(layer):
        return hidden, weight, bias
    if layer.disable_adapters or layer.merged:
        return hidden, weight, bias
    wide, columns = [hidden], [weight]
    for name in _active(layer):
        if name not in layer.lora_A:
            continue
        down, up = layer.lora_A[name], layer.lora_B[name]
        states = layer.lora_dropout[name](hidden.to(down.weight.dtype))
        wide.append((down(states) * layer.scaling[name]).to(hidden.dtype))
        columns.append(up.weight.to(weight.dtype))
        if up.bias is not None:
            added = up.bias * layer.scaling[name]
            bias = added if bias is None else bias + added
    return torch.cat(wide, -1), torch.cat(columns, 1), bias


def _whole(value: Any, dtype: torch.dtype) -> Any:
    """A parameter, also one that FSDP2 has sharded again since the model's forward pass was over.

    Raises:
        InputError: for one that wants a gradient, which would be that of one process.
    """
    if type(value).__name__ != "DTensor":
        return value
    if torch.is_grad_enabled():
        raise InputError(
            "model: expected the whole weight of the output layer, found it sharded again after the forward pass: give "
            "that layer a fully_shard of its own, or take reshard_after_forward=False for the model"
        )
    return value.full_tensor().to(dtype)


def check_adapter(layer: Any) -> Any:
    """The layer below a plain LoRA, or the layer itself.

    Raises:
        InputError: for an adapter of another kind.
    """
    inner = own_layer(layer)
    if has_lora(inner):
        for name in _active(inner):
            if name in getattr(inner, "lora_variant", {}) or getattr(inner, "use_dora", {}).get(name, False):
                kind = type(getattr(inner, "lora_variant", {}).get(name, inner)).__name__
                raise InputError(f"model: expected plain LoRA on the output layer, found another kind of it ({kind})")
        return inner.get_base_layer()
    if hasattr(inner, "base_layer") or hasattr(inner, "token_adapter"):
        raise InputError(f"model: expected plain LoRA on the output layer, found another adapter ({_name(inner)})")
    return inner


def check_layer(layer: Any) -> None:
    """Refuse an output layer that is not one product: quantised, sharded, or with an adapter other than LoRA.

    Raises:
        InputError: naming what was found.
    """
    instead = describe_instead(check_adapter(layer))
    if instead is not None:
        raise InputError(f"model: expected an output layer whose weight can be read, found {instead}")


@torch.no_grad()
def check_product(layer: Any, forward: Any) -> None:
    """Refuse a layer whose output is not the product that its weights say.

    Raises:
        InputError: naming the layer.
    """
    inner = own_layer(layer)
    weight = (inner.get_base_layer() if has_lora(inner) else inner).weight
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(3, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    training = {module: module.training for module in layer.modules()}
    try:
        layer.eval()
        with torch.autocast(weight.device.type, enabled=False):
            output, expected = forward(probe), F.linear(*as_product(layer, probe))
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"model: expected a linear output layer, found {_name(layer)}, which fails") from error
    finally:
        for module, mode in training.items():
            module.training = mode
    bound = 16 * rounding(weight) * float(expected.abs().max().clamp_min(1))
    if output.shape != expected.shape or not torch.allclose(output, expected, rtol=0, atol=bound):
        raise InputError(
            "model: expected an output layer that is x @ weight.T + bias, "
            f"found {_name(layer)}, which does something else"
        )


@torch.no_grad()
def rounding(weight: Tensor) -> float:
    """Relative, of products with a weight: that of its dtype, or more where torch may compute float32 in TF32."""
    some = weight[:_ROUNDED]
    states = torch.randn(3, some.shape[1], generator=torch.Generator().manual_seed(0)).to(some.device, some.dtype)
    with torch.autocast(some.device.type, enabled=False):
        exact = F.linear(states.double(), some.double())
        error = (F.linear(states, some) - exact).abs().max() / exact.abs().max().clamp_min(1e-30)
    return max(torch.finfo(some.dtype).eps, float(error))


def _name(layer: Any) -> str:
    return f"{type(layer).__module__.partition('.')[0]}'s {type(layer).__name__}"
