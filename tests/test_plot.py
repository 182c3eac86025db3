"""The look of the figures: contrast, size, legibility, and no torch."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from tokenbytoken.page import plot

NAMES = ("llama", "deepseek", "jamba", "baseline", "reader")
DARK_PAGES = ("#121212", "#14181E", "#202428", "#29313D")  # backgrounds and surfaces of dark page themes


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with mpl.rc_context():
        yield
    plt.close("all")


def png(fig: Figure) -> bytes:
    """As a notebook stores it: cropped, at the figure's own resolution and face colour."""
    from IPython.core.pylabtools import print_figure

    return print_figure(fig, fmt="png", bbox_inches="tight")


# --- Colour ------------------------------------------------------------------------------------------


def test_contrast_is_that_of_wcag() -> None:
    assert plot.contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert plot.contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.005)  # the usual near miss
    assert plot.contrast("#767676", "#FFFFFF") == pytest.approx(4.54, abs=0.005)
    assert plot.contrast("#FF0000", "#FF0000") == 1


@pytest.mark.parametrize("name", NAMES)
def test_words_can_be_read(name: str) -> None:
    dark, light = plot.colors[f"{name}-dark"], plot.colors[f"{name}-light"]
    for behind in (plot.paper, "#FFFFFF", plot.tint(plot.colors[name])):
        assert plot.contrast(dark, behind) >= 4.5
        assert plot.contrast(plot.ink, behind) >= 4.5
    for behind in DARK_PAGES:
        assert plot.contrast(light, behind) >= 4.5
    assert plot.contrast(plot.faint, plot.paper) >= 4.5
    assert plot.contrast(plot.colors[name], plot.paper) >= 2.5  # fills and lines; they carry a label as well


def test_the_hues_are_those_of_the_design() -> None:
    assert [plot.colors[name] for name in NAMES] == ["#0072B2", "#D55E00", "#009E73", "#6B7280", "#CC79A7"]
    assert set(plot.colors) == {f"{name}{variant}" for name in NAMES for variant in ("", "-dark", "-light")}


def test_colour_is_never_the_only_cue() -> None:
    assert set(plot.markers) == set(plot.dashes) == set(NAMES)
    assert len(set(plot.markers.values())) == len({str(dash) for dash in plot.dashes.values()}) == len(NAMES)
    _, ax = plot.figure()
    lines = [plot.series(ax, [1, 2], [i, i + 1], name) for i, name in enumerate(NAMES)]
    plain = [ax.plot([1, 2], [3, 4])[0] for _ in NAMES]  # without a name: the style's own cycle
    for one, other in itertools.chain(itertools.combinations(lines, 2), itertools.combinations(plain, 2)):
        assert one.get_marker() != other.get_marker()
        assert (one.get_linestyle(), one._unscaled_dash_pattern) != (
            other.get_linestyle(),
            other._unscaled_dash_pattern,
        )


# --- Pictures ----------------------------------------------------------------------------------------


def draw_series() -> Figure:
    fig, ax = plot.figure(height=3.4)
    n: Any = 2.0 ** np.arange(9)
    for i, name in enumerate(NAMES):
        plot.series(ax, n, 10 + n * (1 + i), name, label=name)
    ax.set(xscale="log", yscale="log", xlabel="tokens in a pass", ylabel="ms", title="Time of a pass")
    plot.note(ax, "the knee", (16, 42), name="llama")
    ax.legend()
    return fig


def draw_diagram() -> Figure:
    fig, ax = plot.canvas(height=2.6)
    x = plot.tensor(ax, 2, 12, 10, 8, "x", "(B, T, M)", name="llama")
    w = plot.tensor(ax, 22, 10, 12, 12, "W", "(F, M)", hatch="//")
    plot.arrow(ax, x.right, w.left, "product")
    plot.boxes(ax, 2, 1, 5, 4, ["the", "cat", "sat"], gap=0.5, name="reader")
    plot.stack(ax, 40, 1, [("jamba/", "deepseek"), "llama"] * 8, per_column=8, width=6, height=2)
    return fig


def draw_memory() -> Figure:
    fig, ax = plot.figure(height=2.6)
    rows = {
        "MHA, bf16": [("weights", 812e9, "llama"), ("one reader", 1082e9, "reader")],
        "FP8": [("weights", 487e9, "llama"), ("2 readers", 135e9, "reader")],
    }
    plot.memory(ax, rows, 640e9)
    return fig


def draw_wide() -> Figure:
    fig, axes = plot.figure("wide", 3.4, columns=2)
    for ax in axes:
        plot.series(ax, [1, 2], [3, 4], "jamba")
        ax.set(xlabel="context")
    return fig


