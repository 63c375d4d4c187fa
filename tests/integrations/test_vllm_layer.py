"""The plug-in of vLLM around a stand-in for the layer that it replaces, which multiplies as vLLM's does."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from softsieve import AdaptiveSoftmax
from softsieve.errors import InputError
from softsieve.heads import TopK
from softsieve.integrations.distributed import ShardedAdaptiveSoftmax
from softsieve.integrations.vllm import index_folder, layer, tracker
from softsieve.integrations.vllm.answers import spread, spread_on_device
from softsieve.integrations.vllm.building import TOKENS
from softsieve.integrations.vllm.index_folder import Description
from softsieve.integrations.vllm.layer import Adaptive, Site, adaptive_layer
from softsieve.integrations.vllm.pace import Pace
from softsieve.integrations.vllm.requests import Entry, Need, Reason

ROWS, PADDED, COLUMNS = 4000, 4032, 64


class UnquantizedEmbeddingMethod:
    """Named as vLLM's method for plain weights is."""

    def apply(self, lm_head: Any, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(hidden, lm_head.weight, bias)


class StandIn(nn.Module):
    """vLLM's ``LogitsProcessor``, as far as the plug-in calls it."""

    def __init__(self, vocab_size: int, scale: float = 1.0, soft_cap: float | None = None) -> None:
        super().__init__()
        self.org_vocab_size, self.scale, self.soft_cap, self.head_dtype = vocab_size, scale, soft_cap, None

    def forward(
        self, lm_head: Any, hidden: Tensor, embedding_bias: Tensor | None = None, skip_gather: bool = False
    ) -> Tensor:
        logits: Tensor = lm_head.quant_method.apply(lm_head, hidden, embedding_bias)
        return logits if skip_gather else logits[..., : self.org_vocab_size] * self.scale

    def get_top_tokens(self, lm_head: Any, hidden: Tensor, embedding_bias: Tensor | None = None) -> Tensor:
        return self.forward(lm_head, hidden, embedding_bias).argmax(-1)


def make_head(weight: Tensor) -> Any:
    """An ``lm_head`` with the rows of the weight and the padding that vLLM adds."""
    padded = nn.Parameter(torch.cat([weight, weight.new_full((PADDED - ROWS, COLUMNS), 9.0)]), requires_grad=False)
    indices = SimpleNamespace(num_org_elements=ROWS, num_added_elements=0)
    return SimpleNamespace(weight=padded, shard_indices=indices, quant_method=UnquantizedEmbeddingMethod(), tp_size=1)


def make_states(count: int, seed: int) -> Tensor:
    spectrum = torch.arange(1, COLUMNS + 1) ** -0.5
    states = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(seed)) * spectrum * 4
    return states.to(torch.bfloat16)


@pytest.fixture(scope="module")
def weight() -> Tensor:
    spectrum = torch.arange(1, COLUMNS + 1) ** -0.5
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * spectrum).to(torch.bfloat16)


