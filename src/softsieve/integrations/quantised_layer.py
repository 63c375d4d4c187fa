"""Output layers with quantised weights, as the packages that quantise models have them, row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softsieve.errors import InputError
from softsieve.heads.quantised import DIGITS, QuantisedWeight, Weight, describe
from softsieve.integrations.hidden_states import layer_of, output_layer
from softsieve.integrations.plain_layer import plain_layer

_TORCHAO = ("Int8Tensor", "IntxUnpackedToInt8Tensor")  # classes of tensors whose codes lie row by row
_ROWS = 1 << 14  # rows that are compared at a time


def readable_layer(model: Any) -> tuple[Any, Weight]:
    """The output layer of a model, and its weight as it can be read row by row.

    Raises:
        InputError: when there is none, or its weight is quantised in another way, sharded or elsewhere.
    """
    weight = getattr(layer_of(model), "weight", None)
    quantised = read_torchao(weight) if isinstance(weight, Tensor) else None
    if quantised is None:
        layer = plain_layer(model)
        return layer, layer.weight.detach()
    return output_layer(model), quantised


def read_torchao(weight: Tensor) -> QuantisedWeight | None:
    """The rows of a tensor of torchao, whose codes of 8 bits stay where they are; None for any other tensor.

    Raises:
        InputError: for one that multiplies with quantised activations, or whose scales are not of parts of rows.
    """
    kind: Any = type(weight)
    if kind.__name__ not in _TORCHAO or not kind.__module__.startswith("torchao"):
        return None
    inner: Any = weight
    dynamic = getattr(inner, "act_quant_kwargs", None) or getattr(inner, "activation_quantization", None)
    if dynamic is not None:
        raise InputError(
            f"model: expected an output layer of quantised weights alone, found activations, too ({dynamic})"
        )
    codes, scales, zeros = inner.qdata, inner.scale, inner.zero_point
    if codes.ndim != 2 or codes.dtype != torch.int8 or next(iter(inner.block_size)) != 1 or scales.ndim != 2:
        raise InputError(
            "model: expected an output layer whose rows can be read one by one, "
            f"found {kind.__name__} in blocks of {tuple(inner.block_size)}"
        )
    if zeros is not None and bool(zeros.any()):
        group = codes.shape[1] // scales.shape[1]
        codes = codes.to(torch.int16) - zeros.to(torch.int16).repeat_interleave(group, 1)
        if int(codes.abs().max()) > 127:
            raise InputError(f"model: expected an output layer with codes around 0, found {kind.__name__} with others")
        codes = codes.to(torch.int8)
    half = DIGITS // 2
    small = "int4" in str(getattr(inner, "target_dtype", "")) and codes.shape[1] // scales.shape[1] % 2 == 0
    if small and -half <= int(codes.min()) and int(codes.max()) < half:
        levels = torch.arange(-half, half, dtype=torch.float32, device=codes.device)
        return QuantisedWeight.from_digits(codes + half, scales, levels=levels)
    return QuantisedWeight(codes, scales)


def check_same(weight: QuantisedWeight, own: Tensor) -> None:
    """Refuse a quantised weight that does not stand for the one that a layer has, up to the rounding of its dtype.

    Raises:
        InputError: naming what differs.
    """
    if weight.shape != own.shape:
        raise InputError(f"weight: expected shape {tuple(own.shape)}, as the model has it, found {describe(weight)}")
    if weight.device != own.device:
        raise InputError(f"weight: expected device {own.device}, where the model is, found {weight.device}")
    tolerance = 2 * torch.finfo(own.dtype).eps
    for start in range(0, len(own), _ROWS):
        rows, others = weight[start : start + _ROWS].float(), own[start : start + _ROWS].float()
        different = ~torch.isclose(rows, others, rtol=tolerance, atol=tolerance * float(others.abs().max())).all(-1)
        if bool(different.any()):
            first = start + int(different.nonzero()[0, 0])
            raise InputError(f"weight: expected the one that the model was made of, found another: row {first} differs")
