"""The one table of the book: both of its forms say the same, and neither depends on what was measured."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook
from test_nbval import compare

import tokenbytoken as tbt

COLUMNS: dict[str, Any] = {"form": "", "tokens": ",", "time (ms)": tbt.measure.measured, "gain": ".2f"}


def blanked(text: str) -> str:
    return re.sub("⟨[^⟨⟩\n]*⟩", "<measured>", text)


class Reader(HTMLParser):
    """(tag, scope, class, words) of each cell, row by row, and every attribute that was seen."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, str | None, str | None, str]]] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        self.open, self.words = dict(attrs), ""

    def handle_data(self, data: str) -> None:
        self.words += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self.rows[-1].append((tag, self.open.get("scope"), self.open.get("class"), self.words))


def test_text_is_aligned() -> None:
    made = tbt.table([("cached", 2048, 31.4, 1.5), ("a longer name", 16, 4.0, None)], COLUMNS, caption="Two forms")
    assert str(made) == repr(made)
    assert str(made).split("\n") == [
        "Two forms",
        "form            tokens    time (ms)   gain",
        "cached           2,048   ⟨      31⟩   1.50",
        "a longer name       16   ⟨     4.0⟩      –",
    ]


def test_html_is_a_plain_table() -> None:
    made = tbt.table([("a < b & c", 2048, 31.4, 1.5)], COLUMNS, caption="x < y")
    page = Reader(made._repr_html_())
    assert page.tags[:4] == ["table", "caption", "thead", "tr"]
    assert page.attributes <= {"class", "scope"}
    assert page.rows == [
        [("th", "col", None, "form"), *(("th", "col", "number", head) for head in ("tokens", "time (ms)", "gain"))],
        [("th", "row", None, "a < b & c"), ("td", None, "number", "2,048"), ("td", None, "number", "⟨31⟩"),
         ("td", None, "number", "1.50")],
    ]  # fmt: skip
    assert "<caption>x &lt; y</caption>" in made._repr_html_()
    assert Reader(tbt.table([(1, 2)], {"": "", "n": ""})._repr_html_()).rows[0][0] == ("td", None, None, "")


def test_what_was_measured_changes_nothing_else() -> None:
    forms: dict[str, set[str]] = {"text": set(), "html": set()}
    for seconds in (0.0012, 3.1, 45_678.0, 1.2e12):
        rows = [("a", 7, seconds, 1.0), ("b", 70_000, 2 * seconds, 2.0)]
        marked = [*COLUMNS.items(), ("of all", lambda s: f"{tbt.measure.measured(s)} of 8")]
        made = tbt.table([(*row, row[2]) for row in rows], dict(marked))
        forms["text"].add(blanked(str(made)))
        forms["html"].add(blanked(made._repr_html_()))
    assert {name: len(found) for name, found in forms.items()} == {"text": 1, "html": 1}


def test_padding_that_a_caller_chose_is_kept_in_text_alone() -> None:
    made = tbt.table([("x", "⟨   8.43 s⟩")], ["", "t"])
    assert str(made).split("\n")[1] == "x   ⟨   8.43 s⟩"
    assert "<td class=\"number\">⟨8.43 s⟩</td>" in made._repr_html_()


def test_values_of_every_kind() -> None:
    rows = [("int", 3), ("numpy", np.int64(3)), ("tensor", torch.tensor(3)), ("done", "3 GB"), ("none", None)]
    assert [line.split()[1:] for line in str(tbt.table(rows, {"": "", "n": ".1f"})).split("\n")[1:]] == [
        ["3.0"], ["3.0"], ["3.0"], ["3", "GB"], ["–"]]  # fmt: skip
    assert tbt.table([("a", True), ("b", "no")], {"": "", "fits": ",.1f"}).numbers == (False, False)
    assert tbt.table([("a", "1 GB")], {"": "", "size": ">"}).numbers == (False, True)
    assert tbt.table([(1, 2)], ["T", "n"]).numbers == (False, True)  # the head of a row stands left
    assert str(tbt.table([], ["T", "n"])) == "T   n"


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([(1, 2), (1,)], ["a", "b"], r"row 2 has 1 values for 2 columns: \(1,\)"),
        ([], [], "needs columns"),
        ([(1, 2)], ["a", "a"], "a head of its own"),
        ([(1, 2.5)], {"a": "", "b": "d"}, r"column 'b': 2\.5 does not fit the format 'd'"),
        ([(1, "x")], {"a": "", "b": lambda value: 1 / value}, "column 'b': 'x' does not fit"),
        ([(1, 2)], {"a": "", "b": lambda value: value}, "column 'b': a cell is one line of text, not 2"),
        ([(1, "x\ny")], ["a", "b"], "one line of text"),
    ],
)
def test_what_cannot_be_set_is_refused(rows: Any, columns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tbt.table(rows, columns)


def test_the_ledger_has_both_forms() -> None:
    found = tbt.ledger("llama-3.1-405b", recipe="fp8-ffn")
    page = Reader(found._repr_html_())
    assert [cell[3] for cell in page.rows[1]] == found[0].cells()
    assert [cell[2] for cell in page.rows[1]] == [None, None, *["number"] * 7]
    assert str(found).split("\n")[0] in found._repr_html_()


SOURCE = """import time
import tokenbytoken as tbt
tbt.table([("a", time.perf_counter(), 1.5)], {"": "", "t (s)": tbt.measure.measured, "n": ".2f"})"""


def test_the_notebook_tests_compare_both_forms(tmp_path: Path) -> None:
    """As stored, a table passes though the clock went on; with one digit altered in either form, it fails."""
    made = tbt.table([("a", 12.5, 1.5)], {"": "", "t (s)": tbt.measure.measured, "n": ".2f"})
    stored = {"text/plain": str(made), "text/html": made._repr_html_()}
    altered = {form: stored | {form: text.replace("1.50", "1.60")} for form, text in stored.items()}
    cells = []
    for n, data in enumerate((stored, altered["text/plain"], altered["text/html"]), start=1):
        output = nbformat.v4.new_output("execute_result", data, execution_count=n)
        cells.append(new_code_cell(SOURCE, execution_count=n, outputs=[output]))
    nbformat.write(new_notebook(cells=cells), tmp_path / "tables.ipynb")
    (failed,) = compare(tmp_path, 60).values()
    assert set(failed) == {1, 2}
    assert "mismatch 'text/plain'" in failed[1]
    assert "mismatch 'text/html'" in failed[2]
