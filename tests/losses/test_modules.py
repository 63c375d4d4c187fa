"""The modules are shells: what they do is what the functions do."""

from typing import Any

import pytest
import torch

from softsieve import ASCrossEntropyLoss, ASMultiLabelLoss, as_cross_entropy, as_multilabel_loss
from tests.helpers import make


def test_cross_entropy_module_passes_everything_on() -> None:
    logits, target = make(30, 6)
    target[3] = 5
    weight = torch.rand(6, dtype=torch.float64)
    module = ASCrossEntropyLoss(0.3, weight=weight, ignore_index=5, reduction="sum", return_stats=True)
    target = target.clamp_min(0)
    loss, stats = module(logits, target)
    truth, true_stats = as_cross_entropy(
        logits, target, delta=0.3, weight=weight, ignore_index=5, reduction="sum", return_stats=True
    )
    assert torch.equal(loss, truth)
    assert all(torch.equal(a, b) for a, b in zip(stats, true_stats, strict=True))


def test_delta_may_change_while_training() -> None:
    logits, target = make(30, 6)
    module = ASCrossEntropyLoss(1.0)
    for delta in (1.0, 0.5, 0.0):
        module.delta = delta
        assert torch.equal(module(logits, target), as_cross_entropy(logits, target, delta=delta))
    module.delta = 1.5
    with pytest.raises(ValueError, match="delta: expected"):
        module(logits, target)


def test_weight_moves_with_the_module_and_is_saved() -> None:
    module = ASCrossEntropyLoss(weight=torch.ones(3)).to(torch.float64)
    assert module.weight is not None
    assert module.weight.dtype == torch.float64
    assert list(module.state_dict()) == ["weight"]


def test_multilabel_module_passes_everything_on() -> None:
    logits, target = torch.randn(7, 4), torch.randint(2, (7, 4))
    truth = as_multilabel_loss(logits, target, delta=0.3, reduction="none")
    assert torch.equal(ASMultiLabelLoss(0.3, reduction="none")(logits, target), truth)
    options: dict[str, Any] = {"against": "threshold", "reduction": "sum", "return_stats": True}
    loss, stats = ASMultiLabelLoss(0.3, **options)(logits, target)
    truth, true_stats = as_multilabel_loss(logits, target, delta=0.3, **options)
    assert torch.equal(loss, truth)
    assert all(torch.equal(a, b) for a, b in zip(stats, true_stats, strict=True))


def test_constructors_refuse_bad_options() -> None:
    with pytest.raises(ValueError, match="delta"):
        ASCrossEntropyLoss(2.0)
    with pytest.raises(ValueError, match="reduction"):
        ASCrossEntropyLoss(reduction="all")
    with pytest.raises(TypeError, match="ignore_index"):
        ASCrossEntropyLoss(ignore_index="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight"):
        ASCrossEntropyLoss(weight=[1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="delta"):
        ASMultiLabelLoss(-1.0)
    with pytest.raises(ValueError, match="reduction"):
        ASMultiLabelLoss(reduction="all")
    with pytest.raises(ValueError, match="against: expected one of 'labels', 'threshold', found 'all'"):
        ASMultiLabelLoss(against="all")


def test_they_print_their_settings() -> None:
    assert repr(ASCrossEntropyLoss(0.2)) == "ASCrossEntropyLoss(delta=0.2, ignore_index=-100, reduction='mean')"
    assert repr(ASMultiLabelLoss(0.2)) == "ASMultiLabelLoss(delta=0.2, against='labels', reduction='mean')"
