"""How many threads numba takes: as many as torch."""

from __future__ import annotations

from importlib import import_module

import torch


def follow_torch() -> None:
    """Have numba use as many threads as torch does, from this thread on.

    On a machine that does other work, too, a thread that was not asked for is waited for. Where both use OpenMP, numba
    sets torch's number, too, when it starts its own threads, so that has to be put back: who asks for one thread has
    one.
    """
    numba = import_module("numba")
    threads = torch.get_num_threads()
    numba.get_num_threads()  # starts them: a function that comes from numba's cache may not, and crashes then
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(threads)
