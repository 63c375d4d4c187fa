"""What requests ask of their logits: how many of the largest have to be exact, or all of them, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple


class Reason(Enum):
    """Why logits are taken from the exact head, as counters have it."""

    PROMPT = "prompt"  # the first token after a prompt
    SAMPLED = "sampled"  # drawn from all tokens: temperature without top_k
    EDITED = "edited"  # penalties, a bias or masks may bring any token to the top
    LOGPROBS = "logprobs"  # more of them than are calibrated, those of given tokens or of the prompt
    TOP_K = "top_k"  # more than are calibrated
    BATCH = "batch"  # so many queries at a time that the exact product was measured to be faster
    UNKNOWN = "unknown"  # not one row for each request, as in speculative decoding
    DRIFT = "drift"  # a query unlike those of the calibration
    EXPENSIVE = "expensive"  # a query for which too many rows would have to be read


class Need(NamedTuple):
    """What a request asks of its logits."""

    k: int  # so many of the largest have to be exact
    reason: Reason | None = None  # why all of them have to be; None: they need not
    shown: bool = False  # whether log-probabilities are asked for, too


def need_of(params: Any) -> Need:
    """What sampling parameters of vLLM ask for.

    A greedy token takes the largest logit, one that is drawn with ``top_k`` so many: whatever vLLM does after that,
    ``top_p``, ``min_p``, a temperature, chooses among them. All else is exact.

    Example:
        >>> from types import SimpleNamespace
        >>> params = dict(temperature=0.8, top_k=40, logprobs=None, min_tokens=0, prompt_logprobs=None,
        ...               repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        >>> need_of(SimpleNamespace(**params)).k
        40
        >>> need_of(SimpleNamespace(**params | {"top_k": 0})).reason.value
        'sampled'
    """
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    edits = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "thinking_token_budget")
    if penalties != (1.0, 0.0, 0.0) or any(getattr(params, name, None) for name in edits):
        return Need(0, Reason.EDITED)
    lists = ("logprob_token_ids", "prompt_logprob_token_ids", "trace_decode_token_ids")  # the last: tokens to write
    prompt = params.prompt_logprobs is not None or any(getattr(params, name, None) is not None for name in lists)
    shown = params.logprobs  # 0 shows that of the token alone
    if prompt or (shown is not None and shown < 0):
        return Need(0, Reason.LOGPROBS)
    if params.temperature < 1e-5:  # what vLLM takes for greedy
        return Need(max(1, shown or 0), shown=shown is not None)
    if params.top_k <= 0:
        return Need(0, Reason.SAMPLED)
    return Need(max(params.top_k, shown or 0), shown=shown is not None)


def together(needs: Iterable[Need]) -> Need:
    """What needs without a reason ask for together."""
    k, shown = 0, False
    for need in needs:
        k, shown = max(k, need.k), shown or need.shown
    return Need(k, shown=shown)


class Entry(NamedTuple):
    """A request in the batch."""

    need: Need
    written: Sequence[int]  # its output so far, a list that vLLM appends to
    least: int  # tokens before which stop tokens are masked


class Batch:
    """The requests whose next tokens a step computes, in the order of the rows of their logits.

    Example:
        >>> batch = Batch()
        >>> batch.update([], [(0, Entry(Need(1), [5], 0)), (1, Entry(Need(20), [7], 0))], [])
        >>> len(batch), batch.need()
        (2, Need(k=20, reason=None, shown=False))
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, rows: int) -> bool:
        """Whether logits with so many rows are those of the next tokens of these requests, one each."""
        return rows == len(self)

    def update(
        self, removed: Iterable[int], added: Iterable[tuple[int, Entry]], moved: Iterable[tuple[int, int, bool]]
    ) -> None:
        """Apply changes in vLLM's order: requests removed, added, and moved from one place to another.

        Args:
            moved: places before and after, and whether the request that was there takes the first place.
        """
        entries = self._entries
        for place in removed:
            entries.pop(place, None)
        for place, entry in added:
            entries[place] = entry
        for before, after, swapped in moved:
            one, other = entries.pop(before, None), entries.pop(after, None)
            if one is not None:
                entries[after] = one
            if swapped and other is not None:
                entries[before] = other

    def need(self) -> Need:
        """What all requests together ask for: one that needs all logits takes the pass over the weight for all."""
        for need, written, least in self._entries.values():
            if need.reason is not None:
                return need
            if not written:
                return Need(0, Reason.PROMPT)
            if len(written) < least:
                return Need(0, Reason.EDITED)
        return together(need for need, _, _ in self._entries.values())


class Slots:
    """The requests of a runner that tells of a request when it comes, by its slot, and never that it has gone.

    What a step needs is then what all requests that were ever in its slots need together, each slot by its last one:
    never too little, for the requests of a step are among them. Under speculative decoding a request has several rows.

    Example:
        >>> slots = Slots()
        >>> slots.has(1), slots.need()
        (False, Need(k=0, reason=None, shown=False))
        >>> slots.add(0, Need(1), 0)
        >>> slots.add(1, Need(20), 0)
        >>> slots.has(1), slots.need()
        (True, Need(k=20, reason=None, shown=False))
    """

    def __init__(self) -> None:
        self._needs: dict[int, Need] = {}

    def add(self, slot: int, need: Need, least: int) -> None:
        """A request with these needs takes a slot; stop tokens are masked before it has ``least`` tokens."""
        self._needs[slot] = Need(0, Reason.EDITED) if need.reason is None and least > 0 else need

    def has(self, rows: int) -> bool:
        """Whether logits may be those of these requests: before the first of them, an engine tries itself out."""
        return bool(self._needs)

    def need(self) -> Need:
        """What all of them together ask for."""
        needs = self._needs.values()
        return next((need for need in needs if need.reason is not None), together(needs))
