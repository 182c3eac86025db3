"""The package is in the order that its tree shows: imports point one way, files are small, names are free."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenbytoken as tbt

PACKAGE = Path(tbt.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
DATA = {"models.py", "measurements.py"}  # tables of published figures: as long as they are

#: Each room may use those before it. A file at the top is a room of its own.
ORDER = (
    "_algebra", "_numbers", "_paths", "_table", "config", "models", "cost", "world", "layers", "decoder", "checkpoints",
    "run", "measure", "page", "commands", "__main__",
)  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(room, line, only for types) of every import within the package, in functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if node.level == depth:  # from the top of the package
                for target in [node.module] if node.module else names:
                    yield target.split(".")[0], node.lineno, node in typing
            elif node.level == 0 and (node.module or "").split(".")[0] == "tokenbytoken":
                module = node.module or ""
                for target in [module] if "." in module else [f"tokenbytoken.{name}" for name in names]:
                    yield target.split(".")[1], node.lineno, node in typing
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tokenbytoken":
                    yield [*alias.name.split("."), ""][1], node.lineno, node in typing


@pytest.mark.parametrize("path", [path for path in FILES if path != PACKAGE / "__init__.py"], ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    here = ORDER.index(room(path))
    for target, line, for_types in imports(path):
        assert target in ORDER, f"{name_of(path)}:{line} imports {target}, which has no place in the order"
        # A type may be named from anywhere: nothing of it is there when the package runs.
        assert for_types or ORDER.index(target) <= here, f"{name_of(path)}:{line} imports {target}, which comes later"


def test_the_check_of_imports_sees_them() -> None:
    seen = {(room(path), target) for path in FILES for target, _, _ in imports(path)}
    assert ("cost", "config") in seen
    assert ("decoder", "layers") in seen
    assert ("commands", "measure") in seen


@pytest.mark.parametrize("name", ["config", "models", "cost", "world"])
def test_what_is_data_or_paper_needs_no_torch(name: str) -> None:
    for path in FILES:
        if room(path) == name:
            assert "import torch" not in path.read_text(encoding="utf-8"), name_of(path)


def test_files_are_small_and_folders_too() -> None:
    for path in FILES:
        if path.name not in DATA:
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, name_of(path)
    for folder in {path.parent for path in FILES}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 9, folder.name


def test_no_file_has_the_name_of_a_public_function() -> None:
    modules = {"check", "plot"}  # which are public by that very name
    public = {name for name in tbt.__all__ if not isinstance(getattr(tbt, name), type(tbt))}
    rooms = {path.stem for path in FILES} | {path.parent.name for path in FILES}
    assert not public & (rooms - modules)


def test_every_public_name_is_there_and_seen_by_type_checkers() -> None:
    for name in tbt.__all__:
        assert getattr(tbt, name) is not None
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom)
        for alias in inner.names
    }
    assert typed == set(tbt.__all__)
    assert (PACKAGE / "py.typed").exists()
