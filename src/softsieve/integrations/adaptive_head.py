"""Language models of Hugging Face whose output layer reads a part of its weight for each new token.

`accelerate_head` puts an `AdaptiveHead` in the place of a model's output embeddings, `restore_head` takes it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve._progress import Report, in_silence
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax
from softsieve.integrations.hidden_states import (
    after_layer,
    check_size,
    first_token,
    inputs_of,
    output_layer,
    tokens_of,
    windows,
)

_PROBED = 16  # tokens over which the model's own logits are looked at


class AdaptiveHead(nn.Linear):
    """An output layer with the parameters of another: exact for prompts and with gradients, adaptive for new tokens.

    For a new token of a few sequences the logits are those of `AdaptiveSoftmax.logits`: exact for the rows that could
    be among the largest, estimated elsewhere. Names of parameters stay what they were, so tied weights stay tied and
    what is saved can be loaded by anyone.

    Attributes:
        head: what answers.
        answered, exactly: new tokens so far, and those of them that were answered with the exact product.
    """

    def __init__(self, layer: Any, head: AdaptiveSoftmax) -> None:
        nn.Module.__init__(self)
        self.weight = layer.weight
        self.bias = getattr(layer, "bias", None)  # type: ignore[assignment]
        self.out_features, self.in_features = self.weight.shape
        self.head = head
        self.answered = self.exactly = 0
        self._layer: tuple[nn.Module] = (layer,)  # in a tuple, it is no part of the model

    @property
    def replaced(self) -> nn.Module:
        """The layer that this one stands for."""
        return self._layer[0]

    def forward(self, hidden: Tensor) -> Tensor:
        new = hidden.ndim > 1 and hidden.shape[-2] == 1  # one token of each sequence
        if self.training or torch.is_grad_enabled() or not new:
            return F.linear(hidden, self.weight, self.bias)
        rows = hidden.reshape(-1, hidden.shape[-1])
        self.answered += len(rows)
        if not self.head.estimates(len(rows)):
            self.exactly += len(rows)
            return F.linear(hidden, self.weight, self.bias)
        logits = self.head.logits(rows) / self.head.beta
        return logits.to(hidden.dtype).reshape(*hidden.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.head!r}"


def collect_queries(
    model: Any, tokenizer: Any, text: str, *, count: int = 4000, window: int = 256, batch_size: int = 8
) -> Tensor:
    """What the output layer of a model is given at the first tokens of a text, (count, d).

    Raises:
        InputError: when the text has fewer tokens, or the model cannot read it.
    """
    lead = first_token(tokenizer)
    start = torch.tensor([] if lead is None else [lead], dtype=torch.long)
    layer, parts = output_layer(model), []
    ids = tokens_of(tokenizer, text, count=count)
    check_size(model, {"text": ids}, start, window)
    with torch.no_grad():
        for some in windows(ids, start, window, batch_size):
            parts.append(inputs_of(layer, model, some)[:, len(start) :].flatten(0, 1).cpu())
    return torch.cat(parts)


def accelerate_head(
    model: Any,
    queries: Tensor,
    *,
    eps: float = 0.3,
    delta: float = 0.01,
    k: int | Sequence[int] = 1,
    generator: torch.Generator | None = None,
    progress: Report = in_silence,
) -> AdaptiveHead:
    """Let a model read a part of its output layer's weight for each new token that it generates.

    ``model.generate`` works as before, with any way of choosing tokens. With probability ``1 - delta`` the k largest
    logits of a token are the exact ones, for states like those in ``queries``.

    Args:
        model: a Hugging Face causal language model on a CPU.
        queries: hidden states that its output layer gets, (N, d); `collect_queries` makes them from a text.
        eps: relative error of the largest probabilities.
        delta: chance of a wrong answer.
        k: how many of the largest logits are to be exact; several: the largest.
        generator: of what is drawn in the calibration.
        progress: told how far it is.

    Returns:
        The layer that the model has now. The model is left as it was if anything goes wrong.

    Raises:
        InputError: for a model without output embeddings of floating-point numbers, or one that has such a head.
        TypeError, ValueError: as `AdaptiveSoftmax` and its ``calibrate`` do.
    """
    layer = output_layer(model)
    if isinstance(layer, AdaptiveHead):
        raise InputError(
            "model: expected one with its own output layer, found an adaptive head: call restore_head first"
        )
    known = min(_PROBED, len(model.get_input_embeddings().weight))
    with torch.no_grad():
        beta, _ = after_layer(model, layer, torch.arange(known))
    bias = getattr(layer, "bias", None)
    weight: Any = layer.weight
    head = AdaptiveSoftmax(
        weight.detach(), None if bias is None else bias.detach(), eps=eps, delta=delta, beta=beta, method="auto"
    )
    head.calibrate(queries, k, generator=generator, progress=progress)
    module = AdaptiveHead(layer, head).train(layer.training)
    model.set_output_embeddings(module)
    return module


def restore_head(model: Any) -> None:
    """Give a model its own output layer back.

    Raises:
        InputError: when it has it.
    """
    layer = output_layer(model)
    if not isinstance(layer, AdaptiveHead):
        raise InputError("model: expected an adaptive head, found the model's own output layer")
    model.set_output_embeddings(layer.replaced)
