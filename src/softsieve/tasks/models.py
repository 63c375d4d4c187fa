"""The built-in models: small enough to train on a CPU, nothing to download.

All of them take a learning rate of 3e-3 with AdamW. None makes the host wait for the device, chooses shapes by values
or draws random numbers outside torch, so a training step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BUCKETS = 2**15  # of hashed features of words in sentences, and of texts up to version 0.3
TEXT_BUCKETS = {64: 2**17, 256: 2**16}  # of hashed features of texts, by how many features a text comes to
SAMPLE_RATE = 8000


class Body(nn.Module):
    """Inputs to features: (rows, features), or (rows, positions, features) for tokens."""

    features: int

    def fit(self, batches: Iterable[Mapping[str, Tensor]]) -> None:
        """Take up what the inputs of training rows tell, before training; most bodies take nothing."""


class Net(nn.Module):
    """A body and the head of an objective; called with the inputs of `Rows` by name.

    While it is ``headless`` it returns what the head would be given: for losses that do without logits.
    """

    def __init__(self, body: Body, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head, self.headless = body, head, False

    def forward(self, **inputs: Tensor) -> Tensor:
        hidden: Tensor = self.body(**inputs)
        return hidden if self.headless else self.head(hidden)


class TextBody(Body):
    """Sum of the embeddings of hashed features ``ids`` (rows, n), padded with 0, weighted by how rare they are (idf).

    A feature that `fit` has not seen counts for nothing, as in a linear model. Weights of a text have norm 1, so that a
    long one is as large as a short one; in training some of the features are left out.

    ``by_rows`` makes the gradient of the table sparse, for `RowAdamW`, which then takes the rows of a batch and not the
    whole table. It makes the host wait for the device, so it is for the CPU.
    """

    idf: Tensor

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.features, self.by_rows = features, False
        self.table = nn.EmbeddingBag(TEXT_BUCKETS[features], features, mode="sum", padding_idx=0)
        _shrink_embeddings(self.table, 0.01)
        self.register_buffer("idf", torch.ones(TEXT_BUCKETS[features]).index_fill_(0, torch.tensor([0]), 0.0))
        self.thin, self.dropout = nn.Dropout(0.2), nn.Dropout(0.2)

    @torch.no_grad()
    def fit(self, batches: Iterable[Mapping[str, Tensor]]) -> None:
        seen, rows = torch.zeros_like(self.idf), 0
        for inputs in batches:
            ordered = inputs["ids"].long().sort(1).values
            first = torch.ones_like(ordered, dtype=torch.bool)
            first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
            seen += torch.bincount(ordered[first], minlength=len(seen)).to(seen)
            rows += len(ordered)
        self.idf.copy_(torch.where(seen > 0, ((1 + rows) / (1 + seen)).log() + 1, 0))
        self.idf[0] = 0

    def _weigh(self, ids: Tensor) -> Tensor:
        """The shares of ordered ids in the TF-IDF vectors of their texts, of norm 1; counts are 1 + their log."""
        new = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
        run = new.long().cumsum(1) - 1  # the how-manieth feature it is
        counts = torch.zeros_like(run).scatter_add(1, run, torch.ones_like(run)).gather(1, run).float()
        whole = (1 + counts.log()) * self.idf[ids]  # of a feature, at each of the places that it has
        norm = (whole.square() / counts).sum(1, keepdim=True).sqrt()
        return whole / counts / norm.clamp_min(1e-6)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long().sort(1).values  # ONNX mixes up whole numbers of two sizes
        weights = self.thin(self._weigh(ids))
        if self.by_rows and self.training and torch.is_grad_enabled():
            numbers, places = torch.unique(ids, return_inverse=True)
            rows = F.embedding(numbers, self.table.weight, sparse=True)
            summed = F.embedding_bag(places, rows, mode="sum", per_sample_weights=weights)
        else:
            summed = self.table(ids, per_sample_weights=weights)
        return self.dropout(summed)  # type: ignore[no-any-return]


class PlainTextBody(Body):
    """The text body up to version 0.3, for models that it wrote: features that all count the same, none left out."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.features = features
        self.table = nn.EmbeddingBag(BUCKETS, features, mode="sum", padding_idx=0)
        _shrink_embeddings(self.table, 0.1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, ids: Tensor) -> Tensor:
        count = (ids != 0).sum(1, keepdim=True).clamp_min(1)
        # Divided by the root, a long text is as large as a short one; a mean would be too small to learn from.
        return self.dropout(self.table(ids) * count.rsqrt())  # type: ignore[no-any-return]


