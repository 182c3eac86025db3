"""One rule for the numbers that a caller hands in: Python's, numpy's and torch's pass, a bool or a text never does.

Each function returns the plain Python number, or raises a ValueError that names what is wrong. A symbol passes
unseen, so that closed forms can be traced; its value is checked by whoever gives it one.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any

from ._algebra import is_symbolic

#: No index is larger, and products of several such numbers still fit a float.
LIMIT = 2**63


def whole(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an integer of at least ``least``; a float is refused, even one without a fraction."""
    if is_symbolic(value):
        return value
    number = _plain(value)
    if not isinstance(number, int) or number < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {kind}, not {value!r}")
    if number > LIMIT:
        raise ValueError(f"{name} must be below 2^63")
    return number


def positive(name: str, value: Any) -> float:
    """``value`` as a number above 0. Integers stay integers, so that sums of bytes stay exact."""
    if is_symbolic(value):
        return value
    number = _plain(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be a number above 0, not {value!r}")
    if not 1 / LIMIT <= number <= LIMIT:
        raise ValueError(f"{name} must lie between 2^-63 and 2^63")
    return number


def not_negative(name: str, value: Any) -> float:
    """``value`` as a finite number of at least 0."""
    if is_symbolic(value):
        return value
    number = _plain(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return number


def share(name: str, value: Any) -> float:
    """``value`` as a number above 0 and at most 1."""
    if not is_symbolic(value) and not 0 < _plain(value) <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, not {value!r}")
    return positive(name, value)


def _plain(value: Any) -> float:
    """A Python number, or NaN, which lies in no range, for what is none."""
    if type(value) in (int, float):
        return value
    if isinstance(value, (bool, str, bytes)) or str(getattr(value, "dtype", "")).endswith("bool"):
        return math.nan
    for convert in (index, float):
        try:
            return convert(value)
        except (TypeError, ValueError, RuntimeError):  # torch raises a RuntimeError for a tensor of several numbers
            continue
        except OverflowError:
            return math.inf
    return math.nan
