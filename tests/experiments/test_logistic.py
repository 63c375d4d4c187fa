"""Regression on features of made-up images: what is trained, asked and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import logistic
from softsieve.errors import InputError
from softsieve.heads import AdaptiveSoftmax, TopK
from softsieve.tasks.examples import Data, Examples

SIDE = 10
FEATURES = logistic.CHANNELS * (SIDE // 2) ** 2
RECIPE = logistic.Recipe(SIDE, 6, turn=False)
NAMES = ("across", "blank", "down")


def images(count: int, seed: int) -> Examples:
    """Grey images of noise, with a bright line down or across, or none."""
    draw = np.random.default_rng(seed)
    inputs, labels = [], []
    for i in range(count):
        image = draw.integers(0, 80, (SIDE, SIDE), dtype=np.uint8)
        name = NAMES[i % 3]
        at = draw.integers(SIDE)
        if name == "down":
            image[:, at] = 255
        elif name == "across":
            image[at] = 255
        inputs.append(image)
        labels.append(name)
    return Examples(inputs, labels, [f"image {i}" for i in range(count)])


def lines(name: str = "lines", data_dir: Path = Path()) -> Data:
    return Data(name, "image", images(300, 0), None, images(100, 1))


@pytest.fixture(scope="module")
def regression() -> logistic.Regression:
    return logistic.fit(lines(), RECIPE, train_rows=200, calibration=30, queries=60, seed=0)


def test_the_network_learns_and_its_features_are_asked(regression: logistic.Regression) -> None:
    weight, bias, calibration, test, accuracy = regression
    assert (weight.shape, bias.shape) == ((3, FEATURES), (3,))
    assert (calibration.shape, test.shape) == ((30, FEATURES), (60, FEATURES))
    assert accuracy > 0.8
    assert test.ge(0).all()
    assert 0 < test.eq(0).double().mean() < 1
    assert not weight.requires_grad
    assert not test.requires_grad
    together = torch.cat([calibration, test])
    assert len(torch.unique(together, dim=0)) == 90  # no query is calibrated with and tested


def test_features_are_as_many_as_the_paper_has() -> None:
    for side, _, _ in logistic.RECIPES.values():
        network = logistic.Network(side, 10)
        assert network.head.in_features == 25_088
        assert network(torch.zeros(2, 3, side, side, dtype=torch.uint8)).shape == (2, 10)


def test_images_are_turned_to_all_positions_and_stay_what_they_are() -> None:
    image = torch.arange(9, dtype=torch.uint8).view(1, 1, 3, 3)
    found = logistic.turned(image.expand(200, 1, 3, 3), generator=torch.Generator().manual_seed(0))
    assert found.sum((1, 2, 3)).eq(36).all()
    assert found[:, 0, 1, 1].eq(4).all()  # the centre stays
    assert len(torch.unique(found, dim=0)) == 8


def test_training_is_the_same_for_the_same_seed(regression: logistic.Regression) -> None:
    state = torch.random.get_rng_state()
    again = logistic.fit(lines(), RECIPE, train_rows=200, calibration=30, queries=60, seed=0)
    assert torch.equal(again.weight, regression.weight)
    assert torch.equal(again.test, regression.test)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("guarantee", logistic.GUARANTEES)
@pytest.mark.parametrize("chosen", logistic.CHOSEN)
def test_answers_are_as_promised(regression: logistic.Regression, guarantee: str, chosen: str) -> None:
    row = logistic.measure(regression, guarantee=guarantee, chosen=chosen, eps=0.3, delta=0.1, seed=0)
    assert row["success"] >= 0.8
    assert row["gain"] >= 1
    assert 0 <= row["exact"] <= 1
    assert (row["n"], row["d"], row["queries"]) == (3, FEATURES, 60)
    assert row["accuracy"] == regression.accuracy
    assert row["nonzero"] == pytest.approx(regression.test.ne(0).double().mean().item())


def test_what_is_read_and_wrong_is_counted(regression: logistic.Regression, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AdaptiveSoftmax.topk

    def wrong_for_some(self: AdaptiveSoftmax, x: torch.Tensor, **kwargs: Any) -> TopK:
        found = honest(self, x, **kwargs)
        factor = torch.ones(len(x), 1)
        factor[:15] = 0.5
        read, exact = torch.full((len(x),), 480), torch.arange(len(x)) < 6
        return found._replace(probs=factor * found.probs, coordinates=read, exact=exact)

    exact = AdaptiveSoftmax(regression.weight, regression.bias, method="exact")
    monkeypatch.setattr(AdaptiveSoftmax, "topk", lambda self, x, **kwargs: wrong_for_some(exact, x, **kwargs))
    row = logistic.measure(regression, guarantee="pac", chosen="read", eps=0.3, delta=0.1, seed=0)
    assert row["success"] == 0.75
    assert row["success_error"] == pytest.approx((0.75 * 0.25 / 60) ** 0.5)
    assert row["gain"] == pytest.approx(3 * FEATURES / 480)
    assert row["exact"] == pytest.approx(0.1)


def test_there_is_a_row_for_every_guarantee_and_delta(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logistic, "load_preset", lines)
    monkeypatch.setattr(logistic, "RECIPES", {"eurosat": RECIPE._replace(turn=True)})
    shares: list[float] = []
    rows = logistic.run(
        ["eurosat"],
        tmp_path,
        deltas=[0.1, 0.2],
        epochs=1,
        calibration=20,
        queries=10,
        progress=lambda _, share: shares.append(share),
    )
    keys = [(row["data"], row["guarantee"], row["chosen"], row["delta"]) for row in rows]
    assert keys == [("eurosat", g, c, d) for g in ("calibrated", "pac") for c in logistic.CHOSEN for d in (0.1, 0.2)]
    published = {(row["guarantee"], row["delta"]): row["paper_gain"] for row in rows}
    assert published == {("calibrated", 0.1): 5.18, ("calibrated", 0.2): None, ("pac", 0.1): None, ("pac", 0.2): None}
    assert sum(shares) == pytest.approx(1)
    assert len(logistic.draw(rows).axes) == 2


def test_too_few_test_images_and_unknown_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lines: expected 101 test images, found 100"):
        logistic.fit(lines(), RECIPE, train_rows=10, calibration=1, queries=100, seed=0)
    with pytest.raises(InputError, match="data: expected one of mnist, eurosat, found 'cifar10'"):
        logistic.run(["cifar10"], tmp_path)
