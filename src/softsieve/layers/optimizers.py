"""Optimizers that step inside the backward pass of a `SieveLinear`, some classes at a time: SGD and AdamW."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from softsieve import _checks
from softsieve.kernels import updates
from softsieve.kernels.cross_entropy_torch import accumulation_dtype
from softsieve.kernels.linear_types import Layer

MOST_STEPS = 2**62
_ODD = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9  # that tell apart seeds, steps and parts of one


class HeadOptimizer(nn.Module):
    """What `HeadSGD` and `HeadAdamW` share. Its state is made by the layer that it is given to, and moves with it."""

    states: ClassVar[tuple[str, ...]] = ()  # of each parameter, of its shape and in its accumulation dtype

    def __init__(self, lr: float, weight_decay: float, stochastic: bool, seed: int) -> None:
        super().__init__()
        self.lr = _checks.number("lr", lr, 0, 1e30)
        self.weight_decay = _checks.number("weight_decay", weight_decay, 0, 1e30)
        if not isinstance(stochastic, bool):
            raise TypeError(f"stochastic: expected a bool, found {type(stochastic).__name__}")
        _checks.whole_number("seed", seed, 0, 2**63 - 1)
        self.stochastic, self.seed = stochastic, seed
        self.steps = self._parts = 0  # steps that were taken, and updates in the latest
        self._owned = False

    @property
    @abstractmethod
    def everywhere(self) -> bool:
        """Whether a step changes classes without a gradient, too."""

    @abstractmethod
    def _rule(self, weight_decay: float) -> updates.SGD | updates.AdamW:
        """The update of this step."""

    def attach(self, weight: Tensor, bias: Tensor | None) -> None:
        """Make the state for these parameters; an optimizer is for one layer."""
        if self._owned:
            raise ValueError("optimizer: expected one that no other layer has, found one in use: make one for each")
        self._owned = True
        for parameter, value in {"weight": weight, "bias": bias}.items():
            if value is None:
                continue
            for name in self.states:
                zeros = torch.zeros_like(value, dtype=accumulation_dtype(value), requires_grad=False)
                self.register_buffer(f"{parameter}_{name}", zeros)

    def begin(self) -> None:
        """Count a step; called before its parts."""
        self.steps, self._parts = self.steps + 1, 0

    def step(self, layer: Layer, classes: slice | Tensor, grad: Tensor, grad_bias: Tensor | None) -> None:
        """Change the weights and biases of some classes, each once in a step."""
        self._update("weight", layer.weight, classes, grad, self._rule(self.weight_decay))
        if layer.bias is not None and grad_bias is not None:
            self._update("bias", layer.bias, classes, grad_bias, self._rule(0.0))

    def multiplies(self, layer: Layer, rows: int) -> bool:
        """Whether `step_product` is for so many rows of this layer: only where steps one after the other add up."""
        return False

    def step_product(
        self, layer: Layer, classes: slice, gradient: Tensor, hidden: Tensor, grad_bias: Tensor | None
    ) -> None:
        """`step` by ``gradient.T @ hidden``, which is made where it is used."""
        updates.sgd_product(layer.weight[classes], gradient, hidden, self.lr, self._draw(layer.weight))
        if layer.bias is not None and grad_bias is not None:
            self._update("bias", layer.bias, classes, grad_bias, self._rule(0.0))

    def _update(
        self, parameter: str, whole: Tensor, classes: slice | Tensor, grad: Tensor, rule: updates.SGD | updates.AdamW
    ) -> None:
        value = whole[classes]
        states = [getattr(self, f"{parameter}_{name}")[classes] for name in self.states]
        updates.update(value, grad, states, rule, self._draw(whole))
        if isinstance(classes, Tensor):  # a copy; such classes have no state
            whole.index_copy_(0, classes, value)

    def _draw(self, value: Tensor) -> int | None:
        """A seed for the next update, another one for every part of every step; None where nothing is drawn."""
        if not self.stochastic or value.dtype != torch.bfloat16:
            return None
        self._parts += 1
        numbers = zip((self.seed, self.steps, self._parts), _ODD, strict=True)
        return sum(number * odd for number, odd in numbers) % 2**63

    def get_extra_state(self) -> Tensor:
        """Steps and seed, which with the buffers are all that the next step depends on, besides ``lr``."""
        return torch.tensor([self.steps, self.seed])

    def set_extra_state(self, state: Any) -> None:
        """What `get_extra_state` returned."""
        _checks.saved("optimizer", state, torch.empty(2, dtype=torch.long), high=float(2**63))
        if int(state[0]) > MOST_STEPS:
            raise ValueError(f"optimizer: expected at most {MOST_STEPS} steps, found {int(state[0])}")
        self.steps, self.seed = state.tolist()

    def extra_repr(self) -> str:
        return f"lr={self.lr:g}, weight_decay={self.weight_decay:g}, stochastic={self.stochastic}, seed={self.seed}"


class HeadSGD(HeadOptimizer):
    """SGD inside the backward pass of a `SieveLinear`: `torch.optim.SGD` without the gradient.

    Without momentum and weight decay it has no state, and classes without a gradient are not touched: a step costs what
    the rows cost that are not solved.

    Args:
        lr: learning rate. May be changed between steps.
        momentum: in [0, 1); other than 0 it takes a buffer of the size of the weight.
        weight_decay: of the weight. The bias has none, as is usual.
        stochastic: whether weights in bfloat16 are rounded up or down at random, so that they are right on average;
            else to the nearest, which loses changes of less than a 256th of a weight. Others are never.
        seed: of that.

    Example:
        >>> from softsieve import SieveLinear
        >>> layer = SieveLinear(4, 1000, optimizer=HeadSGD(0.5))
        >>> layer.loss(torch.randn(3, 4), torch.tensor([1, 2, 3])).backward()
        >>> layer.optimizer.steps, layer.weight.grad
        (1, None)
    """

    def __init__(
        self, lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0, stochastic: bool = True, seed: int = 0
    ) -> None:
        super().__init__(lr, weight_decay, stochastic, seed)
        self.momentum = _checks.number("momentum", momentum, 0, 1)
        if self.momentum == 1:
            raise ValueError("momentum: expected a number in [0, 1), found 1")
        self.states = ("momentum_buffer",) if self.momentum else ()  # type: ignore[misc]

    @property
    def everywhere(self) -> bool:
        return bool(self.momentum or self.weight_decay)

    def multiplies(self, layer: Layer, rows: int) -> bool:
        return not self.everywhere and updates.multiplies(layer.weight, rows)

    def _rule(self, weight_decay: float) -> updates.SGD:
        return updates.SGD(self.lr, self.momentum, weight_decay)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, momentum={self.momentum:g}"


class HeadAdamW(HeadOptimizer):
    """AdamW inside the backward pass of a `SieveLinear`: `torch.optim.AdamW` without the gradient.

    Its two moments, in float32, are of the size of the weight; every step changes all classes.

    Args:
        lr: learning rate. May be changed between steps.
        betas, eps, weight_decay: as there. The bias has no decay, as is usual.
        stochastic, seed: as `HeadSGD`.

    Example:
        >>> from softsieve import SieveLinear
        >>> layer = SieveLinear(4, 1000, optimizer=HeadAdamW(1e-3), dtype=torch.bfloat16)
        >>> layer.loss(torch.randn(3, 4), torch.tensor([1, 2, 3])).backward()
        >>> layer.optimizer.weight_exp_avg.dtype, layer.weight.dtype
        (torch.float32, torch.bfloat16)
    """

    states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, stochastic: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(lr, weight_decay, stochastic, seed)
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise TypeError(f"betas: expected two numbers, found {betas!r}")
        first, second = (_checks.number("betas", beta, 0, 1) for beta in betas)
        if max(first, second) == 1:
            raise ValueError(f"betas: expected numbers in [0, 1), found {betas!r}")
        self.betas, self.eps = (first, second), _checks.number("eps", eps, 0, 1e30)

    @property
    def everywhere(self) -> bool:
        return True

    def _rule(self, weight_decay: float) -> updates.AdamW:
        first, second = self.betas
        corrections = 1 - first**self.steps, 1 - second**self.steps
        return updates.AdamW(self.lr, first, second, self.eps, weight_decay, *corrections)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, betas={self.betas}, eps={self.eps:g}"
