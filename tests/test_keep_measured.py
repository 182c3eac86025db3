"""A second run with --keep-measured: readings stay where their cell was reproduced, and nothing else stays."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import execute
import nbformat
import pytest
import recorded
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns

ROOT = Path(__file__).resolve().parents[1]

# A run counts itself in a file beside the notebook, so that each prints and draws something else.
CLOCK = "from pathlib import Path\nn = int(Path('n').read_text()) + 1\n_ = Path('n').write_text(str(n))"
READING = "print(f'12 heads took ⟨{n} ms⟩')"
PICTURE = "from IPython.display import display\nprint('a curve')\ndisplay({'image/png': f'AAA{n}'}, raw=True)"


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    manager, client = start_new_kernel(kernel_name="python3")
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture(autouse=True)
def one_kernel(kernel: KernelManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run in the same process, emptied before it and sent to its folder: a kernel takes a second to start."""

    class Runner(NotebookClient):
        def execute(self, **options: Any) -> NotebookNode:
            folder = self.resources["metadata"]["path"]
            self.nb.cells.insert(0, new_code_cell(f"%reset -f\n%cd -q {folder}"))
            super().execute(**options)
            self.nb.cells.pop(0)
            assert self.kc is not None
            self.kc.stop_channels()
            return self.nb

    monkeypatch.setattr(execute, "NotebookClient", functools.partial(Runner, km=kernel))


def laid(folder: Path, *sources: str) -> Path:
    """A notebook that was executed once, so that its readings say 1."""
    (folder / "n").write_text("0", encoding="utf-8")
    path = folder / "a.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    execute.execute(path)
    return path


def commit(path: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=path.parent, check=True)


def replace(path: Path, old: str, new: str) -> None:
    """Edit a source as a script does: the outputs of the cell stay where they were."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(old, new)
    nbformat.write(notebook, path)


def lay_anew(path: Path, *sources: str) -> None:
    """Edit by writing the notebook again: no cell has an output."""
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)


def shown(path: Path) -> list[str]:
    """The text of each cell, with its picture."""
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(o.get("text", "") + o.get("data", {}).get("image/png", "") for o in c.outputs) for c in cells]


def report_of(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    execute.execute(path, keep_measured=True)
    return capsys.readouterr().out


def test_a_reproduced_notebook_stays_byte_for_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = laid(tmp_path, CLOCK, READING, PICTURE, "'a value'")
    before = path.read_bytes()
    assert "stored picture kept, a fresh one differs: cell 3" in report_of(path, capsys)
    assert path.read_bytes() == before
    execute.execute(path)
    assert shown(path) == ["", "12 heads took ⟨3 ms⟩\n", "a curve\nAAA3", ""]


def test_a_changed_result_brings_its_fresh_readings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cell itself is untouched: an earlier one made its result another."""
    path = laid(tmp_path, CLOCK, "heads = 12", READING.replace("12", "{heads}"), READING)
    replace(path, "heads = 12", "heads = 16")
    report = report_of(path, capsys)
    assert shown(path) == ["", "", "16 heads took ⟨2 ms⟩\n", "12 heads took ⟨1 ms⟩\n"]
    assert "measured anew: cell 3" in report


def test_an_edited_cell_with_the_same_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = laid(tmp_path, CLOCK, READING)
    replace(path, "print(f'12", "print('12'  f'")
    assert "readings of the code before the edit: cell 2" in report_of(path, capsys)
    assert shown(path)[1] == "12 heads took ⟨1 ms⟩\n"
    assert "before the edit" not in report_of(path, capsys)  # said once: the id now belongs to the new source


def test_an_edited_picture_is_drawn_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = laid(tmp_path, CLOCK, PICTURE, PICTURE)
    replace(path, "print('a curve')\n", "print('a curve')  # of time\n")
    assert "fresh output: cell 2, 3" in report_of(path, capsys)
    assert shown(path) == ["", "a curve\nAAA2", "a curve\nAAA2"]
    replace(path, "a curve", "curves")
    execute.execute(path, keep_measured=True)
    assert shown(path)[1] == "curves\nAAA3"


