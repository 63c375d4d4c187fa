"""Answers on a CPU by many plans from one preview of each query, for calibration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from softsieve.heads.cascade.calibration import Trial
from softsieve.heads.cascade.fit import Fallback

if TYPE_CHECKING:
    from softsieve.kernels import cascade_numba as kernels


class Asked(NamedTuple):
    """What answers, and the queries."""

    ask: Callable[..., kernels.Found]
    arrays: kernels.Index
    lengths: list[int]  # of the previews
    x: Any  # (batch, d)
    coded: Any  # the same as the codes take them. (batch, d [+ 1])
    make_scratch: Callable[[], kernels.Scratch]


def answer_all(
    asked: Asked,
    plans: Sequence[kernels.Plan],
    room: Callable[[int, int], tuple[Any, Any, Any]],
    keep: Callable[[kernels.Found, int, int, kernels.Scratch], None],
) -> None:
    """Answer each query by each of the plans from one preview of all rows, with as many threads as there are.

    A thread has a query for itself: nobody waits for another one, and estimates stay in its cache.

    Args:
        asked: what answers, and the queries.
        plans: what each query is answered by.
        room: where the answer by a plan to a query goes, both by their numbers: arguments of the kernel.
        keep: called with each answer, the numbers of plan and query, and the memory that finalists are in.
    """
    from numba import get_num_threads

    ask, arrays, lengths, x, coded, make_scratch = asked
    order = sorted(range(len(plans)), key=lambda number: (plans[number].first, plans[number].second))
    # A second preview goes on from the first, whose estimates are gone then: answers that need none come first.
    short = [_without_second(plan) for plan in plans]
    longer = [plan._replace(limit=-1.0) for plan in plans]
    left = iter(range(len(x)))  # `next` of this is one step for the interpreter

    def work() -> None:
        scratch = make_scratch()._replace(alone=1 << 62)
        for i in left:
            ready, later = 0, list[int]()
            for number in order:
                if later and plans[later[-1]].first != plans[number].first:
                    ready, later = again(i, later, ready, scratch), []
                plan = plans[number]
                if ready > lengths[plan.first]:
                    ready = 0
                found = ask(arrays, short[number], x[i], coded[i], scratch, *room(number, i), ready)
                drifted = found.state == Fallback.DRIFTED
                # One that drifted before its preview, or whose weight has changed, has estimated nothing.
                nothing = found.state == Fallback.CHANGED or (drifted and not found.survivors)
                ready = 0 if nothing else lengths[plan.first]
                if plan.first != plan.second and drifted and not found.flat and found.survivors > plan.limit:
                    later.append(number)
                else:
                    keep(found, number, i, scratch)
            again(i, later, ready, scratch)

    def again(i: int, numbers: list[int], ready: int, scratch: kernels.Scratch) -> int:
        """The same with the second preview."""
        for number in numbers:
            found = ask(arrays, longer[number], x[i], coded[i], scratch, *room(number, i), ready)
            ready = lengths[plans[number].second]
            keep(found, number, i, scratch)
        return ready

    threads = min(get_num_threads(), len(x))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            for done in [pool.submit(work) for _ in range(threads)]:
                done.result()
        finally:  # of an interrupt: the others end, too
            deque(left, maxlen=0)


def trial_of(answers: Tensor, rows: Any, logits: Any, above: Any) -> Trial:
    """What calibration knows of answers by one plan, from what the kernel says of each."""
    fallback, log_z, half, coordinates, bytes_read, scale, survivors, _, signal, toward, flat = answers.unbind(-1)
    return Trial(
        fallback.long(),
        torch.from_numpy(rows),
        torch.from_numpy(logits),
        log_z,
        half,
        coordinates.long(),
        bytes_read.long(),
        scale,
        survivors.long(),
        signal,
        toward,
        flat,
        None if above is None else torch.from_numpy(above),
    )


def _without_second(plan: kernels.Plan) -> kernels.Plan:
    """The same with queries that would need a second preview told by their survivors, as drifted."""
    if plan.first == plan.second:
        return plan
    usual = plan.usual._replace(survivors=min(plan.limit, plan.usual.survivors))
    return plan._replace(second=plan.first, usual=usual)
