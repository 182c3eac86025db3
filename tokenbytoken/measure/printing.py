"""A measured value on the page: between ⟨ and ⟩, to two digits, beside what was predicted for it."""

from __future__ import annotations

import math
from typing import Any

from .timing import Timing

__all__ = ["Calibrated", "measured", "show"]


class Calibrated(float):
    """A number that rests on a measurement, so that :func:`show` marks it; sums and multiples are too."""

    def __add__(self, other: Any) -> Calibrated:
        return Calibrated(float(self) + other)

    def __sub__(self, other: Any) -> Calibrated:
        return Calibrated(float(self) - other)

    def __rsub__(self, other: Any) -> Calibrated:
        return Calibrated(other - float(self))

    def __mul__(self, other: Any) -> Calibrated:
        return Calibrated(float(self) * other)

    def __truediv__(self, other: Any) -> Calibrated:
        return Calibrated(float(self) / other)

    def __rtruediv__(self, other: Any) -> Calibrated:
        return Calibrated(other / float(self))

    __radd__ = __add__
    __rmul__ = __mul__


# What one printed unit holds, in base units.
_UNITS = {
    "": 1.0, "×": 1.0, "%": 1e-2, "tokens/s": 1.0, "FLOP/byte": 1.0,
    "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9,
    "bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
    "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
    "GFLOP": 1e9, "TFLOP": 1e12, "GFLOP/s": 1e9, "TFLOP/s": 1e12,
}  # fmt: skip


def measured(value: float | Timing, unit: str = "") -> str:
    """A measured value, marked and to two digits: ``measured(0.0031, "ms")`` is ``⟨3.1 ms⟩``.

    ``value`` is in base units (seconds, bytes, FLOP/s); ``unit`` says how to print it. Raises ValueError for
    a unit that is not known.
    """
    return f"⟨{in_unit(value.median if isinstance(value, Timing) else value, unit)}⟩"


def show(
    label: str,
    measured: float | Timing,
    predicted: float | None = None,
    unit: str = "ms",
    timing: Timing | None = None,
) -> None:
    """Print one line: label, measured (and its spread), predicted, and measured ÷ predicted.

    Values are in base units, like those of :func:`measured`. A :class:`Timing` brings its spread, the middle
    half of its runs. A prediction from a :class:`Calibration` is marked like a measured value; any other is
    printed to three digits and compared by the tests.
    """
    if isinstance(measured, Timing):
        timing = timing or measured
        measured = measured.median
    line = f"{label}: ⟨{in_unit(measured, unit)}⟩"
    if timing is not None:
        disturbed = ", machine busy" if timing.busy else ""
        low, high = (_digits(value / _UNITS[unit], 2) for value in (timing.low, timing.high))
        line += f" (⟨{low} to {high}{disturbed}⟩)"
    if predicted is not None:
        if not predicted > 0:
            raise ValueError(f"{label}: predicted must be positive, not {predicted}")
        rests = isinstance(predicted, Calibrated)
        line += f", predicted ⟨{in_unit(predicted, unit)}⟩" if rests else f", predicted {in_unit(predicted, unit, 3)}"
        line += f", measured ÷ predicted ⟨{_digits(measured / predicted, 2)}⟩"
    print(line)


def in_unit(value: float, unit: str, digits: int = 2) -> str:
    """``value``, given in base units, to so many digits and with its unit. ValueError for a unit that is not known."""
    if unit not in _UNITS:
        raise ValueError(f"unit {unit!r} is not one of {', '.join(filter(None, _UNITS))}")
    return f"{_digits(value / _UNITS[unit], digits)} {unit}".rstrip()


def _digits(value: float, digits: int) -> str:
    """``value`` rounded to so many significant digits, without an exponent: 0.69, 3.1, 12, 4,500."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    return f"{round(value, places):,.{max(places, 0)}f}"
