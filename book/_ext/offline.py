"""Pages that ask no other host for anything: MathJax comes from an installed package, copied at build."""

from __future__ import annotations

import shutil
from importlib.metadata import files
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

PACKAGE = "sphinx-mathjax-offline"
COMPONENT = "tex-chtml.js"  # TeX in, HTML with fonts out
FONTS = "output/chtml/fonts/woff-v2"
EXTENSIONS = "input/tex/extensions"  # fetched when a page uses one of their macros, such as \boldsymbol
NOTICE = """MathJax 3.2.2, https://www.mathjax.org
Copyright (c) 2009-2022 The MathJax Consortium
Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0
"""


def mathjax_folder() -> Path:
    """Where the installed package keeps its copy of MathJax."""
    component = next(path for path in files(PACKAGE) or [] if path.name == COMPONENT)
    return Path(str(component.locate())).parent


def configure(app: Sphinx, config: object) -> None:
    app.config.mathjax_path = f"mathjax/{COMPONENT}"
    app.config.mathjax3_config = {
        "tex": {"macros": {"R": r"\mathbb{R}"}},
        # The menu would fetch further components when one of its items is picked; MathML for screen readers stays.
        "options": {"enableMenu": False, "processHtmlClass": "tex2jax_process|mathjax_process|math|output_area"},
        "chtml": {"displayAlign": "center"},
    }


def drop_thebe(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Jupyter Book always loads the script that would start live code from another host; the book has none."""
    for kind in ("script_files", "css_files"):
        context[kind] = [f for f in context[kind] if "thebe" not in f"{f} {getattr(f, 'attributes', {})}".lower()]


def copy(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    source, target = mathjax_folder(), Path(app.outdir) / "_static" / "mathjax"
    for folder, kind in ((FONTS, "*.woff"), (EXTENSIONS, "*.js")):
        (target / folder).mkdir(parents=True, exist_ok=True)
        for file in (source / folder).glob(kind):
            shutil.copyfile(file, target / folder / file.name)
    shutil.copyfile(source / COMPONENT, target / COMPONENT)
    (target / "NOTICE.txt").write_text(NOTICE, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", configure, priority=900)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
