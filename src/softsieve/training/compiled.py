"""Layers that a model repeats, compiled once for all of them and for all lengths of texts."""

from __future__ import annotations

from torch import nn

from softsieve.errors import InputError


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of an encoder in place, by `torch.compile`; names of weights stay what they are.

    What lies in a row and is of one kind shares its code: it is compiled for the first of them, once for training and
    once for evaluation, with batches and lengths left open.

    Raises:
        InputError: when the model repeats no layer.
    """
    rows = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    rows = [row for row in rows if len(row) > 1 and len({type(layer) for layer in row}) == 1]
    if not rows:
        raise InputError("compiled: expected a model with layers of one kind in a row, as encoders have, found none")
    layers = [layer for row in rows for layer in row]
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    for layer in layers:
        if id(layer) not in inner:
            layer.compile(dynamic=True)
