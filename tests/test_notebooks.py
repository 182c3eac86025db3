"""Every notebook of the book keeps to the rules, and every rule finds its own fault in a bad notebook."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import edit as edit_tool
import execute
import jupytext
import myst
import nbformat
import pytest
import rules
import yaml
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from rules import Book, Notebook

import tokenbytoken as tbt
from tokenbytoken import measure

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.name)]
BOOK = Book(ROOT / "book")


# ------------------------------------------------------------------------------------------------ the book's notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_keeps_the_rules(path: Path) -> None:
    found = list(rules.faults(Notebook(path, book=BOOK)))
    assert not found, "\n" + "\n".join(found)


def test_every_chapter_of_the_contents_is_a_notebook_with_outputs() -> None:
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    listed = {Path(chapter["file"]).name for part in contents["parts"] for chapter in part["chapters"]}
    numbered = {name for name in listed if re.match(r"\d\d_", name)}
    assert numbered
    assert {path.stem for path in CHAPTERS} == numbered


def seconds() -> dict[str, float]:
    recorded: dict[str, float] = measure.reference("run_times")["payload"]["seconds"]
    return recorded


def test_times_are_recorded_and_within_budget() -> None:
    assert set(seconds()) == {path.stem for path in CHAPTERS}
    assert max(seconds().values()) <= 60
    assert sum(seconds().values()) / len(seconds()) <= 30


# ------------------------------------------------------------------------------------------------------ the rules bite


def test_the_sample_is_faultless(sample: Path) -> None:
    assert list(rules.faults(Notebook(sample))) == []


Change = Callable[[NotebookNode], None]


def cell(notebook: NotebookNode, words: str) -> NotebookNode:
    """The one cell whose source holds these words."""
    (found,) = [cell for cell in notebook.cells if words in cell.source]
    return found


def edit(old: str, new: str) -> Change:
    """Replace the only occurrence of `old` in the sources."""

    def change(notebook: NotebookNode) -> None:
        holder = cell(notebook, old)
        holder.source = holder.source.replace(old, new, 1)

    return change


def end_with_semicolon(notebook: NotebookNode) -> None:
    cell(notebook, "unit = None").source += ";"


def add_text(text: str) -> Change:
    return lambda notebook: notebook.cells.insert(4, new_markdown_cell(text))


def add_output(**data: str) -> Change:
    """One more output of the first counting cell: a stream by its name, or a value by its type."""

    def change(notebook: NotebookNode) -> None:
        outputs = cell(notebook, "count = 65_536").outputs
        for name, text in data.items():
            if name in ("stdout", "stderr"):
                outputs.append(new_output("stream", name=name, text=text))
            elif name == "error":
                outputs.append(new_output("error", ename=text, evalue="", traceback=[]))
            else:
                outputs.append(new_output("display_data", data={name: text}))

    return change


def set_metadata(words: str, **metadata: object) -> Change:
    return lambda notebook: cell(notebook, words).metadata.update(metadata)


def figure_words(alt: str = "", caption: str = "") -> Change:
    words = {"figure": {"caption": caption, "name": "fig-sample"}, "image": {"alt": alt}}
    return set_metadata("plt.subplots", mystnb=words)


SECOND_TABLE = "| symbol | meaning | in the code |\n|---|---|---|\n| $N$ | number of nodes | `nodes` |"


def without(words: str) -> Change:
    def change(notebook: NotebookNode) -> None:
        notebook.cells.remove(cell(notebook, words))
        for count, code in enumerate((c for c in notebook.cells if c.cell_type == "code"), start=1):
            code.execution_count = count

    return change


def strip_outputs(notebook: NotebookNode) -> None:
    for code in notebook.cells:
        if code.cell_type == "code":
            code.outputs, code.execution_count = [], None


def strip_outputs_keep_counts(notebook: NotebookNode) -> None:
    for code in notebook.cells:
        if code.cell_type == "code":
            code.outputs = []


def heavy_picture(notebook: NotebookNode) -> None:
    """150 kB and one byte of picture."""
    for output in cell(notebook, "plt.subplots").outputs:
        output.data["image/png"] = base64.b64encode(bytes(150_001)).decode()


def widget_state(notebook: NotebookNode) -> None:
    notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {}}


def other_kernel(notebook: NotebookNode) -> None:
    notebook.metadata.kernelspec.name = "venv"


def no_language(notebook: NotebookNode) -> None:
    del notebook.metadata["language_info"]


BAD: list[tuple[str, str, Change]] = [
    ("format_is_valid", "kernelspec is 'venv'", other_kernel),
    ("format_is_valid", "language_info", no_language),
    ("executed_in_order", "execution counts", lambda nb: nb.cells.append(new_code_cell("1 + 1"))),
    ("executed_in_order", "execution counts", strip_outputs),
    ("executed_in_order", "execution counts", lambda nb: cell(nb, "count = 65_536").update(execution_count=9)),
    ("executed_in_order", "no cell has an output", strip_outputs_keep_counts),
    ("outputs_are_clean", "stored the error ValueError", add_output(error="ValueError")),
    ("outputs_are_clean", "wrote to stderr", add_output(stderr="a warning")),
    ("outputs_are_clean", "one stream in pieces", add_output(stdout="more")),
    ("outputs_are_clean", "an address", add_output(**{"text/plain": "<function f at 0x7f3a1c>"})),
    ("outputs_are_clean", "a bare NumPy scalar", add_output(**{"text/plain": "np.float64(0.5)"})),
    ("outputs_are_clean", "a progress bar", add_output(**{"text/plain": " 40%|####      | 4/10"})),
    ("outputs_are_clean", "ends with a semicolon", end_with_semicolon),
    ("nothing_of_this_machine", "/home/", add_output(**{"text/plain": "/home/reader/book"})),
    ("nothing_of_this_machine", "/Users/", edit("import time\n", "import time\n# see /Users/reader/book\n")),
    ("nothing_of_this_machine", "Users", add_output(**{"text/plain": r"C:\Users\reader"})),
    ("nothing_of_this_machine", "times of its execution", set_metadata("import time", execution={"iopub": "now"})),
    ("tags_are_known", "'chek'", set_metadata("import time", tags=["chek"])),
    ("tags_are_known", "opts out", edit("import time\n", "# NBVAL_IGNORE_OUTPUT\nimport time\n")),
    ("no_widgets", "the state of widgets", widget_state),
    ("no_widgets", "shows a widget", add_output(**{"application/vnd.jupyter.widget-view+json": "{}"})),
    ("runs_without_a_gpu", ".cuda(", edit("unit = None", "unit = None\nx = x.cuda()")),
    ("runs_without_a_gpu", "cuda", edit("unit = None", "unit = None\nx = torch.ones(2, device='cuda')")),
    ("sizes_are_within_budget", "lines of code", edit("unit = None", "unit = None\n" * 25)),
    ("sizes_are_within_budget", "prints 41 lines", add_output(**{"text/plain": "line\n" * 40})),
    ("sizes_are_within_budget", "picture of 150,001 bytes", heavy_picture),
    ("sizes_are_within_budget", "more than 1,000,000", add_output(**{"text/html": "x" * 1_000_000})),
    ("figures_have_words", "alternative text", figure_words(caption="A sum.")),
    ("figures_have_words", "without a caption", figure_words(alt="Two lines that leave each other")),
    ("figures_have_words", "no alternative text", add_text("![x](notation.md)")),
    ("checked_figures_stand", "its text does not state it", set_metadata("comes out as", checked=["6,557.1"])),
    ("checked_figures_stand", "no output of this notebook", set_metadata("comes out as", checked=["USD 2"])),
    ("figures_have_a_ground", "states 7,654", add_text("It is 7,654 in all.")),
    ("figures_have_a_ground", "states 67.6", add_text("Each reader keeps 67.6 GB.")),
    ("references_resolve", "cites 'nobody2020'", add_text("As {cite:p}`higham1993, nobody2020` say.")),
    ("references_resolve", "the equation 'eq-04-missing'", add_text("By {eq}`eq-04-missing` it holds.")),
    ("references_resolve", "refers to 'fig-missing'", add_text("See {numref}`fig-missing`.")),
    ("references_resolve", "refers to 'ex-04-9'", add_text("See {ref}`the last one <ex-04-9>`.")),
    ("references_resolve", "the page 'missing'", add_text("See {doc}`missing`.")),
    ("references_resolve", "links to 05_missing.ipynb", add_text("See [the next](05_missing.ipynb).")),
    ("references_resolve", "no such heading", add_text("See [letters](notation.md#letters).")),
    ("references_resolve", "used 2 times", add_text("$$\nx = 1\n$$ (eq-04-round)")),
    ("dollars_are_mathematics", "formula made of words", add_text("It costs $2 per hour there, and$ 3 here.")),
    ("dollars_are_mathematics", "USD", add_text("It costs $2 per hour.")),
    ("dollars_are_mathematics", "USD", add_text(r"It costs \$2 per hour and \$3 per day.")),
    ("dollars_are_mathematics", "prints $2", add_output(**{"text/plain": "total $2"})),
    ("cells_hold_whole_sentences", "ends in the middle", add_text("The sum of all of these terms")),
    ("cells_hold_whole_sentences", "begins in the middle", add_text("where $n$ is their number.")),
    ("fences_are_closed", "never closed", add_text("```{note}\nOpen.")),
    ("fences_are_closed", "a line of colons", add_text("::::{note}\nText.\n:::\n::::\n:::")),
    ("fences_are_closed", "has no end", edit("```{solution-end}\n```", "")),
    ("fences_are_closed", "ends nothing", add_text("```{exercise-end}\n```")),
    ("symbols_have_one_meaning", "N means 'number of nodes'", add_text(SECOND_TABLE)),
    ("symbols_have_one_meaning", "u means", edit("| `N` | number of terms", "| $u$ | number of terms")),
    ("starts_like_a_chapter", "not a question", edit("# How much does a sum forget?", "# Sums")),
    ("starts_like_a_chapter", "one title", add_text("# And another?")),
    ("starts_like_a_chapter", "follows one of level", edit("## The ledger", "#### The ledger")),
    ("starts_like_a_chapter", "tagged 'setup'", set_metadata("import tokenbytoken", tags=[])),
    ("has_the_four_beats", "no predict box", edit("{predict}", "{note}")),
    ("has_the_four_beats", "without a folded reply", add_text(":::{predict}\nHow many?\n:::")),
    ("has_the_four_beats", "must be predict-04-1, not", edit("predict-04-1", "predict-05-1")),
    ("has_the_four_beats", "on a wrong variant", edit("assert not", "assert ")),
    ("has_the_four_beats", "no takeaway", edit("{takeaway}", "{note}")),
    ("has_the_four_beats", "no row of the ledger", without("tbt.ledger")),
    ("has_the_four_beats", "no table of symbols", edit("| symbol | meaning |", "| letter | meaning |")),
    ("exercises_are_complete", "4 exercises", edit("```{exercise} A ratio (★★, 10 min)\n:label: ex-04-5", "```{note}")),
    ("exercises_are_complete", "difficulty and minutes", edit("Random terms (★★, 10 min)", "Random terms")),
    ("exercises_are_complete", "more than 75", edit("★★★, 20 min", "★★★, 60 min")),
    ("exercises_are_complete", "label", edit(":label: ex-04-5", ":label: ex-05-5")),
    ("exercises_are_complete", "no solution", edit("```{solution} ex-04-4", "```{note} Kahan")),
    ("exercises_are_complete", "not folded", edit("{solution} ex-04-4\n:class: dropdown", "{solution} ex-04-4")),
    ("main_line_is_short", "words in the main line", add_text("Word " * 5_000 + ".")),
]


def altered(sample: Path, folder: Path, change: Change) -> Notebook:
    """The sample with a fault, in a folder of its own."""
    target = folder / "book"
    shutil.copytree(sample.parent, target)
    notebook = nbformat.read(sample, as_version=4)
    change(notebook)
    (target / sample.name).write_text(json.dumps(notebook), encoding="utf-8")
    return Notebook(target / sample.name, node=notebook)


@pytest.mark.parametrize(("name", "words", "change"), BAD, ids=[f"{name}: {words}" for name, words, _ in BAD])
def test_rule_finds_its_fault(name: str, words: str, change: Change, sample: Path, tmp_path: Path) -> None:
    check = {**rules.RULES, **rules.CHAPTER_RULES}[name]
    found = list(check(altered(sample, tmp_path, change)))
    assert any(words in fault for fault in found), found


def test_every_rule_has_a_bad_notebook() -> None:
    assert {name for name, _, _ in BAD} == set(rules.RULES) | set(rules.CHAPTER_RULES)


def test_what_only_looks_like_a_fault_passes(sample: Path, tmp_path: Path) -> None:
    text = (
        "Bits 0x3f800000 and 0x7e; see [the site](https://example.org/home/page) and [above](#the-ledger).\n\n"
        "The set $2^{30}$, $\\text{all the words}$ and `$2 and $3`; USD 2 an hour, 80 GB, 2024, 3.5 s, 16 bytes.\n\n"
        "- an item without a full stop\n\nbfloat16 is a name."
    )

    def change(notebook: NotebookNode) -> None:
        add_text(text)(notebook)
        add_output(**{"text/plain": "bits 0x3f800000"})(notebook)

    assert list(rules.faults(altered(sample, tmp_path, change))) == []


def test_a_measured_figure_is_no_ground_for_prose(sample: Path, tmp_path: Path) -> None:
    def change(notebook: NotebookNode) -> None:
        add_output(**{"text/plain": "measured ⟨67.6 GB⟩"})(notebook)
        add_text("It measures 67.6 GB.")(notebook)

    assert list(rules.figures_have_a_ground(altered(sample, tmp_path, change)))


def test_a_table_is_read_with_the_units_of_its_heads() -> None:
    columns = {"": "", "held (GB)": ".0f", "a ÷ b": ".1f", "share": ".0%", "time (ms)": ""}
    made = tbt.table([("x", 487, 1.5, 0.95, "⟨31⟩")], columns)
    shown = nbformat.v4.new_output("display_data", {"text/html": made._repr_html_()})
    cell = nbformat.v4.new_code_cell(outputs=[shown])
    told = rules.tables_with_units(cell)
    assert {"487 GB", "1.5×", "95 %"} <= set(told)
    assert "487 ms" not in told
    assert rules.tables_with_units(nbformat.v4.new_code_cell()) == []


def test_figures_match_as_wholes() -> None:
    assert rules.stands_in("516,096", "is 516,096. Then")
    assert rules.stands_in("3.1 GB", "(3.1 GB)")
    for text in ("1,516,096", "516,096.5", "516,0961", "2516,096"):
        assert not rules.stands_in("516,096", text)


# ---------------------------------------------------------------------------------------------- the reading of Markdown


def test_fences_nest_and_carry_options() -> None:
    box = "::::{predict}\nWhich?\n:::{reply} **4** ms\n:class: x\n\nNo.\n:::\n::::"
    text, predict, code = myst.parse(f"before\n\n{box}\n\n```python\n{{a}}\n```")
    assert isinstance(text, myst.Text)
    assert isinstance(predict, myst.Directive)
    assert isinstance(code, myst.Code)
    assert (code.language, code.source) == ("python", "{a}")
    question, reply = predict.children
    assert isinstance(question, myst.Text)
    assert isinstance(reply, myst.Directive)
    assert (reply.name, reply.argument, reply.options) == ("reply", "**4** ms", {"class": "x"})
    assert reply.body.strip() == "No."


def test_a_fence_ends_at_the_first_that_is_as_long() -> None:
    outer, rest, *_ = myst.parse(":::{note}\n:::{tip}\nx\n:::\nout\n:::")
    assert isinstance(outer, myst.Directive)
    assert isinstance(rest, myst.Text)
    assert rest.source.strip() == "out\n:::"


def test_fences_as_the_book_reads_them(sample: Path) -> None:
    """The parser of the site sees the same directives as ours, cell by cell."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.colon_fence import colon_fence_plugin

    parser = MarkdownIt("commonmark").use(colon_fence_plugin)

    def theirs(source: str) -> list[str]:
        names = []
        for token in parser.parse(source):
            info = re.match(r"\{([\w:.+-]+)\}", token.info) if token.type in ("fence", "colon_fence") else None
            if info:
                names.append(info[1])
                names += theirs(token.content) if info[1] not in myst.LITERAL else []
        return names

    seen = 0
    for path in [sample, *NOTEBOOKS]:
        for one in nbformat.read(path, as_version=4).cells:
            if one.cell_type == "markdown":
                ours = [directive.name for directive in myst.directives(one.source)]
                assert ours == theirs(one.source)
                seen += len(ours)
    assert seen > 10


