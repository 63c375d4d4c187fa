"""The exact head: the product with the whole weight."""

from __future__ import annotations

import torch
from torch import Tensor

from softsieve.heads.engine import Answer, Engine, Promise

AT_ONCE = 1 << 24  # logits that are in memory at a time


class Exact(Engine):
    """Answers from the whole weight, so many queries at a time that memory stays small."""

    def topk(self, x: Tensor, k: int, promise: Promise, generator: torch.Generator | None = None) -> Answer:
        queries = self.layer.scaled(x, "x" if x.is_cpu else None)  # on a GPU, looking at numbers is waiting for them
        return self.answer(queries, k).shaped(x.shape[:-1])

    def answer(self, queries: Tensor, k: int) -> Answer:
        """Answer scaled queries (batch, d)."""
        parts = [self._answer(some, k) for some in torch.split(queries, max(1, AT_ONCE // self.layer.reader.rows))]
        return parts[0] if len(parts) == 1 else Answer(*map(torch.cat, zip(*parts, strict=True)))

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
