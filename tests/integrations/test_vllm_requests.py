"""What requests ask of their logits, how the batch is followed, what the plug-in is told, and what it counts."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from softsieve.errors import InputError
from softsieve.integrations.vllm import counters
from softsieve.integrations.vllm.counters import Counters
from softsieve.integrations.vllm.plugin import _refusal, register
from softsieve.integrations.vllm.requests import Batch, Entry, Need, Reason, need_of
from softsieve.integrations.vllm.settings import Settings, read_settings
from softsieve.integrations.vllm.tracker import BatchTracker, current_batch

PLAIN = {
    "temperature": 0.0, "top_k": 0, "logprobs": None, "prompt_logprobs": None, "min_tokens": 0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip


def params(**options: Any) -> Any:
    return SimpleNamespace(**{**PLAIN, **options})


@pytest.mark.parametrize(
    ("options", "need"),
    [
        ({}, Need(1)),
        ({"logprobs": 0}, Need(1, shown=True)),
        ({"logprobs": 20}, Need(20, shown=True)),
        ({"temperature": 0.7, "top_k": 40}, Need(40)),
        ({"temperature": 0.7, "top_k": 5, "logprobs": 20, "top_p": 0.9, "min_p": 0.1, "seed": 3}, Need(20, shown=True)),
        ({"temperature": 0.7}, Need(0, Reason.SAMPLED)),
        ({"temperature": 0.7, "top_k": -1, "top_p": 0.9}, Need(0, Reason.SAMPLED)),
        ({"temperature": 0.7, "min_p": 0.2}, Need(0, Reason.SAMPLED)),
        ({"logprobs": -1}, Need(0, Reason.LOGPROBS)),
        ({"prompt_logprobs": 0}, Need(0, Reason.LOGPROBS)),
        ({"logprob_token_ids": [3]}, Need(0, Reason.LOGPROBS)),
        ({"trace_decode_token_ids": [3, 4], "logprobs": 1}, Need(0, Reason.LOGPROBS)),
        ({"repetition_penalty": 1.1}, Need(0, Reason.EDITED)),
        ({"presence_penalty": -0.5}, Need(0, Reason.EDITED)),
        ({"frequency_penalty": 0.5, "temperature": 1.0, "top_k": 5}, Need(0, Reason.EDITED)),
        ({"logit_bias": {3: 5.0}}, Need(0, Reason.EDITED)),
        ({"allowed_token_ids": [1, 2]}, Need(0, Reason.EDITED)),
        ({"bad_words": ["no"]}, Need(0, Reason.EDITED)),
        ({"structured_outputs": object()}, Need(0, Reason.EDITED)),
        ({"thinking_token_budget": 5}, Need(0, Reason.EDITED)),
    ],
)
def test_what_parameters_ask_for(options: dict[str, Any], need: Need) -> None:
    assert need_of(params(**options)) == need


def test_a_prompt_and_masked_stop_tokens_are_exact() -> None:
    batch, written = Batch(), list[int]()
    batch.update([], [(0, Entry(Need(1), written, 2))], [])
    assert batch.need() == Need(0, Reason.PROMPT)
    written.append(7)
    assert batch.need() == Need(0, Reason.EDITED)
    written.append(8)
    assert batch.need() == Need(1)
    batch.update([], [(1, Entry(Need(2, shown=True), [1], 0))], [])
    assert batch.need() == Need(2, shown=True)
    batch.update([], [(1, Entry(Need(0, Reason.SAMPLED), [1], 0))], [])
    assert batch.need() == Need(0, Reason.SAMPLED)


class Direction(Enum):
    """vLLM's ``MoveDirectionality``."""

    UNIDIRECTIONAL = 1
    SWAP = 2


def test_the_batch_is_followed_through_random_changes() -> None:
    """Against a list of requests that is kept as vLLM keeps its own, without gaps after every update."""
    draw, follower = random.Random(0), BatchTracker(None, "cpu", False)
    rows: list[int] = []
    for number in range(300):
        removed = sorted(draw.sample(range(len(rows)), draw.randint(0, min(2, len(rows)))), reverse=True)
        empty, added, moved = list(removed), [], []
        places: dict[int, int] = {place: one for place, one in enumerate(rows) if place not in removed}
        for extra in range(draw.randint(0, 2)):
            place = empty.pop() if empty else len(rows) + extra
            place = place if place not in places else max(places) + 1
            k = 10 * number + extra + 1
            places[place] = k
            added.append((place, params(logprobs=k), None, [1]))
        while places and max(places) >= len(places):  # the last one goes to the first gap
            last, gap = max(places), min(set(range(len(places))) - set(places))
            places[gap] = places.pop(last)
            moved.append((last, gap, Direction.UNIDIRECTIONAL))
        if len(places) > 1 and draw.random() < 0.3:
            places[0], places[1] = places[1], places[0]
            moved.append((0, 1, Direction.SWAP))
        left = [place for place in removed if place not in {one[0] for one in added}]
        follower.update_state(SimpleNamespace(removed=left, added=added, moved=moved))
        follower.update_state(None)
        rows = [places[place] for place in range(len(places))]
        found = follower.batch._entries
        assert [found[place].need.k for place in range(len(rows))] == rows
        assert len(follower.batch) == len(rows)


