"""What a notebook of this book must keep to, as rules that each name the cell and the fault.

    python book/_tools/rules.py book/*.ipynb        print every fault; exit status 1 if there is one

nbval compares what a cell prints with what it stored; these rules see what nbval cannot: cells that were
never run, numbers in the prose, figures without words, references that lead nowhere, missing beats.
Rules marked ``chapter`` hold for the numbered chapters, the others for every notebook.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import myst
import nbformat
from myst import Code, Directive, Text
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]

TAGS = frozenset(
    {"setup", "hide-input", "hide-output", "hide-cell", "remove-cell", "measure", "check", "exercise", "solution"}
)
FILE_BYTES = 1_000_000
IMAGE_BYTES = 150_000
CODE_LINES = 25
PRINTED_LINES = 40
MAIN_WORDS = 5_000
EXERCISES = (5, 6)
EXERCISE_MINUTES = 75
ALT_LENGTH = 15

PATHS = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users)/|\b[A-Za-z]:\\\\?(?:Users|Windows|Program)|file:///")
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{9,}\b")
SCALAR = re.compile(r"\bnp\.(?:float|int|uint|bool|str|complex)\w*\(")
PROGRESS = re.compile(r"\d+%\|")
CUDA = re.compile(r"""\.cuda\(|(?:\bdevice\s*=\s*|\bdevice\(\s*|\.to\(\s*)["']cuda""")
OPT_OUT = re.compile(r"#\s*(?:NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)")
MEASURED = re.compile(r"⟨[^⟨⟩\n]*⟩")
UNIT = r"(?:ms|µs|ns|[kMGTP]i?B|[kMGTP]?FLOPs?|[MGT]?B/s|[kMGT]?FLOP/s)"
THOUSANDS = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?"
FIGURE = re.compile(rf"(?<![\w.,/^{{-])(?P<number>{THOUSANDS}|\d+(?:\.\d+)?(?=[ \u00a0]{UNIT}(?!\w)))(?![\d,]*\d)")
MONEY = re.compile(r"(?<!\\)\$[ ]?\d[\d,.]*(?![^$\n]*\$)|\\\$[ ]?\d")
WORD = re.compile(r"(?<![\\\w{])[A-Za-z]{4,}(?![\w}])")
UPRIGHT = re.compile(r"\\(?:text|mathrm|operatorname|mathit|mathtt|textbf)\{[^{}]*\}")
EXERCISE_TITLE = re.compile(r"^(?P<title>.+?) \((?P<stars>★{1,3}), (?P<minutes>\d+) min\)$")
EXERCISE_LABEL = re.compile(r"^ex-(?P<chapter>\d\d)-\d+$")


class Book:
    """The folder of notebooks and what may be referred to in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def pages(self) -> dict[Path, str]:
        """The Markdown of every page, notebook or not."""
        pages = {}
        for path in sorted(self.folder.glob("*.ipynb")):
            notebook = nbformat.read(path, as_version=4)
            pages[path] = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for path in sorted(self.folder.glob("*.md")):
            pages[path] = path.read_text(encoding="utf-8")
        return pages

    @cached_property
    def citations(self) -> set[str]:
        bibliography = self.folder / "references.bib"
        text = bibliography.read_text(encoding="utf-8") if bibliography.exists() else ""
        return set(re.findall(r"^\s*@\w+\s*\{\s*([^,\s]+)\s*,", text, re.M))

    @cached_property
    def equations(self) -> Counter[str]:
        return Counter(label for page in self.pages.values() for label in myst.labels(page, equations=True))

    @cached_property
    def targets(self) -> Counter[str]:
        """Labels of headings, directives and figures."""
        found: Counter[str] = Counter()
        for page in self.pages.values():
            found.update(myst.labels(page))
        for path in self.folder.glob("*.ipynb"):
            for cell in nbformat.read(path, as_version=4).cells:
                if name := cell.metadata.get("mystnb", {}).get("figure", {}).get("name"):
                    found[name] += 1
        return found

    def anchors(self, path: Path) -> set[str]:
        page = self.pages.get(path, "")
        return {myst.slug(text) for _, text in myst.headings(page)} | set(myst.labels(page))


class Notebook:
    """One notebook with the views the rules need."""

    def __init__(self, path: Path, node: NotebookNode | None = None, book: Book | None = None) -> None:
        self.path = path
        self.node = node if node is not None else nbformat.read(path, as_version=4)
        self.book = book or Book(path.parent)
        numbered = re.match(r"(\d\d)_", path.name)
        self.number = int(numbered[1]) if numbered else None

    @property
    def cells(self) -> list[tuple[int, NotebookNode]]:
        return list(enumerate(self.node.cells, start=1))

    @property
    def code(self) -> list[tuple[int, NotebookNode]]:
        return [(i, cell) for i, cell in self.cells if cell.cell_type == "code"]

    @property
    def markdown(self) -> list[tuple[int, NotebookNode]]:
        return [(i, cell) for i, cell in self.cells if cell.cell_type == "markdown"]

    @cached_property
    def blocks(self) -> list[Placed]:
        """Every block of every Markdown cell, with what stands around it: boxes, and gates left open by other cells."""
        placed = []
        gate = ""
        for index, cell in self.markdown:
            for block, inside in myst.walk(myst.parse(cell.source)):
                if isinstance(block, Directive) and block.name.endswith("-start"):
                    gate = block.name.removesuffix("-start")
                around = tuple(outer.name for outer in inside)
                placed.append(Placed(index, block, (gate, *around) if gate else around))
                if isinstance(block, Directive) and block.name.endswith("-end"):
                    gate = ""
        return placed

    @cached_property
    def directives(self) -> list[tuple[int, Directive]]:
        return [(placed.cell, placed.block) for placed in self.blocks if isinstance(placed.block, Directive)]

    @cached_property
    def running_text(self) -> list[tuple[int, str]]:
        """(cell, Markdown) of everything a reader reads: prose, titles of boxes, captions."""
        text = [(i, piece) for i, cell in self.markdown for piece in myst.texts(cell.source)]
        captions = [(i, cell.metadata.get("mystnb", {}).get("figure", {}).get("caption", "")) for i, cell in self.code]
        return text + [(i, caption) for i, caption in captions if caption]

    @cached_property
    def printed(self) -> str:
        """Every text output, without what was measured: that is no ground for a number in the prose."""
        texts = [text for _, cell in self.code for text in (*output_texts(cell), *tables_with_units(cell))]
        return MEASURED.sub("⟨⟩", "\n".join(texts))


@dataclass(frozen=True)
class Placed:
    """A block, the number of its cell, and the names of the boxes around it, outermost first."""

    cell: int
    block: Text | Code | Directive
    inside: tuple[str, ...]


def output_texts(cell: NotebookNode) -> list[str]:
    """What a cell printed, and the plain text of the values it showed, but for pictures."""
    texts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            texts.append(output.text)
        elif output.output_type in ("display_data", "execute_result") and not pictures(output):
            texts.append(output.data.get("text/plain", ""))
    return texts


class Cells(HTMLParser):
    """The cells of a table, row by row, as text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip("\n")


def tables_with_units(cell: NotebookNode) -> list[str]:
    """The numbers of the book's tables as prose states them: with the unit that stands in the head.

    ``held (GB)`` over 487 is 487 GB, ``a ÷ b`` over 51 is 51×, and a share of 95% is 95 %.
    """
    found = []
    for output in cell.get("outputs", []):
        html = output.get("data", {}).get("text/html", "")
        heads, *rows = Cells(html).rows if 'class="tbt"' in html else [[]]
        for head, text in ((head, text) for row in rows for head, text in zip(heads, row, strict=True)):
            unit = re.search(r"\(([^()]+)\)$", head)
            found += [f"{text} {unit[1]}"] if unit else []
            found += [f"{text}×", f"{text} ×"] if "÷" in head else []
            found += [f"{text[:-1]} %"] if text.endswith("%") else []
    return found


def pictures(output: NotebookNode) -> dict[str, str]:
    return {kind: data for kind, data in output.get("data", {}).items() if kind.startswith("image/")}


# --------------------------------------------------------------------------------------------------------------------
# The rules. Each yields one sentence for each fault.

Rule = Callable[[Notebook], Iterator[str]]
RULES: dict[str, Rule] = {}
CHAPTER_RULES: dict[str, Rule] = {}


def rule(check: Rule) -> Rule:
    RULES[check.__name__] = check
    return check


def chapter(check: Rule) -> Rule:
    CHAPTER_RULES[check.__name__] = check
    return check


@rule
def format_is_valid(notebook: Notebook) -> Iterator[str]:
    try:
        nbformat.validate(notebook.node)
    except nbformat.ValidationError as error:
        yield f"not a valid notebook: {error.message}"
    kernel = notebook.node.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        yield f"kernelspec is {kernel!r}, not 'python3'"
    if notebook.node.metadata.get("language_info", {}).get("name") != "python":
        yield "language_info is missing"


@rule
def executed_in_order(notebook: Notebook) -> Iterator[str]:
    """nbval runs a cell without a stored count, but does not compare it; counts 1…n close that gap."""
    counts = [cell.get("execution_count") for _, cell in notebook.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1…{len(counts)}: run `make execute`"
    if counts and not any(cell.outputs for _, cell in notebook.code):
        yield "no cell has an output"


@rule
def outputs_are_clean(notebook: Notebook) -> Iterator[str]:
    for index, cell in notebook.code:
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {index} stored the error {output.ename}: {output.evalue}"
            elif output.output_type == "stream" and output.name == "stderr":
                yield f"cell {index} wrote to stderr: {output.text.strip()[:80]}"
        streams = [output.get("name") for output in cell.outputs]
        if any(a == b is not None for a, b in pairwise(streams)):
            yield f"cell {index} stored one stream in pieces"
        text = "\n".join(output_texts(cell))
        for pattern, what in ((ADDRESS, "an address"), (SCALAR, "a bare NumPy scalar"), (PROGRESS, "a progress bar")):
            if found := pattern.search(text):
                yield f"cell {index} prints {what}: {found.group()}"
        if cell.source.rstrip().endswith(";"):
            yield f"cell {index} ends with a semicolon, which hides a value in some front ends and shows it in nbval"


@rule
def nothing_of_this_machine(notebook: Notebook) -> Iterator[str]:
    for index, cell in notebook.cells:
        values = [
            data
            for output in cell.get("outputs", [])
            for kind, data in output.get("data", {}).items()
            if not kind.startswith("image/")
        ]
        streams = [output.get("text", output.get("traceback")) for output in cell.get("outputs", [])]
        if found := PATHS.search(json.dumps([cell.source, cell.metadata, values, streams], ensure_ascii=False)):
            yield f"cell {index} holds a path of a machine: {found.group()}"
        if "execution" in cell.metadata:
            yield f"cell {index} holds the times of its execution"


@rule
def tags_are_known(notebook: Notebook) -> Iterator[str]:
    for index, cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            if tag not in TAGS:
                yield f"cell {index} has the unknown tag {tag!r}"
        if cell.cell_type == "code" and (found := OPT_OUT.search(cell.source)):
            yield f"cell {index} opts out of the comparison: {found.group()}"


@rule
def no_widgets(notebook: Notebook) -> Iterator[str]:
    if "widgets" in notebook.node.metadata:
        yield "the metadata holds the state of widgets"
    for index, cell in notebook.code:
        for output in cell.outputs:
            if any("widget" in kind for kind in output.get("data", {})):
                yield f"cell {index} shows a widget, which is dead on a page"


@rule
def runs_without_a_gpu(notebook: Notebook) -> Iterator[str]:
    for index, cell in notebook.code:
        if found := CUDA.search(cell.source):
            yield f"cell {index} takes a GPU for granted ({found.group()}): ask tbt.measure.device()"


@rule
def sizes_are_within_budget(notebook: Notebook) -> Iterator[str]:
    size = len(nbformat.writes(notebook.node).encode())
    if size > FILE_BYTES:
        yield f"{size:,} bytes, more than {FILE_BYTES:,}"
    for index, cell in notebook.code:
        if (lines := len(cell.source.splitlines())) > CODE_LINES:
            yield f"cell {index} has {lines} lines of code, more than {CODE_LINES}"
        if (lines := sum(len(text.splitlines()) for text in output_texts(cell))) > PRINTED_LINES:
            yield f"cell {index} prints {lines} lines, more than {PRINTED_LINES}"
        for output in cell.outputs:
            for kind, data in pictures(output).items():
                weight = len(data.encode()) if "svg" in kind else len(base64.b64decode(data))
                if weight > IMAGE_BYTES:
                    yield f"cell {index} shows a picture of {weight:,} bytes, more than {IMAGE_BYTES:,}"


@rule
def figures_have_words(notebook: Notebook) -> Iterator[str]:
    for index, cell in notebook.code:
        if not any(pictures(output) for output in cell.outputs):
            continue
        meta = cell.metadata.get("mystnb", {})
        alt = meta.get("image", {}).get("alt", "")
        if len(alt.strip()) < ALT_LENGTH:
            yield f"cell {index} shows a picture without an alternative text of at least {ALT_LENGTH} characters"
        if not meta.get("figure", {}).get("caption", "").strip():
            yield f"cell {index} shows a picture without a caption"
        if not meta.get("figure", {}).get("name", "").startswith("fig-"):
            yield f"cell {index} shows a picture without a name fig-…"
    for index, text in notebook.running_text:
        for picture in myst.marks(text, "image"):
            if len(picture.text.strip()) < ALT_LENGTH:
                yield f"cell {index}: the picture {picture.name} has no alternative text"
    for index, directive in notebook.directives:
        if directive.name in ("figure", "image") and len(directive.options.get("alt", "")) < ALT_LENGTH:
            yield f"cell {index}: the picture {directive.argument} has no alternative text"


def stands_in(figure: str, text: str) -> bool:
    """Whether a figure stands in a text as a whole: 516,096 does not stand in 1,516,096 or 516,096.5."""
    return re.search(rf"(?<![\d.,])(?<!\d[.,]){re.escape(figure)}(?![.,]?\d)", text) is not None


@rule
def checked_figures_stand(notebook: Notebook) -> Iterator[str]:
    """What a cell lists as `checked` stands in its text and in an output that nbval compares."""
    for index, cell in notebook.cells:
        for figure in cell.metadata.get("checked", []):
            if not stands_in(figure, cell.source):
                yield f"cell {index} lists {figure!r} as checked, but its text does not state it"
            if not stands_in(figure, notebook.printed):
                yield f"cell {index} states {figure!r}, but no output of this notebook prints it"


@rule
def figures_have_a_ground(notebook: Notebook) -> Iterator[str]:
    """A number that looks computed (thousands, or three digits and a unit) is printed, or is set in code, or is quoted.

    Guesses and exercises state numbers that are wrong or given, and are left out. A figure taken from
    a source, not computed here, is listed in its cell's metadata as `given`.
    """
    code = "\n".join(cell.source for _, cell in notebook.code)
    ground = notebook.printed + "\n" + re.sub(r"(?<=\d)_(?=\d{3})", ",", code)
    listed = {i: cell.metadata.get("checked", []) + cell.metadata.get("given", []) for i, cell in notebook.cells}
    for placed in notebook.blocks:
        if not isinstance(placed.block, Text) or {"predict", "exercise"} & set(placed.inside):
            continue
        for match in FIGURE.finditer(myst.without(placed.block.source, "code", "role", "math", "display")):
            number = match["number"]
            digits = re.sub(r"\D", "", number).strip("0")
            if "," not in number and len(digits) < 3:
                continue
            if any(stands_in(number, figure) for figure in listed[placed.cell]):
                continue
            if not stands_in(number, ground) and not stands_in(number.replace(",", ""), ground):
                yield f"cell {placed.cell} states {number}, which no output prints and no code sets (quoted? given)"


@rule
def references_resolve(notebook: Notebook) -> Iterator[str]:
    book = notebook.book
    for index, text in notebook.running_text:
        for role in myst.marks(text, "role"):
            name, content = role.name, role.text.strip()
            target = (re.search(r"<([^<>]+)>$", content) or [content, content])[1].strip()
            if myst.CITE.match(name):
                for key in (key.strip() for key in content.split(",")):
                    if key not in book.citations:
                        yield f"cell {index} cites {key!r}, which references.bib does not have"
            elif name == "eq" and target not in book.equations:
                yield f"cell {index} refers to the equation {target!r}, which does not exist"
            elif name in ("ref", "numref") and target not in book.targets:
                yield f"cell {index} refers to {target!r}, which does not exist"
            elif name == "doc" and not any((book.folder / f"{target}{end}").exists() for end in ("", ".ipynb", ".md")):
                yield f"cell {index} refers to the page {target!r}, which does not exist"
        for link in myst.marks(text, "link", "image"):
            yield from broken_link(notebook, index, link.name)
    for label in myst.labels(book.pages.get(notebook.path, ""), equations=True):
        if book.equations[label] > 1:
            yield f"the equation label {label!r} is used {book.equations[label]} times in the book"
    for label in myst.labels(book.pages.get(notebook.path, "")):
        if book.targets[label] > 1:
            yield f"the label {label!r} is used {book.targets[label]} times in the book"


def broken_link(notebook: Notebook, index: int, target: str) -> Iterator[str]:
    if re.match(r"[a-z][a-z+.-]*:", target):
        return
    name, _, anchor = target.partition("#")
    path = notebook.path.parent / name if name else notebook.path
    if not path.exists():
        yield f"cell {index} links to {target}, which does not exist"
    elif anchor and not name and anchor in notebook.book.targets:
        return
    elif anchor and path.suffix in (".md", ".ipynb") and anchor not in notebook.book.anchors(path):
        yield f"cell {index} links to {target}, where there is no such heading"


@rule
def dollars_are_mathematics(notebook: Notebook) -> Iterator[str]:
    """Two amounts of money in a paragraph would become one formula."""
    for index, text in notebook.running_text:
        for formula in myst.marks(text, "math"):
            if len(WORD.findall(UPRIGHT.sub("", formula.text))) > 1:
                yield f"cell {index}: a formula made of words: ${formula.text}$"
        bare = myst.without(text, "code", "role", "math", "display")
        if found := MONEY.search(bare):
            yield f"cell {index}: {found.group()} is not written USD …"
        elif re.search(r"(?<!\\)\$", bare):
            yield f"cell {index}: a dollar sign without its partner"
    for index, cell in notebook.code:
        if found := re.search(r"\$\s?\d", "\n".join(output_texts(cell))):
            yield f"cell {index} prints {found.group()}…: amounts are written USD …"


@rule
def cells_hold_whole_sentences(notebook: Notebook) -> Iterator[str]:
    """A sentence split over two cells cannot be translated, nor read aloud."""
    for index, cell in notebook.markdown:
        blocks = myst.parse(cell.source)
        if blocks and isinstance(blocks[0], Text):
            first = blocks[0].source.strip()
            if re.match(r"[a-zà-ÿ]+(?![\w.])", first):
                yield f"cell {index} begins in the middle of a sentence: {first[:40]}…"
        if blocks and isinstance(blocks[-1], Text):
            last = re.split(r"\n\s*\n", blocks[-1].source.strip())[-1]
            if re.match(r"#{1,6} |[-*+] |\d+[.)] |\||>|<|\(|%|\{|\$\$|\+\+\+|:|!\[", last) or last.endswith("$$"):
                continue
            if not re.search(r"[.?!:…][*_\"”’')\]`]*$", last):
                yield f"cell {index} ends in the middle of a sentence: …{last[-40:]}"


@rule
def fences_are_closed(notebook: Notebook) -> Iterator[str]:
    """Fences and gates end, and three colons left alone show on the page."""
    gates: list[tuple[str, str]] = []
    for placed in notebook.blocks:
        block = placed.block
        if isinstance(block, Text):
            if re.search(r"^\s*:{3,}", myst.without(block.source, "code"), re.M):
                yield f"cell {placed.cell}: a line of colons that closes or opens nothing"
            continue
        if not block.closed:
            name = block.name if isinstance(block, Directive) else "code"
            yield f"cell {placed.cell}: the fence of {name!r} is never closed"
        if isinstance(block, Directive) and block.name.endswith("-start"):
            gates.append((block.name.removesuffix("-start"), f"cell {placed.cell}"))
        elif (
            isinstance(block, Directive)
            and block.name.endswith("-end")
            and (not gates or gates.pop()[0] != block.name.removesuffix("-end"))
        ):
            yield f"cell {placed.cell}: {block.name} ends nothing"
    for name, place in gates:
        yield f"{place}: {name}-start has no end"


@rule
def symbols_have_one_meaning(notebook: Notebook) -> Iterator[str]:
    """The tables `symbol | meaning | in the code | …` of a notebook give each glyph one meaning."""
    meanings: dict[str, tuple[str, int]] = {}
    for index, glyph, meaning in symbols(notebook):
        known, place = meanings.setdefault(glyph, (meaning, index))
        if known != meaning:
            yield f"cell {index}: {glyph} means {meaning!r}, but in cell {place} {known!r}"


def symbols(notebook: Notebook) -> Iterator[tuple[int, str, str]]:
    """(cell, glyph, meaning) for each row of the symbol tables. `B`, *B* and $B$ are one glyph, a bold B another."""
    for placed in notebook.blocks:
        if not isinstance(placed.block, Text):
            continue
        columns: list[str] = []
        for line in placed.block.source.splitlines():
            if not line.strip().startswith("|"):
                columns = []
                continue
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if [cell.lower() for cell in cells[:3]] == ["symbol", "meaning", "in the code"]:
                columns = cells
            elif columns and len(cells) > 1 and not set(cells[0]) <= set(":- "):
                for glyph in re.split(r"(?<=[`$*])\s*,\s*(?=[`$*])", cells[0]):
                    yield placed.cell, bare_glyph(glyph), " ".join(cells[1].split()).lower()


def bare_glyph(glyph: str) -> str:
    glyph = glyph.strip()
    bold = re.fullmatch(r"\*\*(.+)\*\*", glyph)
    return f"\\mathbf{{{bold[1]}}}" if bold else glyph.strip("`$*_ ")


@chapter
def starts_like_a_chapter(notebook: Notebook) -> Iterator[str]:
    titles = [(i, text) for i, cell in notebook.markdown for level, text in myst.headings(cell.source) if level == 1]
    if len(titles) != 1 or titles[0][0] != 1:
        yield f"there must be one title, in the first cell; found {[text for _, text in titles]}"
    elif not titles[0][1].endswith("?"):
        yield f"the title {titles[0][1]!r} is not a question"
    levels = [level for _, cell in notebook.markdown for level, _ in myst.headings(cell.source)]
    for before, after in pairwise(levels):
        if after > before + 1:
            yield f"a heading of level {after} follows one of level {before}"
    first = notebook.code[0][1] if notebook.code else None
    tags = first.metadata.get("tags", []) if first else []
    if first is None or "setup" not in tags or "import tokenbytoken as tbt" not in first.source:
        yield "the first code cell must be tagged 'setup' and import tokenbytoken as tbt"


@chapter
def has_the_four_beats(notebook: Notebook) -> Iterator[str]:
    """Open with a prediction, check, measure against the ledger, close with what to keep and exercises."""
    predictions = [(i, box) for i, box in notebook.directives if box.name == "predict"]
    if not predictions or predictions[0][0] > max(4, len(notebook.cells) // 4):
        yield "no predict box near the top"
    for index, box in predictions:
        if not any(isinstance(inner, Directive) and inner.name == "reply" for inner in box.children):
            yield f"cell {index}: a predict box without a folded reply"
    for number, (index, box) in enumerate(predictions, start=1):
        key = f"predict-{notebook.path.name[:2]}-{number}"
        if box.options.get("key") != key:
            yield f"cell {index}: the key of this predict box must be {key}, not {box.options.get('key')!r}"
    code = "\n".join(cell.source for _, cell in notebook.code)
    if not re.search(r"\bcheck\.(?:close|caught)\(|\bassert\b", code):
        yield "no check"
    if not re.search(r"\bcheck\.caught\(|\bassert not\b", code):
        yield "no check is first run on a wrong variant (tbt.check.caught)"
    if not re.search(r"\btbt\.ledger\(", code):
        yield "no row of the ledger (tbt.ledger)"
    takeaways = [i for i, box in notebook.directives if box.name == "takeaway"]
    if not takeaways:
        yield "no takeaway"
    if not any(glyph for _, glyph, _ in symbols(notebook)):
        yield "no table of symbols (symbol | meaning | in the code | …)"


@chapter
def exercises_are_complete(notebook: Notebook) -> Iterator[str]:
    exercises = [(i, box) for i, box in notebook.directives if box.name in ("exercise", "exercise-start")]
    solutions = [(i, box) for i, box in notebook.directives if box.name in ("solution", "solution-start")]
    if not EXERCISES[0] <= len(exercises) <= EXERCISES[1]:
        yield f"{len(exercises)} exercises, not {EXERCISES[0]} or {EXERCISES[1]}"
    minutes = 0
    for index, box in exercises:
        title = EXERCISE_TITLE.match(box.argument)
        if not title:
            yield f"cell {index}: {box.argument!r} does not say its difficulty and minutes: Title (★★, 10 min)"
        else:
            minutes += int(title["minutes"])
        label = EXERCISE_LABEL.match(box.label)
        if not label or int(label["chapter"]) != notebook.number:
            yield f"cell {index}: the exercise's label {box.label!r} is not ex-{notebook.number:02d}-…"
        if not any(solution.argument.strip() == box.label for _, solution in solutions):
            yield f"cell {index}: the exercise {box.label!r} has no solution"
    if minutes > EXERCISE_MINUTES:
        yield f"the exercises take {minutes} minutes, more than {EXERCISE_MINUTES}"
    known = {box.label for _, box in exercises}
    for index, box in solutions:
        if box.argument.strip() not in known:
            yield f"cell {index}: a solution of {box.argument!r}, which is no exercise of this chapter"
        if "dropdown" not in box.options.get("class", ""):
            yield f"cell {index}: the solution of {box.argument} is not folded (:class: dropdown)"


@chapter
def main_line_is_short(notebook: Notebook) -> Iterator[str]:
    """Exercises, solutions, folded replies and second readings are not the main line."""
    words = 0
    for placed in notebook.blocks:
        if isinstance(placed.block, Text) and not {"exercise", "solution", "reply", "dropdown"} & set(placed.inside):
            plain = myst.without(placed.block.source, "code", "role", "math", "display")
            words += len(re.findall(r"[^\W\d_][\w’'-]*", plain))
    if words > MAIN_WORDS:
        yield f"{words:,} words in the main line, more than {MAIN_WORDS:,}"


def faults(notebook: Notebook) -> Iterator[str]:
    """Every fault of every rule that applies, each with the name of its rule."""
    rules = {**RULES, **CHAPTER_RULES} if notebook.number is not None else RULES
    for name, check in rules.items():
        for fault in check(notebook):
            yield f"{fault}  [{name}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted((ROOT / "book").glob("*.ipynb")))
    books: dict[Path, Book] = {}
    found = 0
    for path in parser.parse_args().notebooks:
        book = books.setdefault(path.parent, Book(path.parent))
        for fault in faults(Notebook(path, book=book)):
            found += 1
            print(f"{path.name}: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
