"""The losses over logits answer as they did when the file was recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from softsieve.kernels.cross_entropy import HAS_TRITON
from tests.golden import losses as golden


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_values_gradients_and_statistics() -> None:
    pytest.importorskip("entmax")
    answers, recorded = golden.pack(golden.answers()), np.load(golden.FILE)
    assert sorted(answers) == sorted(recorded.files)
    for name in answers:
        if name.endswith("names"):
            assert answers[name].tolist() == recorded[name].tolist()
            continue
        ours, expected = (values[name].astype(np.float64) for values in (answers, recorded))
        tolerance = 1e-3 if name == "torch.float16" else 1e-6
        assert answers[name].dtype == recorded[name].dtype
        assert ours == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True), name