class TokensBody(Body):
    """Convolutions over the words of a sentence; ``ids`` (rows, positions, hashed features of it), padded with 0."""

    features = 96

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(BUCKETS, 64, padding_idx=0)
        _shrink_embeddings(self.table, 0.1)
        self.widen = nn.Linear(64, self.features)
        self.convolutions = nn.ModuleList(nn.Conv1d(self.features, self.features, 5, padding=2) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(self.features) for _ in range(3))
        self.dropout = nn.Dropout(0.3)

    def forward(self, ids: Tensor) -> Tensor:
        word = (ids[..., :1] != 0).float()  # (rows, positions, 1); padding must stay 0 to look like the end
        hidden = self.norms[0](self.widen(self.dropout(8 * self.table(ids).mean(2))))  # (rows, positions, features)
        for convolution, norm in zip(self.convolutions, list(self.norms)[1:], strict=True):
            around = convolution((hidden * word).transpose(1, 2)).transpose(1, 2)
            hidden = norm(hidden + self.dropout(F.relu(around)))
        return hidden  # type: ignore[no-any-return]


class ImageBody(Body):
    """A small ResNet on ``pixels``, uint8 (rows, 3, size, size); in training, shifted at random, maybe mirrored."""

    def __init__(self, size: int, mirror: bool) -> None:
        super().__init__()
        self.net = ResNet(3, shrink=4 if size > 40 else 2 if size > 16 else 1)
        self.features = self.net.features
        self.mirror = mirror

    def forward(self, pixels: Tensor) -> Tensor:
        if self.training:
            pixels = self._move(pixels)
        return self.net(pixels.float() / 127.5 - 1)  # type: ignore[no-any-return]

    def _move(self, pixels: Tensor) -> Tensor:
        """Every image moved by up to an eighth of its side, its edge repeated, and mirrored or not."""
        rows, _, _, size = pixels.shape
        reach, device = size // 8, pixels.device
        place = torch.arange(size, device=device)
        down, right = (place + torch.randint(-reach, reach + 1, (2, rows, 1), device=device)).clamp(0, size - 1)
        if self.mirror:
            right = torch.where(torch.rand(rows, 1, device=device) < 0.5, right, right.flip(1))
        row = torch.arange(rows, device=device)[:, None, None]
        # Indices around a slice put the slice last: (rows, size, size, 3).
        return pixels[row, :, down[:, :, None], right[:, None, :]].permute(0, 3, 1, 2)


class AudioBody(Body):
    """A small ResNet on the log-mel spectrogram of ``samples``, int16 (rows, samples) at 8 kHz."""

    window: Tensor
    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(256), persistent=False)
        self.register_buffer("filters", mel_filters(40, 256, SAMPLE_RATE), persistent=False)
        self.net = ResNet(1, shrink=4)
        self.features = self.net.features

    def forward(self, samples: Tensor) -> Tensor:
        return self.net(self._compute_log_mel(samples))  # type: ignore[no-any-return]

    @torch.no_grad()
    def _compute_log_mel(self, samples: Tensor) -> Tensor:
        """(rows, 1, 40, frames) in float32 whatever the autocast: squares of small numbers need it."""
        with torch.autocast(samples.device.type, enabled=False):
            waves = samples.float() / 2**15
            frames = torch.stft(waves, 256, 96, window=self.window, center=False, return_complex=True)
            mel = self.filters @ frames.abs().square()
            # Strides say of an image of one channel how it lies.
            return ((mel + 1e-5).log() / 4 + 1).unsqueeze(-1).permute(0, 3, 1, 2)


class ResNet(nn.Module):
    """Three stages of one residual block each on an image ``shrink`` times smaller, then the mean over its places."""

    features = 128

    def __init__(self, channels: int, *, shrink: int) -> None:
        super().__init__()
        self.stem = _make_convolution(channels, 32, stride=2 if shrink == 4 else 1)
        self.pool = nn.Identity() if shrink == 1 else nn.MaxPool2d(3, 2, padding=1)
        self.blocks = nn.Sequential(
            ResidualBlock(32, 32, stride=1), ResidualBlock(32, 64, stride=2), ResidualBlock(64, 128, stride=2)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, images: Tensor) -> Tensor:
        # On a CPU, convolutions take half the time where the channels of a place lie together.
        images = F.relu(self.stem(images.contiguous(memory_format=torch.channels_last)))
        places = self.blocks(self.pool(images))  # (rows, features, height, width)
        return self.dropout(places.mean((2, 3)))  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.first = _make_convolution(channels, out_channels, stride=stride)
        self.second = _make_convolution(out_channels, out_channels)
        same = stride == 1 and channels == out_channels
        self.shortcut = nn.Identity() if same else _make_convolution(channels, out_channels, kernel=1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))) + self.shortcut(images))


def _make_convolution(channels: int, out_channels: int, *, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


def _shrink_embeddings(table: nn.Embedding | nn.EmbeddingBag, deviation: float) -> None:
    nn.init.normal_(table.weight, std=deviation)
    with torch.no_grad():
        table.weight[0] = 0


def mel_filters(count: int, window: int, rate: int) -> Tensor:
    """Triangles evenly spaced on the mel scale up to half the rate, (count, window // 2 + 1)."""
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, highest, count + 2) / 2595) - 1)  # in Hz
    at = torch.linspace(0, rate / 2, window // 2 + 1)
    rising = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp_min(0)
