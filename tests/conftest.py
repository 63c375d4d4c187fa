"""Settings for all tests, made before torch is imported."""

import os

# bf16 matrix products of oneDNN stop some virtual machines with an illegal instruction otherwise.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

settings.register_profile("softsieve", deadline=None, max_examples=200, derandomize=True)
settings.load_profile("softsieve")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
