"""What the public functions refuse, each with the argument, what was expected and what was found.

Only types, shapes and options are checked here; label values are checked where they are read
(`kernels.cross_entropy_torch`, `losses.multilabel`), because a compiled graph cannot branch on them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def number(name: str, value: object, low: float = -float("inf"), high: float = float("inf")) -> float:
    """``value`` as a float, refused unless it is a real number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymFloat):
        raise TypeError(f"{name}: expected a number, found {type(value).__name__}")
    found = float(value)
    if not low <= found <= high:  # also refuses NaN
        raise ValueError(f"{name}: expected a number in [{low:g}, {high:g}], found {found:g}")
    return found


def open_unit(name: str, value: object) -> float:
    """``value`` as a float, refused unless it is a number strictly between 0 and 1."""
    found = number(name, value)
    if not 0 < found < 1:
        raise ValueError(f"{name}: expected a number between 0 and 1, both excluded, found {found:g}")
    return found


def positive(name: str, value: object) -> float:
    """``value`` as a float, refused unless it is a finite number above 0."""
    found = number(name, value)
    if not 0 < found < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, found {found:g}")
    return found


def choice(name: str, value: object, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, found {value!r}")


def whole_number(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}: expected an int, found {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected an int in [{low}, {high}], found {value}")


def ignore_index(value: int) -> None:
    whole_number("ignore_index", value, -(2**63), 2**63 - 1)


def _plain_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, found {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, found {value.layout}")


def logits(value: Tensor) -> None:
    """Refuse what is not a non-empty floating-point tensor (..., classes)."""
    _plain_tensor("logits", value)
    if value.dtype not in _FLOATING:
        raise TypeError(f"logits: expected a floating-point dtype, found {value.dtype}")
    if value.ndim == 0 or value.numel() == 0:
        raise ValueError(f"logits: expected a non-empty tensor (..., classes), found shape {tuple(value.shape)}")


def target(value: Tensor, like: Tensor, *, multilabel: bool = False, name: str = "logits") -> None:
    """Refuse targets that do not fit ``like``: one integer a row, or one 0/1 a class for multi-label."""
    _plain_tensor("target", value)
    allowed = (torch.bool, *_INTEGER, *_FLOATING) if multilabel else _INTEGER
    if value.dtype not in allowed:
        what = "0/1 flags" if multilabel else "integer class labels (class probabilities are not supported)"
        raise TypeError(f"target: expected {what}, found {value.dtype}")
    shape = like.shape if multilabel else like.shape[:-1]
    if value.shape != shape:
        raise ValueError(
            f"target: expected shape {tuple(shape)} for {name} of shape {tuple(like.shape)}, found {tuple(value.shape)}"
        )
    same_device("target", value, like, name)


def weight(value: Tensor | None, like: Tensor, *, name: str = "weight", sized: bool = True) -> None:
    """Refuse class weights other than one floating-point number a class; how many is for others to say if not sized."""
    if value is None:
        return
    _plain_tensor(name, value)
    if value.dtype not in _FLOATING:
        raise TypeError(f"{name}: expected a floating-point dtype, found {value.dtype}")
    if sized and value.shape != like.shape[-1:]:
        raise ValueError(f"{name}: expected shape ({like.shape[-1]},), one a class, found {tuple(value.shape)}")
    if value.requires_grad:
        raise ValueError(f"{name}: expected constants, found a tensor that requires a gradient")
    same_device(name, value, like)


def same_device(name: str, value: Tensor, like: Tensor, what: str = "logits") -> None:
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, where the {what} are, found {value.device}")


# -- linear layers with a loss -----------------------------------------------------------------------------------------


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
    _beside_weight("hidden", hidden, weight)
    if bias is not None:
        _floats("bias", bias, "(classes,)")
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: expected shape ({len(weight)},), one a class, found {tuple(bias.shape)}")
        _beside_weight("bias", bias, weight)


def each_row(name: str, value: Tensor, target: Tensor) -> None:
    """Refuse what is not a floating-point number for each label."""
    _floats(name, value, "of the shape of the target")
    if value.shape != target.shape:
        raise ValueError(f"{name}: expected shape {tuple(target.shape)}, one a row, found {tuple(value.shape)}")
    if value.device != target.device:
        raise ValueError(f"{name}: expected device {target.device}, where the target is, found {value.device}")


def margins(delta: object, target: Tensor) -> Tensor:
    """Delta as a tensor () or (rows,), refused unless in [0, 1]; numbers on a GPU are not looked at."""
    if not isinstance(delta, Tensor):
        found = number("delta", delta, 0, 1)
        if torch.compiler.is_compiling():  # written so, it is compiled once for any delta
            return torch.ones((), dtype=torch.float64, device=target.device) * found
        return torch.full((), found, dtype=torch.float64, device=target.device)
    each_row("delta", delta, target)
    if delta.requires_grad:
        raise ValueError("delta: expected constants, found a tensor that requires a gradient")
    if delta.is_cpu and not torch.compiler.is_compiling() and not bool(((delta >= 0) & (delta <= 1)).all()):
        raise ValueError("delta: expected numbers in [0, 1]")
    return delta.reshape(-1)


def no_smoothing(value: float) -> None:
    if value:
        raise ValueError(
            f"label_smoothing: expected 0, found {value}: it would give every class a gradient, "
            "and AS-Softmax is there to avoid that"
        )


# -- linear heads ------------------------------------------------------------------------------------------------------


def _floats(name: str, value: Tensor, shape: str) -> None:
    _plain_tensor(name, value)
    if value.dtype not in _FLOATING:
        raise TypeError(f"{name}: expected a floating-point dtype, found {value.dtype}")
    if value.numel() == 0:
        raise ValueError(f"{name}: expected a non-empty tensor {shape}, found shape {tuple(value.shape)}")


def _beside_weight(name: str, value: Tensor, weight: Tensor) -> None:
    if value.device != weight.device:
        raise ValueError(f"{name}: expected device {weight.device}, where the weight is, found {value.device}")


def finite(name: str, value: Tensor) -> None:
    """Refuse NaN and infinity."""
    # A finite sum says it, without a temporary of the size of the tensor.
    if not math.isfinite(float(value.detach().sum(dtype=torch.float64))) and not bool(value.isfinite().all()):
        raise ValueError(f"{name}: expected finite numbers, found NaN or infinity")


def matrix(name: str, value: Tensor) -> None:
    """Refuse what is not a finite floating-point matrix (n, d)."""
    _floats(name, value, "(n, d)")
    if value.ndim != 2:
        raise ValueError(f"{name}: expected a matrix (n, d), found shape {tuple(value.shape)}")
    finite(name, value)


def vector(name: str, value: Tensor, weight: Tensor) -> None:
    """Refuse what is not a finite number for each row of the weight."""
    _floats(name, value, "(n,)")
    if value.shape != weight.shape[:1]:
        raise ValueError(f"{name}: expected shape ({len(weight)},), one a row, found {tuple(value.shape)}")
    _beside_weight(name, value, weight)
    finite(name, value)


def queries(name: str, value: Tensor, weight: Tensor, *, look: bool = True) -> None:
    """Refuse what are not queries (..., d) for the weight, finite ones if they are looked at."""
    _floats(name, value, "(..., d)")
    if value.ndim == 0 or value.shape[-1] != weight.shape[1]:
        raise ValueError(f"{name}: expected shape (..., {weight.shape[1]}), found {tuple(value.shape)}")
    _beside_weight(name, value, weight)
    if look:
        finite(name, value)
