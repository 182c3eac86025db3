"""Edit a notebook as text: MyST Markdown in your editor, and back.

    make edit NB=book/04_kv_cache.ipynb         with the editor that VISUAL or EDITOR names, or vi

Cells that were not touched keep their outputs; run `make execute NB=…` for the others.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "md:myst"


def edit(path: Path, editor: list[str]) -> bool:
    """Open `path` as text; write it back if the text changed, and return whether it did."""
    notebook = nbformat.read(path, as_version=4)
    text = ROOT / "_build" / "edit" / f"{path.stem}.md"
    text.parent.mkdir(parents=True, exist_ok=True)
    jupytext.write(notebook, text, fmt=FORMAT)
    before = text.read_text(encoding="utf-8")
    subprocess.run([*editor, str(text)], check=True)
    if text.read_text(encoding="utf-8") == before:
        return False
    edited = combine_inputs_with_outputs(jupytext.read(text, fmt=FORMAT), notebook)
    untouched = {cell.source for cell in notebook.cells}
    for cell in edited.cells:
        # jupytext pairs cells that merely look alike; an output must not outlive the code that made it.
        if cell.cell_type == "code" and cell.source not in untouched:
            cell.outputs, cell.execution_count = [], None
    nbformat.validate(edited)
    nbformat.write(edited, path)
    return True


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("name one notebook: make edit NB=book/04_kv_cache.ipynb", file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    changed = edit(path, shlex.split(editor))
    print(f"{path}: {f'changed; now make execute NB={path}' if changed else 'as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
