"""Swap the loss: the same small classifier of digits trained with cross-entropy and with AS-Softmax.

Needs softsieve alone. Takes a few seconds: python examples/swap_the_loss.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softsieve import as_cross_entropy
from softsieve.data import digits

DELTA = 0.3  # how far the target must lead a class before that class has no gradient any more
EPOCHS, BATCH = 15, 32

pixels, labels = digits()  # 1797 images of 8 x 8, which come with the package
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1000], order[1000:]


def plain_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def sparse_loss(logits: Tensor, target: Tensor) -> Tensor:
    return as_cross_entropy(logits, target, delta=DELTA)  # the one line that changes


for name, loss_function in (("cross-entropy", plain_loss), ("AS-Softmax", sparse_loss)):
    torch.manual_seed(1)  # both start from the same weights and see the same batches
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            loss_function(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()

    with torch.no_grad():
        accuracy = (model(pixels[test]).argmax(-1) == labels[test]).float().mean()
        # A row is solved when its target leads every other class by DELTA: it costs nothing any more.
        _, stats = as_cross_entropy(model(pixels[train]), labels[train], delta=DELTA, return_stats=True)
    print(f"{name:13}  test accuracy {accuracy:.1%}, training rows solved {stats.solved.float().mean():.1%}")

# The loss alone saves little time. What it knows about rows does: skip_solved_rows.py.
