"""The exact head: the product with the whole weight."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec

import torch
from torch import Tensor

from softsieve.heads.engine import Answer, Engine, Promise
from softsieve.heads.quantised import QuantisedWeight

AT_ONCE = 1 << 24  # logits that are in memory at a time
FUSED_K, FUSED_BATCH = 16, 64  # up to which a GPU makes top k and log Z in the pass that multiplies


class Exact(Engine):
    """Answers from the whole weight, so many queries at a time that memory stays small."""

    def topk(self, x: Tensor, k: int, promise: Promise, generator: torch.Generator | None = None) -> Answer:
        if self._is_fused(x, k):
            return self._answer_fused(x.detach().reshape(-1, x.shape[-1]), k).shaped(x.shape[:-1])
        queries = self.layer.scaled(x, "x" if x.is_cpu else None)  # on a GPU, looking at numbers is waiting for them
        return self.answer(queries, k).shaped(x.shape[:-1])

    def answer(self, queries: Tensor, k: int) -> Answer:
        """Answer scaled queries (batch, d)."""
        parts = [self._answer(some, k) for some in torch.split(queries, max(1, AT_ONCE // self.layer.reader.rows))]
        return parts[0] if len(parts) == 1 else Answer(*map(torch.cat, zip(*parts, strict=True)))

    @cached_property
    def _fits(self) -> bool:
        """Whether there is a kernel that reads this weight."""
        weight = self.layer.weight
        plain = weight.is_cuda and not isinstance(weight, QuantisedWeight)
        return plain and weight.dtype.itemsize == 2 and weight.stride(1) == 1 and find_spec("triton") is not None

    def _is_fused(self, x: Tensor, k: int) -> bool:
        few = k <= FUSED_K and x.numel() <= FUSED_BATCH * x.shape[-1]
        # Matrix units multiply float32 by bfloat16 as exactly, in three parts, but not by float16.
        exact = x.dtype == self.layer.weight.dtype or self.layer.weight.dtype == torch.bfloat16
        return self._fits and few and exact and x.dtype != torch.float64

    def _answer_fused(self, queries: Tensor, k: int) -> Answer:
        """The same in one pass over the weight, which writes no logits for k = 1, of unscaled queries."""
        from softsieve.kernels import exact_triton as kernels

        layer = self.layer
        bias = layer.scaled_bias()
        whole, numbers = kernels.ask(queries.contiguous(), layer.weight, bias, k=k, scale=layer.beta)
        log_z = numbers[:, 2 * k]
        return Answer(
            whole[:, :k],
            numbers[:, :k],
            numbers[:, k : 2 * k],
            log_z,
            log_z[:, None].expand(-1, 2),
            whole[:, k],
            whole[:, k + 1],
            torch.ones(len(queries), dtype=torch.bool, device=queries.device),
        )

    def _answer(self, queries: Tensor, k: int) -> Answer:
        all_logits = self.layer.logits(queries)
        log_z = all_logits.logsumexp(-1)
        logits, indices = all_logits.topk(k, -1)
        entries = torch.full((len(queries),), self.layer.weight.numel(), dtype=torch.int64, device=queries.device)
        return Answer(
            indices,
            (logits - log_z[:, None]).exp(),
            logits,
            log_z,
            log_z[:, None].expand(-1, 2),
            entries,
            torch.full_like(entries, self.layer.bytes),
            torch.ones_like(entries, dtype=torch.bool),
        )
