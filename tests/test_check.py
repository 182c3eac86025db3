"""The checks a reader sees: they pass what is right, stop what is wrong, and print the same everywhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import answers as authors
import nbformat
import numpy as np
import pytest
import torch
from nbformat import NotebookNode

from tokenbytoken.page import answers as page_answers
from tokenbytoken.page.answers import title
from tokenbytoken.page.check import answer, caught, close

WANT = torch.tensor([[1.0, -200.0], [3.0, 0.5]])
INF = math.inf


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.removesuffix("\n")


# --- close -------------------------------------------------------------------------------------------


def test_close_prints_a_bound_and_no_digits_of_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    lines = set()
    for error in (0.0, 1e-4, 1.9e-3):  # 200 × 1e-5 = 2e-3 is allowed
        close(WANT + error, WANT, 1e-5, label="logits", why="float32, 30 layers")
        lines.add(printed(capsys))
    assert lines == {"logits: largest error ≤ 1e-5 of scale (float32, 30 layers)"}
    close(WANT, WANT, 2.5e-12, label="x")
    assert printed(capsys) == "x: largest error ≤ 2.5e-12 of scale"
    close(WANT, WANT, 0.01, label="x")
    assert printed(capsys) == "x: largest error ≤ 0.01 of scale"
    close(WANT, WANT, 0, label="x")
    assert printed(capsys) == "x: equal, every element"


@pytest.mark.parametrize(
    ("got", "want", "tolerance", "message"),
    [
        (WANT + 3e-3, WANT, 1e-5, r"largest error is 1.5e-05 of scale, allowed is 1e-5"),
        (WANT + 1e-5, WANT, 0, "allowed is equality"),
        (WANT.T[:1], WANT, 1e-5, r"shape \(1, 2\) is not \(2, 2\)"),
        (torch.zeros(2, 0), torch.zeros(2, 0), 1e-5, "nothing to compare"),
        (torch.zeros(0), [], 0, "nothing to compare"),
        (1.0, [1.0], 0, r"shape \(\) is not \(1,\)"),
        (torch.ones(2, 1), torch.ones(1, 2), 0.9, r"shape \(2, 1\) is not \(1, 2\)"),
        (WANT, [], 0.9, r"shape \(2, 2\) is not \(0,\)"),
        (1 + 5j, 1 + 0j, 0.9, "largest error is 5 of scale"),
        (1 + 5j, 1.0, 0.9, "largest error is 5 of scale"),
        (WANT + 0.01j, WANT, 1e-5, "largest error is 5e-05 of scale"),
        (WANT * 1j, WANT * -1j, 0.9, "largest error is 2 of scale"),
        ([1.0, complex(1, math.nan)], [1.0, 1.0], 0.9, "not a number"),
        ([complex(0, INF)], [complex(0, -INF)], 0.9, "largest error"),
        ([1.0, INF], [1.0, 2.0], 0.9, "largest error is inf"),
        ([1.0, math.nan], [1.0, INF], 0.9, "not a number"),
        (WANT * math.nan, WANT, 0.9, "not a number"),
        (WANT, WANT * math.nan, 0.9, "not a number"),
        (torch.full((2,), math.nan), torch.full((2,), math.nan), 0.9, "not a number"),
        ([0.0, INF], [0.0, -INF], 0.9, "largest error"),
        ([0.0, 1e300], [0.0, INF], 0.9, "largest error"),
        ([1e-30], [0.0], 0.9, "largest error"),
        (2**60, 2**60 + 1, 0, "largest error"),
        (3, 4, 1e-3, "largest error"),
        ([True, False], [True, True], 0, "largest error"),
    ],
)
def test_close_stops_what_is_wrong(got: object, want: object, tolerance: float, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^thing: .*{message}"):
        close(got, want, tolerance, label="thing")


def test_close_takes_what_a_chapter_has() -> None:
    close([1.0, -INF], [1.0, -INF], 1e-6, label="a mask")
    close(np.float32(0.5), 0.5, 0, label="a scalar")
    close(WANT.numpy(), WANT.tolist(), 0, label="an array")
    close(WANT.to(torch.float8_e4m3fn), WANT.to(torch.float8_e4m3fn).float(), 0, label="FP8")
    close(torch.ones(2, requires_grad=True), torch.ones(2), 0, label="a parameter")
    close([1, 2], torch.tensor([1, 2]), 0, label="tokens")
    close(np.fft.fft([1.0, 2.0, 4.0]), torch.fft.fft(torch.tensor([1.0, 2.0, 4.0])), 1e-6, label="complex numbers")


@pytest.mark.parametrize("bad", ["text", None, [[1.0], [1.0, 2.0]], [2**70], [None]])
def test_what_is_no_number_is_refused(bad: object) -> None:
    for pair in ((bad, 1.0), (1.0, bad)):
        for compare in (close, caught):
            with pytest.raises(ValueError, match="only tensors, arrays, numbers"):
                compare(pair[0], pair[1], 0, label="thing")


def test_a_tolerance_is_relative() -> None:
    for tolerance in (-1e-5, 1.0, 2, math.nan):
        with pytest.raises(ValueError, match="tolerance must be in"):
            close(1.0, 1.0, tolerance, label="x")


# --- caught ------------------------------------------------------------------------------------------


def test_caught(capsys: pytest.CaptureFixture[str]) -> None:
    caught(WANT + 1.0, WANT, 1e-5, label="without the scale")
    assert printed(capsys) == "without the scale: caught (error > 0.0001 of scale)"
    caught([1, 2], [1, 3], 0, label="one token off")
    assert printed(capsys) == "one token off: caught (not equal)"
    caught(WANT * math.nan, WANT, 1e-5, label="0/0")
    assert printed(capsys) == "0/0: caught (not a number)"
    caught(WANT[0], WANT, 1e-5, label="cut")
    assert printed(capsys) == "cut: caught (shape (2,) is not (2, 2))"
    caught(np.conj(np.fft.fft([1.0, 2.0, 4.0])), np.fft.fft([1.0, 2.0, 4.0]), 1e-6, label="turned the wrong way")
    assert printed(capsys) == "turned the wrong way: caught (error > 1e-5 of scale)"


@pytest.mark.parametrize("error", [0.0, 1e-3, 1.9e-2])  # right; within tolerance; failing by less than ten times it
def test_a_variant_that_is_hardly_wrong_is_not_caught(error: float) -> None:
    with pytest.raises(AssertionError, match=r"variant: not caught"):
        caught(WANT + error, WANT, 1e-5, label="variant")


def test_a_right_variant_is_never_caught() -> None:
    for tolerance in (0, 1e-5):
        with pytest.raises(AssertionError, match="not caught"):
            caught(WANT, WANT, tolerance, label="variant")


# --- answer ------------------------------------------------------------------------------------------

BYTES = {"answer": 516_096, "slips": [[8_257_536, "query heads"], [258_048, "elements, not bytes"]]}
TIME = {"answer": 4.4832, "slips": [[2.2416, "FP8 is one byte"]]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A book that has one question: ``ask(question)``, to which ``answer("ex-01-1", …)`` belongs."""

    def ask(question: dict[str, Any], key: str = "ex-01-1") -> None:
        monkeypatch.setattr(page_answers, "_entries", lambda: {key: authors.hidden(key, question)})

    return ask


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (None, "Exercise 1.1"),
        (..., "Exercise 1.1"),
        (516_096, "516,096 bytes: correct"),
        (516_096.0, "516,096 bytes: correct"),
        (np.int64(516_096), "516,096 bytes: correct"),
        (258_048, "258,048 bytes: not yet (elements, not bytes)"),
        (8_257_536, "8,257,536 bytes: not yet (query heads)"),
        (516_097, "516,097 bytes: not yet"),
        (True, "True bytes: not yet"),
        ("516096", "516096 bytes: not yet"),
    ],
)
def test_whole_numbers_are_exact(
    value: object, line: str, asked: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    asked(BYTES)
    answer("ex-01-1", value, unit="bytes")
    assert printed(capsys) == line


@pytest.mark.parametrize(
    ("value", "verdict"), [(4.48, "correct"), (4.5, "correct"), (4.4, "not yet"), (2.24, "not yet (FP8 is one byte)")]
)
def test_fractions_are_rounded_as_people_round(
    value: float, verdict: str, asked: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    asked(TIME)
    answer("ex-01-1", value, unit="ms")
    assert printed(capsys) == f"{value:.4g} ms: {verdict}"


@pytest.mark.parametrize(
    ("question", "value", "verdict"),
    [
        ({"answer": "b"}, "b", "correct"),
        ({"answer": "b"}, " B", "correct"),
        ({"answer": "b", "slips": [["a", "that is the query"]]}, "a", "not yet (that is the query)"),
        ({"answer": [2, 9]}, (2, 9), "correct"),
        ({"answer": [2, 9]}, (9, 2), "not yet"),
        ({"answer": 100, "tolerance": 0.2}, 90, "correct"),
        ({"answer": 100, "tolerance": 0.2}, 60, "not yet"),
        ({"answer": 0}, 0, "correct"),
        ({"answer": 3}, torch.tensor(3), "correct"),
        ({"answer": 0.5}, -0.5, "not yet"),
        ({"answer": 2.5}, float("nan"), "not yet"),
        ({"answer": 2.5}, float("inf"), "not yet"),
        ({"answer": 2.5}, {"a": 1}, "not yet"),
        ({"answer": [2.5, 4.0]}, (2.51, 3.99), "correct"),
        ({"answer": [2.5, 4.0]}, np.linspace(1, 2, 100), "not yet"),  # of 3¹⁰⁰ forms none is made
    ],
)
def test_words_tuples_and_tolerances(
    question: dict[str, Any], value: Any, verdict: str, asked: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    asked(question)
    answer("ex-01-1", value)
    assert printed(capsys).rpartition(": ")[2] == verdict


def test_the_grid_is_as_wide_as_it_says(asked: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    for correct in (1.0, 3.62, 147.7, 1.2e-5, 6.7e11, -2.5):
        asked({"answer": correct})
        for factor, right in ((1.0, True), (1.0049, True), (0.9951, True), (1.0126, False), (0.9875, False)):
            answer("ex-01-1", correct * factor)
            assert printed(capsys).endswith(": correct") is right, (correct, factor)


def test_what_the_authors_get_wrong_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slip 4\.49 is the correct answer"):
        authors.hidden("ex-01-1", {"answer": 4.4832, "slips": [[4.49, "…"]]})
    with pytest.raises(ValueError, match="twice"):
        authors.hidden("ex-01-1", {"answer": 5, "slips": [[4, "…"], [4, "…"]]})
    for key in ("ex-99-1", "ex-01-1z", "answer", 7, None, [1]):
        with pytest.raises(ValueError, match="no exercise of the book has the key"):
            answer(key, 3)  # type: ignore[arg-type]


# --- the book's own questions ------------------------------------------------------------------------

PLAIN: dict[str, Any] = json.loads(authors.PLAIN.read_text(encoding="utf-8"))
CALL = re.compile(r'tbt\.check\.answer\(\s*"(ex-[^"]*)"')


def chapters() -> dict[str, list[NotebookNode]]:
    paths = sorted((authors.ROOT / "book").glob("[0-9][0-9]_*.ipynb"))
    return {path.stem: nbformat.read(path, as_version=4).cells for path in paths}


def exercises(kind: str) -> dict[str, list[NotebookNode]]:
    """The cells of each exercise by its label: those of ``exercise``, the question, or of ``solution``.

    A Markdown cell may end one and begin the next; a copy with its part of the text belongs to each.
    """
    found: dict[str, list[NotebookNode]] = {}
    for cells in chapters().values():
        label = ""
        for cell in cells:
            if cell.cell_type == "code":
                if label:
                    found[label].append(cell)
                continue
            gates = rf"\{{{kind}-start\}}(?:.*\n:label:)? (?P<label>ex-\d\d-\d+)|\{{{kind}-end\}}"
            position = 0
            for gate in [*re.finditer(gates, cell.source), None]:
                if label:
                    part = cell.source[position : gate.start() if gate else None]
                    found[label].append(nbformat.v4.new_markdown_cell(part))
                if gate:
                    label, position = gate["label"] or "", gate.end()
                    found.setdefault(label, [])
    return {label: cells for label, cells in found.items() if label}


def printed_by(cell: NotebookNode) -> str:
    """What a cell showed, as text."""
    return "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", []))


def values(text: str) -> Iterator[Any]:
    """Every value that a text gives, read as a reader would: numbers, words, rows of numbers."""
    yield from set(re.findall(r"[^\W\d_]+", text))
    for match in re.finditer(r"(?<![\w.])\d[\d,_]*(?:\.\d+)?", text):
        number = re.sub("[,_]", "", match[0])
        yield float(number) if "." in number else int(number)
    for match in re.finditer(r"\d+(?:, \d+)+", text):
        yield [int(number) for number in match[0].split(", ")]


def test_the_published_digests_are_those_of_the_authors_list() -> None:
    assert authors.DIGESTS.read_text(encoding="utf-8") == authors.text(), "run python book/_tools/answers.py"


def test_every_question_stands_in_its_exercise_once() -> None:
    asked = [
        (label, key)
        for label, cells in exercises("exercise").items()
        for key in CALL.findall("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    ]
    assert [key for label, key in asked if not re.fullmatch(f"{label}[a-z]?", key)] == []
    assert sorted(key for _, key in asked) == sorted(PLAIN)
    everywhere = "\n".join(cell.source for cells in chapters().values() for cell in cells)
    assert set(CALL.findall(everywhere)) == set(PLAIN)


SOLUTIONS = exercises("solution")


@pytest.mark.parametrize("key", PLAIN)
def test_the_solution_gives_the_answer_that_is_on_file(key: str) -> None:
    """Among all that the executed solution says there is a value that the question takes.

    Another question's answer under this key, or one of a recorded run that has been recorded again, is found here.
    """
    said = "\n".join(f"{cell.source}\n{printed_by(cell)}" for cell in SOLUTIONS[re.sub("[a-z]$", "", key)])
    assert any(page_answers.question(key).reply(value) == "" for value in values(said)), PLAIN[key]["answer"]


def test_unanswered_exercises_print_their_number() -> None:
    """Each exercise that can be answered; one whose cell prints figures to be explained prints them before."""
    silent = {"ex-01-4", "ex-02-6"}
    asked = exercises("exercise")
    numbers = {label: re.compile(rf"({title(label)}[a-z]?\n)+") for label in asked}
    shown = {label: "".join(map(printed_by, cells)) for label, cells in asked.items()}
    assert [label for label in asked if label not in silent and not numbers[label].fullmatch(shown[label])] == []
    assert all(shown[label].endswith(f"{title(label)}\n") for label in silent)
    assert len(asked) == 105


@pytest.mark.parametrize("key", PLAIN)
def test_each_answer_is_right_and_each_slip_is_named(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    question = PLAIN[key]
    answer(key, question["answer"])
    assert printed(capsys).endswith(": correct")
    if isinstance(question["answer"], float):
        for factor in (0.9985, 1.0015):
            answer(key, question["answer"] * factor)
            assert printed(capsys).endswith(": correct")
    for value, reply in question.get("slips", []):
        answer(key, value)
        assert printed(capsys).endswith(f": not yet ({reply})")


def test_the_published_file_gives_nothing_away() -> None:
    entries = json.loads(authors.DIGESTS.read_text(encoding="utf-8"))
    for key, entry in entries.items():
        assert set(entry) <= {"right", "grid", "slips"}
        assert all(re.fullmatch("[0-9a-f]{12}", one) for one in (entry["right"], *entry.get("slips", {}))), key
    digests = [entry["right"] for entry in entries.values()]
    assert len(set(digests)) == len(digests)  # of equal answers, too
