"""The plug-in on a GPU without vLLM: a stand-in for its model runner captures the calls that vLLM makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softsieve import AdaptiveSoftmax
from softsieve.data.synthetic_heads import SyntheticHead, make_head
from softsieve.integrations.vllm import index_folder, layer, tracker
from softsieve.integrations.vllm.index_folder import Description
from softsieve.integrations.vllm.layer import Site, adaptive_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS, COLUMNS, EPS = 20000, 320, 0.3


class UnquantizedEmbeddingMethod:
    """Named as vLLM's method for plain weights is."""


class StandIn(nn.Module):
    """vLLM's ``LogitsProcessor``, as far as the plug-in calls it."""

    org_vocab_size, scale, soft_cap, head_dtype = ROWS, 1.0, None, None

    def forward(self, lm_head: Any, hidden: Tensor, bias: Any = None, skip_gather: bool = False) -> Tensor:
        return nn.functional.linear(hidden, lm_head.weight)

    def get_top_tokens(self, lm_head: Any, hidden: Tensor, bias: Any = None) -> Tensor:
        return self.forward(lm_head, hidden).argmax(-1)


@pytest.fixture(scope="module")
def made() -> SyntheticHead:
    return make_head(ROWS, COLUMNS, rank=24, calibration=3000, test=1024, device="cuda")


@pytest.fixture(scope="module")
def index(made: SyntheticHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    head = AdaptiveSoftmax(made.weight, eps=EPS, delta=0.01, method="cascade")
    head.calibrate(made.calibration, [4], generator=torch.Generator().manual_seed(0))
    head.save(folder / "rank-0-of-1.safetensors", weight=False)
    index_folder.write_states(folder, made.calibration.cpu(), {})
    own, dtype = index_folder.fingerprint(made.weight, None), str(made.weight.dtype).removeprefix("torch.")
    index_folder.write_description(folder, Description(ROWS, COLUMNS, dtype, 1.0, EPS, 0.01, [4], [own]))
    return folder


@pytest.fixture
def runner(index: Path, made: SyntheticHead) -> Iterator[tuple[Any, Any, Any]]:
    """The layer, its weight, and the tracker of a runner of the newer kind, with one greedy request."""
    indices = SimpleNamespace(num_org_elements=ROWS, num_added_elements=0)
    head = SimpleNamespace(weight=made.weight, shard_indices=indices, quant_method=UnquantizedEmbeddingMethod())
    follower = tracker.BatchTracker(None, object())
    processor = adaptive_layer(StandIn, lambda: Site(place=index, required=True, strict=True, batch=64))()
    processor(head, made.test[:4].to(made.weight.dtype))  # before the first request: the index is loaded
    params = dict.fromkeys(("prompt_logprobs", "logprobs"), None) | dict.fromkeys(("min_tokens", "top_k"), 0)
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    follower.add_request(0, SimpleNamespace(temperature=0.0, **params, **penalties))
    yield processor, head, follower
    tracker._tracked.clear()


def check_answers(processor: Any, reason: str) -> None:
    """The adaptive head gave answers: where something is wrong with it the exact one does, and the log says what."""
    adaptive = processor.adaptive
    assert adaptive.serving is not None, f"the adaptive head gave up while {reason}: see the log"
    assert adaptive._pending is not None, f"no answer was adaptive: {adaptive.counters.exact()}"
    answers, bytes_read, fallbacks = adaptive._pending.tolist()
    assert answers > 0, f"all {fallbacks} queries took the whole weight"
    assert bytes_read > 0


def test_a_step_does_not_wait_and_chooses_as_the_exact_head(runner: Any, made: SyntheticHead) -> None:
    processor, head, _ = runner
    states = made.test.to(made.weight.dtype)
    for _ in range(3):  # launched one by one, then recorded, which waits, then replayed
        processor(head, states[:8])
    check_answers(processor, "it was warmed up")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.cat([processor(head, some).argmax(-1) for some in torch.split(states, 8)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_answers(processor, "waiting was an error")
    right = nn.functional.linear(states, made.weight)
    best = right.gather(-1, found[:, None])[:, 0] == right.amax(-1)
    assert best.double().mean() > 0.98


def test_the_calls_of_a_step_are_captured_in_a_graph(runner: Any, made: SyntheticHead) -> None:
    processor, head, _ = runner
    states = made.test.to(made.weight.dtype)
    hidden = states[:8].clone()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            processor(head, hidden)
            processor.get_top_tokens(head, hidden)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    check_answers(processor, "it was warmed up")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = processor(head, hidden)
        drafted = processor.get_top_tokens(head, hidden)  # as the model of a draft asks
        gave_up = processor.adaptive.serving is None
    assert not gave_up, "the adaptive head gave up while it was captured: see the log"
    wrong = torch.zeros(2, dtype=torch.int64, device=states.device)  # tokens of the logits, and drafted
    for some in torch.split(states, 8):
        hidden.copy_(some)
        graph.replay()
        right = nn.functional.linear(some, made.weight)
        chosen = torch.stack([logits.argmax(-1), drafted], 1)
        wrong += (right.gather(-1, chosen) != right.amax(-1, keepdim=True)).sum(0)
    check_answers(processor, "graphs were replayed")
    assert (wrong < 0.02 * len(states)).all(), f"wrong of {len(states)}: {wrong.tolist()}"


def test_answers_are_counted_now_and_then(runner: Any, made: SyntheticHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "STEPS", 4)
    processor, head, _ = runner
    for _ in range(4):
        processor(head, made.test[:8].to(made.weight.dtype))
    counted = processor.adaptive.counters.values()
    assert counted[0] + sum(counted[2:]) >= 32
    assert counted[1] > 0