def test_roles_are_no_code_and_code_holds_no_roles() -> None:
    text = "by {eq}`eq-1` and `{eq}` and `` {ref}`x` `` and {cite:p}`a,b`"
    assert [(role.name, role.text) for role in myst.marks(text, "role")] == [("eq", "eq-1"), ("cite:p", "a,b")]
    assert myst.replace(text, lambda role: "R", "role") == "by R and `{eq}` and `` {ref}`x` `` and R"


def test_marks_stand_where_they_are_found() -> None:
    """In a list, a table, a quotation, a link, and across lines."""
    text = (
        "(a)=\n# On `b`\n\n- c, {eq}`d` [f\n  $g$](h.md#i)\n\n  $$\n  j\n  $$ (k)\n\n> l\n> ![m `n`](o.png)\n\n"
        "| `p` | $q$ |\n|---|---|\n| $r$ | {ref}`s` |\n\nUSD $2 and $3, \\$4"
    )
    found = {text[mark.start : mark.end]: (mark.kind, mark.text, mark.name) for mark in myst.all_marks(text)}
    assert found == {
        "(a)=": ("target", "a", "a"),
        "`b`": ("code", "b", ""),
        "{eq}`d`": ("role", "d", "eq"),
        "[f\n  $g$](h.md#i)": ("link", "f\n  $g$", "h.md#i"),
        "$g$": ("math", "g", ""),
        "$$\n  j\n  $$ (k)": ("display", "\n  j\n  ", "k"),
        "![m `n`](o.png)": ("image", "m `n`", "o.png"),
        "`p`": ("code", "p", ""),
        "$q$": ("math", "q", ""),
        "$r$": ("math", "r", ""),
        "{ref}`s`": ("role", "s", "ref"),
    }
    blank = myst.without(text, "code", "link", "display", "target")
    assert [len(line) for line in blank.split("\n")] == [len(line) for line in text.split("\n")]
    assert not {"(a)", "`b`", "[f", "j"} & set(blank.split())