@pytest.fixture(scope="module")
def index(weight: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    states = make_states(3000, 2)
    head = AdaptiveSoftmax(weight, eps=0.1, delta=0.01, method="cascade")
    head.calibrate(states, [20], generator=torch.Generator().manual_seed(0))
    head.eps = TOKENS
    head.calibrate(states, [4], generator=torch.Generator().manual_seed(0))
    head.eps = 0.1
    head.save(folder / "rank-0-of-1.safetensors", weight=False)
    index_folder.write_states(folder, states, {})
    own = index_folder.fingerprint(weight, None)
    index_folder.write_description(folder, Description(ROWS, COLUMNS, "bfloat16", 1.0, 0.1, 0.01, [4, 20], [own]))
    return folder


@pytest.fixture
def batch() -> Iterator[Any]:
    """The batch of an engine whose requests have each written a token."""
    follower = tracker.BatchTracker(None, "cpu", False)
    yield lambda *needs: follower.batch.update(
        range(64), [(place, Entry(need, [1], 0)) for place, need in enumerate(needs)], []
    )
    tracker._tracked.clear()


Make = Callable[..., Any]


@pytest.fixture
def make(index: Path) -> Make:
    def made(*args: Any, place: Path | None = index, **options: Any) -> Any:
        where = Site(**{"place": place, "required": True, "batch": 8, **options})
        return adaptive_layer(StandIn, lambda: where)(*(args or (ROWS,)))

    return made


def adaptive(made: Any) -> Adaptive:
    found: Adaptive = made.adaptive
    return found


def exact(head: Any, x: Tensor) -> Tensor:
    return StandIn(ROWS).forward(head, x)


def test_greedy_tokens_are_those_of_the_exact_head(make: Make, weight: Tensor, batch: Any) -> None:
    made, head, states = make(), make_head(weight), make_states(400, 3)
    wrong = 0
    for x in torch.split(states, 4):
        batch(*[Need(1)] * 4)
        logits, right = made(head, x), exact(head, x)
        assert logits.shape == (4, ROWS)
        assert logits.dtype == torch.float32
        wrong += int((logits.argmax(-1) != right.argmax(-1)).sum())
    assert wrong <= 8  # 2 %, where 1 % is promised
    answers, read, *_ = adaptive(made).counters.values()
    assert answers >= 380
    assert read < 400 * 2 * ROWS * COLUMNS / 2


@pytest.mark.parametrize("k", [1, 20])
def test_log_probabilities_have_the_promised_error(make: Make, weight: Tensor, batch: Any, k: int) -> None:
    made, head, states = make(), make_head(weight), make_states(400, 4)
    errors = []
    for x in states:
        batch(Need(k, shown=True))
        right, own = exact(head, x[None]).float().log_softmax(-1), made(head, x[None]).log_softmax(-1).topk(k)
        error = (own.values - right.gather(-1, own.indices)).abs().max()
        missed = (own.values - right.topk(k).values).abs().max()  # of rows that are equal in 8 bits any will do
        errors.append(float(torch.maximum(error, missed)))
    promised = -math.log1p(-0.1) + 0.07  # logits up to 16 are rounded to multiples of 1/16
    assert sum(error > promised for error in errors) <= 8  # 2 %, where 1 % is promised
    assert sorted(errors)[200] > 0  # they are estimates


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ([Need(0, Reason.SAMPLED)], Reason.SAMPLED),
        ([Need(1), Need(0, Reason.EDITED)], Reason.EDITED),
        ([Need(21)], Reason.TOP_K),
        ([Need(1)] * 9, Reason.BATCH),
        ([Need(1)] * 2, Reason.UNKNOWN),
    ],
)
def test_what_needs_every_logit_takes_the_exact_head(
    make: Make, weight: Tensor, batch: Any, needs: list[Need], reason: Reason
) -> None:
    made, head = make(), make_head(weight)
    batch(*needs)
    x = make_states(3 if reason is Reason.UNKNOWN else len(needs), 5)
    assert torch.equal(made(head, x), exact(head, x))
    assert adaptive(made).counters.exact() == {reason.value: len(x)}


def test_without_a_batch_the_exact_head_answers(make: Make, weight: Tensor) -> None:
    made, head, x = make(), make_head(weight), make_states(1, 6)
    assert torch.equal(made(head, x), exact(head, x))
    assert adaptive(made).counters.exact() == {"unknown": 1}


def test_drafts_take_the_adaptive_head_without_a_batch(make: Make, weight: Tensor) -> None:
    made, head, x = make(draft=True), make_head(weight), make_states(4, 7)
    assert made(head, x).argmax(-1).tolist() == exact(head, x).argmax(-1).tolist()
    assert made.get_top_tokens(head, x).tolist() == exact(head, x).argmax(-1).tolist()
    assert adaptive(made).counters.values()[0] == 8


