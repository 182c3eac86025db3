"""Which outputs of the recorded run may stay when a notebook is run again.

A second run measures again, and its ⟨…⟩ values differ a little from those that the prose quotes. A cell whose fresh
output differs from the stored one only inside ⟨…⟩ showed the same results twice: everything that is compared was
reproduced. What stands inside the marker is a reading of one moment on one machine, and the stored reading is as true
as the fresh one. So the recorded run stays the recorded run: its readings belong together, and to the sentences about
them. It is never the other way round: a result that changed always takes the fresh output, readings included.

A picture cannot be compared without its readings, so the stored one stays only while the code that drew it and
the text printed beside it are the same. The code of a cell is not all that its output depends on: after a change to
an earlier cell or to the package that makes a reading another one, or draws another picture, run the notebook
without keeping. :class:`Kept` therefore names each picture that would have come out differently.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

# What tbt.measure prints around a reading, and what nbval_sanitize.cfg blanks.
MARKED = re.compile("⟨[^⟨⟩\n]*⟩")


@dataclass
class Kept:
    """What keeping did, as numbers of code cells (their execution counts)."""

    fresh: list[int] = field(default_factory=list)  # a new output, because something outside ⟨…⟩ changed
    measured_anew: list[int] = field(default_factory=list)  # those of them that hold a reading
    edited: list[int] = field(default_factory=list)  # other code, the same results: its stored readings stay
    pictures: list[int] = field(default_factory=list)  # the stored picture stays, a fresh one would differ

    def __str__(self) -> str:
        said = {
            "fresh output": self.fresh,
            "measured anew": self.measured_anew,
            "readings of the code before the edit": self.edited,
            "stored picture kept, a fresh one differs": self.pictures,
        }
        lines = [f"    {words}: cell {', '.join(map(str, cells))}" for words, cells in said.items() if cells]
        return "\n".join(lines) or "    every output as recorded"


def cell_id(cell: NotebookNode, salt: int = 0) -> str:
    """Eight hex digits made from kind and source; `salt` tells twins apart."""
    return hashlib.sha1(f"{cell.cell_type}\n{cell.source}\n{salt}".encode()).hexdigest()[:8]


def unedited(cell: NotebookNode) -> bool:
    """Whether the source is still the one that was executed, which the id remembers."""
    return any(cell.get("id") == cell_id(cell, salt) for salt in range(10))


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def committed(path: Path, revision: str = "HEAD") -> NotebookNode | None:
    """The notebook as committed; None outside a repository or where the revision does not know it."""
    show = ["git", "show", f"{revision}:./{path.name}"]
    try:
        shown = subprocess.run(show, cwd=path.parent, capture_output=True, text=True, encoding="utf-8", check=False)
    except FileNotFoundError:  # no git
        return None
    return nbformat.reads(shown.stdout, as_version=4) if shown.returncode == 0 else None


@dataclass(frozen=True)
class Stored:
    outputs: list[NotebookNode]
    same_code: bool  # whether they were made by the code that the cell holds now


def stored_outputs(notebook: NotebookNode, committed: NotebookNode | None) -> list[Stored | None]:
    """For each code cell of a notebook about to be run: the outputs of its recorded run, if there was one.

    They are the cell's own, where it has any: what was executed last is the recorded run, committed or not. An
    editor may have dropped them, or laid the cell anew; such a cell takes those of the committed cell with the same
    source, wherever that stood, and else those of the committed cell in whose place it stands.
    """
    cells = code_cells(notebook)
    found: list[Stored | None] = [
        Stored(cell.outputs, unedited(cell)) if cell.get("execution_count") else None for cell in cells
    ]
    if committed is None or None not in found:
        return found
    sources, before = [cell.source for cell in cells], code_cells(committed)
    free = set(range(len(before)))
    for index, source in enumerate(sources):
        twin = next((old for old in sorted(free) if before[old].source == source), None)
        if twin is None:
            continue
        free.remove(twin)
        if found[index] is None:
            found[index] = Stored(before[twin].outputs, same_code=True)
    blocks = difflib.SequenceMatcher(None, [old.source for old in before], sources, autojunk=False).get_opcodes()
    for kind, start, end, new_start, new_end in blocks:
        for old, new in zip(range(start, end), range(new_start, new_end), strict=False):
            if kind == "replace" and found[new] is None and old in free:
                found[new] = Stored(before[old].outputs, same_code=False)
    return found


def outline(outputs: list[NotebookNode]) -> list[dict[str, str]]:
    """What must be the same for the stored outputs to stay: all text, readings blanked; of a picture only its kind."""
    outlines = []
    for output in outputs:
        parts = {"kind": output.output_type, "stream": output.get("name", ""), "text": output.get("text", "")}
        parts |= {
            kind: "" if kind.startswith("image/") else str(value) for kind, value in output.get("data", {}).items()
        }
        outlines.append({name: MARKED.sub("⟨⟩", text) for name, text in parts.items()})
    return outlines


def pictures(outputs: list[NotebookNode]) -> list[str]:
    data = (item for output in outputs for item in output.get("data", {}).items())
    return [str(value) for kind, value in data if kind.startswith("image/")]


def keep(notebook: NotebookNode, stored: list[Stored | None]) -> Kept:
    """Put stored outputs back, in place, into a notebook that was just run and cleaned; say which were not."""
    report = Kept()
    for cell, old in zip(code_cells(notebook), stored, strict=True):
        count, fresh = cell.execution_count, cell.outputs
        same_pictures = old is not None and pictures(old.outputs) == pictures(fresh)
        if old is None or outline(old.outputs) != outline(fresh) or not (old.same_code or same_pictures):
            report.fresh.append(count)
            if MARKED.search(str(fresh)):
                report.measured_anew.append(count)
            continue
        if not same_pictures:
            report.pictures.append(count)
        if not old.same_code and MARKED.search(str(fresh)):
            report.edited.append(count)
        cell.outputs = old.outputs
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    return report
