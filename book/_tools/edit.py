"""Edit a notebook as text: open it as MyST Markdown in $EDITOR, then convert it back and run it.

    python book/_tools/edit.py book/04_kv_cache.ipynb

The notebook changes only if the edited text runs without a fault; if it does not, the text is kept beside
the notebook (04_kv_cache.md) and taken up by the next call.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import execute
import jupytext  # type: ignore[import-untyped]
import nbformat
from nbformat import NotebookNode

FORMAT = "md:myst"


def to_text(notebook: NotebookNode) -> str:
    return jupytext.writes(notebook, fmt=FORMAT)


def from_text(text: str) -> NotebookNode:
    """The notebook of a text, without outputs."""
    return jupytext.reads(text, fmt=FORMAT)


def edit(path: Path, editor: list[str]) -> None:
    """One round: text, editor, notebook, run. Raises Refused with the text kept when the run has a fault."""
    kept = path.with_suffix(".md")
    before = to_text(nbformat.read(path, as_version=4))
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / kept.name
        draft.write_text(kept.read_text(encoding="utf-8") if kept.exists() else before, encoding="utf-8")
        subprocess.run([*editor, str(draft)], check=True)
        after = draft.read_text(encoding="utf-8")
        if after == before:
            return
        stored = path.with_name(f".{path.name}.part")
        try:
            nbformat.write(from_text(after), stored)
            execute.execute(stored)
        except Exception:
            shutil.copyfile(draft, kept)
            raise
        else:
            stored.replace(path)
            kept.unlink(missing_ok=True)
        finally:
            stored.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        print(f"set EDITOR, or convert by hand: jupytext --to {FORMAT} {path}", file=sys.stderr)
        return 1
    try:
        edit(path, shlex.split(editor))
    except execute.Refused as fault:
        print(f"{path}: not changed, the text is kept as {path.with_suffix('.md')}: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
