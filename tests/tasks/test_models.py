"""The built-in models: what they must not depend on, that they learn, and that nothing in them needs the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from softsieve.losses.objectives import make_objective
from softsieve.tasks.models import (
    AudioBody,
    Body,
    ImageBody,
    Net,
    TextBody,
    TokensBody,
    mel_filters,
)

BODIES: dict[str, tuple[Callable[[], Body], Callable[[], dict[str, Tensor]]]] = {
    "text": (TextBody, lambda: {"ids": torch.randint(1, 2**15, (6, 9), dtype=torch.int32)}),
    "tokens": (TokensBody, lambda: {"ids": torch.randint(1, 2**15, (6, 9, 4), dtype=torch.int32)}),
    "image8": (lambda: ImageBody(8, True), lambda: {"pixels": torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8)}),
    "image32": (
        lambda: ImageBody(32, False),
        lambda: {"pixels": torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)},
    ),
    "image64": (lambda: ImageBody(64, True), lambda: {"pixels": torch.randint(256, (6, 3, 64, 64), dtype=torch.uint8)}),
    "audio": (AudioBody, lambda: {"samples": torch.randint(-9999, 9999, (6, 2000), dtype=torch.int16)}),
}


def make(name: str) -> tuple[Body, dict[str, Tensor]]:
    body, inputs = BODIES[name]
    return body(), inputs()


@pytest.mark.parametrize("name", BODIES)
def test_every_parameter_learns(name: str) -> None:
    body, inputs = make(name)
    objective = make_objective("softmax")
    model = Net(body, objective.head(body.features, 5))
    target = torch.randint(5, (6, 9) if name == "tokens" else (6,))
    logits = model(**inputs)
    assert logits.shape == (*target.shape, 5)
    objective(logits, target).loss.backward()  # type: ignore[no-untyped-call]
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", BODIES)
def test_it_runs_without_values(name: str) -> None:
    """Fake tensors have none, so no shape and no branch can hang on one."""
    with FakeTensorMode():
        body, inputs = make(name)
        model = Net(body, torch.nn.Linear(body.features, 5))
        for training in (True, False):
            model.train(training)(**inputs).sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", BODIES)
def test_a_training_step_is_captured_in_a_cuda_graph(name: str) -> None:
    from softsieve._graphs import Graphed

    body, inputs = make(name)
    model = Net(body, torch.nn.Linear(body.features, 5)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

    def step(**inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**inputs).float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return (loss.detach(),)

    graphed = Graphed(step)
    on_device = {key: value.cuda() for key, value in inputs.items()}
    losses = [float(graphed(**on_device)[0]) for _ in range(20)]
    assert len(graphed.graphs) == 1
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["text", "tokens"])
def test_padding_changes_nothing(name: str) -> None:
    body, inputs = make(name)
    body.eval()
    ids = inputs["ids"]
    padded = torch.cat([ids, torch.zeros_like(ids)], 1)
    found = body(ids=padded)
    torch.testing.assert_close(found[:, : ids.shape[1]] if name == "tokens" else found, body(ids=ids))


@pytest.mark.parametrize("name", ["text", "tokens"])
def test_nothing_but_padding_is_finite(name: str) -> None:
    body, inputs = make(name)
    assert body(ids=torch.zeros_like(inputs["ids"])).isfinite().all()


def test_words_see_their_neighbours() -> None:
    body = TokensBody().eval()
    ids = torch.randint(1, 2**15, (1, 9, 4))
    other = ids.clone()
    other[0, 3] = 7
    changed = (body(ids=ids) != body(ids=other)).any(-1)[0]
    assert changed.tolist() == [i <= 7 for i in range(9)]  # two convolutions of reach 2


@pytest.mark.parametrize("name", ["image32", "audio"])
@pytest.mark.parametrize("training", [True, False])
def test_channels_of_a_place_lie_together(name: str, training: bool) -> None:
    """In training and in evaluation alike, and from the first convolution on: the other order takes twice the time."""
    body, inputs = make(name)
    body.train(training)
    orders: list[bool] = []
    for module in body.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(
                lambda _, __, out: orders.append(out.is_contiguous(memory_format=torch.channels_last))
            )
    body(**inputs)
    assert len(orders) > 5
    assert all(orders)


def test_images_move_only_in_training() -> None:
    body = ImageBody(16, True)
    pixels = torch.randint(256, (64, 3, 16, 16), dtype=torch.uint8)
    body.eval()
    torch.testing.assert_close(body(pixels=pixels), body(pixels=pixels), atol=0, rtol=0)
    moved = body._move(pixels)
    assert moved.shape == pixels.shape
    assert (moved != pixels).flatten(1).any(1).float().mean() > 0.9


def test_moved_images_are_shifts_of_the_images_and_their_mirror_images() -> None:
    pixels = torch.randint(256, (200, 3, 16, 16), dtype=torch.uint8)
    for mirror in (False, True):
        mirrored = 0
        for image, moved in zip(pixels, ImageBody(16, mirror)._move(pixels), strict=True):
            inside = moved[:, 2:14, 2:14]  # no edge in it: at most two places of 16 are repeated
            shifts = [(y, x) for y in range(5) for x in range(5)]
            same = [(image[:, y : y + 12, x : x + 12] == inside).all() for y, x in shifts]
            flipped = [(image.flip(2)[:, y : y + 12, x : x + 12] == inside).all() for y, x in shifts]
            assert sum(map(bool, same + flipped)) == 1
            mirrored += any(flipped)
        assert 60 < mirrored < 140 if mirror else mirrored == 0


def test_a_higher_tone_is_further_up_the_spectrogram() -> None:
    body = AudioBody()
    time = torch.arange(2000) / 8000
    tones = torch.stack([(2 * torch.pi * f * time).sin() for f in (300.0, 1000.0, 3000.0)])
    mel = body._compute_log_mel((tones * 32767).short())[:, 0].mean(2)
    loudest = mel.argmax(1)
    centres = mel_filters(40, 256, 8000).argmax(1) * 8000 / 256
    torch.testing.assert_close(centres[loudest], torch.tensor([300.0, 1000, 3000]), atol=100, rtol=0)


def test_mel_filters_are_triangles_over_the_whole_range() -> None:
    filters = mel_filters(40, 256, 8000)
    assert filters.shape == (40, 129)
    assert ((filters >= 0) & (filters <= 1)).all()
    torch.testing.assert_close(filters.sum(0)[4:120], torch.ones(116), atol=0.02, rtol=0)  # neighbours add up to one


def test_the_spectrogram_keeps_full_precision_under_autocast() -> None:
    body = AudioBody()
    samples = torch.randint(-9999, 9999, (2, 2000), dtype=torch.int16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = body._compute_log_mel(samples)
    torch.testing.assert_close(found, body._compute_log_mel(samples), atol=0, rtol=0)


def test_spectrogram_settings_are_not_weights() -> None:
    assert not [key for key in AudioBody().state_dict() if "filters" in key or "window" in key]


def test_a_feature_counts_for_as_much_as_it_is_rare_and_not_at_all_unseen() -> None:
    body = TextBody().eval()
    body.fit({"ids": torch.tensor([row])} for row in ([1, 2, 2, 0], [1, 3, 0, 0]))
    rare, common = 1 + torch.tensor(3 / 2).log(), torch.tensor(1.0)
    torch.testing.assert_close(body.idf[:5], torch.stack([common * 0, common, rare, rare, common * 0]))
    torch.testing.assert_close(body(ids=torch.tensor([[1, 2]])), body(ids=torch.tensor([[2, 0, 1]])))
    seen, unseen = body(ids=torch.tensor([[1, 2]])), body(ids=torch.tensor([[1, 2, 4]])[:, [0, 1, 2]])
    torch.testing.assert_close(seen, unseen)
    assert (body(ids=torch.tensor([[0, 0], [4, 9]])) == 0).all()


def test_texts_are_weighted_as_scikit_learn_does() -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = ["a b b c", "a c c c c d", "a"]
    ids = torch.tensor([[ord(word) - 96 for word in text.split()] + [0] * (6 - len(text.split())) for text in texts])
    made = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w").fit_transform(texts).toarray()
    body = TextBody().eval()
    body.fit([{"ids": ids}])
    expected = torch.from_numpy(made).float() @ body.table.weight[1:5].detach()
    torch.testing.assert_close(body(ids=ids).detach(), expected)
