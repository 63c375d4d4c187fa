"""AdamW that leaves alone the rows of a table that a batch has nothing to say about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class RowAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`; in groups with ``by_rows``, rows of a weight whose gradient is 0 stay as they are.

    So does their state: neither momentum nor weight decay moves the embedding of a word that a batch does not have. A
    sparse gradient costs as much as it has rows, a dense one as much as the weight, and both give the same.

    Example:
        >>> table = nn.Parameter(torch.ones(3, 2))
        >>> optimizer = RowAdamW([{"params": [table], "by_rows": True}], lr=0.1)
        >>> nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
        >>> optimizer.step()
        >>> [round(value, 3) for value in table[:, 0].tolist()]
        [1.0, 0.899, 1.0]
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; of a weight by rows, over those that have a gradient."""
        apart: list[tuple[nn.Parameter, Tensor]] = []
        for group in self.param_groups:
            for weight in group["params"] if group.get("by_rows") else ():
                if weight.grad is not None:
                    self._step_rows(weight, weight.grad, group)
                    apart.append((weight, weight.grad))
                    weight.grad = None  # nothing for the step of all others
        loss = super().step(closure)
        for weight, grad in apart:
            weight.grad = grad
        return loss

    def _step_rows(self, weight: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        step: Tensor = state["step"]
        step += 1
        rate, (first, second) = group["lr"], group["betas"]
        kept = 1 - rate * group["weight_decay"]
        length = rate / (1 - first**step)
        spread = (1 - second**step).sqrt()

        def change(grad: Tensor, *old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            value, mean, square = old
            mean = mean.lerp(grad, 1 - first)
            square = (square * second).addcmul_(grad, grad, value=1 - second)
            return value * kept - length * mean / (square.sqrt() / spread).add_(group["eps"]), mean, square

        tensors = weight, state["exp_avg"], state["exp_avg_sq"]
        if grad.is_sparse:
            grad = grad.coalesce()
            values, numbers = grad.values(), grad.indices()[0]
            some = (values != 0).any(1)
            values, numbers = values[some], numbers[some]
            for tensor, new in zip(tensors, change(values, *(tensor[numbers] for tensor in tensors)), strict=True):
                tensor[numbers] = new
        else:  # nothing that waits for the device: this is captured in CUDA graphs
            some = (grad != 0).any(1, keepdim=True)
            for tensor, new in zip(tensors, change(grad, *tensors), strict=True):
                tensor.copy_(torch.where(some, new, tensor))


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """`torch.nn.utils.clip_grad_norm_` for gradients of which some are sparse."""
    values = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        if parameter.grad is not None:
            values.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
    share = largest / (nn.utils.get_total_norm(values) + 1e-6)
    for value in values:
        value.mul_(share.clamp_max(1.0))
