"""What vLLM calls in each of its processes, and what a layer is told of its engine."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from softsieve.errors import InputError, first_line
from softsieve.integrations.vllm import counters
from softsieve.integrations.vllm.settings import BESIDE, STRICT, read_settings

OLDEST, NEWEST = (0, 32), (0, 32)  # versions of vLLM whose hooks were tried (tests/integrations/test_vllm_engine.py)
TRACKERS = "vllm.logits_processors"  # the entry point of processors that see every logit


def register() -> None:
    """Put the adaptive layer in the place of vLLM's ``LogitsProcessor``. Any number of calls do what one does.

    Raises:
        InputError: when this vLLM has not the hooks that it takes, and ``SOFTSIEVE_STRICT`` is 1.
    """
    from softsieve.integrations.vllm.layer import LOGGER, adaptive_layer

    try:
        from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        if LogitsProcessor.__name__ in op_registry_oot:
            return
        if not issubclass(LogitsProcessor, PluggableLayer):
            raise ImportError("LogitsProcessor is no PluggableLayer")
        PluggableLayer.register_oot(adaptive_layer(LogitsProcessor, site), name=LogitsProcessor.__name__)
    except (ImportError, AttributeError, TypeError) as error:
        why = f"this vLLM has no layer for logits that can be replaced ({first_line(error)})"
        if os.environ.get(STRICT) == "1":
            raise InputError(f"softsieve: {why}") from error
        LOGGER.warning("softsieve: the exact head answers: %s", why)
        return
    counters.publish()


def site() -> Any:
    """Where a layer is that is being made: in which engine, with which settings."""
    import vllm
    from vllm.config import get_current_vllm_config

    from softsieve.integrations.vllm.layer import Site
    from softsieve.integrations.vllm.tracker import engine_name

    config = get_current_vllm_config()
    strict = os.environ.get(STRICT) == "1"
    try:
        settings = read_settings(config.additional_config, os.environ)
    except InputError as error:
        return Site(Path(), True, strict, str(error))
    if not settings.enabled or config.model_config is None:
        return Site()
    model = Path(config.model_config.model)
    place = settings.index or (model / BESIDE if model.is_dir() else None)
    return Site(
        place,
        settings.index is not None,
        settings.strict,
        _refusal(vllm.__version__, config),
        getattr(config.model_config, "runner_type", "") == "draft",
        _group(),
        settings.batch,
        engine_name(config),
    )


def _refusal(version: str, config: Any) -> str | None:
    """Why an engine cannot have an adaptive head; None when it can."""
    if not OLDEST <= _numbers(version) <= NEWEST:
        tried = ".".join(map(str, OLDEST)) if OLDEST == NEWEST else f"{OLDEST} to {NEWEST}"
        return f"expected vLLM {tried}, with which this version of softsieve was tried, found {version}"
    if config.lora_config is not None:
        return "expected an engine without LoRA, found one with it"
    own = [point.name for point in entry_points(group=TRACKERS) if not point.value.startswith("softsieve.")]
    if config.model_config.logits_processors or own:
        return "expected no logits processors besides vLLM's own, which may look at any logit, found some"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    Example:
        >>> _numbers("0.32.0+cpu")
        (0, 32)
    """
    numbers = [part for part in version.split(".")[:2] if part.isdigit()]
    return tuple(map(int, numbers))


def _group() -> Any:
    """The process group of tensor parallelism; None where there is none yet."""
    try:
        from vllm.distributed import get_tp_group

        return get_tp_group().device_group
    except (ImportError, AttributeError, AssertionError):
        return None
