"""The front matter's figures and tables are what the package's numbers give now."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import front_matter
import pytest

import tokenbytoken as tbt

BOOK = Path(front_matter.__file__).resolve().parents[1]


def test_generated_files_are_current() -> None:
    assert front_matter.stale() == []


def test_a_changed_number_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tbt, "state_bytes_per_token", lambda config: 516_095)
    assert {"_static/cover.svg", "_generated/full_size.md"} <= set(front_matter.stale())


@pytest.mark.parametrize("name", [name for name in front_matter.FILES if name.endswith(".svg")])
def test_drawings_are_sound(name: str) -> None:
    root = ET.fromstring((BOOK / name).read_text(encoding="utf-8"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        if kind == "text":
            assert int(element.attrib["font-size"]) >= 17  # nine pixels on a phone of 360
            assert 0 <= float(element.attrib["x"]) <= width
            assert 0 <= float(element.attrib["y"]) <= height
        if kind == "rect" and element.get("x"):
            assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width + 0.5
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", (BOOK / name).read_text(encoding="utf-8"))


def test_the_cover_has_a_tile_for_each_layer() -> None:
    root = ET.fromstring((BOOK / "_static/cover.svg").read_text(encoding="utf-8"))
    tiles = [e for e in root.iter() if e.tag.endswith("rect") and e.get("height") == "3.6"]
    mixers = [e for e in tiles if e.get("width") == "67.5"]
    assert len(mixers) == 126 + 61 + 72
    fills = [e.get("fill") for e in mixers]
    assert fills.count("#009E73") == 63  # Jamba's Mamba layers
    assert fills.count("#0072B2") == 126 + 9


def test_published_results_stand_in_the_tables() -> None:
    table = (BOOK / "_generated/full_size.md").read_text(encoding="utf-8")
    for figure in ("405,853,388,800", "671,026,419,200", "398,555,145,696", "516,096", "70,272", "36,864"):
        assert figure in table
