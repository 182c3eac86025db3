"""MyST Markdown as the book's own parser reads it, for the notebook rules and the Colab edition.

`parse` gives the blocks of a page as plain data, `marks` what running text holds besides words. markdown-it says
of a block in which lines it stands, but of what stands within a line nothing: each inline rule is wrapped so that
it notes where it began and ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from urllib.parse import unquote

import yaml
from docutils.parsers.rst.directives.misc import TestDirective
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from mdit_py_plugins.anchors.index import slugify
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.directives import parse_directive_text
from myst_parser.parsers.mdit import create_md_parser

CONFIG = Path(__file__).resolve().parents[2] / "_config.yml"
CITE = re.compile(r"^(?:foot)?cite(?::[a-z]+)?$")

# Directives whose body is not Markdown.
LITERAL = frozenset(
    {"math", "code", "code-block", "code-cell", "raw", "mermaid", "toctree", "bibliography", "eval-rst"}
)

# The tokens that are marks, and what we call them.
KINDS = {
    "code_inline": "code", "image": "image", "link_open": "link", "math_inline": "math",
    "math_block": "display", "math_block_label": "display", "myst_role": "role", "myst_target": "target",
}  # fmt: skip


@dataclass
class Text:
    """Lines of Markdown outside any fence."""

    source: str


@dataclass
class Code:
    """A fenced block that is no directive."""

    language: str
    source: str
    closed: bool = True


@dataclass
class Directive:
    """``{name} argument`` with its options and its body, still as source."""

    name: str
    argument: str
    options: dict[str, str]
    body: str
    closed: bool = True
    children: list[Block] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name that references use, or an empty string."""
        return self.options.get("label", self.options.get("name", ""))


Block = Text | Code | Directive


@dataclass(frozen=True)
class Mark:
    """Code, role, formula, link, picture or label in a text, and from where to where it stands."""

    kind: str
    start: int
    end: int
    text: str  # what it holds; the words of a link, the alternative text of a picture
    name: str  # of a role its name, of a displayed formula its label, of a link or picture where it leads


def noting(rule: Callable[[StateInline, bool], bool]) -> Callable[[StateInline, bool], bool]:
    """The rule, but the tokens it makes hold from where to where their source stands."""

    def noted(state: StateInline, silent: bool) -> bool:
        start, known = state.pos, len(state.tokens)
        if not rule(state, silent):
            return False
        for token in state.tokens[known:]:
            token.meta.setdefault("place", (start, state.pos))
        return True

    return noted


def site_parser() -> MarkdownIt:
    """The parser of the site, but stricter: a dollar with a space on its inner side is money, no formula."""
    extensions = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["parse"]["myst_enable_extensions"]
    parser = create_md_parser(MdParserConfig(enable_extensions=set(extensions), dmath_allow_space=False), RendererHTML)
    ruler = parser.inline.ruler
    for name, rule in zip(ruler.get_active_rules(), ruler.getRules(""), strict=True):
        ruler.at(name, noting(rule))
    return parser


PARSER = site_parser()


# --------------------------------------------------------------------------------------------------------------------
# Blocks


@cache
def block_tokens(source: str) -> list[Token]:
    tokens: list[Token] = []
    PARSER.block.parse(source + "\n", PARSER, {}, tokens)
    return tokens


def parse(source: str) -> list[Block]:
    """Split a page into blocks; directives whose body is Markdown are parsed to the bottom."""
    lines = source.split("\n")
    blocks: list[Block] = []
    start = 0
    for token in block_tokens(source):
        # A colon fence needs a name; three bare colons are text.
        if token.type == "fence" or (token.type == "colon_fence" and token.info.strip().startswith("{")):
            first, end = token.map or (0, 0)
            blocks += [Text("\n".join(lines[start:first])), fenced(token, token.content.count("\n") == end - first - 2)]
            start = end
    blocks.append(Text("\n".join(lines[start:])))
    return [block for block in blocks if not isinstance(block, Text) or block.source.strip()]


def fenced(token: Token, closed: bool) -> Code | Directive:
    info, text = token.info.strip(), token.content.removesuffix("\n")
    if not info.startswith("{"):
        return Code(info, text, closed)
    name, _, argument = info[1:].partition("}")
    # TestDirective is the one that takes any option. A box in a box, at once, is none.
    read = parse_directive_text(TestDirective, "", "\n" + text if text.startswith(":::") else text)
    body = "\n".join(read.body)
    return Directive(name, argument.strip(), read.options, body, closed, [] if name in LITERAL else parse(body))


