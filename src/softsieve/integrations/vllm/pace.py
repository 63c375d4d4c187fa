"""What answers take while an engine serves: whether the adaptive or the exact head is the faster one for a step."""

from __future__ import annotations

from softsieve.integrations.vllm.crossover import LEAD

MEMORY = 32  # steps that a mean goes back to
FIRST = 8  # steps that the measurement at the start counts for
MOST = 2.0  # times the mean that a step counts for, at most: it may have waited for other work on the machine
AGAIN = 64  # steps of the exact head after which the adaptive one is tried once more; doubled each time it loses
SELDOM = 4096  # the most of these
COMPARED = 4  # steps of the adaptive head after which the exact one is timed once; doubled each time
RARELY = 512  # the most of these


class Pace:
    """Times of both heads by k and batch size, as they are served.

    States of a text that a model reads may be easier than those of what it writes, so what is measured at the start is
    where this begins. A head that is not asked is not measured, so the slower one is asked now and then: the adaptive
    one the more seldom the more often it has lost, the exact one every `RARELY` steps in the end.

    Example:
        >>> pace = Pace({4: {1: (0.002, 0.008), 2: (0.006, 0.008)}})
        >>> pace.adaptive(4, 1), pace.adaptive(4, 2), pace.adaptive(4, 3)
        (True, True, False)
        >>> for _ in range(40):
        ...     pace.answered(4, 2, 0.011)  # slower than it was at the start
        >>> pace.adaptive(4, 2)
        False
    """

    def __init__(self, measured: dict[int, dict[int, tuple[float, float]]]) -> None:
        """Seconds of the adaptive and of the exact head, by k and batch size; sizes that are not there stay exact."""
        self._times = {k: {size: list(both) for size, both in sizes.items()} for k, sizes in measured.items()}
        self._steps = {k: {size: [FIRST, FIRST] for size in sizes} for k, sizes in measured.items()}
        self._since: dict[tuple[int, int], int] = {}  # steps of the adaptive head since the exact one was timed
        self._until: dict[tuple[int, int], int] = {}  # steps of it until that is done again
        self._waited: dict[tuple[int, int], int] = {}
        self._patience: dict[tuple[int, int], int] = {}

    def sizes(self, k: int) -> list[int]:
        """The batch sizes that were measured for a k, rising."""
        return sorted(self._times[k])

    def _size(self, k: int, batch: int) -> int | None:
        """The least size that was measured and has room for a batch."""
        return next((size for size in self.sizes(k) if size >= batch), None)

    def adaptive(self, k: int, batch: int) -> bool:
        """Whether the adaptive head is to answer a step."""
        size = self._size(k, batch)
        if size is None:
            return False
        place, (own, exact) = (k, size), self._times[k][size]
        if own < LEAD * exact:
            since, until = self._since.get(place, 0) + 1, self._until.get(place, COMPARED)
            self._since[place] = since
            if since < until:
                return True
            self._since[place], self._until[place] = 0, min(2 * until, RARELY)
            return False
        waited, patience = self._waited.get(place, 0) + 1, self._patience.get(place, AGAIN)
        self._waited[place] = waited
        if waited < patience:
            return False
        self._waited[place], self._patience[place] = 0, min(2 * patience, SELDOM)
        return True

    def answered(self, k: int, batch: int, seconds: float) -> None:
        """The adaptive head took so long for a step."""
        self._note(k, batch, seconds, exact=False)

    def computed(self, k: int, batch: int, seconds: float) -> None:
        """The exact head took so long for a step."""
        self._note(k, batch, seconds, exact=True)

    def _note(self, k: int, batch: int, seconds: float, *, exact: bool) -> None:
        size = self._size(k, batch)
        if size is None:
            return
        times, steps = self._times[k][size], self._steps[k][size]
        steps[exact] = min(steps[exact] + 1, MEMORY)
        times[exact] += (min(seconds, MOST * times[exact]) - times[exact]) / steps[exact]
        if not exact and times[0] < LEAD * times[1]:
            self._patience.pop((k, size), None)
