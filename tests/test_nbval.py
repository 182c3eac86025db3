"""The comparison of stored outputs bites: nbval and the notebook rules together catch whatever was altered.

Two nets. nbval runs each cell and compares what it prints with what it stored, measured values aside; a cell
without a stored execution count it runs without comparing. The rules see exactly those cells.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
import rules
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from stages import NBVAL

ROOT = Path(__file__).resolve().parents[1]
MEASURED = re.compile(r"⟨\d[^⟨⟩]*⟩")
PREDICTED = re.compile(r"(?<![\d.,])(\d[\d.,]*)( ms)(?![^⟨⟩\n]*⟩)")  # a time without the marker is computed


def compare(folder: Path, timeout: float) -> dict[str, dict[int, str]]:
    """Run nbval as `make test` does; for each notebook of the folder, the code cells that failed and why."""
    report = folder / "report.xml"
    notebooks = sorted(map(str, folder.glob("*.ipynb")))
    workers = "2" if len(notebooks) > 1 else "0"
    options = ["-n", workers, "--dist", "loadfile", "--nbval-cell-timeout", str(timeout), "--color", "no"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", "/dev/null",
         *NBVAL, *options, f"--junitxml={report}", *notebooks],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert report.exists(), run.stdout + run.stderr
    failed: dict[str, dict[int, str]] = {Path(name).stem: {} for name in notebooks}
    seen = set()
    for case in ET.parse(report).iter("testcase"):
        stem = next(stem for stem in failed if stem in case.attrib["classname"])
        seen.add(stem)
        for fault in [*case.iter("failure"), *case.iter("error")]:
            failed[stem][int(case.attrib["name"].removeprefix("Cell "))] = fault.text or ""
    assert seen == set(failed), run.stdout
    return failed


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def alter_first(notebook: NotebookNode, pattern: re.Pattern[str], change: Callable[[re.Match[str]], str]) -> int:
    """Alter the first match in a stored stream; return which code cell it was in."""
    for number, cell in enumerate(code_cells(notebook)):
        for output in cell.outputs:
            if output.output_type == "stream" and pattern.search(output.text):
                output.text = pattern.sub(change, output.text, count=1)
                return number
    raise AssertionError(f"no output matches {pattern.pattern}")


def other_digit(digit: str) -> str:
    return str((int(digit) + 1) % 10)


def alter_result(notebook: NotebookNode) -> int:
    """The last digit of the first number that stands outside any marker."""
    unmarked = re.compile(r"\A((?:[^⟨\d]|⟨[^⟩]*⟩)*[\d,.]*)(\d)")
    return alter_first(notebook, unmarked, lambda match: match[1] + other_digit(match[2]))


def alter_prediction(notebook: NotebookNode) -> int:
    return alter_first(notebook, PREDICTED, lambda match: match[1][:-1] + other_digit(match[1][-1]) + match[2])


def alter_measurement(notebook: NotebookNode) -> int:
    return alter_first(notebook, MEASURED, lambda match: "⟨987 654 s⟩")


def strip_outputs(notebook: NotebookNode, *, keep_counts: bool = False) -> None:
    for cell in code_cells(notebook):
        cell.outputs = []
        if not keep_counts:
            cell.execution_count = None


def add_cell(notebook: NotebookNode, source: str, count: int | None = None) -> int:
    notebook.cells.append(new_code_cell(source, execution_count=count))
    return len(code_cells(notebook)) - 1


# Each changes a cell of its own, and all of them one notebook: a kernel takes seconds to start. The endless cell is the
# last.
ALTERATIONS: dict[str, Callable[[NotebookNode], int]] = {
    "result": alter_result,
    "prediction": alter_prediction,
    "pretended": lambda notebook: add_cell(notebook, "print('new')", count=99),
    "warning": lambda notebook: add_cell(notebook, "import warnings\nwarnings.warn('old')", count=99),
    "endless": lambda notebook: add_cell(notebook, "while True: pass", count=99),
}
NOTEBOOKS: dict[str, Callable[[NotebookNode], Any]] = {
    "untouched": lambda notebook: None,
    "measurement": alter_measurement,
    "emptied": lambda notebook: strip_outputs(notebook, keep_counts=True),
    "altered": lambda notebook: {name: change(notebook) for name, change in ALTERATIONS.items()},
}


class Compared(NamedTuple):
    """What an alteration returned, the cells nbval failed and why, the number of broken rules."""

    changed: Any
    failed: dict[int, str]
    broken: int


def broken_rules(sample: Path, notebook: NotebookNode) -> int:
    return len(list(rules.faults(rules.Notebook(sample, node=notebook))))


@pytest.fixture(scope="module")
def compared(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    folder = tmp_path_factory.mktemp("altered")
    changed, broken = {}, {}
    for name, change in NOTEBOOKS.items():
        notebook = nbformat.read(sample, as_version=4)
        changed[name] = change(notebook)
        broken[name] = broken_rules(sample, notebook)
        nbformat.write(notebook, folder / f"{name}.ipynb")
    failed = compare(folder, timeout=5)
    return {name: Compared(changed[name], failed[name], broken[name]) for name in NOTEBOOKS}


@pytest.mark.parametrize("name", ["untouched", "measurement"])
def test_passes(name: str, compared: dict[str, Compared]) -> None:
    assert not compared[name].failed
    assert not compared[name].broken


@pytest.mark.parametrize("name", ALTERATIONS)
def test_nbval_fails_the_altered_cell(name: str, compared: dict[str, Compared]) -> None:
    assert compared["altered"].changed[name] in compared["altered"].failed


def test_nbval_fails_no_other_cell(compared: dict[str, Compared]) -> None:
    altered, failed, _ = compared["altered"]
    assert len(set(altered.values())) == len(ALTERATIONS)
    assert set(failed) == set(altered.values())


@pytest.mark.parametrize("change", [strip_outputs, lambda notebook: add_cell(notebook, "print('new')")])
def test_rules_catch_what_nbval_does_not_compare(change: Callable[[NotebookNode], Any], sample: Path) -> None:
    notebook = nbformat.read(sample, as_version=4)
    assert not broken_rules(sample, notebook)
    change(notebook)
    assert broken_rules(sample, notebook)


def test_both_nets_catch_emptied_outputs(compared: dict[str, Compared]) -> None:
    assert compared["emptied"].failed
    assert compared["emptied"].broken


def test_an_endless_cell_ends_red(compared: dict[str, Compared]) -> None:
    altered, failed, _ = compared["altered"]
    assert "Timeout of 5 seconds exceeded" in failed[altered["endless"]]


def test_the_timeout_of_the_test_run_is_explicit() -> None:
    """nbval's own default lets a hung cell use up the whole job."""
    seconds = float(NBVAL[NBVAL.index("--nbval-cell-timeout") + 1])
    assert 0 < seconds <= 300