def test_moved_and_inserted_cells_find_their_outputs_in_the_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = READING.replace("12", "24")
    path = laid(tmp_path, CLOCK, READING, other, PICTURE)
    commit(path)
    lay_anew(path, CLOCK, PICTURE, "print('new')", other, READING + "  # edited in its place")
    report = report_of(path, capsys)
    assert shown(path) == ["", "a curve\nAAA1", "new\n", "24 heads took ⟨1 ms⟩\n", "12 heads took ⟨2 ms⟩\n"]
    assert "fresh output: cell 3, 5" in report  # moved and edited at once: nothing says what it was
    lay_anew(path, CLOCK, READING + "  # edited in its place", other, PICTURE)
    assert "before the edit: cell 2" in report_of(path, capsys)
    assert shown(path) == ["", "12 heads took ⟨1 ms⟩\n", "24 heads took ⟨1 ms⟩\n", "a curve\nAAA1"]


def test_the_last_run_goes_before_the_last_commit(tmp_path: Path) -> None:
    path = laid(tmp_path, CLOCK, READING)
    commit(path)
    execute.execute(path)  # a new record, not committed
    execute.execute(path, keep_measured=True)
    assert shown(path)[1] == "12 heads took ⟨2 ms⟩\n"


def test_nothing_is_kept_where_nothing_was_recorded(tmp_path: Path) -> None:
    path = laid(tmp_path, CLOCK, READING)
    lay_anew(path, CLOCK, READING)
    execute.execute(path, keep_measured=True)
    assert shown(path)[1] == "12 heads took ⟨2 ms⟩\n"


def output(text: str = "", **data: str) -> list[NotebookNode]:
    if data:
        return [new_output("display_data", data={kind.replace("_", "/"): value for kind, value in data.items()})]
    return [new_output("stream", name="stdout", text=text)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (output("4.48 ms"), output("4.49 ms")),
        (output("⟨3\nms⟩"), output("⟨4\nms⟩")),
        (output("⟨3 ms⟩"), output("⟨3 ms⟩ ⟨4 ms⟩")),
        (output("⟨3 ms⟩"), output("<3 ms>")),
        (output("⟨3 ms⟩"), []),
        (output(text_plain="⟨3⟩ 1"), output(text_plain="⟨3⟩ 2")),
        (output(image_png="AAAA"), output(image_svg="AAAA")),
        (output(image_png="AAAA"), output(text_plain="AAAA")),
    ],
)
def test_outlines_tell_results_apart(one: list[NotebookNode], other: list[NotebookNode]) -> None:
    assert recorded.outline(one) != recorded.outline(other)


def test_the_marker_is_the_one_that_nbval_blanks() -> None:
    cfg = (ROOT / "book" / "_tools" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    ((pattern, _),) = get_sanitize_patterns(cfg)
    text = "⟨3 ms⟩ ⟨⟩ ⟨3\nms⟩ ⟨⟨1⟩⟩ <3> ⟨4"
    assert re.findall(pattern, text) == recorded.MARKED.findall(text) == ["⟨3 ms⟩", "⟨⟩", "⟨1⟩"]


def test_ids_of_the_book_remember_the_sources() -> None:
    """Without that, every picture would count as edited."""
    for path in sorted((ROOT / "book").glob("[0-9]*.ipynb")):
        cells = recorded.code_cells(nbformat.read(path, as_version=4))
        assert cells
        assert all(recorded.unedited(cell) for cell in cells), path.name


def test_records_and_kept_readings_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TBT_RECORD", "1")
    monkeypatch.setattr("sys.argv", ["execute.py", "--keep-measured", "a.ipynb"])
    with pytest.raises(SystemExit):
        execute.main()
    assert "choose one" in capsys.readouterr().err
