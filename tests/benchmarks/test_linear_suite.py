"""The benchmark of linear layers with their loss: what it says of a layer is true."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import linear as suite
from softsieve import linear_as_cross_entropy


@pytest.mark.parametrize("dense", [0.0, 0.3, 1.0])
def test_a_layer_has_the_share_of_dense_rows(dense: float) -> None:
    hidden, weight, target = suite.make_layer(2000, 256, 3000, dense=dense, dtype=torch.float32, device="cpu")
    _, stats = linear_as_cross_entropy(hidden, weight, target, delta=0.1, return_stats=True)
    assert stats.dense.float().mean() == pytest.approx(dense, abs=0.06)
    if dense < 1:  # rows of all kinds
        assert stats.solved.float().mean() > 0.3 * (1 - dense)
        assert (~stats.solved & ~stats.dense).float().mean() > 0.05


def test_exact_gradients_are_those_of_autograd() -> None:
    hidden, weight, target = suite.make_layer(40, 32, 300, dense=0.3, dtype=torch.float64, device="cpu")
    hidden.requires_grad_()
    weight.requires_grad_()
    rows, columns = torch.arange(0, 40, 3), torch.arange(0, 300, 7)
    for delta in (0.1, 1.0):
        to_hidden, to_weight = torch.autograd.grad(
            linear_as_cross_entropy(hidden, weight, target, delta=delta, backend="reference"), (hidden, weight)
        )
        found = suite._exact_gradients(hidden, weight, target, delta, rows, columns)
        torch.testing.assert_close(found, (to_hidden[rows], to_weight[columns]))


def test_all_methods_are_judged_by_their_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong gradient is seen, and what is missing has a reason."""

    def wrong(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return 1.1 * F.cross_entropy(F.linear(hidden, weight), target)

    def absent() -> suite.Loss:
        raise ImportError("No module named 'absent'")

    monkeypatch.setattr(suite, "RIVALS", {"right": lambda: suite._eager, "wrong": lambda: wrong, "absent": absent})
    methods, missing = suite.rivals()
    assert (list(methods), missing) == (["right", "wrong"], {"absent": "ImportError: No module named 'absent'"})
    results = suite.measure(
        60, 16, 200, dense=0.3, methods=methods, dtype=torch.float32, device="cpu", repeats=1, check=True
    )
    found = {result.method: result for result in results}
    for method in ("right", suite.PLAIN, suite.OURS):
        assert max(found[method].hidden_error, found[method].weight_error) < 1e-5
    assert found["wrong"].hidden_error == pytest.approx(0.1, rel=0.01)
    fastest = min(found["right"].ms, found["wrong"].ms)
    assert found[suite.OURS].time_ratio == pytest.approx(found[suite.OURS].ms / fastest)
    assert found[suite.OURS].extra_mb >= 0
