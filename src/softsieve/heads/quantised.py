"""Quantised weights: rows of whole numbers with scales, which are dequantised when they are read."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from softsieve import _checks

DIGITS = 16  # codes of 4 bits
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


class QuantisedWeight:
    """A matrix (n, d) of codes in groups, each with a scale and perhaps a minimum.

    Defined by the rows that it stands for, here of 8 bits::

        group = d // scales.shape[1]
        rows = codes.float() * scales.float().repeat_interleave(group, 1)
        rows += minimums.float().repeat_interleave(group, 1)

    Codes of 4 bits are numbers of ``levels``: with 0, 1, ... 15 and a minimum they are GGUF's Q4_K and the integers of
    most packages, with other levels NF4 and its like. `from_digits` packs them.

    It has a tensor's words for what `AdaptiveSoftmax` needs of a weight: ``shape``, ``len``, rows by number or slice,
    and ``to`` and ``float``, which dequantise. Its tensors are kept without a copy, if they are contiguous.

    Args:
        codes: (n, d) int8; or (n, d / 2) uint8, two codes of 4 bits a byte: in the lower half those of the first half
            of a group, in the upper half those of the second.
        scales: (n, groups), of float16, bfloat16 or float32. Groups divide d evenly; one group: a scale a row.
        minimums: like the scales, what code 0 stands for; none: 0.
        levels: (16,) float32, what codes of 4 bits stand for before scale and minimum; 0 to 15 unless given.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was found.

    Example:
        >>> weight = QuantisedWeight(torch.tensor([[2, -1, 4, 0]], dtype=torch.int8), torch.tensor([[0.5, 0.25]]))
        >>> tuple(weight.shape), weight.float().tolist()
        ((1, 4), [[1.0, -0.5, 1.0, 0.0]])
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, minimums: Tensor | None = None, *, levels: Tensor | None = None
    ) -> None:
        _check(codes, scales, minimums, levels)
        self.codes, self.scales = codes.detach().contiguous(), scales.detach().contiguous()
        self.minimums = None if minimums is None else minimums.detach().contiguous()
        if codes.dtype == torch.uint8 and levels is None:
            levels = torch.arange(DIGITS, dtype=torch.float32, device=codes.device)
        self.levels = None if levels is None else levels.detach().contiguous()

    @classmethod
    def from_digits(
        cls, digits: Tensor, scales: Tensor, minimums: Tensor | None = None, *, levels: Tensor | None = None
    ) -> QuantisedWeight:
        """The same from codes of 4 bits that are not packed yet: (n, d), whole numbers from 0 to 15.

        Example:
            >>> QuantisedWeight.from_digits(torch.tensor([[1, 15]]), torch.ones(1, 1), -torch.ones(1, 1)).float()
            tensor([[ 0., 14.]])
        """
        for name, value in {"digits": digits, "scales": scales}.items():
            if _checks.tensor(name, value).ndim != 2:
                raise ValueError(f"{name}: expected a matrix, found shape {tuple(value.shape)}")
        if digits.is_floating_point() or not bool(((digits >= 0) & (digits < DIGITS)).all()):
            raise ValueError(f"digits: expected whole numbers from 0 to {DIGITS - 1}, found others")
        (rows, size), groups = digits.shape, scales.shape[1]
        if not groups or size % (2 * groups):
            raise ValueError(f"scales: expected as many as divide {size} into groups of even size, found {groups}")
        halves = digits.to(torch.uint8).view(rows, groups, 2, -1)
        packed = (halves[:, :, 0] | halves[:, :, 1] << 4).view(rows, size // 2)
        return cls(packed, scales, minimums, levels=levels)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self)})"

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice | Tensor) -> QuantisedWeight:
        """Some rows, as they are."""
        some = object.__new__(type(self))  # parts of what was checked
        some.codes, some.scales, some.levels = self.codes[rows], self.scales[rows], self.levels
        some.minimums = None if self.minimums is None else self.minimums[rows]
        return some

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.codes.shape[1] * (1 if self.levels is None else 2)))

    @property
    def group(self) -> int:
        """Entries of a row that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """That of the codes."""
        return self.codes.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cpu(self) -> bool:
        return self.codes.is_cpu

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.nbytes for part in self.row_parts)

    @property
    def row_parts(self) -> list[Tensor]:
        """What has a row for each row: codes, scales and, if there are some, minimums."""
        return [part for part in (self.codes, self.scales, self.minimums) if part is not None]

    def numel(self) -> int:
        return self.shape.numel()

    def detach(self) -> QuantisedWeight:
        return self

    def float(self) -> Tensor:
        """The rows, dequantised."""
        return self.to(torch.float32)

    def double(self) -> Tensor:
        return self.to(torch.float64)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The rows, dequantised in a dtype."""
        (rows, size), groups = self.shape, self.scales.shape[1]
        if self.levels is None:
            values = self.codes.to(dtype).view(rows, groups, -1)
        else:
            digits = self.codes.view(rows, groups, 1, -1)
            halves = torch.cat([digits & 15, digits >> 4], 2)
            values = self.levels.to(dtype)[halves.int()].view(rows, groups, -1)
        values = values.mul_(self.scales.to(dtype)[..., None])
        if self.minimums is not None:
            values = values.add_(self.minimums.to(dtype)[..., None])
        return values.view(rows, size)

    def __deepcopy__(self, memo: dict[int, object]) -> QuantisedWeight:
        again: QuantisedWeight = from_tensors({name: value.clone() for name, value in to_tensors(self).items()})
        return again


