"""Where the book's files lie: beside the package, in a checkout and in a Colab edition alike. And reading JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, naming the file, where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path.parent.name}/ holds no {path.name}") from None
    except (ValueError, RecursionError) as error:  # bytes that are no text are a ValueError, too
        raise ValueError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value
