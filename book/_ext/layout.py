"""What a style sheet cannot see for itself: which figures are wide, and which table cells are short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imagesize
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

TEXT = 1000  # pixels: tokenbytoken.page.plot draws figures of the text's width with 840, wide ones with 1260
SHORT = 18  # letters: a number with its unit, a model's name


class WideFigures(SphinxPostTransform):
    """Give the class `wide` to pictures with more pixels than a figure of the text's width has."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        for node in self.document.findall(nodes.image):
            path = Path(self.app.srcdir) / node["uri"]
            if path.suffix in {".png", ".jpg"} and path.exists() and imagesize.get(path)[0] > TEXT:
                node["classes"].append("wide")


class ShortCells(SphinxPostTransform):
    """Give the class `short` to table cells that should never break: "67.6 GB", "llama-3.1-405b"."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        for node in self.document.findall(nodes.entry):
            if len(node.astext()) <= SHORT:
                node["classes"].append("short")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(WideFigures)
    app.add_post_transform(ShortCells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