FIGURES: list[Callable[[], Figure]] = [draw_series, draw_diagram, draw_memory, draw_wide]


@pytest.mark.parametrize("draw", FIGURES)
def test_a_stored_picture_is_opaque_paper_and_small(draw: Callable[[], Figure]) -> None:
    data = png(draw())
    assert len(data) <= 150_000
    image = plt.imread(io.BytesIO(data))
    assert image.shape[1] >= 5 * 150  # sharp on a dense screen
    red, green, blue = plot._rgb(plot.paper)
    for corner in (image[0, 0], image[0, -1], image[-1, 0], image[-1, -1]):
        assert np.allclose(corner[:3] * 255, (red, green, blue), atol=1)
        assert image.shape[2] == 3 or corner[3] == 1
    assert image.shape[2] == 3 or (image[..., 3] == 1).all()


@pytest.mark.parametrize("draw", FIGURES)
def test_every_word_is_ten_points_high_and_inside(draw: Callable[[], Figure]) -> None:
    fig = draw()
    fig.canvas.draw()
    axes = [axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = {label for axis in axes for label in axis.get_ticklabels(which="both")}  # some lie outside, undrawn
    words = [t for t in fig.findobj(Text) if t.get_text().strip()]
    assert set(words) - ticks
    for text in words:
        assert float(text.get_fontsize()) >= 10, text.get_text()
        if text not in ticks:
            box = text.get_window_extent()
            assert fig.bbox.x0 <= box.x0 < box.x1 <= fig.bbox.x1, text.get_text()
            assert fig.bbox.y0 <= box.y0 < box.y1 <= fig.bbox.y1, text.get_text()


def test_the_style_survives_other_libraries_defaults() -> None:
    with mpl.rc_context({"figure.facecolor": "black", "text.color": "white", "savefig.transparent": True}):
        fig, ax = plot.figure()
        assert mpl.colors.to_hex(fig.get_facecolor()).upper() == plot.paper
        assert mpl.colors.to_hex(ax.text(0, 0, "word").get_color()).upper() == plot.ink.upper()
    with pytest.raises(ValueError, match="width is 'text' or 'wide'"):
        plot.figure("huge")  # type: ignore[arg-type]


# --- To scale ----------------------------------------------------------------------------------------


def test_memory_is_drawn_to_scale_and_what_does_not_fit_is_hatched() -> None:
    _, ax = plot.figure()
    rows = {"a": [("w", 6e9, "llama"), ("r", 4e9, "reader")], "b": [("w", 3e9, "llama")]}
    plot.memory(ax, rows, 8e9)
    bars = [(round(b.get_x(), 6), round(b.get_width(), 6), bool(b.get_hatch())) for b in ax.patches]
    assert bars == [(0, 6, False), (6, 2, False), (8, 2, True), (0, 3, False)]
    words = [t.get_text() for t in ax.texts]
    assert "10 GB ✗" in words
    assert "3 GB" in words
    assert "holds 8 GB" in words


def test_memory_without_a_limit_hatches_nothing() -> None:
    _, ax = plot.figure()
    plot.memory(ax, {"a": [("w", 6 * 2**30, "llama")]}, unit=2**30, unit_name="GiB")
    assert [b.get_hatch() or "" for b in ax.patches] == [""]
    assert "6 GiB" in [t.get_text() for t in ax.texts]


def test_a_stack_has_one_tile_a_layer() -> None:
    _, ax = plot.canvas()
    tiles = plot.stack(ax, 0, 0, ["llama"] * 5 + [("jamba/", "deepseek")] * 2, per_column=4)
    assert len(tiles) == 7
    assert len(ax.patches) == 5 + 2 * 2
    assert tiles[4].x > tiles[3].x
    assert tiles[4].y == tiles[0].y
    assert [bool(p.get_hatch()) for p in ax.patches[-2:]] == [True, False]


def test_anchors_lie_on_the_edge() -> None:
    box = plot.Box(1, 2, 10, 4)
    assert (box.left, box.right, box.top, box.bottom, box.center) == ((1, 4), (11, 4), (6, 6), (6, 2), (6, 4))


def test_a_canvas_has_square_units() -> None:
    fig, ax = plot.canvas("wide", 3.0)
    fig.canvas.draw()
    (x0, y0), (x1, y1) = ax.transData.transform([(0, 0), (1, 1)])
    assert x1 - x0 == pytest.approx(y1 - y0)


def test_no_torch_is_needed() -> None:
    script = "import sys; import tokenbytoken.page.plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
