"""A million classes: train the last layer without logits or gradient, then serve it without reading all of it.

Needs softsieve alone, under 2 GB of memory and some twenty seconds: python examples/million_classes.py
"""

import time

import torch

from softsieve import HeadSGD, SieveLinear

CLASSES, HIDDEN, ROWS = 1_000_000, 32, 16

# A state is near the centre of its class; the layer has yet to learn the classes that the batch holds.
torch.manual_seed(0)
spectrum = torch.arange(1, HIDDEN + 1) ** -0.5  # as in trained layers, a few directions matter most
layer = SieveLinear(HIDDEN, CLASSES, bias=False, optimizer=HeadSGD(8.0))
weight = layer.weight.data.copy_(4 * torch.randn(CLASSES, HIDDEN) * spectrum)  # 128 MB


def states_of(classes: torch.Tensor, noise: float) -> torch.Tensor:
    return 0.3 * weight[classes] + noise * torch.randn(len(classes), HIDDEN)


# Training: the logits of 16 rows would take 64 MB, the gradient of the weight 128; neither is ever made.
target = torch.randint(CLASSES, (ROWS,))
states = states_of(target, noise=2.0)
for step in range(4):
    start = time.perf_counter()
    loss, stats = layer.loss(states, target, delta=0.1, return_stats=True)
    loss.backward()  # and the step: some classes at a time
    solved, seconds = stats.solved.float().mean(), time.perf_counter() - start
    print(f"step {step}: loss {loss:.3f}, {solved:.0%} of the rows solved, {seconds:.2f} s")

# Serving: an index of the weight, calibrated on states like those that will come. A promise of 90 % (delta) takes 130.
states = states_of(torch.randint(CLASSES, (240,)), noise=0.3)
layer.serve(states[:132], k=1, eps=0.3, delta=0.1, method="cascade")
start = time.perf_counter()
answers = [layer.topk(state, k=1) for state in states[140:]]
adaptive = time.perf_counter() - start
start = time.perf_counter()
exact = [torch.mv(weight, state).argmax() for state in states[140:]]
dense = time.perf_counter() - start

right = sum(int(answer.indices[0] == best) for answer, best in zip(answers, exact, strict=True))
share = sum(int(answer.bytes_read) for answer in answers) / (100 * weight.numel() * weight.element_size())
print(f"the largest of a million logits: {right} of 100 right, {share:.0%} of the weight read a query")
print(f"{10 * adaptive:.1f} ms a query; the exact product takes {10 * dense:.1f} ms")
