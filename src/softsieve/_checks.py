"""What the public functions refuse, each with the argument, what was expected and what was found.

Only types, shapes and options are checked here; label values are checked where they are read
(`kernels.cross_entropy_torch`, `kernels.multilabel_torch`), because a compiled graph cannot branch on them.
"""

from __future__ import annotations

import math
import numbers
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softsieve.errors import InputError

REDUCTIONS = ("none", "mean", "sum")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def number(name: str, value: object, low: float = -float("inf"), high: float = float("inf")) -> float:
    """``value`` as a float, refused unless it is a real number in [low, high]."""
    if type(value) is float and low <= value <= high:  # nearly always: what follows takes longer than a small kernel
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymFloat):
        raise TypeError(f"{name}: expected a number, found {type(value).__name__}")
    if isinstance(value, int | Fraction) and not -(10**308) <= value <= 10**308:  # an int may be larger than any float
        raise ValueError(f"{name}: expected a number in [{low:g}, {high:g}], found one beyond 1e308")
    real = float(value)
    if not low <= real <= high:  # also refuses NaN
        raise ValueError(f"{name}: expected a number in [{low:g}, {high:g}], found {real:g}")
    return real


def open_unit(name: str, value: object) -> float:
    """``value`` as a float, refused unless it is a number strictly between 0 and 1."""
    real = number(name, value)
    if not sys.float_info.min <= real < 1:  # half of it must be above 0, too
        raise ValueError(f"{name}: expected a number between 0 and 1, both excluded, found {real:g}")
    return real


def positive(name: str, value: object) -> float:
    """``value`` as a float, refused unless it is a finite number above 0."""
    real = number(name, value)
    if not 0 < real < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, found {real:g}")
    return real


def choice(name: str, value: object, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if type(value) is str and value in allowed:
        return
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, found {value!r}")


def whole_number(name: str, value: object, low: int, high: int) -> None:
    if type(value) is int and low <= value <= high:
        return
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}: expected an int, found {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected an int in [{low}, {high}], found {value}")


def flag(name: str, value: object) -> bool:
    """``value``, refused unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, found {type(value).__name__}")
    return value


def ignore_index(value: int) -> None:
    whole_number("ignore_index", value, -(2**63), 2**63 - 1)


def path(name: str, value: object) -> Path:
    """``value`` as a path, refused unless it could be the one of a file."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name}: expected a path, found {type(value).__name__}")
    if "\0" in str(value) or any(len(os.fsencode(part)) > 255 for part in Path(value).parts):
        raise ValueError(f"{name}: expected a path that a file can have, found {str(value)[:80]!r}")
    return Path(value)


def device(name: str | None) -> torch.device:
    """The device of that name, None: a GPU where there is one; refused where there is none of that name."""
    there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if name is None:
        return torch.device("cuda" if len(there) > 1 else "cpu")
    if name not in there and not (name == "cuda" and len(there) > 1):
        raise InputError(f"device: expected one of {', '.join(there)}, found {name!r}")
    return torch.device(name)


def state(value: object, names: Iterable[str]) -> None:
    """Refuse what is not a `state_dict` with these names."""
    if not isinstance(value, Mapping):
        raise TypeError(f"state: expected a dict, found {type(value).__name__}")
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"state: expected {', '.join(map(repr, missing))} in it, found {', '.join(map(repr, value))}")


def row_numbers(name: str, value: object, count: int) -> Tensor:
    """``value`` on the CPU as int64, refused unless it is a tensor of integers in [0, count)."""
    rows = tensor(name, value)
    if rows.dtype not in _INTEGER:
        raise TypeError(f"{name}: expected integers, found {rows.dtype}")
    in_memory(name, rows)
    rows = rows.detach().cpu().long()
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < count):
        raise ValueError(f"{name}: expected rows in [0, {count - 1}], found {int(rows.min())} to {int(rows.max())}")
    return rows


