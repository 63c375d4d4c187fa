"""All engines keep one protocol, and the right one is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softsieve import AdaptiveSoftmax
from softsieve._progress import no_progress
from softsieve.data.synthetic_heads import make_head
from softsieve.heads.cascade.basis import Moments
from softsieve.heads.cascade.cpu import CpuCascade
from softsieve.heads.coordinates import Coordinates
from softsieve.heads.dithered import Dithered
from softsieve.heads.engine import Engine, Layer, Options, Promise, right
from softsieve.heads.engines import engine_for
from softsieve.heads.exact import Exact

PROMISE = Promise(0.3, 0.1)
OPTIONS: dict[type[Engine], Options] = {
    Exact: Options(beta=0.9),
    Coordinates: Options(beta=0.9, method="coordinates"),
    Dithered: Options(beta=0.9, method="cascade", guarantee="pac"),
    CpuCascade: Options(beta=0.9, method="cascade"),
}


def made(kind: type[Engine]) -> tuple[Engine, Tensor]:
    """An engine that is ready to be asked, and queries."""
    head = make_head(600, 64, rank=8, calibration=400, test=20)
    layer = Layer(head.weight.float(), torch.linspace(-1, 1, 600), OPTIONS[kind])
    if kind is CpuCascade:
        moments = Moments(64)
        moments.update(head.calibration[:150] * 0.9)
        engine: Engine = kind.build(layer, moments, progress=no_progress)
    else:
        engine = kind(layer)
    if kind in (CpuCascade, Coordinates):
        generator = torch.Generator().manual_seed(0)
        engine.calibrate(head.calibration[150:], [3, 0], PROMISE, generator=generator, progress=no_progress)
    return engine, head.test


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_protocol(kind: type[Engine]) -> None:
    engine, x = made(kind)
    layer = engine.layer
    assert engine.serves(3, None, PROMISE)
    answer = engine.topk(x.view(4, 5, 64), 3, PROMISE, None)
    assert answer.indices.shape == (4, 5, 3)
    assert answer.log_z.shape == (4, 5)
    assert (
        float(right(engine.topk(x, 3, PROMISE, None), layer.logits, layer.scaled(x), 0.3, rows=600).double().mean())
        > 0.8
    )
    assert engine.log_partition(x, PROMISE, None).indices.shape == (20, 0)
    logits = engine.logits(layer.scaled(x), PROMISE)
    known = [number for number in range(20) if number not in logits.fallbacks]
    exact = layer.logits(layer.scaled(x))
    assert torch.equal(logits.logits[known].argmax(-1), exact[known].argmax(-1))
    again = kind.from_state(layer, PROMISE, engine.state())
    assert again.calibrations.keys() == engine.calibrations.keys()
    one, other = (e.topk(x, 3, PROMISE, torch.Generator().manual_seed(0)) for e in (engine, again))
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"method": "exact"}, Exact),
        ({"method": "auto"}, CpuCascade),
        ({"method": "auto", "guarantee": "pac"}, Exact),
        ({"method": "cascade"}, CpuCascade),
        ({"method": "cascade", "guarantee": "pac"}, Dithered),
        ({"method": "coordinates"}, Coordinates),
        ({"method": "coordinates", "guarantee": "pac"}, Coordinates),
    ],
)
def test_which_engine(options: dict[str, Any], kind: type[Engine]) -> None:
    weight = torch.randn(20, 4)
    assert engine_for(Options(**options), weight) is kind
    assert AdaptiveSoftmax(weight, **options)._kind is kind
    assert engine_for(Options(**{**options, "method": "exact"}), weight.to("meta")) is Exact


def test_what_cannot_be_built_says_so() -> None:
    layer = Layer(torch.randn(20, 4))
    for kind in (Exact, Coordinates, Dithered):
        with pytest.raises(ValueError, match="build: expected method='cascade'"):
            kind.build(layer, Moments(4), progress=no_progress)
        with pytest.raises(RuntimeError, match="no index yet"):
            kind(layer).updated([0])
    with pytest.raises(ValueError, match="calibrate: expected a method"):
        Exact(layer).calibrate(torch.randn(5, 4), [1], PROMISE, generator=None, progress=no_progress)


@pytest.mark.parametrize("name", Options._fields)
def test_what_engines_were_made_with_stays(name: str) -> None:
    head = AdaptiveSoftmax(torch.randn(20, 4))
    before = getattr(head, name)
    with pytest.raises(AttributeError, match=f"{name}: fixed when a head is made"):
        setattr(head, name, before)
    head.eps = 0.1
    assert head.eps == 0.1
