"""One table in two forms: HTML for the page, aligned text for everything that compares or prints.

A chapter ends a cell with ``tbt.table(rows, columns)``. The notebook then stores both forms, and the notebook tests
compare both, what was measured (between ⟨ and ⟩) blanked in either. Knows neither torch nor the rest of the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Real
from typing import Any

__all__ = ["Table", "table"]

Format = str | Callable[[Any], str]

MARKER = re.compile("⟨[^⟨⟩\n]*⟩")
MARKER_WIDTH = 10  # letters that a measured value takes in text, its marks included, whatever it is
GAP = "   "
NOTHING = "–"
PHRASE = 60  # letters from which a text is set in several lines in the page


@dataclass(frozen=True)
class Table:
    """Heads and cells as text, and which columns hold numbers. Made by :func:`table`."""

    heads: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    numbers: tuple[bool, ...]
    caption: str = ""

    def __str__(self) -> str:
        """Aligned text, the caption above.

        A measured value is padded inside its marks and never widens its column: the rest of the text is the same
        whatever was measured.
        """
        columns = list(zip(self.heads, *self.cells, strict=True))
        widths = [max(map(_width, column)) for column in columns]
        lines = [GAP.join(map(_set, line, widths, self.numbers)).rstrip() for line in (self.heads, *self.cells)]
        return "\n".join([self.caption, *lines] if self.caption else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """A plain table: heads of columns and rows are ``th`` with a scope, numbers have the class ``number``, and a
        column of sentences ``words``: it alone may break lines."""
        heads = "".join(map(self._head, range(len(self.heads))))
        lines = ['<table class="tbt">']
        lines += [f"<caption>{_html(self.caption)}</caption>"] if self.caption else []
        lines += [f"<thead>\n<tr>{heads}</tr>\n</thead>", "<tbody>"]
        for first, *rest in self.cells:
            cells = "".join(f"<td{self._class(i)}>{_html(text)}</td>" for i, text in enumerate(rest, start=1))
            lines.append(f'<tr><th scope="row">{_html(first)}</th>{cells}</tr>')
        return "\n".join([*lines, "</tbody>", "</table>"])

    def _head(self, column: int) -> str:
        if not self.heads[column]:
            return "<td></td>"  # a head without words is no head: nothing to read out
        return f'<th scope="col"{self._class(column)}>{_html(self.heads[column])}</th>'

    def _class(self, column: int) -> str:
        if self.numbers[column]:
            return ' class="number"'
        return ' class="words"' if any(len(line[column]) > PHRASE for line in self.cells) else ""


def table(
    rows: Iterable[Sequence[Any]], columns: Mapping[str, Format] | Sequence[str], *, caption: str = ""
) -> Table:
    """A table of numbers and texts: aligned text when printed, HTML where a notebook shows it.

    ``columns`` maps each head (with its unit, as in ``"time (ms)"``) to the format of what stands below it: a format
    spec (``",.1f"``), a function from value to text, or ``""`` for values as they are. A list of heads formats
    nothing. Texts keep their words under a spec for numbers, so that a column may hold what
    :func:`tokenbytoken.measure.measured` made; ``None`` is a dash. The first column stands left, as the head of its
    row; of the others those stand right that hold a number, a measured value, or have the spec ``">"``.

    Raises ValueError for no column, a row of another length, or a value that its format does not fit.

    >>> table([("Llama 3.1 8B", 131_072, 16.06), ("Mamba 2.8B", None, 5.54)],
    ...       {"model": "", "context": ",", "weights (GB)": ".1f"})
    model          context   weights (GB)
    Llama 3.1 8B   131,072           16.1
    Mamba 2.8B           –            5.5
    """
    formats = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, "")
    if not formats or len(formats) < len(columns):
        raise ValueError("a table needs columns, each with a head of its own")
    cells: list[tuple[str, ...]] = []
    numbers = [form == ">" for form in formats.values()]
    for number, row in enumerate(rows, start=1):
        values = [_plain(value) for value in row]
        if len(values) != len(formats):
            raise ValueError(f"row {number} has {len(values)} values for {len(formats)} columns: {tuple(row)!r}")
        line = tuple(_text(value, form, head) for value, (head, form) in zip(values, formats.items(), strict=True))
        cells.append(line)
        for i, (value, text) in enumerate(zip(values, line, strict=True)):
            numbers[i] |= _is_number(value) or MARKER.fullmatch(text) is not None
    return Table(tuple(formats), tuple(cells), (False, *numbers[1:]), caption)


def _plain(value: Any) -> Any:
    """The number inside a tensor or an array of one element; anything else as it is."""
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _text(value: Any, form: Format, head: str) -> str:
    if value is None:
        return NOTHING
    try:
        if not isinstance(form, str):
            text = form(value)
        else:
            text = format(value, form) if form != ">" and _is_number(value) else str(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {head!r}: {value!r} does not fit the format {form!r} ({error})") from None
    if not isinstance(text, str) or "\n" in text:
        raise ValueError(f"column {head!r}: a cell is one line of text, not {text!r}")
    return text


def _width(text: str) -> int:
    """Letters that a cell takes: for a measured value always as many, or those of the padding that it brings."""
    return len(MARKER.sub(lambda marker: "x" * _reserved(marker[0]), text))


def _reserved(marker: str) -> int:
    return len(marker) if marker.startswith("⟨ ") else MARKER_WIDTH


def _set(text: str, width: int, right: bool) -> str:
    """The cell in its column. Padding goes inside a measured value's marks, whose content the tests do not see."""
    if right and MARKER.fullmatch(text):
        return f"⟨{text[1:-1].strip():>{width - 2}}⟩"
    outside = " " * (width - _width(text))
    text = MARKER.sub(lambda marker: f"⟨{marker[0][1:-1].strip():>{_reserved(marker[0]) - 2}}⟩", text)
    return outside + text if right else text + outside


def _html(text: str) -> str:
    """Escaped; padding inside marks is for text alone."""
    return escape(re.sub("⟨ +", "⟨", text))
