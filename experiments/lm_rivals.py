"""Losses of other packages on the hidden states of a language model, given what their rewritten forward passes give."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGES = {"Liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}
IGNORED = -100


def _liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    module = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    loss: Tensor = module.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]
    return loss


def _cut(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Its kernels take 16 bits, so autocast is done before them."""
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    loss: Tensor = import_module("cut_cross_entropy").linear_cross_entropy(hidden.to(kind), weight.to(kind), target)
    return loss


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"Liger": _liger, "cut-cross-entropy": _cut}


def rival_loss(name: str, model: Any, ids: Tensor) -> Tensor:
    """The loss of next tokens by a package, for a model that neither scales its logits nor has LoRA on that layer."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    target = F.pad(ids, (0, 1), value=IGNORED)[:, 1:]
    return LOSSES[name](hidden.flatten(0, 1), model.get_output_embeddings().weight, target.flatten())


def left_out(precision: str, weights: str, lora: int) -> dict[str, str]:
    """Packages that cannot be measured here, with the reason."""
    reasons = {}
    for name, package in PACKAGES.items():
        if not torch.cuda.is_available():
            reasons[name] = "needs a GPU"
        elif find_spec(package) is None:
            reasons[name] = f"{package} is not installed"
        elif lora:
            reasons[name] = "knows no LoRA on the output layer"
        elif name == "cut-cross-entropy" and "bfloat16" not in (precision, weights):
            reasons[name] = "takes 16 bits alone"
    return reasons
