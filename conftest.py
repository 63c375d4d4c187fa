"""Settings for all tests and doctests, made before torch and Triton are imported."""

import os
import re
from collections.abc import Iterator
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
    torch.set_num_threads(1)

settings.register_profile("softsieve", deadline=None, max_examples=200, derandomize=True)
settings.load_profile("softsieve")

# What `make quick` leaves out: the tests that a pattern is in the name of. Single tests have their marker in place.
MARKED = {
    "browser": r"test_report_browser|docs/test_site",
    "compiles": r"triton|compile|cascade|dithered|README\.md|AdaptiveSoftmax|test_code_blocks|tests/golden/"
    r"|integrations/test_onnx|heads/test_(biases|changed|drift|engines|index|logits|modes|old_files|sampling)"
    r"|integrations/test_(adaptive|distributed|generation|hidden|vllm_building|vllm_layer)|cli/test_(demo|doctor|generate|head)"
    r"|comparisons/test_heads|experiments/test_(language|logistic|perplexity)|test_head_scaling",
    "statistics": r"heads/test_(calibration|guarantees)|test_bad_inputs|tests/experiments/|tests/benchmarks/"
    r"|cli/test_(predict|train)|comparisons/test_losses|integrations/test_(causal_trainers|lightning|transformers)"
    r"|training/test_(infobatch|loop)|test_reads_less_where|test_a_generator_decides",
    "subprocess": r"distributed|resume|two_processes|test_hashes_are_the_same|tests/rough/|test_public_names",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their names."""
    for item in items:
        for marker, pattern in MARKED.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(marker)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """As many threads for every test, whatever commands with ``--threads`` the one before has run."""
    threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(threads)
    numba.set_num_threads(numba_threads)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
