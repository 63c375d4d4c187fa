"""A logits processor of vLLM that changes nothing, and knows the requests of the batch.

vLLM tells its logits processors of every change of a batch before it computes its logits, and the layer that computes
them nothing. Processors that are installed under the entry point ``vllm.logits_processors`` are made by every engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from softsieve.integrations.vllm.requests import Batch, Entry, need_of

# What processors must be derived from, for each of vLLM's two model runners. Where one is not there, its runner is not.
_BASES = ("vllm.v1.sample.logits_processor.interface", "vllm.v1.worker.gpu.sample.logits_processor.interface")

_tracked: list[Batch] = []  # the batch of the engine that this process works for, once it has one


def current_batch() -> Batch | None:
    """The batch of this process; None where no model runner tells of one."""
    return _tracked[-1] if _tracked else None


def _bases() -> tuple[type, ...]:
    found = []
    for name in _BASES:
        try:
            found.append(import_module(name).LogitsProcessor)
        except (ImportError, AttributeError):  # no vLLM, or another one: `plugin` says so
            continue
    return tuple(found)


class BatchTracker(*_bases()):  # type: ignore[misc]
    """Follows the batch of a model runner that tells of it; changes no logits.

    The runner that vLLM calls V2 says which requests are in a step only after their logits were computed. It makes a
    tracker with other arguments, which then follows nothing, and the exact head answers.
    """

    def __init__(self, vllm_config: Any, *place: Any) -> None:
        self.batch = Batch()
        _tracked.clear()
        if len(place) == 2:  # device and whether memory is pinned; V2 has its own request state instead
            _tracked.append(self.batch)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Any parameters will do."""

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follow a change of the batch; None: there was none."""
        if batch_update is None:
            return
        added = [
            (place, Entry(need_of(params), written, params.min_tokens))
            for place, params, _, written in batch_update.added
        ]
        moved = [(before, after, way.name == "SWAP") for before, after, way in batch_update.moved]
        self.batch.update(batch_update.removed, added, moved)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Of V2: this processor has nothing to do for any request."""
        return False

    def apply(self, logits: Any, *_: Any) -> Any:
        return logits
