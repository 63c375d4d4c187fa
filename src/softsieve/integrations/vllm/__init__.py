"""The adaptive head inside vLLM: a plug-in that the engine finds by itself (entry point ``vllm.general_plugins``).

`register` is what vLLM calls in each of its processes. It puts `layer.adaptive_layer` in the place of vLLM's
``LogitsProcessor``, by vLLM's own ``PluggableLayer.register_oot``. What every request asks of the logits is told by
`tracker.BatchTracker`, a logits processor that changes nothing (entry point ``vllm.logits_processors``). The guide is
docs/guides/vllm.md.
"""

from __future__ import annotations

from softsieve.integrations.vllm.plugin import register

__all__ = ["register"]
