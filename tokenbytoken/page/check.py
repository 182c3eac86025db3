"""Checks that a reader sees: one line each, the same on every processor, and each shown to be able to fail.

:func:`close` asserts and prints a bound instead of an error's digits, because digits differ between
processors. :func:`caught` runs the same comparison on a wrong variant, which must fail. :func:`answer`
looks at a reader's answer and names the likely slip.
"""

from __future__ import annotations

from numbers import Real
from types import EllipsisType
from typing import Any, cast

import numpy as np
import torch

from .answers import question, title

__all__ = ["answer", "caught", "close"]

MARGIN = 10.0  # a wrong variant must miss by this many tolerances: less would be luck, not a check


def close(got: Any, want: Any, tolerance: float, *, label: str, why: str = "") -> None:
    """Assert that ``got`` equals ``want`` within ``tolerance`` × the largest magnitude in ``want``.

    ``got`` and ``want`` are tensors, arrays, numbers or nested lists of one shape; complex numbers are compared by
    the magnitude of their difference. Infinities must stand in the same places with the same sign; a NaN never
    passes, nor does an empty pair. With ``tolerance=0`` every element must be equal. Raises AssertionError, and
    ValueError for what is no number; prints one line when all is well.
    """
    error, fault = _error(got, want, tolerance)
    if fault:
        raise AssertionError(f"{label}: {fault}")
    if not error <= tolerance:
        bound = "equality" if tolerance == 0 else f"{_short(tolerance)} of scale"
        raise AssertionError(f"{label}: the largest error is {error:.2g} of scale, allowed is {bound}")
    bound = "equal, every element" if tolerance == 0 else f"largest error ≤ {_short(tolerance)} of scale"
    print(f"{label}: {bound}" + (f" ({why})" if why else ""))


def caught(wrong: Any, want: Any, tolerance: float, *, label: str) -> None:
    """Assert that a wrong variant fails the check that the right one passes, and fails it clearly.

    It must miss by more than ten tolerances (by anything, when the tolerance is 0), so that the line
    printed is the same on every processor. Raises AssertionError when the check would let it pass.
    """
    error, fault = _error(wrong, want, tolerance)
    right = _tensor(want)
    if right.numel() == 0 or bool(right.isnan().any()):
        raise AssertionError(f"{label}: there is nothing to compare with")
    if fault:
        print(f"{label}: caught ({fault})")
        return
    limit = MARGIN * tolerance
    if not error > limit:
        raise AssertionError(f"{label}: not caught, its error is only {error:.2g} of scale, {_short(limit)} is asked")
    print(f"{label}: caught" + (f" (error > {_short(limit)} of scale)" if tolerance else " (not equal)"))


def answer(key: str, value: Any, unit: str = "") -> None:
    """Look at a reader's answer to the question ``key`` and print one line: correct, or what slipped.

    ``None`` or ``...`` is an answer not given yet: of it only the number of the exercise is printed. Whole numbers
    and texts must match exactly, whatever the type of the number; a fraction within 0.5 % or the question's own
    tolerance, and never by more than twice that. What is expected stands in ``book/data/answers.json``, and not to be
    read (:mod:`tokenbytoken.page.answers`). Raises ValueError for a key that the book does not have.
    """
    asked = question(key)
    if value is None or isinstance(value, EllipsisType):
        print(title(key))
        return
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        value = value.item()  # a number that a tensor or an array wraps
    reply = asked.reply(value)
    verdict = "not yet" if reply is None else f"not yet ({reply})" if reply else "correct"
    print(_show(value) + (f" {unit}" if unit else "") + f": {verdict}")


def _error(got: Any, want: Any, tolerance: float) -> tuple[float, str]:
    """(largest |got − want| ÷ largest finite |want|, what makes a comparison impossible or '')."""
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be in [0, 1), not {tolerance}: it is relative to the scale")
    a, b = _tensor(got), _tensor(want)
    if a.shape != b.shape:
        return 0.0, f"shape {tuple(a.shape)} is not {tuple(b.shape)}"
    if a.numel() == 0:
        return 0.0, "nothing to compare"
    same = a == b  # infinities of one sign included, which would give inf − inf below
    if bool(same.all()):
        return 0.0, ""
    if bool((a.isnan() | b.isnan()).any()):
        return 0.0, "not a number"
    # Integers beyond 2⁵³ may differ and still be equal as doubles: unequal stays unequal.
    a, b = _wide(a), _wide(b)
    gap = torch.where(same, 0.0, (a - b).abs())
    finite = b.abs()[b.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    largest = float(gap.max())
    return (largest / scale if scale > 0 and largest > 0 else float("inf")), ""


def _tensor(value: Any) -> torch.Tensor:
    # Through numpy, which reads a list of Python floats as the doubles that they are.
    try:
        tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):  # texts, None, rows of unequal length, integers of more than 64 bits
        raise ValueError(f"only tensors, arrays, numbers and lists of them can be compared, not {value!r}") from None
    if tensor.is_floating_point() and tensor.element_size() < 4:
        tensor = tensor.float()  # exact, and every operation knows float32 (FP8 lacks most)
    return tensor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision; a complex number keeps both of its parts."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _show(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    number = cast(Any, value)
    return f"{int(number):,}" if float(number).is_integer() else f"{number:,.4g}"


def _short(number: float) -> str:
    """1e-05 as 1e-5, the way a person writes it."""
    mantissa, _, exponent = f"{number:.2g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