def row_values(name: str, value: object, indices: Tensor) -> Tensor:
    """``value`` on the CPU, refused unless it is a tensor with one number for each of the ``indices``."""
    numbers = tensor(name, value)
    in_memory(name, numbers)
    if indices.shape != numbers.shape:
        raise ValueError(f"{name}: expected shape {tuple(indices.shape)}, found {tuple(numbers.shape)}")
    return numbers.detach().cpu()


def row_flags(name: str, values: Tensor) -> Tensor:
    """Flags of rows as bool, refused unless they are bool, or integers that are 0 or 1."""
    if values.dtype not in (torch.bool, *_INTEGER):
        raise TypeError(f"{name}: expected margins or flags, found {values.dtype}")
    flags = values.bool()
    if bool((values != flags).any()):
        raise ValueError(f"{name}: expected flags of integers to be 0 or 1, found {int(values[values != flags][0])}")
    return flags


def row_margins(values: Tensor) -> Tensor:
    """Margins of rows, refused unless they are differences of probabilities; NaN counts as the least."""
    known = values.nan_to_num(-1.0, math.inf, -math.inf)
    if bool((known.abs() > 1.001).any()):  # rounded
        raise ValueError(f"margins: expected numbers in [-1, 1], found {float(known[known.abs().argmax()]):g}")
    return known


