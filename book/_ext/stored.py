"""A page shows what its notebook stored, so a notebook that stored an error, or nothing, is not published."""

from __future__ import annotations

import json
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def faults(notebook: dict) -> list[str]:
    """One line for each code cell that failed, wrote to stderr, or was never run."""
    found = []
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        if cell.get("execution_count") is None:
            found.append(f"cell {number} was never run")
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                found.append(f"cell {number} stored an error: {output.get('ename')}: {output.get('evalue')}")
            elif output.get("name") == "stderr":
                found.append(f"cell {number} wrote to stderr")
    return found


def check(app: Sphinx, docname: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb":
        for fault in faults(json.loads(source[0])):
            logger.warning(fault, location=docname, type="stored")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
