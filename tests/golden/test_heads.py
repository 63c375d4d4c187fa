"""Every engine of `AdaptiveSoftmax` answers as it did when the file was recorded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from softsieve.kernels.cross_entropy import HAS_TRITON
from tests.golden import heads as golden


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(answers: dict[str, Tensor], engine: str) -> None:
    recorded = np.load(golden.HEADS)
    assert sorted(answers) == sorted(name for name in recorded.files if name.startswith("gpu") == (engine == "gpu"))
    for name, value in answers.items():
        ours, expected = value.numpy(), recorded[name]
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), name
        if ours.dtype.kind == "f":
            assert np.allclose(ours, expected, rtol=1e-5, atol=1e-5), name
        else:
            assert (ours == expected).all(), name


def test_heads_on_a_cpu() -> None:
    check(golden.head_answers(), "cpu")


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_head_on_a_gpu() -> None:
    check(golden.gpu_answers(), "gpu")