def test_slugs_are_those_of_the_site() -> None:
    from mdit_py_plugins.anchors.index import slugify

    for heading in ("Past keys never change", "What it costs: 2 × n?", "A `KVCache`, and *more*", "n = 1…256"):
        assert myst.slug(heading) == slugify(re.sub(r"[`*]", "", heading))


# --------------------------------------------------------------------------------------- editing and running a notebook


def test_a_round_trip_through_text_changes_nothing(sample: Path) -> None:
    """Chapters are edited as text: what is not edited must come back as it was."""
    for path in [sample, *NOTEBOOKS]:
        before = nbformat.read(path, as_version=4)
        after = jupytext.reads(jupytext.writes(before, fmt=edit_tool.FORMAT), fmt=edit_tool.FORMAT)
        assert [(c.cell_type, c.source, c.metadata) for c in after.cells] == [
            (c.cell_type, c.source, c.metadata) for c in before.cells
        ], path.name


def test_edit_keeps_the_outputs_of_untouched_cells(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ipynb", "print(1)", "print(3)")
    execute.execute(path)
    before = path.read_bytes()
    assert not edit_tool.edit(path, ["true"])
    assert path.read_bytes() == before
    assert edit_tool.edit(path, ["sed", "-i", "s/print(1)/print(2)/"])
    changed, untouched = nbformat.read(path, as_version=4).cells
    assert (changed.source, changed.outputs) == ("print(2)", [])
    assert [output.text for output in untouched.outputs] == ["3\n"]


def write(path: Path, *sources: str) -> Path:
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    return path


def test_execute_stores_a_clean_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ipynb", "import sys\nprint(1)\nsys.stdout.flush()\nprint(2)", "", "3")
    assert execute.execute(path) > 0
    notebook = nbformat.read(path, as_version=4)
    assert [code.execution_count for code in notebook.cells] == [1, 2]
    assert [output.text for output in notebook.cells[0].outputs] == ["1\n2\n"]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert all(dict(code.metadata) == {} for code in notebook.cells)
    ids = [code.id for code in notebook.cells]
    execute.execute(path)
    assert [code.id for code in nbformat.read(path, as_version=4).cells] == ids


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import sys\nprint('careful', file=sys.stderr)", "stderr"),
        ("import tokenbytoken\nprint(tokenbytoken.__path__)", "path"),
        ("while True: pass", "timed out"),
    ],
)
def test_execute_refuses_and_leaves_the_file_alone(source: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.ipynb", "print(1)", source)
    before = path.read_bytes()
    with pytest.raises(execute.Refused, match=words):
        execute.execute(path, timeout=3)
    assert path.read_bytes() == before


def test_times_are_merged_into_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.records, "_RECORDS", tmp_path)
    monkeypatch.setenv("TBT_RECORD", "0")
    execute.record({"01_a": 1.04, "02_b": 2.0})
    execute.record({"02_b": 3.0})
    assert measure.reference("run_times")["payload"] == {"seconds": {"01_a": 1.0, "02_b": 3.0}}
    monkeypatch.setattr(measure.records, "cpu_model", lambda: "another processor")
    execute.record({"02_b": 4.0})
    assert measure.reference("run_times")["payload"] == {"seconds": {"02_b": 4.0}}
