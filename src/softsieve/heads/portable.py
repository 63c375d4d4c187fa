"""Heads that can be moved, saved, loaded, copied and pickled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from softsieve import _checks
from softsieve.errors import InputError, first_line
from softsieve.heads import weightless
from softsieve.heads.engine import Engine, Layer, Options, Promise, State
from softsieve.heads.engines import check_cascade
from softsieve.heads.modes import in_own_modes, ordinary, own_modes
from softsieve.heads.quantised import QuantisedWeight, Weight, from_tensors, to_tensors

Head = TypeVar("Head", bound="Portable")
SETTINGS = ("eps", "delta", *Options._fields)


class Portable:
    """What `AdaptiveSoftmax` is made of, as tensors and settings."""

    if TYPE_CHECKING:
        weight: Any
        bias: Tensor | None
        _device_type: str
        _engine: Engine | None
        _kind: type[Engine]
        _layer: Layer

        @property
        def _promise(self) -> Promise: ...

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to change what engines were made with. ``eps`` and ``delta`` may change, and ask for a calibration."""
        if name in Options._fields and name in self.__dict__:
            raise AttributeError(f"{name}: fixed when a head is made: make another one")
        super().__setattr__(name, value)

    @in_own_modes
    def to(self: Head, device: torch.device | str) -> Head:
        """The same head on another device, with an index that has not to be built again.

        Calibrations stay with the kind of device they were made on: a CPU and a GPU read in different steps.

        Raises:
            WeightChanged: when the weight is not the one that the index or the calibrations were made for.
            ValueError: when torch cannot use the device.

        Example:
            >>> from softsieve import AdaptiveSoftmax
            >>> AdaptiveSoftmax(torch.eye(2), eps=0.1).to("cpu").eps
            0.1
        """
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"device: expected one that torch can use, found {device!r}: {first_line(error)}"
            ) from error
        tensors, settings, _ = self._state()
        return type(self)._from_state(State({name: value.to(device) for name, value in tensors.items()}, settings))

    @in_own_modes
    def save(self, path: str | os.PathLike[str], *, weight: bool = True) -> None:
        """Write everything to one safetensors file, all or nothing.

        Args:
            weight: whether the weight and the bias are written, too. If not, `load` needs them as arguments.

        Raises:
            InputError: when it cannot be written; an older file stays as it was.
            WeightChanged: when the weight is not the one that the index or the calibrations were made for.
        """
        from softsieve.heads import index_file  # needs safetensors

        file = _file(path)
        tensors, settings, _ = self._state()
        if not weight:
            weightless.remove_weight(tensors, settings)
        index_file.write(file, tensors, settings)

    @classmethod
    def load(
        cls: type[Head], path: str | os.PathLike[str], *, weight: Weight | None = None, bias: Tensor | None = None
    ) -> Head:
        """Read what `save` wrote. Executes nothing.

        Args:
            weight, bias: those of the head, if it was saved without. They are used where they are, not copied.

        Raises:
            InputError: when a file cannot be read, is truncated, or is not a saved head; when a weight or bias is not
                the one that the file was made of, is missing, or is an argument for a file that has its own.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> from softsieve import AdaptiveSoftmax
            >>> weight = torch.randn(1000, 64)
            >>> with TemporaryDirectory() as folder:
            ...     AdaptiveSoftmax(weight, eps=0.1).save(f"{folder}/head.safetensors", weight=False)
            ...     AdaptiveSoftmax.load(f"{folder}/head.safetensors", weight=weight).eps
            0.1
        """
        from softsieve.heads import index_file  # needs safetensors

        file = _file(path)
        try:
            with own_modes(weight.device.type if isinstance(weight, Tensor | QuantisedWeight) else "cpu"):
                tensors, settings = index_file.read(file)
                weightless.add_weight(Path(path), tensors, settings, weight, bias)
                head = cls._from_state(State(tensors, settings))
                if weight is None and head._engine is not None:  # one that is an argument was compared
                    head._engine.check_weight()
                return head
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{path}: broken: {first_line(error)}") from error

    def _state(self, *, check: bool = True) -> State:
        """Tensors and settings that `_from_state` makes the same head of.

        Raises:
            WeightChanged: when what was fitted to the weight was fitted to another one, if that is to be checked.
        """
        engine, tensors = self._engine, to_tensors(self.weight)
        if self.bias is not None:
            tensors["bias"] = self.bias.clone()  # it may be a part of the weight, which files cannot say
        settings: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS}
        if engine is None:
            return State(tensors, {**settings, "calibrations": {}, "elsewhere": {}})
        if check:
            engine.check_weight()
        own = engine.state()
        return State(tensors | own.tensors, settings | own.settings, engine.fitted_to)

    @classmethod
    def _from_state(cls: type[Head], state: State) -> Head:
        """The head of what `_state` gave, whose dictionaries are used up."""
        tensors, settings, _ = state
        options = {name: settings.pop(name) for name in SETTINGS}
        head = cls(from_tensors(tensors), tensors.pop("bias", None), **options)  # type: ignore[call-arg]
        fits = {**settings["calibrations"], **settings.get("elsewhere", {})}
        if "index.centre" in tensors:
            check_cascade("index", head._layer.options, head.weight)
        elif head._engine is None and fits:
            raise ValueError(f"calibrations.{next(iter(fits))}: expected an index with it, found none")
        if head._engine is not None or "index.centre" in tensors:
            head._engine = head._kind.from_state(head._layer, head._promise, state)
        for name in ("calibrations", "elsewhere"):
            if not settings.get(name, True):
                del settings[name]
        if settings or tensors:
            raise ValueError(f"unexpected content {sorted({*settings, *tensors})}")
        return head

    # Engines have memory of their threads, locks and graphs: copies make their own.

    def __getstate__(self) -> dict[str, Any]:
        return self._state(check=False)._asdict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(self.from_copy(state).__dict__)

    @classmethod
    def from_copy(cls: type[Head], state: dict[str, Any]) -> Head:
        """A head from what `__getstate__` gave. The copy of one that refuses its weight refuses it, too."""
        tensors, settings, fitted_to = State(**state)
        with own_modes(next(iter(tensors.values())).device.type):
            return cls._from_state(State(ordinary(tensors), dict(settings), fitted_to))


def _file(path: str | os.PathLike[str]) -> Path:
    file = _checks.path("path", path)
    if not file.name:
        raise InputError(f"path: expected the one of a file, found {str(path)!r}")
    return file
