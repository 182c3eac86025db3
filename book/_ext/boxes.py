"""The book's own boxes: Predict (with its folded replies), Takeaway, Where it breaks.

    :::::{predict}
    :key: predict-01-1
    :answer: choice
    How long does one token take?
    ::::{reply} 4 ms
    That would be right if each weight were read at the memory's speed …
    ::::
    :::::

A prediction is one of its replies (``choice``), or a ``number`` with a ``:unit:``. The page carries key, kind and unit
as data attributes, for scripts; without any, a reader sees the question and its folded replies.

Notes are docutils' own, exercises and solutions are sphinx-exercise's; together they are the five kinds of
box that the book has. A reply is a `<details>` element: it opens without JavaScript and by keyboard.
"""

from __future__ import annotations

from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.locale import _
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator
from sphinx_exercise.nodes import is_exercise_node


class predict(nodes.Admonition, nodes.Element):
    """A question that a reader answers before reading on; ``key``, ``kind`` and ``unit`` say what is asked."""


class reply(nodes.General, nodes.Element):
    """One answer that a reader may have picked, folded; its first child is the answer itself."""


class reply_answer(nodes.General, nodes.TextElement):
    """The line of a reply that is always seen."""


class Box(SphinxDirective):
    """An admonition with a fixed name and, if an argument is given, a title after it."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True
    kind: ClassVar[str]
    label: ClassVar[str]

    def run(self) -> list[nodes.Node]:
        self.assert_has_content()
        box = nodes.admonition(classes=[self.kind])
        title = nodes.title("", "", nodes.inline("", _(self.label), classes=["box-kind"]))
        if self.arguments:
            words, messages = self.parse_inline(self.arguments[0])
            title += [nodes.Text(" "), *words, *messages]
        self.set_source_info(box)
        self.set_source_info(title)
        box += title
        self.state.nested_parse(self.content, self.content_offset, box)
        return [box]


class Predict(Box):
    kind, label = "predict", "Predict"
    option_spec: ClassVar[dict[str, Any]] = {
        "key": directives.unchanged_required,
        "answer": lambda text: directives.choice(text, ("number", "choice")),
        "unit": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        (box,) = super().run()
        missing = {"key", "answer"} - self.options.keys()
        if missing:
            raise self.error(f"a predict box needs :{missing.pop()}:")
        if (self.options["answer"] == "number") is not ("unit" in self.options):
            raise self.error("a number has a unit, a choice has none: :unit: belongs to :answer: number")
        asked = predict("", *box.children, classes=box["classes"], kind=self.options["answer"], **self.options)
        asked.source, asked.line = box.source, box.line
        return [asked]


class Takeaway(Box):
    kind, label = "takeaway", "Takeaway"


class Breaks(Box):
    kind, label = "breaks", "Where it breaks"


class Reply(SphinxDirective):
    """What an answer forgot, folded under the answer. Stands inside a predict box."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        self.assert_has_content()
        words, messages = self.parse_inline(self.arguments[0])
        node, answer = reply(), reply_answer("", "", *words)
        answer.rawsource = self.arguments[0]
        self.set_source_info(node)
        self.set_source_info(answer)
        node += answer
        self.state.nested_parse(self.content, self.content_offset, node)
        return [node, *messages]


class PlainTitles(SphinxPostTransform):
    """Set "Exercise 4.1 (Bytes of the cache (★, 5 min))" without the outer parentheses."""

    default_priority = 25  # after sphinx-exercise resolved its titles

    def run(self, **kwargs: Any) -> None:
        for title in self.document.findall(nodes.title):
            if not is_exercise_node(title.parent) or len(title) < 2 or title[-1].astext() != ")":
                continue
            title.remove(title[-1])
            opening = next(child for child in title if child.astext() == " (")
            title.replace(opening, nodes.Text(" "))


def visit_predict(self: HTML5Translator, node: predict) -> None:
    told = {f"data-{name}": node[name] for name in ("key", "kind", "unit") if name in node}
    self.body.append(self.starttag(node, "div", CLASS="admonition", **told))


def depart_predict(self: HTML5Translator, node: predict) -> None:
    self.body.append("</div>\n")


def visit_reply(self: HTML5Translator, node: reply) -> None:
    self.body.append(self.starttag(node, "details", CLASS="reply"))


def depart_reply(self: HTML5Translator, node: reply) -> None:
    self.body.append("</details>\n")


def visit_answer(self: HTML5Translator, node: reply_answer) -> None:
    self.body.append(self.starttag(node, "summary", ""))


def depart_answer(self: HTML5Translator, node: reply_answer) -> None:
    self.body.append("</summary>\n")


def visit_plain(self: Any, node: nodes.Node) -> None:
    """Formats without folding show a reply as text in its place."""


def setup(app: Sphinx) -> dict[str, bool]:
    plain = (visit_plain, visit_plain)
    app.add_node(predict, html=(visit_predict, depart_predict), latex=plain, text=plain)
    app.add_node(reply, html=(visit_reply, depart_reply), latex=plain, text=plain)
    app.add_node(reply_answer, html=(visit_answer, depart_answer), latex=plain, text=plain)
    for directive in (Predict, Reply, Takeaway, Breaks):
        app.add_directive(directive.__name__.lower(), directive)
    app.add_post_transform(PlainTitles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