def test_the_sanitiser_blanks_the_marker_alone() -> None:
    from nbval.plugin import get_sanitize_patterns

    path = ROOT / NBVAL[NBVAL.index("--nbval-sanitize-with") + 1]
    ((pattern, replacement),) = get_sanitize_patterns(path.read_text(encoding="utf-8"))

    def blanked(text: str) -> str:
        return re.sub(pattern, replacement, text)

    assert blanked("predicted 4.48 ms, took ⟨3.1 ms⟩, ⟨0.7⟩") == "predicted 4.48 ms, took <measured>, <measured>"
    for text in ("4.48 ms", "<3.1 ms>", "(3.1 ms)", "⟨3.1\nms⟩", "3.1 ms⟩", "⟨3.1 ms", "0x7f3a1c00", "2026-01-01"):
        assert blanked(text) == text


def altered_chapter(path: Path) -> tuple[NotebookNode, set[int]] | None:
    """A chapter up to the last of the cells that were altered, and those that must fail; None if it lacks one."""
    notebook = nbformat.read(path, as_version=4)
    try:
        measured = alter_measurement(notebook)
        altered = {alter_result(notebook), alter_prediction(notebook)}
    except AssertionError:
        return None
    last = code_cells(notebook)[max(measured, *altered)]
    notebook.cells = notebook.cells[: notebook.cells.index(last) + 1]
    return notebook, altered


@pytest.mark.slow
def test_bites_on_a_real_chapter(tmp_path: Path) -> None:
    """With a result, a prediction and a measured value altered, the first two must fail: where they come earliest."""
    chapters = {path: altered_chapter(path) for path in (ROOT / "book").glob("[0-9]*.ipynb")}
    found = {path: chapter for path, chapter in chapters.items() if chapter is not None}
    assert found, "no chapter prints both a predicted time and a measured value"
    path = min(found, key=lambda path: (len(code_cells(found[path][0])), path))
    notebook, altered = found[path]
    nbformat.write(notebook, tmp_path / path.name)
    (failed,) = compare(tmp_path, timeout=120).values()
    assert set(failed) == altered

    book = rules.Book(ROOT / "book")
    for change in (strip_outputs, lambda notebook: add_cell(notebook, "1 + 1")):
        notebook = nbformat.read(path, as_version=4)
        change(notebook)
        assert list(rules.executed_in_order(rules.Notebook(path, node=notebook, book=book)))
