"""What all tests share: the tools of the book on the path, and a small chapter that uses everything a chapter may."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_tools"))

# Before torch is imported: two spinning OpenMP runtimes on two cores slow each other down thirtyfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

REFERENCES = """\
@article{higham1993,
  author = {Nicholas J. Higham},
  title = {The accuracy of floating point summation},
  journal = {SIAM Journal on Scientific Computing},
  year = {1993},
  doi = {10.1137/0914050},
}
@article{goldberg1991,
  author = {David Goldberg},
  title = {What every computer scientist should know about floating-point arithmetic},
  journal = {ACM Computing Surveys},
  year = {1991},
  doi = {10.1145/103162.103163},
}
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-chapters", action="store_true", help="run every stand-alone notebook, not one")


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The executed sample chapter, in a folder of its own with a page and a bibliography to refer to."""
    import execute
    import jupytext
    import nbformat

    folder = tmp_path_factory.mktemp("book")
    (folder / "references.bib").write_text(REFERENCES, encoding="utf-8")
    (folder / "notation.md").write_text("# Notation\n\nLetters.\n", encoding="utf-8")
    path = folder / "04_sample.ipynb"
    nbformat.write(jupytext.read(ROOT / "tests" / "sample_chapter.md"), path)
    execute.execute(path, timeout=60)
    return path
