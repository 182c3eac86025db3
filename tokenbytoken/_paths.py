"""Where the book's files lie: beside the package, in a checkout and in a Colab edition alike."""

from __future__ import annotations

from pathlib import Path

BOOK = Path(__file__).resolve().parent.parent / "book"


def book_file(name: str) -> Path:
    """The path of a file of the book, such as ``data/passage.txt``.

    Raises ValueError when the file is not there, or when ``name`` leads out of the book's folder.
    """
    path = (BOOK / name).resolve()
    if not path.is_relative_to(BOOK):
        raise ValueError(f"{name!r} leads out of the book's folder")
    if not path.is_file():
        raise ValueError(f"the book has no file {name!r} (looked in the folder {BOOK.name}/ beside the package)")
    return path
