"""Settings for all tests and doctests, made before torch and Triton are imported."""

import os
from typing import Any

# bf16 matrix products of oneDNN stop some virtual machines with an illegal instruction otherwise.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# What a test asks a hub for is not there: no waiting for a network to say so.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numba
import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU, line by line

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several processes would wait for each other
    numba.set_num_threads(1)

settings.register_profile("softsieve", deadline=None, max_examples=200, derandomize=True)
settings.load_profile("softsieve")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