def generator(value: torch.Generator | None, device: torch.device | None = None) -> None:
    """Refuse what is no generator, or one of another device than that on which is drawn."""
    if value is None:
        return
    if not isinstance(value, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator, found {type(value).__name__}")
    if device is not None and value.device.type != device.type:
        raise ValueError(f"generator: expected one of {device.type}, where is drawn, found one of {value.device.type}")


def group(value: object) -> str:
    """The name of a process group."""
    name = getattr(value, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(f"group: expected a process group of torch.distributed, found {type(value).__name__}")
    return name


def in_memory(name: str, value: Tensor) -> None:
    if value.is_meta:
        raise ValueError(f"{name}: expected numbers, found a tensor without any (device meta)")


def tensor(name: str, value: object) -> Tensor:
    """``value``, refused unless it is a dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, found {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, found {value.layout}")
    return value


def logits(value: Tensor) -> None:
    """Refuse what is not a non-empty floating-point tensor (..., classes)."""
    _floats("logits", value, "(..., classes)", least=1)


def target(value: Tensor, like: Tensor, *, multilabel: bool = False, name: str = "logits") -> None:
    """Refuse targets that do not fit ``like``: one integer a row, or one 0/1 a class for multi-label."""
    tensor("target", value)
    allowed = (torch.bool, *_INTEGER, *_FLOATING) if multilabel else _INTEGER
    if value.dtype not in allowed:
        what = "0/1 flags" if multilabel else "integer class labels (class probabilities are not supported)"
        raise TypeError(f"target: expected {what}, found {value.dtype}")
    shape = like.shape if multilabel else like.shape[:-1]
    if value.shape != shape:
        raise ValueError(
            f"target: expected shape {tuple(shape)} for {name} of shape {tuple(like.shape)}, found {tuple(value.shape)}"
        )
    _same_device("target", value, like, f"the {name} are")


def usual(logits: Tensor, target: Tensor) -> bool:
    """Whether they are what nearly all calls give and nothing is wrong with: rows of logits, an int64 label for each.

    Asked before `logits`, `target` and `class_last`, which take longer than a small kernel.
    """
    return (
        type(logits) is type(target) is Tensor
        and logits.ndim == 2
        and target.ndim == 1
        and len(target) == len(logits)
        and target.dtype is torch.int64
        and logits.dtype in _FLOATING
        and logits.layout is target.layout is torch.strided
        and logits.device == target.device
        and logits.numel() > 0
    )


def class_numbers(value: Tensor, hidden: Tensor) -> None:
    """Refuse what are not integers (..., labels) for hidden states (..., d); 0/1 flags have another dtype or shape."""
    tensor("labels", value)
    if value.dtype not in _INTEGER:
        raise TypeError(
            f"labels: expected class numbers, padded with ignore_index, found {value.dtype}"
            + (": 0/1 flags are for as_multilabel_loss" if value.dtype in (torch.bool, *_FLOATING) else "")
        )
    if value.ndim != hidden.ndim or value.shape[:-1] != hidden.shape[:-1] or value.shape[-1] == 0:
        shape = f"({', '.join([*map(str, hidden.shape[:-1]), 'labels'])})"
        raise ValueError(
            f"labels: expected shape {shape} for hidden states of shape {tuple(hidden.shape)}, "
            f"found {tuple(value.shape)}"
        )
    _same_device("labels", value, hidden, "the hidden states are")


def class_last(logits: Tensor) -> None:
    """Warn where `F.cross_entropy` would take logits and target of these shapes too, and read another dimension.

    Not refused: a batch of sequences as long as there are classes is nothing wrong.
    """
    size = logits.shape[-1]
    if logits.ndim > 2 and size > 1 and all(other == size for other in logits.shape[1:-1]):
        _tell_of_layout()


def _tell_of_layout() -> None:
    warnings.warn(
        "logits: expected classes in the last dimension, and found as many of every dimension but the first, which "
        "F.cross_entropy would read as (N, C, ...) with classes in the second. If they are in the last, give "
        "logits.flatten(0, -2) and target.flatten(); if in the second, logits.movedim(1, -1).flatten(0, -2)",
        stacklevel=4,
    )


# A compiled graph tells it when it is made: what `torch.compiler.assume_constant_result` does, which imports dynamo.
_tell_of_layout._dynamo_marked_constant = True  # type: ignore[attr-defined]


def weight(value: Tensor | None, like: Tensor, *, name: str = "weight", sized: bool = True) -> None:
    """Refuse class weights other than one floating-point number a class; how many is for others to say if not sized."""
    if value is None:
        return
    _floats(name, value, None)
    if sized and value.shape != like.shape[-1:]:
        raise ValueError(f"{name}: expected shape ({like.shape[-1]},), one a class, found {tuple(value.shape)}")
    _constant(name, value)
    _same_device(name, value, like, "the logits are")


def _floats(name: str, value: Tensor, shape: str | None, *, least: int = 0) -> None:
    """Refuse what is not a floating-point tensor; with a ``shape`` also an empty one, or one of fewer dimensions."""
    tensor(name, value)
    if value.dtype not in _FLOATING:
        raise TypeError(f"{name}: expected a floating-point dtype, found {value.dtype}")
    if shape is not None and (value.ndim < least or value.numel() == 0):
        raise ValueError(f"{name}: expected a non-empty tensor {shape}, found shape {tuple(value.shape)}")


def _constant(name: str, value: Tensor) -> None:
    if value.requires_grad:
        raise ValueError(f"{name}: expected constants, found a tensor that requires a gradient")


def _same_device(name: str, value: Tensor, like: Tensor, what: str = "the weight is") -> None:
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, where {what}, found {value.device}")


def states(value: Tensor) -> torch.dtype:
    """The dtype of hidden states, refused unless they are a non-empty floating-point tensor (..., d)."""
    _floats("hidden", value, "(..., d)")
    return value.dtype


def linear_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse what does not make logits: states (..., d), a weight (classes, d) like them, and a bias (classes,)."""
    _floats("hidden", hidden, "(..., d)")
    _floats("weight", weight, "(classes, d)")
    kind = type(weight)
    if kind not in (Tensor, torch.nn.Parameter) and kind.__name__ == "DTensor":  # which takes long to import
        raise TypeError(
            "weight: expected a tensor, found a DTensor: call the module that shards it, "
            "or give weight.to_local() and the group of its mesh"
        )
    if hidden.ndim == 0 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "hidden, weight: expected shapes (..., d) and (classes, d), "
            f"found {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TypeError(f"weight: expected {hidden.dtype}, as the states are, found {weight.dtype}")
    _same_device("hidden", hidden, weight)
    if bias is not None:
        _one_each("bias", bias, weight, "class")


def each_row(name: str, value: Tensor, target: Tensor) -> None:
    """Refuse what is not a constant floating-point number for each label."""
    _floats(name, value, None)
    if value.shape != target.shape:
        raise ValueError(f"{name}: expected shape {tuple(target.shape)}, one a row, found {tuple(value.shape)}")
    _same_device(name, value, target, "the target is")
    _constant(name, value)


def margins(delta: object, target: Tensor) -> Tensor:
    """Delta as a tensor () or (rows,), refused unless in [0, 1]; numbers on a GPU are not read."""
    if not isinstance(delta, Tensor):
        margin = number("delta", delta, 0, 1)
        if torch.compiler.is_compiling():  # written so, it is compiled once for any delta
            return torch.ones((), dtype=torch.float64, device=target.device) * margin
        return torch.full((), margin, dtype=torch.float64, device=target.device)
    each_row("delta", delta, target)
    if delta.is_cpu and not torch.compiler.is_compiling() and not bool(((delta >= 0) & (delta <= 1)).all()):
        raise ValueError("delta: expected numbers in [0, 1]")
    return delta.reshape(-1)


def saved(name: str, value: object, like: Tensor, *, high: float, low: float = 0, sized: bool = True) -> None:
    """Refuse a tensor of a file that is not like the one it is to replace, or has numbers outside [low, high]."""
    numbers = tensor(name, value)
    if numbers.dtype != like.dtype or numbers.ndim != like.ndim or (sized and numbers.shape != like.shape):
        raise ValueError(
            f"{name}: expected {like.dtype} of shape {tuple(like.shape) if sized else '(N,)'}, "
            f"found {numbers.dtype} of shape {tuple(numbers.shape)}"
        )
    if not bool(((numbers >= low) & (numbers <= high)).all()):  # also refuses NaN
        raise ValueError(f"{name}: expected numbers in [{low:g}, {high:g}]")


def _one_each(name: str, value: Tensor, weight: Any, what: str) -> None:
    _floats(name, value, "(n,)")
    if value.shape != weight.shape[:1]:
        raise ValueError(f"{name}: expected shape ({len(weight)},), one a {what}, found {tuple(value.shape)}")
    _same_device(name, value, weight)


def finite(name: str, value: Tensor) -> None:
    """Refuse NaN and infinity."""
    in_memory(name, value)
    # A finite sum says it, without a temporary of the size of the tensor.
    if not math.isfinite(float(value.detach().sum(dtype=torch.float64))) and not bool(value.isfinite().all()):
        raise ValueError(f"{name}: expected finite numbers, found NaN or infinity")


def matrix(name: str, value: Tensor) -> None:
    """Refuse what is not a finite floating-point matrix (n, d)."""
    _floats(name, value, "(n, d)")
    if value.ndim != 2:
        raise ValueError(f"{name}: expected a matrix (n, d), found shape {tuple(value.shape)}")
    finite(name, value)


def vector(name: str, value: Tensor, weight: Any) -> None:
    """Refuse what is not a finite number for each row of the weight, a tensor or a quantised one."""
    _one_each(name, value, weight, "row")
    finite(name, value)


def queries(name: str, value: Tensor, weight: Tensor, *, look: bool = True) -> None:
    """Refuse what are not queries (..., d) for the weight, finite ones if ``look`` says to read them."""
    _floats(name, value, "(..., d)")
    if value.ndim == 0 or value.shape[-1] != weight.shape[1]:
        raise ValueError(f"{name}: expected shape (..., {weight.shape[1]}), found {tuple(value.shape)}")
    _same_device(name, value, weight)
    if look:
        finite(name, value)
