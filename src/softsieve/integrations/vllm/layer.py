"""vLLM's layer that computes logits, with the adaptive head in it.

The class is made of the layer that it replaces, which is an argument: nothing here imports vLLM.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softsieve.errors import InputError, first_line
from softsieve.heads import DriftWarning, TopK
from softsieve.integrations.distributed import Ranks, ShardedAdaptiveSoftmax
from softsieve.integrations.plain_layer import describe_instead
from softsieve.integrations.vllm import counters, index_folder
from softsieve.integrations.vllm.answers import spread
from softsieve.integrations.vllm.crossover import STATES, Times, crossover, measure_times
from softsieve.integrations.vllm.pace import Pace
from softsieve.integrations.vllm.requests import Need, Reason
from softsieve.integrations.vllm.threads import bind_threads
from softsieve.integrations.vllm.tracker import current_batch

LOGGER = logging.getLogger("vllm.softsieve")  # below vLLM's own, so that it is shown with it
UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")  # vLLM's methods for weights as they are
STEPS = 256  # of a device, after which its counts are asked for
WATCHED = 1000  # answers among which drifted queries are counted; a warning is logged once in so many
DRIFTED, DRIFTING = 10, 0.1  # how many of them, and what share, a warning takes


class Site(NamedTuple):
    """Where a layer is: what the engine around it says."""

    place: Path | None = None  # where to look for an index; None: nowhere
    required: bool = False  # whether a user named that place, so that nothing there is worth a line
    strict: bool = False
    refusal: str | None = None  # why this engine cannot have an adaptive head
    draft: bool = False  # whether the model only proposes tokens, which another one checks
    group: Any = None  # the process group of tensor parallelism
    batch: int | None = None  # so many tokens a step at most; None: measured
    engine: str = ""  # the engine's name, by which its batch is known


class Serving(NamedTuple):
    """An index in use."""

    head: ShardedAdaptiveSoftmax
    weight: Tensor  # the engine's parameter
    rows: int  # of the whole vocabulary
    dtype: torch.dtype  # of the exact head's logits
    scale: float  # what the exact head multiplies them with
    batches: dict[int, int]  # by k, rising: up to how many queries at a time it is faster
    pace: Pace | None = None  # what both heads take while they serve, where one process may decide by it
    errors: Mapping[int, float] = MappingProxyType({})  # by k: the relative ones of probabilities that are promised

    def serves(self, need: Need, batch: int) -> tuple[int, Reason | None]:
        """The calibrated k to ask with, and why not to ask."""
        most = min(self.errors.values(), default=0.0) if need.shown else 1.0
        fine = (k for k in self.batches if k >= need.k and self.errors.get(k, 0.0) <= most)
        calibrated = next(fine, None)
        if calibrated is None:
            return 0, Reason.TOP_K
        faster = batch <= self.batches[calibrated] if self.pace is None else self.pace.adaptive(calibrated, batch)
        return calibrated, None if faster else Reason.BATCH

    def topk(self, x: Tensor, k: int) -> TopK:
        """The answer with a calibrated k, for what that one promises."""
        self.head.head.eps = self.errors.get(k, self.head.eps)
        return self.head.topk(x, k)

    def logits(self, answer: TopK) -> Tensor:
        """Those of all rows (batch, rows), of an answer."""
        return spread(answer, self.rows, self.dtype, beta=self.head.head.beta, scale=self.scale)


class Adaptive:
    """The adaptive answers of one layer: when to give them, and what was given.

    Attributes:
        site: where the layer is.
        serving: the index in use; None before the first call, and when there is none.
        counters: what was answered.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.serving: Serving | None = None
        self.counters = counters.Counters(None)
        self._prepared = False
        self._answered = self._drifted = self._steps = 0
        self._warned = False  # of these answers
        self._slower = 0  # the k for which the exact head answers this step because it is faster
        self._pending: Tensor | None = None  # answers, bytes and fallbacks that a device has yet to be asked for

    def logits(self, layer: Any, lm_head: Any, hidden: Tensor, bias: Tensor | None, exact: Any) -> Tensor | None:
        """Logits (batch, rows) of a step; None when the exact head is to answer."""
        k, start = self._ask(layer, lm_head, hidden, bias, exact), time.perf_counter()
        answer = self._topk(lm_head, hidden, k) if k else None
        if answer is None or self.serving is None:
            return None
        logits = self.serving.logits(answer)
        if self.serving.pace is not None:
            self.serving.pace.answered(k, len(hidden), time.perf_counter() - start)
        return logits

    def exactly(self, compute: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """What the exact head computes; timed, if it is because it is faster, with what the sampler would do next."""
        pace, k = None if self.serving is None else self.serving.pace, self._slower
        if pace is None or not k:
            return compute(hidden)
        start = time.perf_counter()
        logits = compute(hidden).float()
        pace.computed(k, len(hidden), time.perf_counter() - start)
        return logits

    def top_tokens(self, layer: Any, lm_head: Any, hidden: Tensor, bias: Tensor | None, exact: Any) -> Tensor | None:
        """The tokens (batch,) with the largest logits, for drafts; None when the exact head is to answer."""
        k = self._ask(layer, lm_head, hidden, bias, exact, Need(1))
        answer = self._topk(lm_head, hidden, k) if k else None
        return None if answer is None else answer.indices[:, 0]

    def _ask(
        self, layer: Any, lm_head: Any, hidden: Tensor, bias: Tensor | None, exact: Any, need: Need | None = None
    ) -> int:
        """The calibrated k to answer these rows with; 0 when the exact head is to answer."""
        if not self._prepared:
            self._prepared = True
            self._prepare(layer, lm_head, bias, exact)
        self._slower = 0
        if self.serving is None or not len(hidden):
            return 0
        if need is None:
            need = self._need(len(hidden))
        k, reason = (0, need.reason) if need.reason is not None else self.serving.serves(need, len(hidden))
        if reason is not None:
            self.counters.add_exact(reason, len(hidden))
            self._slower = k if reason is Reason.BATCH else 0
            return 0
        return k

    def _need(self, rows: int) -> Need:
        """What is asked of the logits of a step, if these are the rows of the requests in the batch."""
        if self.site.draft:
            return Need(1)
        batch = current_batch(self.site.engine)
        if batch is None or not batch.has(rows):
            return Need(0, Reason.UNKNOWN)
        return batch.need()

    def _topk(self, lm_head: Any, hidden: Tensor, k: int) -> TopK | None:
        """The answer of the head; None, and no more answers from then on, when there is something wrong with it."""
        serving = self.serving
        if serving is None:
            return None
        try:
            if lm_head.weight.data_ptr() != serving.weight.data_ptr():
                raise InputError("weight: not where it was when the index was loaded")
            if not hidden.is_cpu:
                answer = serving.topk(hidden, k)
                self._count_later(answer)
                return answer
            bind_threads()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", DriftWarning)
                answer = serving.topk(hidden, k)
        except (RuntimeError, TypeError, ValueError) as error:  # on all ranks, if on one
            self.serving = None  # also with `strict`, which is about starting: the server goes on
            LOGGER.warning("softsieve: the exact head answers from now on: %s", first_line(error))
            return None
        self._count(answer, [warning for warning in caught if issubclass(warning.category, DriftWarning)])
        return answer

    def _count_later(self, answer: TopK) -> None:
        """Count on the device, whose numbers are asked for now and then: nobody waits for every answer."""
        device = answer.exact.device
        if self._pending is None:
            self._pending = torch.zeros(3, dtype=torch.int64, device=device)
        fallbacks = answer.exact.sum()
        self._pending += torch.stack([answer.exact.numel() - fallbacks, answer.bytes_read.sum(), fallbacks])
        self._steps += 1
        if self._steps >= STEPS and not torch.cuda.is_current_stream_capturing():
            answers, bytes_read, exactly = self._pending.tolist()
            self.counters.add(answers=answers, bytes_read=bytes_read)
            self.counters.add_exact(Reason.EXPENSIVE, exactly)  # a device does not say why
            self._pending.zero_()
            self._steps = 0

    def _count(self, answer: TopK, drift: list[Any]) -> None:
        # Sums in numpy, for what `spread` says.
        fallbacks, bytes_read = int(answer.exact.numpy().sum()), int(answer.bytes_read.numpy().sum())
        self.counters.add(answers=len(answer.exact) - fallbacks, bytes_read=bytes_read)
        if fallbacks:
            self.counters.add_exact(Reason.DRIFT if drift else Reason.EXPENSIVE, fallbacks)
        self._answered += len(answer.exact)
        if drift:
            self._drifted += fallbacks
            # At once: they take the whole weight, so that the head is soon found to be slower and asked seldom.
            if not self._warned and self._drifted >= max(DRIFTED, DRIFTING * self._answered):
                self._warned = True
                LOGGER.warning(
                    "softsieve: %d of the last %d states are unlike those of the index and were answered exactly: "
                    "build it with a text like what is served (%s)",
                    self._drifted,
                    self._answered,
                    drift[0].message,
                )
        if self._answered >= WATCHED:
            self._answered = self._drifted = 0
            self._warned = False

    # -- the index -----------------------------------------------------------------------------------------------------

    def _refuse(self, why: str, *, quietly: bool = False) -> None:
        """Say in one line why the exact head answers; with ``strict`` an error."""
        if self.site.strict:
            raise InputError(f"softsieve: {why}")
        LOGGER.log(logging.DEBUG if quietly else logging.WARNING, "softsieve: the exact head answers: %s", why)

    def _prepare(self, layer: Any, lm_head: Any, bias: Tensor | None, exact: Any) -> None:
        site = self.site
        if site.place is None:
            self._refuse("no index is named, and the model is in no folder of this machine", quietly=True)
            return
        if not site.required and not site.place.is_dir():
            self._refuse(f"{site.place}: no such folder", quietly=True)
            return
        try:
            ranks = Ranks(site.group)
            self.serving, folder = self._load(site.place, layer, lm_head, bias, exact, ranks)
        except (InputError, OSError, RuntimeError) as error:
            self._refuse(first_line(error))
            return
        if ranks.rank == 0:
            self.counters = counters.Counters(os.environ.get(counters.FOLDER))
            sizes = ", ".join(f"{batch} for the {k} largest" for k, batch in self.serving.batches.items())
            LOGGER.info("softsieve: %s: the adaptive head answers steps of up to so many tokens: %s", folder, sizes)

    def _load(
        self, place: Path, layer: Any, lm_head: Any, bias: Tensor | None, exact: Any, ranks: Ranks
    ) -> tuple[Serving, Path]:
        """Find the index of this layer, load it on all ranks, and measure.

        Raises:
            InputError: when this rank has none that it can use.
            RuntimeError: when another rank has none.
        """

        def name() -> str:
            if self.site.refusal is not None:
                raise InputError(self.site.refusal)
            _check_layer(layer, lm_head)
            rows = lm_head.shard_indices.num_org_elements
            return index_folder.fingerprint(lm_head.weight[:rows], _part(bias, rows))

        fingerprints = ranks.tell(ranks.together(name))
        folder = ranks.together(lambda: index_folder.find_index(place, lm_head.weight, fingerprints))
        try:
            return self._open(folder, layer, lm_head, bias, exact, ranks), folder
        except (TypeError, ValueError) as error:  # of an index that is damaged where nothing is compared
            why = first_line(error)
            raise InputError(why if str(folder) in why else f"{folder}: {why}") from error

    def _open(self, folder: Path, layer: Any, lm_head: Any, bias: Tensor | None, exact: Any, ranks: Ranks) -> Serving:
        """The index of a folder, in use."""
        rows = lm_head.shard_indices.num_org_elements
        description = index_folder.read_description(folder)
        device = lm_head.weight.device
        if device.type == "cpu":
            bind_threads()
        head = ShardedAdaptiveSoftmax.load(
            folder, group=self.site.group, weight=lm_head.weight[:rows].detach(), bias=_part(bias, rows)
        )

        def check() -> Tensor:
            if not head.head.calibrations:
                raise InputError(
                    f"{folder}: expected an index for {device.type}, found one for another kind of device: build it "
                    f"with --device {device.type}"
                )
            if description.rows != layer.org_vocab_size:
                raise InputError(f"{folder}: expected {layer.org_vocab_size} rows, found {description.rows}")
            if not math.isclose(head.head.beta, layer.scale, rel_tol=1e-3):
                raise InputError(f"{folder}: expected logits times {layer.scale:g}, found times {head.head.beta:g}")
            states = index_folder.sample(index_folder.read_states(folder)[0], STATES)
            if not len(states) or states.shape[1] != description.columns or not bool(states.isfinite().all()):
                raise InputError(
                    f"{folder}: expected finite states of {description.columns} numbers, found {tuple(states.shape)}"
                )
            return states.to(device, lm_head.weight.dtype)

        states = ranks.together(check)
        dtype = getattr(layer, "head_dtype", None) or lm_head.weight.dtype
        fits = head.head.calibrations
        errors = {k: fits[own].eps for k in description.ks if (own := min(k, rows)) in fits}
        serving = Serving(head, lm_head.weight, description.rows, dtype, layer.scale, {}, errors=errors)
        if self.site.batch is not None:
            return serving._replace(batches=dict.fromkeys(description.ks, self.site.batch))
        times = {k: self._times(serving, k, exact, states, ranks) for k in description.ks}
        batches = {k: ranks.tell(crossover(own))[0] for k, own in times.items()}
        alone = ranks.count == 1 and device.type == "cpu"  # several would not decide alike; a device is not waited for
        return serving._replace(batches=batches, pace=Pace(times) if alone else None)

    @staticmethod
    def _times(serving: Serving, k: int, exact: Any, states: Tensor, ranks: Ranks) -> Times:
        def adaptive(x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DriftWarning)
                return serving.logits(serving.topk(x, k))

        def exactly(x: Tensor) -> Tensor:
            logits: Tensor = exact(x)
            return logits.float()  # as the sampler does

        def now() -> float:
            if states.is_cuda:
                torch.cuda.synchronize(states.device)
            return time.perf_counter()

        agree: Callable[[bool], bool] = lambda faster: bool(ranks.tell(faster)[0])  # noqa: E731
        return measure_times(adaptive, exactly, states, agree=agree, now=now)


def _part(bias: Tensor | None, rows: int) -> Tensor | None:
    return None if bias is None else bias[:rows].detach()


def _check_layer(layer: Any, lm_head: Any) -> None:
    """Refuse an output layer that is more than a matrix, or does more than multiply.

    Raises:
        InputError: saying what there is instead.
    """
    method = type(getattr(lm_head, "quant_method", None)).__name__
    instead = describe_instead(lm_head)
    if instead is None and method not in UNQUANTIZED:
        instead = f"a quantised weight ({method})"
    if instead is None and lm_head.weight.device.type not in ("cpu", "cuda"):
        instead = f"a weight on {lm_head.weight.device.type}"
    if instead is None and layer.soft_cap is not None:
        instead = f"logits that are soft-capped at {layer.soft_cap:g}"
    if instead is None and layer.scale <= 0:
        instead = f"logits that are multiplied with {layer.scale:g}"
    if instead is None and lm_head.shard_indices.num_added_elements > 0:
        instead = "a vocabulary with added tokens"
    if instead is not None:
        raise InputError(f"expected a plain output layer in memory, found {instead}")


def adaptive_layer(base: type, site: Callable[[], Site]) -> type:
    """A subclass of vLLM's ``LogitsProcessor`` that answers with the adaptive head where that is right and faster.

    Args:
        base: the class to replace.
        site: says where a layer is that is being made.
    """
    base_class: Any = base

    class AdaptiveLogitsProcessor(base_class):  # type: ignore[misc]
        """Computes logits: exact, or exact for the largest and a floor elsewhere."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.adaptive = Adaptive(site())

        def forward(
            self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None, skip_gather: bool = False
        ) -> Tensor | None:
            def exact(x: Tensor) -> Any:
                return base_class.forward(self, lm_head, x, embedding_bias, skip_gather)

            adaptive = getattr(self, "adaptive", None)  # not there in vLLM's layer for LoRA, which borrows this method
            logits: Tensor | None = None
            if adaptive is not None and not skip_gather and not getattr(self, "logits_as_input", False):
                logits = adaptive.logits(self, lm_head, hidden_states, embedding_bias, exact)
            if logits is None:
                logits = exact(hidden_states) if adaptive is None else adaptive.exactly(exact, hidden_states)
            return logits

        def get_top_tokens(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> Tensor:
            def exact(x: Tensor) -> Any:
                return base_class.forward(self, lm_head, x, embedding_bias)

            tokens: Tensor | None = self.adaptive.top_tokens(self, lm_head, hidden_states, embedding_bias, exact)
            if tokens is None:
                tokens = base_class.get_top_tokens(self, lm_head, hidden_states, embedding_bias)
            return tokens

    return AdaptiveLogitsProcessor