def test_tokens_without_log_probabilities_take_the_calibration_for_them(
    make: Make, weight: Tensor, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, head, x = make(), make_head(weight), make_states(1, 8)
    asked: list[tuple[int, float]] = []
    topk = ShardedAdaptiveSoftmax.topk

    def noted(self: Any, x: Tensor, k: int) -> TopK:
        asked.append((k, self.eps))
        return topk(self, x, k)

    monkeypatch.setattr(ShardedAdaptiveSoftmax, "topk", noted)
    for needs in ([Need(1)], [Need(1, shown=True)], [Need(5)]):
        batch(*needs)
        made(head, x)
    assert asked == [(4, TOKENS), (20, 0.1), (20, 0.1)]


def test_rows_that_are_not_gathered_are_exact(make: Make, weight: Tensor, batch: Any) -> None:
    made, head, x = make(), make_head(weight), make_states(1, 8)
    batch(Need(1))
    assert torch.equal(made(head, x, None, True), StandIn(ROWS)(head, x, None, True))


def test_the_weight_is_shared_and_a_change_is_noticed(
    make: Make, weight: Tensor, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, head, x = make(), make_head(weight), make_states(1, 9)
    batch(Need(1))
    made(head, x)
    serving = adaptive(made).serving
    assert serving is not None
    assert serving.head.head.weight.data_ptr() == head.weight.data_ptr()
    head.weight.data.mul_(2.0)
    with torch.no_grad():
        head.weight[0, 0] += 1.0
    with caplog.at_level(logging.WARNING):
        assert torch.equal(made(head, x), exact(head, x))
    assert "the exact head answers from now on" in caplog.text
    assert adaptive(made).serving is None


def test_a_weight_in_another_place_is_noticed(make: Make, weight: Tensor, batch: Any) -> None:
    made, head, x = make(), make_head(weight), make_states(1, 9)
    batch(Need(1))
    made(head, x)
    head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    assert torch.equal(made(head, x), exact(head, x))
    assert adaptive(made).serving is None


def broken_file(folder: Path) -> None:
    path = folder / "rank-0-of-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 255
    path.write_bytes(content)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "expected an index, found none"),
    "unfinished": (lambda folder: (folder / "index.json").unlink(), "expected an index, found none"),
    "a file is missing": (lambda folder: (folder / "rank-0-of-1.safetensors").unlink(), "expected a file, found none"),
    "no states": (lambda folder: (folder / "states.safetensors").unlink(), "no such file"),
    "damaged": (broken_file, "damaged"),
    "another file": (lambda folder: (folder / "index.json").write_text("{}"), "found another file"),
    "no JSON": (lambda folder: (folder / "index.json").write_text("{"), "cannot be read"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", SPOILT)
def test_an_index_that_cannot_be_used_is_one_line_or_an_error(
    make: Make, weight: Tensor, index: Path, batch: Any, tmp_path: Path, case: str, strict: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = tmp_path / "index"
    shutil.copytree(index, folder)
    spoil, message = SPOILT[case]
    spoil(folder)
    refused(make(place=folder, strict=strict), make_head(weight), message, strict, batch, caplog)


def refused(made: Any, head: Any, message: str, strict: bool, batch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The layer answers exactly, and says why in one line; if it is strict it does not answer."""
    batch(Need(1))
    x = make_states(1, 10)
    if strict:
        with pytest.raises(InputError, match=message):
            made(head, x)
        return
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(made(head, x), exact_of(made, head, x))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert message in lines[0]
    assert "\n" not in lines[0]


def exact_of(made: Any, head: Any, x: Tensor) -> Tensor:
    return StandIn.forward(made, head, x)


def quantised(head: Any) -> None:
    head.quant_method = type("Fp8Method", (UnquantizedEmbeddingMethod,), {})()


def other_revision(head: Any) -> None:
    head.weight.data[7, 7] += 1.0


def other_dtype(head: Any) -> None:
    head.weight = nn.Parameter(head.weight.float(), requires_grad=False)


def other_vocabulary(head: Any) -> None:
    head.shard_indices.num_org_elements = ROWS - 64


HEADS: dict[str, tuple[Callable[[Any], None], str]] = {
    "quantised": (quantised, "found a quantised weight"),
    "another revision": (other_revision, "found that of another"),
    "another dtype": (other_dtype, "expected an index for float32 of 64 columns, found one for bfloat16"),
    "another vocabulary": (other_vocabulary, "found that of another"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", HEADS)
def test_the_index_of_another_layer_is_refused(
    make: Make, weight: Tensor, batch: Any, case: str, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    head = make_head(weight)
    change, message = HEADS[case]
    change(head)
    made = make(strict=strict)
    batch(Need(1))
    x = make_states(1, 10).to(head.weight.dtype)
    if strict:
        with pytest.raises(InputError, match=message):
            made(head, x)
        return
    with caplog.at_level(logging.WARNING):
        assert torch.equal(made(head, x), exact(head, x))
    assert message in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((ROWS, 2.0), "expected logits times 2, found times 1"), ((ROWS, 1.0, 30.0), "soft-capped at 30")],
)
def test_logits_that_are_treated_otherwise_are_refused(
    make: Make, weight: Tensor, batch: Any, arguments: tuple[Any, ...], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    refused(make(*arguments), make_head(weight), message, False, batch, caplog)


def test_an_engine_that_cannot_have_one_is_refused(
    make: Make, weight: Tensor, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    refused(make(refusal="expected vLLM 0.32"), make_head(weight), "expected vLLM 0.32", False, batch, caplog)


def test_no_index_beside_a_model_is_nothing_to_say(
    make: Make, weight: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, head, x = make(place=tmp_path / "none", required=False), make_head(weight), make_states(1, 11)
    with caplog.at_level(logging.INFO):
        assert torch.equal(made(head, x), exact(head, x))
    assert caplog.text == ""


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(("folder", "message"), [("none", "none: no such folder"), (None, "no index is named")])
def test_no_index_at_all_is_an_error_where_that_is_asked_for(
    make: Make, weight: Tensor, tmp_path: Path, folder: str | None, message: str, draft: bool
) -> None:
    place = None if folder is None else tmp_path / folder
    made = make(place=place, required=False, strict=True, draft=draft)
    with pytest.raises(InputError, match=message):
        made(make_head(weight), make_states(1, 11))


def test_the_index_is_found_among_others_by_its_fingerprint(
    make: Make, weight: Tensor, index: Path, batch: Any, tmp_path: Path
) -> None:
    shutil.copytree(index, tmp_path / "b")
    shutil.copytree(index, tmp_path / "a")
    own = index_folder.read_description(index)
    other = Description(**{**vars(own), "fingerprints": ["0" * 32]})
    index_folder.write_description(tmp_path / "a", other)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "index.json").write_text("{")  # a damaged one does not hide the others
    made = make(place=tmp_path)
    batch(Need(1))
    made(make_head(weight), make_states(1, 12))
    assert adaptive(made).serving is not None


def test_all_ranks_find_the_same_index(index: Path, weight: Tensor, tmp_path: Path) -> None:
    """Also where one of them has the same rows in two models."""
    own = index_folder.read_description(index)
    for name, fingerprints in {"a": ["1" * 32, "2" * 32], "b": ["1" * 32, "3" * 32]}.items():
        (tmp_path / name).mkdir()
        index_folder.write_description(tmp_path / name, Description(**{**vars(own), "fingerprints": fingerprints}))
    assert index_folder.find_index(tmp_path, weight, ["1" * 32, "3" * 32]) == tmp_path / "b"


def test_a_place_that_cannot_be_looked_at_is_one_line(
    make: Make, weight: Tensor, tmp_path: Path, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    refused(make(place=tmp_path / ("x" * 300)), make_head(weight), "File name too long", False, batch, caplog)


def test_another_number_of_ranks_is_refused(index: Path, weight: Tensor) -> None:
    with pytest.raises(InputError, match="expected an index for 2 ranks, found one for 1"):
        index_folder.find_index(index, weight, [index_folder.fingerprint(weight, None)] * 2)


def test_the_crossover_is_measured_where_it_serves(
    make: Make, weight: Tensor, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measure(own: Any, rival: Any, states: Tensor, *, agree: Any, now: Any) -> Any:
        assert now() <= now()
        assert torch.equal(rival(states[:1]), exact(head, states[:1]).float())
        assert own(states[:1]).shape == (1, ROWS)
        assert agree(True)
        asked.append(len(states))
        return {1: (0.0, 1.0), 2: (0.0, 1.0), 4: (2.0, 1.0)}

    monkeypatch.setattr(layer, "measure_times", measure)
    made, head = make(batch=None), make_head(weight)
    batch(*[Need(1)] * 3)
    x = make_states(3, 13)
    assert torch.equal(made(head, x), exact(head, x))
    serving = adaptive(made).serving
    assert serving is not None
    assert serving.batches == {4: 2, 20: 2}
    assert asked == [128, 128]
    batch(*[Need(1)] * 2)
    assert made(head, x[:2]).dtype == torch.float32


def test_a_head_that_is_slower_than_it_was_at_the_start_is_left(make: Make, weight: Tensor, batch: Any) -> None:
    made, head, x = make(batch=None), make_head(weight), make_states(2, 13)
    batch(*[Need(1)] * 2)
    made(head, x)
    own = adaptive(made)
    assert own.serving is not None
    pace = Pace({4: {2: (1.0, 10.0)}})
    own.serving = own.serving._replace(pace=pace, batches={4: 2})
    answers = own.counters.values()[0]
    made(head, x)
    assert own.counters.values()[0] == answers + 2
    assert pace._times[4][2][0] < 1.0  # its time was noted
    for _ in range(200):
        pace.answered(4, 2, 20.0)
    assert torch.equal(made(head, x), exact(head, x).float())
    assert pace._times[4][2][1] < 10  # the exact head's, too
    assert own.counters.exact()["batch"] >= 2


def test_a_head_that_was_slower_is_tried_again_more_and_more_seldom() -> None:
    pace = Pace({1: {1: (2.0, 1.0)}})
    tried = [step for step in range(20_000) if pace.adaptive(1, 1)]
    gaps = [after - before for before, after in zip([-1, *tried], tried, strict=False)]
    assert gaps[:8] == [64, 128, 256, 512, 1024, 2048, 4096, 4096]
    for _ in range(200):
        pace.answered(1, 1, 0.5)
    assert pace.adaptive(1, 1)


def test_the_exact_head_is_timed_now_and_then() -> None:
    """The start may have found it slower than it is."""
    pace = Pace({1: {1: (2.0, 4.0)}})
    asked = [step for step in range(20_000) if not pace.adaptive(1, 1)]
    gaps = [after - before for before, after in zip([-1, *asked], asked, strict=False)]
    assert gaps[:10] == [4, 8, 16, 32, 64, 128, 256, 512, 512, 512]
    for _ in range(16):
        pace.computed(1, 1, 1.0)
    assert not pace.adaptive(1, 1)


def test_a_step_that_waited_for_other_work_does_not_decide() -> None:
    pace = Pace({1: {1: (3.0, 5.0)}})
    pace.answered(1, 1, 500.0)
    assert pace.adaptive(1, 1)


def test_drifted_states_are_answered_exactly_counted_and_told(
    make: Make, weight: Tensor, batch: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "WATCHED", 40)
    made, head = make(), make_head(weight)
    with caplog.at_level(logging.WARNING):
        for x in -make_states(60, 14) * 50:
            batch(Need(1))
            made(head, x[None])
    assert adaptive(made).counters.exact() == {"drift": 60}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # one in 40 answers
    assert all("10 of the last 10 states are unlike those of the index" in line for line in lines)


def test_a_warning_of_drift_does_not_wait_for_a_head_that_is_asked_seldom(
    make: Make, weight: Tensor, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Drifted states take the whole weight: after some of them the exact head is the faster one."""

    class Slower(Pace):
        def answered(self, k: int, batch: int, seconds: float) -> None:
            super().answered(k, batch, 5.0)

        def computed(self, k: int, batch: int, seconds: float) -> None:
            super().computed(k, batch, 4.0)

    made, head = make(), make_head(weight)
    batch(Need(1))
    own = adaptive(made)
    made(head, make_states(1, 14))
    assert own.serving is not None
    own.serving = own.serving._replace(pace=Slower({4: {1: (1.0, 4.0)}}))
    with caplog.at_level(logging.WARNING):
        for x in -make_states(200, 15) * 50:
            made(head, x[None])
    assert own.counters.exact()["batch"] > 100  # the head was left
    assert len(caplog.records) == 1
    assert "are unlike those of the index" in caplog.text


def test_some_drifted_states_are_no_warning(
    make: Make, weight: Tensor, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, head = make(), make_head(weight)
    batch(Need(1))
    states = make_states(121, 16)
    states[10::11] *= -50
    with caplog.at_level(logging.WARNING):
        for x in states:
            made(head, x[None])
    assert adaptive(made).counters.exact()["drift"] == 11
    assert caplog.text == ""


@pytest.mark.parametrize("device", ["cpu", "any"])
def test_logits_are_rounded_as_often_as_the_exact_head_does(weight: Tensor, device: str) -> None:
    """That one multiplies what it has rounded, and a fitted ``beta`` is not quite its scale."""
    scale, beta = 1 / 9, 0.1111
    x = make_states(50, 17)
    answer = AdaptiveSoftmax(weight, beta=beta, method="exact").topk(x, 20)
    spreading = spread if device == "cpu" else spread_on_device
    own = spreading(answer, ROWS, torch.bfloat16, beta=beta, scale=scale).gather(-1, answer.indices)
    right = StandIn(ROWS, scale)(make_head(weight), x).float().gather(-1, answer.indices)
    assert (own == right).float().mean() >= 0.98  # sums are added up in another order


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_floor_stands_for_the_rest(k: int) -> None:
    logits = torch.randn(5, 8, dtype=torch.float64)
    best = logits.topk(k)
    log_z = logits.logsumexp(-1)
    none = torch.zeros(5)
    answer = TopK(best.indices, best.values, best.values, log_z, none, none, none, none.bool())
    made = spread(answer, 8, torch.float64)
    torch.testing.assert_close(made.logsumexp(-1), log_z.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(made.topk(k).values, best.values.float())
    assert (made.topk(k).indices == best.indices).all()
    assert k == 8 or bool((made.sort(-1).values[:, 7 - k] < best.values[:, -1].float()).all())


def test_an_estimate_that_is_too_low_leaves_a_floor_below_all() -> None:
    none = torch.zeros(1)
    values = torch.tensor([[3.0, 2.0]])
    answer = TopK(torch.tensor([[4, 1]]), values, values, torch.tensor([3.0]), none, none, none, none.bool())
    made = spread(answer, 6, torch.float32)
    assert made.isfinite().all()
    assert made[0, 0] < 2.0


@pytest.mark.parametrize(("k", "dtype"), [(3, torch.bfloat16), (8, torch.float32), (50, torch.float32)])
def test_logits_are_spread_alike_on_any_device(k: int, dtype: torch.dtype) -> None:
    made = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    answer = AdaptiveSoftmax(made).topk(make_states(5, 1)[:, :8].float(), k)
    torch.testing.assert_close(spread_on_device(answer, 50, dtype), spread(answer, 50, dtype), rtol=0, atol=0)


def test_logits_are_spread_with_nothing_that_comes_from_the_host() -> None:
    """A number that is copied to a GPU waits for it, and cannot be part of a graph."""

    class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(options or {}))

    names: list[str] = []
    answer = AdaptiveSoftmax(torch.eye(50)).topk(torch.rand(2, 50), 3)
    with Asked():  # type: ignore[no-untyped-call]
        spread_on_device(answer, 50, torch.bfloat16)
        spread_on_device(answer, 50, torch.bfloat16, beta=0.1, scale=0.1)
        assert "aten.nextafter.default" in names
        assert "aten.lift_fresh.default" not in names
        torch.tensor(1.0)
    assert "aten.lift_fresh.default" in names


def test_an_index_of_another_kind_of_device_is_refused(
    make: Make, weight: Tensor, index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(index, tmp_path / "other")
    built = AdaptiveSoftmax(weight, eps=0.1, delta=0.01, method="cascade")
    built.build(make_states(3000, 2))  # what is fitted on a GPU says nothing on a CPU
    built.save(folder / "rank-0-of-1.safetensors", weight=False)
    made = make(place=folder)
    with caplog.at_level(logging.WARNING):
        made(make_head(weight), make_states(1, 3))
    assert adaptive(made).serving is None
    assert "expected an index for cpu, found one for another kind of device: build it with --device cpu" in caplog.text
