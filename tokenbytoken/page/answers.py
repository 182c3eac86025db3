"""Expected answers that nobody can read: digests in ``book/data/answers.json``, the reply to each slip beside its own.

A chapter's cell names a question, not its answer, so that neither the page nor the notebook gives it away. A fraction
is looked up by its place on a logarithmic grid (0.5 % from cell to cell unless the question has its own), and its two
neighbours count as the same; whatever else is looked up as it is. ``book/_tools/answers.py`` writes the file from the
authors' list of plain values, by the functions below.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from numbers import Integral, Real
from typing import Any

from .._paths import book_file, read_json

__all__ = ["GRID", "Question", "digest", "forms", "question", "title"]

GRID = 0.005
MOST_FORMS = 3**6  # those of six fractions: no question asks for more at once
FILE = "data/answers.json"
KEY = re.compile(r"ex-(?P<chapter>\d\d)-(?P<exercise>\d+)(?P<part>[a-z]?)")


@dataclass(frozen=True)
class Question:
    """What is known of one question: the digest of its answer, of each slip, and the grid where they are fractions."""

    key: str
    right: str
    slips: Mapping[str, str]  # digest → reply
    grid: float | None

    def reply(self, value: Any) -> str | None:
        """``""`` for the right answer, the words about a known slip, None for any other value."""
        found = [digest(self.key, form) for form in forms(value, self.grid)]
        if self.right in found:
            return ""
        return next((self.slips[one] for one in found if one in self.slips), None)


def question(key: str) -> Question:
    """The question of that key, such as ``"ex-04-1a"``. Raises ValueError for one that the book does not have."""
    try:
        entry = _entries()[key]
    except (KeyError, TypeError):  # a number, or a list, where the key should stand
        raise ValueError(f"no exercise of the book has the key {key!r}: they stand in book/{FILE}") from None
    return Question(key, entry["right"], entry.get("slips", {}), entry.get("grid"))


@cache
def _entries() -> dict[str, Any]:
    return read_json(book_file(FILE))


def title(key: str) -> str:
    """What a reader calls the question: Exercise 4.1a for ``ex-04-1a``. Raises ValueError for what is no key."""
    match = KEY.fullmatch(key)
    if not match:
        raise ValueError(f"{key!r} is no key: ex, chapter, number of the exercise, as in ex-04-1 or ex-04-1a")
    return f"Exercise {int(match['chapter'])}.{match['exercise']}{match['part']}"


def digest(key: str, form: str) -> str:
    """Twelve hex digits of one form of a value, others for each question."""
    return hashlib.sha256(f"{key}\n{form}".encode()).hexdigest()[:12]


def forms(value: Any, grid: float | None = None) -> list[str]:
    """The forms under which a value may be on file, its own first. What cannot be an answer has none.

    With a grid, numbers but 0 have three: their own cell and its neighbours, so that a value within one cell's width
    always counts as the same, and one more than two cells away never does. Without, a number is what it is to
    twelve digits, whatever its type: 8.0 is 8. Of a text neither case nor spaces around it matter; of a sequence (a
    tensor, too) each element is looked up. True and False are no numbers.
    """
    if hasattr(value, "tolist"):  # tensors and arrays, and the numbers that they wrap
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        found = [forms(item, grid) for item in value]
        if math.prod(map(len, found)) > MOST_FORMS:
            return []  # a hundred fractions are no answer, and would have more forms than memory holds
        return [f"({', '.join(parts)})" for parts in product(*found)]
    if isinstance(value, str):
        return [f'"{value.strip().casefold()}"']
    if isinstance(value, bool):
        return [str(value)]
    if not isinstance(value, Real):
        return []
    if grid and math.isfinite(value) and value != 0:
        cell, sign = round(math.log(abs(value)) / math.log1p(grid)), "-" if value < 0 else "+"
        return [f"{sign}{one}" for one in (cell, cell - 1, cell + 1)]
    return [_exact(value)]


def _exact(value: Any) -> str:
    if isinstance(value, Integral):
        return str(int(value))
    number = float(value)
    if math.isfinite(number) and abs(number - round(number)) <= 1e-12 * abs(number):
        return str(round(number))
    return f"{number:.12g}"
