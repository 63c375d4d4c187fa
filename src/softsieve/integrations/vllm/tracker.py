"""A logits processor of vLLM that changes nothing, and knows the requests of the batch.

vLLM tells its logits processors of every change of a batch before it computes its logits, and the layer that computes
them nothing. Processors that are installed under the entry point ``vllm.logits_processors`` are made by every engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from softsieve.integrations.vllm.requests import Batch, Entry, Slots, need_of

# What processors must be derived from, for each of vLLM's two model runners. Where one is not there, its runner is not.
_BASES = ("vllm.v1.sample.logits_processor.interface", "vllm.v1.worker.gpu.sample.logits_processor.interface")

_tracked: dict[str, Batch | Slots] = {}  # the batches of the engines in this process, by `engine_name`


def engine_name(vllm_config: Any) -> str:
    """What vLLM calls the engine that has a configuration: one process may work for several."""
    return getattr(vllm_config, "instance_id", "")


def current_batch(engine: str) -> Batch | Slots | None:
    """The batch of an engine; None where no model runner tells of one."""
    return _tracked.get(engine)


def _bases() -> tuple[type, ...]:
    bases = []
    for name in _BASES:
        try:
            bases.append(import_module(name).LogitsProcessor)
        except (ImportError, AttributeError):  # no vLLM, or another one: `plugin` says so
            continue
    return tuple(bases)


class BatchTracker(*_bases()):  # type: ignore[misc]
    """Follows the batch of a model runner; changes no logits.

    The runner that vLLM calls V2, which GPUs take, tells of requests when they come, and which of them are in a step
    only after their logits were computed.
    """

    def __init__(self, vllm_config: Any, *place: Any) -> None:
        self.batch, self.slots = Batch(), Slots()
        # V1 gives a device and whether memory is pinned, V2 its state of requests.
        _tracked[engine_name(vllm_config)] = self.batch if len(place) == 2 else self.slots

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
        """Of V2: follow a request that comes. Says that this processor has nothing to do for it."""
        self.slots.add(req_idx, need_of(sampling_params), sampling_params.min_tokens)
        return False

    def apply(self, logits: Any, *_: Any) -> Any:
        return logits
