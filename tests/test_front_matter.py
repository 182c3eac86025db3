"""The front matter's figures and tables are what the package's numbers give now."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import front_matter
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import tokenbytoken as tbt
from tokenbytoken import plot

BOOK = Path(front_matter.__file__).resolve().parents[1]


def test_generated_files_are_current() -> None:
    assert front_matter.stale() == []


def test_a_changed_number_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tbt, "state_bytes_per_token", lambda config: 516_095)
    assert {"_static/cover.svg", "_generated/full_size.md"} <= set(front_matter.stale())


@pytest.fixture(params=front_matter.FIGURES)
def fig(request: pytest.FixtureRequest) -> Iterator[Figure]:
    """A drawing, laid out."""
    drawn = front_matter.FIGURES[request.param]()
    drawn.canvas.draw()
    yield drawn
    plt.close(drawn)


def frames(fig: Figure) -> list[Bbox]:
    return [box.get_window_extent() for box in fig.axes[0].patches if isinstance(box, Rectangle)]


def test_words_are_large_and_stay_in_their_boxes(fig: Figure) -> None:
    for words in fig.findobj(Text):
        place = words.get_window_extent()
        if words.get_text() and words.get_visible() and place.width:
            assert float(words.get_fontsize()) >= 10  # nine pixels on a phone of 360
            middle = ((place.x0 + place.x1) / 2, (place.y0 + place.y1) / 2)
            for frame in [one for one in frames(fig) if one.contains(*middle) and one.height > place.height]:
                assert frame.x0 < place.x0 < place.x1 < frame.x1, words.get_text()


def test_arrows_lead_from_something_to_something(fig: Figure) -> None:
    (ax,) = fig.axes
    near = [place.padded(8) for place in [*frames(fig), *(words.get_window_extent() for words in ax.texts)]]
    for arrow in [arrow for arrow in ax.patches if isinstance(arrow, FancyArrowPatch)]:
        ends = getattr(arrow, "_posA_posB")  # noqa: B009 (no public name leads to them)
        for end in ax.transData.transform(ends):
            assert any(place.contains(*end) for place in near), ends


def test_drawings_load_nothing_from_elsewhere() -> None:
    for name in front_matter.FIGURES:
        text = (BOOK / f"_static/{name}.svg").read_text(encoding="utf-8")
        ET.fromstring(text)
        assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)


def test_the_cover_has_a_tile_for_each_layer() -> None:
    fig = front_matter.cover()
    boxes = [box for box in fig.axes[0].patches if isinstance(box, Rectangle)]
    fills = Counter(to_hex(tile.get_facecolor()).upper() for tile in boxes if tile.get_height() < 1)
    plt.close(fig)
    hues = [fills[plot.colors[name]] for name in ("llama", "deepseek", "jamba", "baseline")]
    assert hues == [126 + 9, 61, 63, 126 + 61 + 72]  # attention, latent attention, Mamba, feed-forward


def test_published_results_stand_in_the_tables() -> None:
    table = (BOOK / "_generated/full_size.md").read_text(encoding="utf-8")
    for figure in ("405,853,388,800", "671,026,419,200", "398,555,145,696", "516,096", "70,272", "36,864"):
        assert figure in table
