"""Skip solved rows: a loop of your own that visits the rows that still teach something.

Needs softsieve alone. Takes a few seconds: python examples/skip_solved_rows.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from softsieve import SolvedSampler, as_cross_entropy

ROWS, CLASSES, FEATURES, EPOCHS = 4000, 10, 32, 8

torch.manual_seed(0)
centres = 2 * torch.randn(CLASSES, FEATURES)
target = torch.arange(ROWS) % CLASSES
rows = centres[target] + 2 * torch.randn(ROWS, FEATURES)
data = TensorDataset(torch.arange(ROWS), rows, target)  # the sampler wants to know which rows a batch holds


def train(sampler: SolvedSampler | None) -> tuple[nn.Module, int]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=50, sampler=sampler, shuffle=sampler is None)
    visited = 0
    for epoch in range(EPOCHS):
        solved = 0
        before = visited
        for index, x, y in loader:
            loss, stats = as_cross_entropy(model(x), y, delta=0.1, return_stats=True)
            if sampler is not None:
                sampler.update(index, stats.margin)  # what the loss knows anyway: no extra pass
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            visited += len(y)
            solved += int(stats.solved.sum())
        print(f"  epoch {epoch}: {visited - before:4} rows visited, {solved / (visited - before):.0%} of them solved")
    return model, visited


for name, chosen in (("every row", None), ("skipping", SolvedSampler(ROWS))):
    print(name)
    model, visited = train(chosen)
    with torch.no_grad():
        accuracy = (model(rows).argmax(-1) == target).float().mean()
    print(f"  {visited} rows in all, accuracy {accuracy:.1%}")
