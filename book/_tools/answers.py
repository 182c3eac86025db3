"""Write what the exercises expect, as digests: tests/answers.json → book/data/answers.json.

    python book/_tools/answers.py

``tests/answers.json`` is the authors' list, one entry a question: its ``answer``; the ``slips`` that are foreseen,
each a value and the reply to it; a ``tolerance`` where it is not 0.5 % of a fraction; and ``from``, the chapter's
expression, where the answer hangs on a recorded run and has to be looked at again after another recording.
A chapter calls ``tbt.check.answer("ex-04-1a", value)``; neither page nor notebook nor Colab edition holds an answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenbytoken.page.answers import GRID, digest, forms

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ROOT / "tests" / "answers.json"
DIGESTS = ROOT / "book" / "data" / "answers.json"


def grid_of(question: dict[str, Any]) -> float | None:
    """The width of a cell of a question's grid; None where its answer is matched exactly."""
    answer = question["answer"]
    parts = answer if isinstance(answer, list) else [answer]
    return question.get("tolerance", GRID if any(isinstance(part, float) for part in parts) else None)


def hidden(key: str, question: dict[str, Any]) -> dict[str, Any]:
    """The entry of the published file. Raises ValueError where a slip would count as the answer."""
    grid = grid_of(question)
    entry: dict[str, Any] = {"right": digest(key, forms(question["answer"], grid)[0])}
    if grid is not None:
        entry["grid"] = grid
    slips: dict[str, str] = {}
    for value, reply in question.get("slips", []):
        near = {digest(key, form) for form in forms(value, grid)}
        if entry["right"] in near:
            raise ValueError(f"{key}: the slip {value!r} is the correct answer")
        if near & slips.keys():
            raise ValueError(f"{key}: the slip {value!r} stands there twice")
        slips[digest(key, forms(value, grid)[0])] = reply
    if slips:
        entry["slips"] = slips
    return entry


def text() -> str:
    """The published file, as it should be."""
    plain = json.loads(PLAIN.read_text(encoding="utf-8"))
    entries = {key: hidden(key, question) for key, question in sorted(plain.items())}
    return json.dumps(entries, ensure_ascii=False, indent=1) + "\n"


def main() -> int:
    DIGESTS.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
