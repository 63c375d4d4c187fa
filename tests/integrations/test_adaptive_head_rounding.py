"""Adaptive heads of 16-bit models: rounding makes no estimate equal to one of the largest logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import AdaptiveSoftmax
from softsieve.heads.cascade.engine import gap_for
from softsieve.integrations.adaptive_head import AdaptiveHead
from tests.heads.instances import language

pytestmark = pytest.mark.filterwarnings("ignore::softsieve.heads.DriftWarning")

WORDS, HIDDEN = 3000, 32
LEVELS = {torch.bfloat16: 1000.0, torch.float16: 8000.0}  # of all logits, where numbers of the dtype are 4 to 8 apart
DTYPES = list(LEVELS)


def make(dtype: torch.dtype, *, beta: float, k: int, whole: torch.dtype | None = None) -> tuple[AdaptiveHead, Tensor]:
    """A layer whose logits are far from 0 and near each other, and states (N, 1, d); both of another dtype if asked."""
    weight, x = language(WORDS, HIDDEN, 900, torch.Generator().manual_seed(0))
    layer = nn.Linear(HIDDEN, WORDS)
    with torch.no_grad():
        layer.weight.copy_(weight.to(dtype))
        layer.bias.fill_(LEVELS[dtype])
    layer, states = layer.to(whole or dtype), x.to(dtype).to(whole or dtype)
    head = AdaptiveSoftmax(layer.weight, layer.bias, beta=beta, delta=0.05, method="cascade")
    head.calibrate(states[:600], k, generator=torch.Generator().manual_seed(0))
    return AdaptiveHead(layer, head).eval(), states[600:, None]


class Judged:
    """What is said of rounded logits, for states whose k largest are right before they are rounded. (N, n)

    Where beta is negative, all is turned round: what answers knows the rows that are smallest in the layer.
    """

    def __init__(self, module: AdaptiveHead, states: Tensor, found: Tensor, k: int) -> None:
        sign = 1 if module.head.beta > 0 else -1
        x = states[:, 0].double()
        exact = sign * F.linear(x, module.weight.double(), module.bias.double()).detach()
        slack = 1e-5 * exact.abs().amax(-1, keepdim=True)  # of sums in float32
        best, answer = exact.topk(k).values, module.head.topk(states[:, 0], k)
        right = (answer.logits.double() / abs(module.head.beta) - best).abs().amax(-1, keepdim=True) <= slack
        assert right.float().mean() > 0.9
        low, high, found = (exact - slack).to(found.dtype), (exact + slack).to(found.dtype), sign * found
        kth = found.gather(-1, answer.indices[:, -1:])
        top = found.gather(-1, answer.indices)
        # Rows that are among the k largest of those found, and not of the exact ones.
        self.wrong = (found >= kth) & (high < kth) & right
        # Whether the row that argmax takes is no largest one.
        self.lost = (high.gather(-1, found.argmax(-1, keepdim=True)) < low.amax(-1, keepdim=True)) & right
        # Logits of the answer that are not those of the exact product.
        self.off = (top < low.gather(-1, answer.indices)) | (top > high.gather(-1, answer.indices))
        self.tied = (found == kth).sum(-1) > 1
        self.estimated = (found < low) | (found > high)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("beta", [1.0, 0.3, -0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_estimate_becomes_one_of_the_largest(dtype: torch.dtype, beta: float, k: int) -> None:
    module, states = make(dtype, beta=beta, k=k)
    with torch.no_grad():
        found = module(states)[:, 0]
    assert found.dtype == dtype
    assert module.exactly < 30
    judged = Judged(module, states, found, k)
    assert judged.estimated.float().mean() > 0.1
    assert not judged.wrong.any()
    assert not judged.lost.any()
    assert not judged.off.any()
    assert judged.tied.float().mean() > 0.1  # rows that are equal by the exact product stay so
    plain = Judged(module, states, (module.head.logits(states[:, 0]) / beta).to(dtype), k)
    assert plain.wrong.any(-1).sum() > 5
    assert not plain.off.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_under_autocast(dtype: torch.dtype) -> None:
    module, states = make(dtype, beta=1.0, k=1, whole=torch.float32)
    with torch.no_grad():
        with torch.autocast("cpu", dtype):
            found = module(states)[:, 0]
        wide = module(states)[:, 0]
    assert (found.dtype, wide.dtype) == (dtype, torch.float32)
    assert torch.equal(wide, module.head.logits(states[:, 0]))
    judged = Judged(module, states, found, 1)
    assert not (judged.wrong | judged.lost | judged.off).any()
    assert Judged(module, states, wide.to(dtype), 1).wrong.any()


def test_fallbacks_stay_exact() -> None:
    module, states = make(torch.bfloat16, beta=1.0, k=1)
    mixed = torch.cat([states[:4], 1e-3 * states[4:8]])  # of which the second half drifts
    with torch.no_grad():
        found = module(mixed)
        assert module.exactly == 4
        assert torch.equal(found[:4], module(mixed[:4]))
        assert torch.equal(found[4:], F.linear(mixed[4:], module.weight, module.bias))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("beta", [1.0, 0.3, -70.0])
def test_what_is_so_far_below_is_below_when_it_is_rounded(dtype: torch.dtype, beta: float) -> None:
    """By one to three numbers of a dtype, whatever the k-th logit is."""
    own = torch.float64 if dtype == torch.float32 else torch.float32
    near = torch.finfo(dtype).tiny * torch.linspace(-3, 3, 601, dtype=own)  # those around 0 are equally far apart
    powers = 2.0 ** torch.arange(-8, 9, dtype=own)[:, None] * (1 + torch.linspace(-0.02, 0.02, 801, dtype=own))
    kth = torch.cat([near, powers.flatten(), -powers.flatten()]) * beta
    gap = gap_for(dtype, own, beta)
    assert gap is not None
    rounded, below = ((value / beta).to(dtype) for value in (kth, kth - gap[0] * kth.abs() - gap[1]))
    aside = torch.full_like(rounded, -torch.inf if beta > 0 else torch.inf)
    assert ((below < rounded) if beta > 0 else (below > rounded)).all()
    for _ in range(4):
        rounded = torch.nextafter(rounded, aside)
    assert ((below > rounded) if beta > 0 else (below < rounded)).all()
    assert gap_for(own, own, beta) is None
    assert gap_for(None, own, beta) is None
