"""vLLM with the adaptive head against vLLM with its own: one engine in this process, in which both take turns."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softsieve.integrations.vllm.index_folder import read_description
from softsieve.integrations.vllm.requests import Batch, Entry, Need
from softsieve.integrations.vllm.tracker import _tracked

SHOWN = 20  # log-probabilities that are compared
DRAWN, DRAWS = 20, 20_000  # tokens that are drawn from, with top_k, and how often


class Result(NamedTuple):
    """One batch size. Times are milliseconds of a step, medians over its repeats, each the mean over its steps."""

    batch: int
    tokens_s: float  # of the adaptive head
    exact_tokens_s: float
    faster: float  # the median over pairs of repeats, one after the other
    least: float  # the smallest of these ratios
    most: float
    adaptive: float  # share of new tokens that the adaptive head answered
    step_ms: float
    head_ms: float
    sampler_ms: float
    layers_ms: float  # and all else
    exact_step_ms: float
    exact_head_ms: float
    exact_sampler_ms: float


class Quality(NamedTuple):
    """Answers for the states of the exact head's own text, one at a time."""

    states: int
    same: float  # share of greedy tokens that are the same
    equal: float  # the same, or one whose logit is as large to the exact head
    logprobs_within: float  # share of states whose largest 20 log-probabilities are within the promise
    logprobs_median: float  # of the largest error of a state
    logprobs_p99: float
    promised: float
    chi_square: float  # of 20,000 draws with top_k = 20 from one state
    chi_square_exact: float  # the same for draws from the exact head's logits
    freedom: int


Now = Callable[[], float]


class Clock:
    """Adds up what calls take."""

    def __init__(self, now: Now) -> None:
        self.seconds, self.now = 0.0, now

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = self.now()
            try:
                return call(*args, **options)
            finally:
                self.seconds += self.now() - start

        return timed


