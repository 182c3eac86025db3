"""Each chapter offers its stand-alone notebook, and a launch button where the repository's address is known."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
CHAPTER = re.compile(r"book/\d\d_\w+")
COLAB = "https://colab.research.google.com/github"


def repository(folder: Path) -> str | None:
    """`owner/name` on GitHub, as BOOK_REPOSITORY or else the git remote gives it; None when neither does."""
    if setting := os.environ.get("BOOK_REPOSITORY"):
        found = re.fullmatch(r"([\w.-]+/[\w.-]+)", setting)
    else:
        git = subprocess.run(
            ["git", "remote", "get-url", "origin"], cwd=folder, capture_output=True, text=True, check=False
        )
        address = r"(?:https://|git@|ssh://git@)github\.com[/:]([\w.-]+/[\w.-]+?)(?:\.git)?/?"
        found = re.fullmatch(address, git.stdout.strip())
    return found[1] if found else None


def edition(app: Sphinx, docname: str) -> Path:
    return Path(app.srcdir) / app.config.editions_folder / f"{docname.rsplit('/', 1)[-1]}.ipynb"


def add_buttons(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    if not CHAPTER.fullmatch(pagename) or not edition(app, pagename).exists():
        return
    name = edition(app, pagename).name
    buttons = context.setdefault("header_buttons", [])
    if slug := repository(Path(app.srcdir)):
        buttons.append(
            {
                "type": "link",
                "text": "Colab",
                "tooltip": "Open the stand-alone notebook in Colab",
                "icon": "fas fa-rocket",
                "url": f"{COLAB}/{slug}/blob/{app.config.editions_branch}/colab/{name}",
            }
        )
    buttons.append(
        {
            "type": "link",
            "text": "Notebook",
            "tooltip": "Download the stand-alone notebook (for Colab)",
            "icon": "fas fa-download",
            "url": f"{context['pathto']('colab/' + name, 1)}",
        }
    )


def copy(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    target = Path(app.outdir) / "colab"
    target.mkdir(exist_ok=True)
    for docname in sorted(app.env.found_docs):
        if CHAPTER.fullmatch(docname):
            if edition(app, docname).exists():
                shutil.copyfile(edition(app, docname), target / edition(app, docname).name)
            else:
                logger.warning("no stand-alone notebook: run `make colab` first", location=docname, type="editions")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("editions_folder", "_build/colab", "html")
    app.add_config_value("editions_branch", "gh-pages", "html")
    app.connect("html-page-context", add_buttons, priority=700)
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
