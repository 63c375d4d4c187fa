"""What a user takes next of 20,000 items: train a small transformer without logits, serve it without all items.

Needs softsieve alone and half a minute: python examples/next_item.py. The sequences are made up: users walk along paths
through the items and stray now and then. For sequences of your own: python -m experiments next-item --data FILE.
"""

import torch
from torch import nn

from softsieve import AdaptiveSoftmax, linear_as_cross_entropy

ITEMS, USERS, LENGTH, SIZE = 20_000, 4_000, 12, 32

torch.manual_seed(0)
walk = torch.randint(ITEMS // 20, (USERS, 1)) + torch.arange(LENGTH)  # 1,000 items are popular ...
stray = torch.rand(USERS, LENGTH) < 0.1
sequences = torch.where(stray, torch.randint(ITEMS, (USERS, LENGTH)), walk % (ITEMS // 20))  # ... all may be taken
train, test = sequences[:, :-1], sequences  # each user's last item is kept for the test


class Recommender(nn.Module):
    """Items to states; its output layer is the embedding of the items."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(ITEMS, SIZE), nn.Embedding(LENGTH, SIZE)
        nn.init.normal_(self.items.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(SIZE, 2, 4 * SIZE, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(SIZE), enable_nested_tensor=False)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(items.shape[1])
        x = self.items(items) * SIZE**0.5 + self.places.weight[: items.shape[1]]
        return self.layers(x, mask=mask, is_causal=True)


# Training: the logits of a step would take 102 MB, and their gradient as much again; neither is ever made.
model = Recommender()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(5):
    for users in torch.randperm(USERS).split(128):
        states, target = model(train[users, :-1]), train[users, 1:]
        loss, stats = linear_as_cross_entropy(states, model.items.weight, target, delta=0.1, return_stats=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss:.2f}, {stats.solved.float().mean():.0%} of the positions solved")

# Serving: an index of the items, calibrated with states of users; a promise of 90 % (delta) takes 130 of them.
with torch.no_grad():
    states = model.eval()(test[:, :-1])[:, -1]
head = AdaptiveSoftmax(model.items.weight.detach(), delta=0.1, method="cascade")
head.calibrate(states[:2000], k=10)
answers = head.topk(states[2000:], k=10)
exact = (states[2000:] @ model.items.weight.detach().T).topk(10).indices
agree = (answers.indices.sort().values == exact.sort().values).all(1).float().mean()
hits = (answers.indices == test[2000:, -1:]).any(1).float().mean()
print(f"the ten items are those of the exact product for {agree:.0%} of the users")
print(f"the item that was taken is among them for {hits:.0%}")