class Engine:
    """An engine whose head can be switched."""

    def __init__(self, model: str, *, eager: bool, index: str | None, now: Now = time.perf_counter) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when the engine is made
        from vllm import LLM

        own = {"strict": True, **({} if index is None else {"index": index})}
        self.llm = LLM(
            model, dtype="bfloat16", enforce_eager=eager, max_model_len=1024, kv_cache_memory_bytes=256 << 20,
            enable_prefix_caching=False, additional_config={"softsieve": own}, seed=0,
        )  # fmt: skip
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        self.network = self.runner.model
        self.layer = self.network.logits_processor
        self.lm_head = getattr(self.network, "lm_head", None) or self.network.model.embed_tokens
        self.now, self.head, self.sampler = now, Clock(now), Clock(now)
        self.states: list[Tensor] | None = None
        forward = self.layer.forward

        def noted(lm_head: Any, hidden: Tensor, *more: Any, **options: Any) -> Any:
            if self.states is not None:
                self.states.append(hidden.clone())
            return forward(lm_head, hidden, *more, **options)

        self.layer.forward = self.head.around(noted)
        self.runner.sampler.forward = self.sampler.around(self.runner.sampler.forward)
        self.write([[1, 2, 3]], 2)  # the index is loaded, the crossover measured
        self.serving = self.layer.adaptive.serving

    def write(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy text after prompts, so many tokens of each."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    @contextmanager
    def exactly(self, on: bool = True) -> Iterator[None]:
        """Have the exact head answer, or as ever."""
        self.layer.adaptive.serving = None if on else self.serving
        try:
            yield
        finally:
            self.layer.adaptive.serving = self.serving

    def logits(self, state: Tensor, k: int, *, exactly: bool, shown: bool = False) -> Tensor:
        """Those of one state (1, d) for a request that needs the k largest, of the adaptive head at any crossover.

        Args:
            shown: whether it asks for log-probabilities.
        """
        name = self.layer.adaptive.site.engine
        before = _tracked[name]
        batch = Batch()
        batch.update([], [(0, Entry(Need(k, shown=shown), [1], 0))], [])
        _tracked[name] = batch
        try:
            if not exactly:
                self.layer.adaptive.serving = self.serving._replace(
                    batches=dict.fromkeys(self.serving.batches, 1), pace=None
                )
            with self.exactly() if exactly else nullcontext():
                found: Tensor = self.layer(self.lm_head, state)
                return found.float()
        finally:
            _tracked[name], self.layer.adaptive.serving = before, self.serving


def speed(engine: Engine, prompts: Sequence[Sequence[int]], *, batch: int, tokens: int, repeats: int) -> Result:
    """Tokens a second of both heads, in turns. Both write after the same prompts, other ones in every repeat."""
    taken: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    own = engine.layer.adaptive.counters
    answers = own.values()[0]
    for repeat in range(repeats + 1):  # the first pair is not counted
        asked = [prompts[(repeat * batch + number) % len(prompts)] for number in range(batch)]
        for exactly in (True, False) if repeat % 2 else (False, True):
            with engine.exactly(exactly):
                engine.write(asked, 1)  # warm
                engine.head.seconds = engine.sampler.seconds = 0.0
                start = engine.now()
                engine.write(asked, 1)
                prompt = engine.now() - start, engine.head.seconds, engine.sampler.seconds
                engine.head.seconds = engine.sampler.seconds = 0.0
                start = engine.now()
                engine.write(asked, tokens)
                whole = engine.now() - start, engine.head.seconds, engine.sampler.seconds
            if repeat:
                step, head, sampler = (after - before for after, before in zip(whole, prompt, strict=True))
                taken[exactly].append((step, head, sampler))
            elif not exactly:
                answers = own.values()[0]
    steps = tokens - 1
    ratios = [exact[0] / adaptive[0] for exact, adaptive in zip(taken[True], taken[False], strict=True)]
    (step, head, sampler), (exact_step, exact_head, exact_sampler) = (
        (1e3 * statistics.median(part) / steps for part in zip(*taken[exactly], strict=True))
        for exactly in (False, True)
    )
    return Result(
        batch,
        1e3 * batch / step,
        1e3 * batch / exact_step,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        (own.values()[0] - answers) / (repeats * batch * steps),
        step,
        head,
        sampler,
        step - head - sampler,
        exact_step,
        exact_head,
        exact_sampler,
    )


def quality(engine: Engine, prompts: Sequence[Sequence[int]], *, tokens: int) -> Quality:
    """Greedy tokens, log-probabilities and draws, for the states of the exact head's text after each prompt."""
    states: list[Tensor] = []
    for prompt in prompts:
        engine.states = []
        with engine.exactly():
            engine.write([prompt], tokens)
        states += engine.states[1:]  # the first is the prompt's
        engine.states = None
    promised = -math.log1p(-read_description(engine.layer.adaptive.site.place).eps)
    same = equal = within = 0
    errors = []
    for state in states:
        right = engine.logits(state, 1, exactly=True)[0]
        token = int(engine.logits(state, 1, exactly=False)[0].argmax())
        same += token == int(right.argmax())
        equal += bool(right[token] == right.max())
        exact = right.log_softmax(-1)
        best = engine.logits(state, SHOWN, exactly=False, shown=True)[0].log_softmax(-1).topk(SHOWN)
        error = float((best.values - exact[best.indices]).abs().max())
        within += error <= promised
        errors.append(error)
    count = len(states)
    spread = sorted(states, key=lambda one: float(engine.logits(one, 1, exactly=True).softmax(-1).max()))
    doubtful = spread[len(spread) // 4 :]  # from one of much doubt on
    state = next((one for one in doubtful if not _tied(engine.logits(one, DRAWN, exactly=True)[0])), doubtful[0])
    right = engine.logits(state, DRAWN, exactly=True)[0]
    statistics_of = [chi_square(engine.logits(state, DRAWN, exactly=exactly)[0], right) for exactly in (False, True)]
    return Quality(
        count,
        same / count,
        equal / count,
        within / count,
        statistics.median(errors),
        sorted(errors)[int(0.99 * count)],
        promised,
        statistics_of[0],
        statistics_of[1],
        DRAWN - 1,
    )


def _tied(logits: Tensor) -> bool:
    """Whether the last of those drawn from is as large as the next: vLLM then draws from more, the head from any."""
    best = logits.topk(DRAWN + 1).values
    return bool(best[-1] == best[-2])


def chi_square(logits: Tensor, right: Tensor) -> float:
    """That of draws by vLLM's sampler with top_k against the softmax of the largest of the right logits."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    torch.manual_seed(0)
    kept = apply_top_k_top_p(logits[None].clone(), torch.tensor([DRAWN]), None).softmax(-1)
    drawn = torch.cat([random_sample(kept.repeat(20, 1), {}) for _ in range(DRAWS // 20)])
    best = right.topk(DRAWN)
    expected = best.values.double().softmax(-1) * DRAWS
    counts = torch.bincount(drawn.long(), minlength=len(right))[best.indices]
    return float(((counts - expected).square() / expected).sum())
