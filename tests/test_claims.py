"""The report's claims of chapter 18: what is quoted, what is decided, and the Korean page that says the same."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

import nbformat
import pytest

BOOK = Path(__file__).resolve().parents[1] / "book"
CLAIMS: list[dict[str, Any]] = json.loads((BOOK / "data" / "claims.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, float]]:
    """What the chapter computed for each claim, as it printed it."""
    cells = nbformat.read(BOOK / "18_reality_check.ipynb", as_version=4).cells
    (cell,) = (cell for cell in cells if cell.cell_type == "code" and "figures[n] for n" in cell.source)
    found: dict[str, dict[str, float]] = json.loads(cell.outputs[0].text)
    return found


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_claims_are_numbered_and_complete() -> None:
    assert [claim["n"] for claim in CLAIMS] == list(range(1, len(CLAIMS) + 1))
    for claim in CLAIMS:
        assert claim.keys() == {"n", "where", "chapter", "verdict", "ko", "en", "why", "why_ko"}
        assert claim["verdict"] in ("holds", "holds if", "wrong", "unclear", "opinion")
        assert not claim["chapter"] or (BOOK / f"{claim['chapter']}.ipynb").is_file()


def test_both_languages_state_the_same_figures(figures: dict[str, dict[str, float]]) -> None:
    for claim in CLAIMS:
        used = fields(claim["why"])
        assert used == fields(claim["why_ko"]) == figures[str(claim["n"])].keys(), claim["n"]


def test_quotes_are_korean_or_the_reports_code() -> None:
    for claim in CLAIMS:
        assert re.search("[가-힣]", claim["ko"]) or claim["ko"].startswith(("logits", "dist.")), claim["n"]
        assert re.search("[가-힣]", claim["why_ko"])
        assert not re.search("[가-힣]", claim["en"] + claim["why"])


def test_figures_are_those_that_were_published(figures: dict[str, dict[str, float]]) -> None:
    """Of the models' makers and of DeepSeek-V2's paper, none of them from this package."""
    assert int(figures["20"]["params"] / 1e9) == 405
    assert round(figures["25"]["total"] / 1e9) == 671
    assert int(figures["25"]["active"]) == 37
    assert round(figures["26"]["six"], 3) == 0.933  # arXiv 2405.04434, abstract
    assert int(figures["27"]["params"]) == 398
    assert figures["27"]["layers"] == 8 * figures["27"]["attention"] == 72
    assert figures["14"] == {"small": 1, "large": 8}  # Falcon's model cards


def test_the_chapter_says_how_many_of_each(figures: dict[str, dict[str, float]]) -> None:
    text = "\n".join(cell.source for cell in nbformat.read(BOOK / "18_reality_check.ipynb", as_version=4).cells)
    number = {word: sum(claim["verdict"] == word for claim in CLAIMS) for word in ("holds", "holds if", "wrong")}
    checkable = sum(claim["verdict"] != "opinion" for claim in CLAIMS)
    said = f"{number['holds']} of {checkable} checkable claims hold as written, {number['holds if']} under a condition"
    assert f"{said}, {number['wrong']} are wrong" in text
