"""A reading of MyST Markdown, as far as this book uses it: fences, directives with options, roles, equations.

The blocks of a page as plain data, for the notebook rules and the Colab edition. Fences follow the
parser of the book itself: a fence ends at the first line that repeats its character at least as often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from textwrap import dedent

FENCE = re.compile(r"^(?P<indent>[ ]*)(?P<fence>`{3,}|~{3,}|:{3,})[ ]*(?P<info>.*?)[ ]*$")
NAME = re.compile(r"^\{(?P<name>[\w:.+-]+)\}[ ]*(?P<argument>.*)$")
OPTION = re.compile(r"^:(?P<key>[\w-]+):(?:[ ]+(?P<value>.*))?$")
ROLE = re.compile(r"(?<![`\\])\{(?P<name>[A-Za-z][\w:+.-]*)\}(?P<ticks>`+)(?P<text>.+?)(?<!`)(?P=ticks)(?!`)", re.S)
TARGET = re.compile(r"^\((?P<label>[\w:.-]+)\)=[ ]*$", re.M)
DISPLAY = re.compile(r"\$\$(?P<body>.+?)\$\$(?:[ \t]*\((?P<label>[\w:.-]+)\))?", re.S)
INLINE = re.compile(r"(?<![\\$])\$(?![\s$])(?P<body>(?:\\.|[^$\\])+?)(?<![\s\\])\$(?![\d$])", re.S)
SPAN = re.compile(r"(?<!`)(?P<ticks>`+)(?!`)(?P<text>.+?)(?<!`)(?P=ticks)(?!`)", re.S)
LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target><[^>]*>|[^()\s]+)(?P<title>[ ]+\"[^\"]*\")?\)"
)
CITE = re.compile(r"^(?:foot)?cite(?::[a-z]+)?$")

# Directives whose body is not Markdown.
LITERAL = frozenset(
    {"math", "code", "code-block", "code-cell", "raw", "mermaid", "toctree", "bibliography", "eval-rst"}
)


@dataclass
class Text:
    """Lines of Markdown outside any fence."""

    source: str
    line: int


@dataclass
class Code:
    """A fenced block that is no directive."""

    language: str
    source: str
    line: int
    closed: bool = True


@dataclass
class Directive:
    """``{name} argument`` with its options and its body, still as source."""

    name: str
    argument: str
    options: dict[str, str]
    body: str
    line: int
    fence: str = ":::"
    closed: bool = True
    children: list[Block] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name that references use, or an empty string."""
        return self.options.get("label", self.options.get("name", ""))


Block = Text | Code | Directive


def parse(source: str, first_line: int = 1) -> list[Block]:
    """Split a page into blocks; directives whose body is Markdown are parsed to the bottom."""
    lines = source.split("\n")
    blocks: list[Block] = []
    plain: list[str] = []
    start = i = 0

    def flush() -> None:
        if any(line.strip() for line in plain):
            blocks.append(Text("\n".join(plain), first_line + start))
        plain.clear()

    while i < len(lines):
        opening = FENCE.match(lines[i])
        if not opening or (opening["fence"][0] == "`" and "`" in opening["info"]) or not opens(opening):
            if not plain:
                start = i
            plain.append(lines[i])
            i += 1
            continue
        flush()
        end = next((j for j in range(i + 1, len(lines)) if closes(lines[j], opening["fence"])), None)
        body = lines[i + 1 : len(lines) if end is None else end]
        blocks.append(fenced(opening, body, first_line + i, end is not None))
        i = len(lines) if end is None else end + 1
    flush()
    return blocks


def opens(match: re.Match[str]) -> bool:
    """A colon fence needs a name; three bare colons are text, or the end of a fence."""
    return match["fence"][0] != ":" or bool(NAME.match(match["info"]))


def closes(line: str, fence: str) -> bool:
    bare = line.strip()
    return len(bare) >= len(fence) and set(bare) == {fence[0]}


def fenced(opening: re.Match[str], body: list[str], line: int, closed: bool) -> Code | Directive:
    text = dedent("\n".join(body)) if opening["indent"] else "\n".join(body)
    named = NAME.match(opening["info"])
    if not named:
        return Code(opening["info"], text, line, closed)
    options, rest, used = read_options(text)
    directive = Directive(named["name"], named["argument"], options, rest, line, opening["fence"], closed)
    if directive.name not in LITERAL:
        directive.children = parse(rest, line + 1 + used)
    return directive


def read_options(body: str) -> tuple[dict[str, str], str, int]:
    """Leading ``:key: value`` lines, or a leading block between two ``---``; then the body and the lines used."""
    lines = body.split("\n")
    options: dict[str, str] = {}
    used = 0
    if lines and lines[0].strip() == "---" and "---" in [line.strip() for line in lines[1:]]:
        used = 1 + next(i for i, line in enumerate(lines[1:], start=1) if line.strip() == "---")
        for line in lines[1 : used - 1]:
            key, _, value = line.partition(":")
            options[key.strip()] = value.strip()
    else:
        while used < len(lines) and (match := OPTION.match(lines[used].strip())):
            options[match["key"]] = (match["value"] or "").strip()
            used += 1
    return options, "\n".join(lines[used:]), used


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


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to everything but code spans; the text of a role is not a code span."""
    pieces: list[str] = []
    position = 0
    roles = {match.end("name") + 1 for match in ROLE.finditer(text)}
    for span in SPAN.finditer(text):
        if span.start() in roles:
            continue
        pieces += [change(text[position : span.start()]), span.group()]
        position = span.end()
    return "".join([*pieces, change(text[position:])])


def blank(pattern: re.Pattern[str], text: str) -> str:
    """Overwrite matches by spaces, keeping the lines."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def without_code(text: str) -> str:
    return blank(SPAN, text)


def without_math(text: str) -> str:
    return blank(INLINE, blank(DISPLAY, text))


def equation_labels(source: str) -> list[str]:
    """Labels of the numbered equations of a page, in order."""
    found: list[tuple[int, str]] = []
    for block, _ in walk(parse(source)):
        if isinstance(block, Directive) and block.name == "math" and block.label:
            found.append((block.line, block.label))
        elif isinstance(block, Text):
            for match in DISPLAY.finditer(block.source):
                if match["label"]:
                    found.append((block.line + block.source[: match.start()].count("\n"), match["label"]))
    return [label for _, label in sorted(found)]


def slug(heading: str) -> str:
    """The anchor MyST gives a heading (GitHub's rule)."""
    plain = re.sub(r"[`*]", "", LINK.sub(lambda match: match["text"], heading)).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def headings(source: str) -> list[tuple[int, str]]:
    """(level, text) of each heading at the top level of a page."""
    found = []
    for block in parse(source):
        if isinstance(block, Text):
            for match in re.finditer(r"^(#{1,6})[ ]+(.+?)[ ]*#*$", block.source, re.M):
                found.append((len(match[1]), match[2]))
    return found
