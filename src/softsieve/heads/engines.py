"""Which engine answers for a method on a device: the one place that knows them all."""

from __future__ import annotations

from softsieve.heads.cascade.cpu import CpuCascade
from softsieve.heads.cascade.gpu import GpuCascade, reason_against
from softsieve.heads.coordinates import Coordinates
from softsieve.heads.engine import Engine, Options
from softsieve.heads.exact import Exact
from softsieve.heads.quantised import QuantisedWeight, Weight


def engine_for(options: Options, weight: Weight) -> type[Engine]:
    """The class of the engine for checked options."""
    if options.method == "coordinates":
        return Coordinates
    if options.method == "cascade" and options.guarantee == "pac":
        from softsieve.heads.dithered import Dithered  # needs numba

        return Dithered
    if options.method == "exact" or options.guarantee == "pac" or reason_against_cascade(weight) is not None:
        return Exact
    return CpuCascade if weight.is_cpu else GpuCascade


def check_cascade(what: str, options: Options, weight: Weight) -> None:
    """Refuse options and a weight for which there is no calibrated cascade.

    Raises:
        ValueError: naming ``what`` needs one.
    """
    if options.method not in ("auto", "cascade") or options.guarantee != "calibrated":
        raise ValueError(
            f"{what}: expected method='cascade' or 'auto' and guarantee='calibrated', "
            f"found {options.method!r} and {options.guarantee!r}"
        )
    reason = reason_against_cascade(weight)
    if reason is not None:
        raise ValueError(f"method: no cascade here: {reason}")


def reason_against_cascade(weight: Weight) -> str | None:
    """Why there can be no cascade for a weight; None when there can be one."""
    if weight.is_cpu:
        return None
    return (
        "a quantised weight has one on a CPU alone" if isinstance(weight, QuantisedWeight) else reason_against(weight)
    )
