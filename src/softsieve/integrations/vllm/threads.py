"""The cores of a worker: numba's threads are as many as torch's, which vLLM has bound."""

from __future__ import annotations

import os
import sys
import threading

import torch

from softsieve._threads import follow_torch

_local = threading.local()


def bind_threads() -> None:
    """Have numba use as many threads as torch does, from this thread on.

    numba counts the cores that the process may use when it is imported, and never starts more threads than that. vLLM
    may have bound the thread that asks to one core by then, so the count is given before.
    """
    if getattr(_local, "bound", False):
        return
    count = torch.get_num_threads()
    if "numba" not in sys.modules:
        os.environ.setdefault("NUMBA_NUM_THREADS", str(count))
    follow_torch()
    _local.bound = True
