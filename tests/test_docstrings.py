"""The examples in docstrings run, those of every module of the package."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import tokenbytoken

MODULES = [m.name for m in pkgutil.walk_packages(tokenbytoken.__path__, "tokenbytoken.") if "__main__" not in m.name]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) > 4
