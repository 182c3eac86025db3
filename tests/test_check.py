"""The checks a reader sees: they pass what is right, stop what is wrong, and print the same everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

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
                compare(*pair, 0, label="thing")


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

SLIPS = {8_257_536: "query heads", 258_048: "elements, not bytes"}


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (None, "not answered yet"),
        (..., "not answered yet"),
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
def test_whole_numbers_are_exact(value: object, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer(value, 516_096, unit="bytes", slips=SLIPS)
    assert printed(capsys) == line


@pytest.mark.parametrize(
    ("value", "verdict"), [(4.48, "correct"), (4.5, "correct"), (4.4, "not yet"), (2.24, "not yet (FP8 is one byte)")]
)
def test_fractions_are_rounded_as_people_round(value: float, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer(value, 4.4832, unit="ms", slips={2.2416: "FP8 is one byte"})
    assert printed(capsys) == f"{value:.4g} ms: {verdict}"


def test_words_tuples_and_tolerances(capsys: pytest.CaptureFixture[str]) -> None:
    answer("b", "b")
    answer("a", "b", slips={"a": "that is the query"})
    answer((2, 9), (2, 9))
    answer([2, 9], (2, 9))
    answer(90, 100, tolerance=0.2)
    answer(0, 0)
    answer(torch.tensor(3), 3)
    assert printed(capsys).splitlines() == [
        "b: correct",
        "a: not yet (that is the query)",
        "(2, 9): correct",
        "[2, 9]: correct",
        "90: correct",
        "0: correct",
        "3: correct",
    ]


def test_a_slip_that_is_right_is_the_authors_error() -> None:
    with pytest.raises(ValueError, match=r"slip 4\.49 is the correct answer"):
        answer(None, 4.4832, slips={4.49: "…"})