def test_a_runner_that_tells_of_no_step_asks_for_what_any_of_its_requests_may_need() -> None:
    follower = BatchTracker(None, object())
    slots = current_batch("")
    assert slots is follower.slots
    assert not slots.has(2)  # an engine that tries itself out before the first request
    for slot, asked in enumerate((params(), params(logprobs=5))):
        assert follower.add_request(slot, asked) is False
    assert slots.has(3)  # a request under speculative decoding has several rows
    assert slots.need() == Need(5, shown=True)
    follower.add_request(1, params(temperature=1.0))
    assert slots.need() == Need(0, Reason.SAMPLED)
    follower.add_request(1, params(min_tokens=3))
    assert slots.need() == Need(0, Reason.EDITED)
    follower.add_request(1, params())  # the slot is taken by another one
    assert slots.need() == Need(1)
    assert follower.apply("logits", "context") == "logits"
    assert follower.is_argmax_invariant()


def test_engines_of_one_process_have_batches_of_their_own() -> None:
    first, second = (BatchTracker(SimpleNamespace(instance_id=name), "cpu", False) for name in ("first", "second"))
    assert current_batch("first") is first.batch
    assert current_batch("second") is second.batch
    assert current_batch("third") is None


def test_settings_of_the_engine_come_before_those_of_the_environment() -> None:
    environ = {"SOFTSIEVE_INDEX": "there", "SOFTSIEVE_STRICT": "1"}
    assert read_settings({}, {}) == Settings()
    assert read_settings({}, environ) == Settings(Path("there"), True)
    own = {"softsieve": {"index": "here", "strict": False, "enabled": False, "batch": 3}, "other": 1}
    assert read_settings(own, environ) == Settings(Path("here"), False, False, 3)


@pytest.mark.parametrize(
    ("own", "environ", "message"),
    [
        ({"indx": "x"}, {}, "expected index, strict, enabled, batch, found 'indx'"),
        ({"strict": 1}, {}, "strict: expected true or false, found 1"),
        ({"index": 3}, {}, "index: expected a path, found 3"),
        ({"batch": -1}, {}, "batch: expected a whole number"),
        ([], {}, "expected settings by name"),
        ({}, {"SOFTSIEVE_STRICT": "yes"}, "SOFTSIEVE_STRICT: expected 0 or 1, found 'yes'"),
    ],
)
def test_settings_that_are_none_of_ours(own: Any, environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_settings({"softsieve": own}, environ)


def config(**options: Any) -> Any:
    model = SimpleNamespace(logits_processors=options.pop("logits_processors", None))
    return SimpleNamespace(**{"lora_config": None, "model_config": model, **options})


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("0.32.1+cpu", {}, None),
        ("0.31.2", {}, "expected vLLM 0.32"),
        ("0.33.0", {}, "expected vLLM 0.32"),
        ("1.0.0rc1", {}, "expected vLLM 0.32"),
        ("dev", {}, "expected vLLM 0.32"),
        ("0.32.0", {"lora_config": object()}, "without LoRA"),
        ("0.32.0", {"logits_processors": ["a:B"]}, "no logits processors"),
    ],
)
def test_engines_that_cannot_have_an_adaptive_head(version: str, options: dict[str, Any], message: str | None) -> None:
    why = _refusal(version, config(**options))
    assert why is None if message is None else message in str(why)


class Pluggable:
    """vLLM's ``PluggableLayer``."""

    registry: ClassVar[dict[str, type]] = {}

    @classmethod
    def register_oot(cls, layer: type, name: str) -> None:
        cls.registry[name] = layer


def give_hooks(monkeypatch: pytest.MonkeyPatch, base: type, **custom_op: Any) -> None:
    """Have modules of vLLM with a layer for logits that is derived from a class."""
    processor = type("LogitsProcessor", (base,), {})
    contents: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.model_executor": {}, "vllm.model_executor.layers": {},
        "vllm.model_executor.custom_op": custom_op,
        "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": processor},
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("base", "custom_op", "message"),
    [
        (object, {}, "cannot import name 'PluggableLayer'"),
        (object, {"PluggableLayer": Pluggable, "op_registry_oot": {}}, "LogitsProcessor is no PluggableLayer"),
    ],
)
def test_a_vllm_without_the_hooks_is_one_line_or_an_error(
    base: type, custom_op: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    give_hooks(monkeypatch, base, **custom_op)
    with caplog.at_level(logging.WARNING):
        register()
    assert [message in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setenv("SOFTSIEVE_STRICT", "1")
    with pytest.raises(InputError, match=message):
        register()


def test_the_layer_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(counters.FOLDER, "made")  # by another process
    monkeypatch.setattr(Pluggable, "registry", {})
    give_hooks(monkeypatch, Pluggable, PluggableLayer=Pluggable, op_registry_oot=Pluggable.registry)
    register()
    (made,) = Pluggable.registry.values()
    assert made.__name__ == "AdaptiveLogitsProcessor"
    register()
    assert Pluggable.registry == {"LogitsProcessor": made}


def test_counters_of_workers_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        one = Counters(str(tmp_path))
        one.add(answers=3, bytes_read=50)
        one.add_exact(Reason.DRIFT, process)
    (tmp_path / "9.counters").write_bytes(b"")  # of a worker that has just begun
    answers, read, *exact = counters.total(str(tmp_path))
    assert (answers, read) == (6, 100)
    assert dict(zip(Reason, exact, strict=True))[Reason.DRIFT] == sum(exact) == 3


def test_making_an_index_imports_nothing_of_vllm() -> None:
    """Which takes seconds, where it is installed; the tracker imports it."""
    code = "import sys; from softsieve.integrations.vllm import building; sys.exit(TRACKER in sys.modules)"
    code = code.replace("TRACKER", repr(BatchTracker.__module__))
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_what_vllm_imports_at_its_start_does_not_import_numba() -> None:
    """When an engine starts, vLLM looks through all modules, and stumbles over numba's compiler."""
    modules = "plugin, layer, tracker, counters"
    code = f"import sys; from softsieve.integrations.vllm import {modules}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
