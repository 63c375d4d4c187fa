"""An encoder that stays as it is: what it says of texts is computed once, and a head is trained on that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from softsieve.errors import InputError
from softsieve.tasks.hf import STATES, ClassifierBody, PretrainedBody
from softsieve.tasks.rows import Rows

BLOCK = 128  # rows that the encoder takes at a time


def freeze(model: nn.Module) -> Callable[[Rows], Rows] | None:
    """Take the encoder of a model out of training.

    Returns:
        what makes rows of states for the same model out of rows of tokens, where a text has one state; None with a
        label for every word, where states are as many as words and the encoder goes along without a gradient.

    Raises:
        InputError: when the model has no encoder, or trains more than a head on top of it.
    """
    body = model.body
    if isinstance(body, ClassifierBody) and body.per_word:
        body.model.base_model.requires_grad_(False)
        return None
    if not isinstance(body, PretrainedBody):
        what = "its own classifier (pooling='model')" if isinstance(body, ClassifierBody) else "the built-in model"
        raise InputError(
            f"freeze_encoder: expected an encoder of Hugging Face with the mean of its states, found {what}"
        )
    body.encoder.requires_grad_(False)
    return None if body.per_word else partial(_encode, body)


@torch.no_grad()
def _encode(body: PretrainedBody, rows: Rows) -> Rows:
    """The rows with the states of their texts (rows, features) in the place of their tokens."""
    device = next(body.parameters()).device
    order = torch.arange(len(rows)) if rows.lengths is None else rows.lengths.argsort()  # alike in length: no padding
    states = torch.empty(len(rows), body.features, dtype=torch.float32)
    training = body.training
    body.eval()
    for index in torch.split(order, BLOCK):
        inputs: dict[str, Tensor] = {name: value.to(device) for name, value in rows.batch(index).inputs.items()}
        states[index] = body(**inputs).float().cpu()
    body.train(training)
    return type(rows)({STATES: states}, rows.target)