Weight: TypeAlias = Tensor | QuantisedWeight  # what a head may have


def _check(codes: Tensor, scales: Tensor, minimums: Tensor | None, levels: Tensor | None) -> None:
    _checks.tensor("codes", codes)
    if codes.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"codes: expected int8, or uint8 of two codes a byte, found {codes.dtype}")
    if codes.ndim != 2 or not codes.numel():
        raise ValueError(f"codes: expected a non-empty matrix, found shape {tuple(codes.shape)}")
    packed = codes.dtype == torch.uint8
    size = codes.shape[1] * (2 if packed else 1)
    for name, part in {"scales": scales, **({} if minimums is None else {"minimums": minimums})}.items():
        if _checks.tensor(name, part).dtype not in _SCALES:
            raise TypeError(f"{name}: expected float16, bfloat16 or float32, found {part.dtype}")
        rows, groups = part.shape if part.ndim == 2 else (0, 0)
        if rows != len(codes) or not groups or size % (groups * (2 if packed else 1)):
            even = " of even size" if packed else ""
            raise ValueError(
                f"{name}: expected {len(codes)} rows of as many as divide {size} into groups{even}, "
                f"found shape {tuple(part.shape)}"
            )
        _like(name, part, codes)
        _checks.finite(name, part)
    if minimums is not None and (minimums.shape != scales.shape or minimums.dtype != scales.dtype):
        raise ValueError(
            f"minimums: expected {scales.dtype} of shape {tuple(scales.shape)}, like the scales, "
            f"found {minimums.dtype} of shape {tuple(minimums.shape)}"
        )
    if levels is not None:
        if not packed:
            raise ValueError("levels: expected none, because codes of 8 bits stand for themselves, found some")
        if _checks.tensor("levels", levels).dtype != torch.float32 or levels.shape != (DIGITS,):
            raise ValueError(
                f"levels: expected {DIGITS} numbers of float32, found {levels.dtype} of shape {tuple(levels.shape)}"
            )
        _like("levels", levels, codes)
        _checks.finite("levels", levels)


def _like(name: str, part: Tensor, codes: Tensor) -> None:
    if part.device != codes.device:
        raise ValueError(f"{name}: expected device {codes.device}, where the codes are, found {part.device}")


def describe(weight: Weight) -> str:
    """What a weight is like, for messages and files.

    Example:
        >>> describe(torch.zeros(3, 2)), describe(QuantisedWeight(torch.zeros(3, 8).char(), torch.ones(3, 2)))
        ('float32 of shape (3, 2)', '8 bits in groups of 4 of shape (3, 8)')
    """
    if isinstance(weight, Tensor):
        return f"{str(weight.dtype).removeprefix('torch.')} of shape {tuple(weight.shape)}"
    bits = 8 if weight.levels is None else 4
    minimums = "" if weight.minimums is None else " with minimums"
    return f"{bits} bits in groups of {weight.group}{minimums} of shape {tuple(weight.shape)}"


# -- as tensors, for files, copies and other devices -------------------------------------------------------------------

_PREFIX = "weight."


def to_tensors(weight: Weight) -> dict[str, Tensor]:
    """The tensors of a weight by name."""
    if isinstance(weight, Tensor):
        return {"weight": weight}
    parts = {name: getattr(weight, name) for name in ("codes", "scales", "minimums", "levels")}
    return {_PREFIX + name: value for name, value in parts.items() if value is not None}


def from_tensors(tensors: dict[str, Tensor]) -> Any:
    """The weight of what `to_tensors` gave, which is taken out of other tensors.

    Raises:
        LookupError, TypeError, ValueError: when there is none, or one that cannot be.
    """
    if "weight" in tensors:
        return tensors.pop("weight")
    names = [name for name in tensors if name.startswith(_PREFIX)]
    parts = {name.removeprefix(_PREFIX): tensors.pop(name) for name in names}
    if not parts:
        raise KeyError("weight")
    return QuantisedWeight(**parts)
