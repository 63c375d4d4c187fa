"""Log-probabilities of tokens without logits: `token_log_probs`, and what TRL's trainers ask a model for."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import _checks
from softsieve.errors import InputError
from softsieve.integrations.causal_loss import (
    TEMPERATURE,
    WEIGHTS,
    WRAPPERS,
    ModelForward,
    accelerate_loss,
    inside,
    loss_of,
    restore_loss,
)
from softsieve.integrations.lazy_logits import LazyLogits


def token_log_probs(
    model: Any, input_ids: Tensor, labels: Tensor | None = None, *, temperature: float = 1.0, backend: str = "auto",
    **inputs: Any,
) -> Tensor:  # fmt: skip
    """The log-probability of each next token, differentiable, without the logits: what DPO and GRPO are made of.

    Computes::

        logits = model(input_ids, **inputs).logits[:, :-1] / temperature
        logits.log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)

    and 0 where a label is -100. The model may train by `accelerate_loss` or not, and is left as it was. Where it does
    not, each call looks first whether it could.

    Args:
        model: a causal language model of Hugging Face or PEFT, also inside DDP or `torch.compile`.
        input_ids: tokens.
        labels: those whose log-probability is asked for, -100 where none is; None: the tokens themselves.
        temperature: divides the logits.
        backend: that of `linear_as_cross_entropy`.
        **inputs: what else the model gets: ``attention_mask``, ``position_ids``, pictures.

    Shape:
        input_ids and labels ``(rows, length)``; returns ``(rows, length - 1)`` in float32.

    Raises:
        InputError: as `accelerate_loss` does, and for labels of another shape.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> tokens = torch.arange(6)[None]
        >>> found = token_log_probs(model, tokens)
        >>> dense = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        >>> torch.allclose(found, dense)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a language model, found {type(model).__name__}")
    _checks.tensor("input_ids", input_ids)
    labels = input_ids if labels is None else _checks.tensor("labels", labels)
    if labels.shape != input_ids.shape or labels.ndim != 2:
        raise InputError(
            f"labels: expected (rows, length) like the input_ids {tuple(input_ids.shape)}, found {tuple(labels.shape)}"
        )
    _checks.positive("temperature", temperature)
    forward = loss_of(model)
    ours = forward is None or not forward.active
    if ours:
        accelerate_loss(model, 1.0, backend=backend)
    try:
        asked = {"input_ids": input_ids, "labels": labels, TEMPERATURE: temperature}
        found: Tensor = model(**{"use_cache": False, **inputs, **asked})
    finally:
        if ours:
            restore_loss(model)
    return found[:, found.shape[1] - (labels.shape[1] - 1) :]  # PEFT may have put a prompt of its own before


def fused_outputs(
    forward: ModelForward, args: tuple[Any, ...], options: dict[str, Any], weights: Tensor | None = None
) -> Any:
    """What a trainer of TRL gets from ``model(..., labels=labels, fused_lm_head=True)``, also with LoRA on the layer.

    Its log-probabilities are those of the loss: at a delta of 1 the true ones, below it minus AS cross-entropy, and
    multiplied by the ``weights`` of the labels. A head in float32, or one whose temperature cannot be told, stays that
    of TRL.

    Raises:
        InputError: for weights that such a head would ignore.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    from trl.trainer.utils import FusedCausalLMOutput

    settings = _trl_settings(forward.own)
    if settings is None or settings["cast_lm_head_to_fp32"]:
        if weights is not None:
            raise InputError(f"{WEIGHTS}: expected the loss of softsieve, found a head that stays TRL's, in float32")
        return forward.before(*args, **options, fused_lm_head=True)
    loss = forward.loss
    labels, shifted = options.pop("labels"), options.pop("shift_labels", None)
    items = options.pop("num_items_in_batch", None)
    with loss.collect(training=forward.model.training):
        outputs = forward.before(*args, **{**options, "use_cache": False, "return_dict": True})
        logits: LazyLogits = outputs.logits / settings["temperature"]
        if shifted is None:
            logits, shifted = logits[:, :-1], labels[:, 1:]
        delta = loss.delta if forward.model.training else 1.0
        log_probs = loss.log_probs(logits, shifted, delta=delta)
        entropy = logits.entropy()
    if weights is not None:
        log_probs = log_probs * F.pad(weights, (0, 1))[:, 1 : log_probs.shape[1] + 1]
    mask = shifted != -100
    total = -log_probs.sum() / (mask.sum().clamp_min(1) if items is None else items)
    auxiliary = getattr(outputs, "aux_loss", None)
    routed = getattr(outputs, "router_logits", None)
    if auxiliary is None and routed is not None:
        text = forward.model.config.get_text_config()
        auxiliary = load_balancing_loss_func(
            routed, text.num_experts, text.num_experts_per_tok, options.get("attention_mask")
        )
    if auxiliary is not None:
        total = total + getattr(forward.model.config.get_text_config(), "router_aux_loss_coef", 0.0) * auxiliary
    stats = loss.stats
    made = {"log_probs": log_probs, "entropy": entropy.masked_fill(~mask, 0.0), "label_mask": mask}
    if stats is not None:
        made["is_top1"] = stats.right
    for name, work in {"mean_logits": _mean, "log_sum_sq_probs": _log_sum_of_squares}.items():
        if name in FusedCausalLMOutput.__dataclass_fields__:
            made[name] = logits.detach().by_rows(work).masked_fill(~mask, 0.0)
    return FusedCausalLMOutput(loss=total, aux_loss=auxiliary, **made)


def _trl_settings(function: Any) -> dict[str, Any] | None:
    """What TRL's `add_fused_lm_head` was told, which only the function that it has made knows."""
    for _ in range(WRAPPERS):
        code = getattr(function, "__func__", function)
        if getattr(code, "__closure__", None):
            known = inspect.getclosurevars(code).nonlocals
            if {"temperature", "cast_lm_head_to_fp32"} <= known.keys():
                return dict(known)
        function = inside(function)
    return None


def _mean(logits: Tensor) -> Tensor:
    return logits.float().mean(-1)


def _log_sum_of_squares(logits: Tensor) -> Tensor:
    return (2 * F.log_softmax(logits.float(), -1)).logsumexp(-1)