def walk(blocks: list[Block], inside: tuple[Directive, ...] = ()) -> Iterator[tuple[Block, tuple[Directive, ...]]]:
    """Every block, outer before inner, with the directives around it."""
    for block in blocks:
        yield block, inside
        if isinstance(block, Directive):
            yield from walk(block.children, (*inside, block))


def directives(source: str) -> Iterator[Directive]:
    for block, _ in walk(parse(source)):
        if isinstance(block, Directive):
            yield block


def texts(source: str) -> Iterator[str]:
    """Every piece of running Markdown, inside boxes too; arguments (titles) of directives included."""
    for block, _ in walk(parse(source)):
        if isinstance(block, Text):
            yield block.source
        elif isinstance(block, Directive) and block.argument and block.name not in LITERAL | {"figure", "image"}:
            yield block.argument


def labels(source: str, *, equations: bool = False) -> list[str]:
    """The labels that a page sets, in order: those of its equations, or those of all else."""
    found = []
    for block, _ in walk(parse(source)):
        if isinstance(block, Text):
            found += [mark.name for mark in marks(block.source, "display" if equations else "target")]
        elif isinstance(block, Directive) and (block.name == "math") == equations:
            found.append(block.label)
    return [label for label in found if label]


def headings(source: str) -> list[tuple[int, str]]:
    """(level, text) of each heading at the top level of a page."""
    return [
        (int(token.tag[1:]), words.content)
        for token, words in pairwise(block_tokens(source))
        if token.type == "heading_open" and token.level == 0
    ]


def titles(source: str) -> dict[str, str]:
    """What a label before a heading is called: as the heading says."""
    tokens = block_tokens(source)
    return {
        label.content: words.content
        for label, heading, words in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if label.type == "myst_target" and heading.type == "heading_open"
    }


def slug(heading: str) -> str:
    """The anchor MyST gives a heading."""
    (line,) = PARSER.parseInline(heading)
    return slugify("".join(part.content for part in line.children or [] if part.type in ("text", "code_inline")))


# --------------------------------------------------------------------------------------------------------------------
# Running text


@cache
def all_marks(text: str) -> list[Mark]:
    starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    found = []
    paragraphs: set[tuple[int, int]] = set()  # a row of a table is one, whatever its cells
    for token in block_tokens(text):
        first, end = token.map or (0, 0)
        start, stop = starts[first], starts[end] - 1
        if token.type == "inline":
            paragraphs.add((start, stop))
        elif token.type in KINDS:
            lines = text[start:stop]
            found.append(as_mark(token, text, start + lines.index(token.markup or "("), start + len(lines.rstrip())))
    for start, stop in paragraphs:
        for token in PARSER.inline.parse(text[start:stop], PARSER, {}, []):
            if token.type in KINDS:
                found.append(as_mark(token, text, *(start + place for place in token.meta["place"])))
    return sorted(found, key=lambda mark: mark.start)


def as_mark(token: Token, text: str, start: int, end: int) -> Mark:
    kind, words, name = KINDS[token.type], token.content, token.meta.get("name") or token.info
    if kind in ("link", "image"):
        words = text[start:end].rpartition("](")[0].partition("[")[2]
        name = unquote(str(token.attrs.get("href", token.attrs.get("src"))))
    elif kind == "target":
        name = words
    return Mark(kind, start, end, words, name)


def marks(text: str, *kinds: str) -> list[Mark]:
    """The marks of these kinds in a text, in order; what the words of a link hold comes after the link."""
    return [mark for mark in all_marks(text) if mark.kind in kinds]


def replace(text: str, change: Callable[[Mark], str], *kinds: str) -> str:
    """The text with something else in the place of each mark of these kinds, but not of those within another."""
    pieces: list[str] = []
    position = 0
    for mark in marks(text, *kinds):
        if mark.start >= position:
            pieces += [text[position : mark.start], change(mark)]
            position = mark.end
    return "".join([*pieces, text[position:]])


def without(text: str, *kinds: str) -> str:
    """The text with these marks overwritten by spaces, keeping the lines."""
    return replace(text, lambda mark: re.sub(r"[^\n]", " ", text[mark.start : mark.end]), *kinds)
