"""Codes of four bits, two in a byte: previews of twice as many coordinates in as many bytes, for GPUs.

They are made of the codes of eight bits that an index has, so files know nothing of them. The first `LEADING`
coordinates, which say most, keep eight bits; of the others every code stands for `STEP` of those of eight bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.heads.cascade.index import LEVELS, SPREADS

# As the kernels have them:
LEADING = SPREADS  # codes of eight bits, in place of a record's spreads, so that a tier takes half of its bytes
MOST = 119  # of the leading codes: both halves of a byte have a sign, 16 * 7 + 7
STEP = 5  # codes of eight bits that one of four bits stands for; 8 of these are 3.8 root mean squares of a column
_AT_ONCE = 1 << 24  # codes that are worked on at a time


class Packed(NamedTuple):
    """Previews of an index in four bits. Tier t has its length in `size_of` bytes, the first tier none."""

    codes: Tensor  # (n, bytes of the longest) int8
    spreads: Tensor  # (tiers, n) uint8: predicted deviations, in steps
    steps: list[float]


def size_of(length: int) -> int:
    """Bytes of a row for a preview of this length.

    Example:
        >>> size_of(120), size_of(248)
        (64, 128)
    """
    return (length + LEADING) // 2


def pack(records: Tensor, tiers: list[int], unit: Tensor, steps: list[float]) -> Packed:
    """Pack the codes of an index with more than one tier.

    Args:
        records, unit, steps: of the index, the last ones those of the tiers.
        tiers: lengths of the tiers.
    """
    n, longest = len(records), tiers[-1]
    codes = torch.empty(n, size_of(longest), dtype=torch.int8, device=records.device)
    deviations = torch.empty(len(tiers), n, device=records.device)
    for start in range(0, n, step := max(1, _AT_ONCE // longest)):
        part = records[start : start + step]
        own = part[:, SPREADS : SPREADS + longest]
        leading = own[:, :LEADING].clamp(max=MOST)
        coarse = torch.div(own[:, LEADING:].float(), STEP).round_().clamp_(-8, 7)
        nibbles = coarse.to(torch.int8)
        low = ((leading + 8) & 15) - 8
        codes[start : start + step, :LEADING] = (leading - low) | (low & 15)
        codes[start : start + step, LEADING:] = (nibbles[:, 1::2] << 4) | (nibbles[:, 0::2] & 15)
        lost = (torch.cat([leading, coarse * STEP], -1) - own).mul_(unit[:longest]).square_().cumsum_(-1)
        for tier, length in enumerate(tiers):
            kept = part[:, tier].view(torch.uint8).float() * steps[tier]
            total = kept.square_() + lost[:, length - 1]
            deviations[tier, start : start + step] = total.sqrt_()
    largest = (deviations.amax(-1).clamp_min(1e-30) / LEVELS).tolist()
    scale = torch.tensor(largest, device=records.device)[:, None]
    spreads = (deviations / scale).ceil_().clamp_(1, LEVELS).byte()
    return Packed(codes, spreads, largest)


def widen(codes: Tensor) -> Tensor:
    """Packed codes as matrix units read them: the high ones, then the low ones, 16 times as large.

    Example:
        >>> widen(torch.tensor([[0x2F, 0x71]], dtype=torch.int8)).tolist()
        [[32, 112, -16, 16]]
    """
    return torch.cat([codes & -16, codes << 4], -1)


def unpack(codes: Tensor, length: int) -> Tensor:
    """What packed codes stand for, in codes of eight bits. (rows, length)"""
    high, low = widen(codes[:, : size_of(length)]).chunk(2, -1)
    pairs = torch.stack([low, high], -1) >> 4
    leading = pairs[:, :LEADING, 0] + 16 * pairs[:, :LEADING, 1]
    return torch.cat([leading, STEP * pairs[:, LEADING:].flatten(1)], -1).float()
