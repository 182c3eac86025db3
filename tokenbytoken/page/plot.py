"""The book's figures, in one hand: calm, on paper, legible on a phone, and never by colour alone.

A figure has an opaque paper face, so that it reads the same on a light and on a dark page. Hues are those of
Okabe and Ito, which colour-blind readers can tell apart; every series also has its own marker and dash.

>>> fig, ax = figure()                               # doctest: +SKIP
>>> series(ax, [1, 2, 4], [9.1, 9.3, 9.9], "llama", label="measured")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.patheffects import withStroke

__all__ = [
    "Box",
    "arrow",
    "boxes",
    "canvas",
    "colors",
    "contrast",
    "dashes",
    "figure",
    "markers",
    "memory",
    "note",
    "paper",
    "series",
    "stack",
    "style",
    "tensor",
    "tint",
]

paper = "#FAF7F0"
ink = "#1F2428"
faint = "#5F6670"  # axes, ticks, secondary words
grid = "#E2DDD1"

# One hue for each architecture, as it is for fills and lines; "-dark" is for words on paper or white,
# "-light" for words on a dark page. The tests compute every contrast.
colors: dict[str, str] = {
    "llama": "#0072B2",
    "deepseek": "#D55E00",
    "jamba": "#009E73",
    "baseline": "#6B7280",
    "reader": "#CC79A7",
    "llama-dark": "#005E94",
    "deepseek-dark": "#9C4400",
    "jamba-dark": "#006B4C",
    "baseline-dark": "#575E6B",
    "reader-dark": "#9B4476",
    "llama-light": "#6CB8E6",
    "deepseek-light": "#FF9A52",
    "jamba-light": "#4CC9A2",
    "baseline-light": "#AEB6C2",
    "reader-light": "#E6A5C7",
}
markers = {"llama": "o", "deepseek": "s", "jamba": "^", "baseline": "D", "reader": "v"}
dashes: dict[str, Any] = {
    "llama": "-",
    "deepseek": (0, (6, 2)),
    "jamba": (0, (1, 1.2)),
    "baseline": (0, (4, 2, 1, 2)),
    "reader": (0, (8, 2, 1, 2, 1, 2)),
}

# 5.6 inches across a phone of 360 pixels are 64 pixels an inch: 10 points are then 9 pixels.
_WIDTHS = {"text": 5.6, "wide": 8.4}

style: dict[Any, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "figure.facecolor": paper,
    "savefig.facecolor": paper,
    "savefig.transparent": False,
    "axes.facecolor": paper,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "text.color": ink,
    "axes.labelcolor": ink,
    "axes.titlecolor": ink,
    "axes.edgecolor": faint,
    "xtick.color": faint,
    "ytick.color": faint,
    "xtick.labelcolor": ink,
    "ytick.labelcolor": ink,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": grid,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "lines.markeredgecolor": paper,
    "hatch.linewidth": 1.0,
    "hatch.color": ink,
    "axes.prop_cycle": cycler(
        color=[colors[name] for name in markers],
        marker=list(markers.values()),
        linestyle=list(dashes.values()),
    ),
}


def figure(
    width: Literal["text", "wide"] = "text", height: float = 3.4, *, rows: int = 1, columns: int = 1, **subplots: Any
) -> tuple[Figure, Any]:
    """A figure and its axes (an array of them for more than one), in the book's style.

    ``width`` is the text column (5.6 in) or reaches into the margin (8.4 in); ``height`` is in inches. Other
    arguments go to ``plt.subplots``. The style is set for the session, so that what is drawn later follows it.
    """
    if width not in _WIDTHS:
        raise ValueError(f"width is 'text' or 'wide', not {width!r}")
    plt.rcParams.update(style)
    return plt.subplots(rows, columns, figsize=(_WIDTHS[width], height), **subplots)


def series(ax: Axes, x: Sequence[float], y: Sequence[float], name: str, *, label: str = "", **line: Any) -> Any:
    """A line in the colour, marker and dash of an architecture (``llama``, ``deepseek``, ``jamba`` …)."""
    look = {"color": colors[name], "marker": markers[name], "linestyle": dashes[name], **line}
    return ax.plot(x, y, label=label or None, **look)[0]


def note(ax: Axes, text: str, xy: tuple[float, float], offset: tuple[float, float] = (8, 8), name: str = "") -> Any:
    """Words beside a point, in data coordinates, ``offset`` points away; ``name`` takes an architecture's colour."""
    color = colors[f"{name}-dark"] if name else ink
    halo = [withStroke(linewidth=3, foreground=paper)]  # words stay readable where they cross a line
    return ax.annotate(text, xy, xytext=offset, textcoords="offset points", color=color, path_effects=halo)


# --- Diagrams ----------------------------------------------------------------------------------------


def canvas(
    width: Literal["text", "wide"] = "text", height: float = 3.0, units: float | None = None
) -> tuple[Figure, Axes]:
    """An empty sheet for a diagram: no axes, equal units both ways, (0, 0) bottom left.

    The sheet is ``units`` wide (10 for each inch unless given) and as high as the figure's shape makes it.
    """
    fig, ax = figure(width, height)
    across = units if units is not None else 10 * _WIDTHS[width]
    ax.set(xlim=(0, across), ylim=(0, across * height / _WIDTHS[width]), aspect="equal")
    ax.axis("off")
    return fig, ax


@dataclass(frozen=True)
class Box:
    """A drawn rectangle and its anchor points, for arrows."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def center(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


def tensor(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    label: str = "",
    shape: str = "",
    *,
    name: str = "baseline",
    filled: bool = True,
    hatch: str = "",
    size: float = 10,
) -> Box:
    """A tensor as a box with its lower left corner at (x, y): its label inside, its shape letters beneath it."""
    face = tint(colors[name]) if filled else "none"
    ax.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=colors[name], linewidth=1.4, hatch=hatch))
    box = Box(x, y, width, height)
    if label:
        behind = {"facecolor": face, "edgecolor": "none", "pad": 1.5} if hatch and filled else None
        ax.text(*box.center, label, ha="center", va="center", color=ink, fontsize=size, bbox=behind)
    if shape:
        ax.annotate(
            shape, box.bottom, xytext=(0, -3), textcoords="offset points", ha="center", va="top",
            color=colors[f"{name}-dark"], fontsize=size, family="DejaVu Sans Mono",
        )  # fmt: skip
    return box


def boxes(
    ax: Axes, x: float, y: float, width: float, height: float, labels: Sequence[str], *, gap: float = 0, **look: Any
) -> list[Box]:
    """A row of equal boxes, such as tokens or heads, from left to right."""
    return [tensor(ax, x + i * (width + gap), y, width, height, label, **look) for i, label in enumerate(labels)]


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str = "",
    *,
    name: str = "",
    bend: float = 0,
    dashed: bool = False,
) -> None:
    """An arrow between two points (``box.right``, ``box.left`` …), with a word above its middle."""
    color = colors[name] if name else faint
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, shrinkA=2, shrinkB=2, color=color, linewidth=1.4,
            linestyle="--" if dashed else "-", connectionstyle=f"arc3,rad={bend}",
        )
    )  # fmt: skip
    if label:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        ax.annotate(
            label, middle, xytext=(0, 3), textcoords="offset points", ha="center", va="bottom",
            color=colors[f"{name}-dark"] if name else ink,
        )  # fmt: skip


def stack(
    ax: Axes,
    x: float,
    y: float,
    layers: Iterable[str | tuple[str, str]],
    *,
    width: float = 6,
    height: float = 1,
    gap: float = 0.2,
    per_column: int | None = None,
) -> list[Box]:
    """A decoder as tiles, layer 0 at the bottom, each tile one layer.

    A layer is a colour name for the whole tile, or (mixer, feed-forward) for its left and right half; a name
    that ends in ``/`` is hatched. ``per_column`` breaks a tall stack into columns side by side.
    """
    tiles = []
    for i, layer in enumerate(layers):
        column, row = divmod(i, per_column) if per_column else (0, i)
        halves = (layer,) if isinstance(layer, str) else layer
        left, low = x + column * (width + 3 * gap), y + row * (height + gap)
        for j, half in enumerate(halves):
            part = width / len(halves)
            ax.add_patch(
                Rectangle(
                    (left + j * part, low), part, height, facecolor=colors[half.rstrip("/")], edgecolor=paper,
                    linewidth=0.4, hatch="////" if half.endswith("/") else "",
                )
            )  # fmt: skip
        tiles.append(Box(left, low, width, height))
    return tiles


def memory(
    ax: Axes,
    rows: Mapping[str, Sequence[tuple[str, float, str]]],
    capacity: float | None = None,
    *,
    unit: float = 1e9,
    unit_name: str = "GB",
) -> None:
    """Bars of memory to scale: each row is (part, bytes, colour name) from left to right, the first row on top.

    What lies beyond ``capacity`` is hatched, its total carries a ✗, and the capacity is a line. A part's name
    stands in its bar where there is room, else in the legend. Bytes are shown in ``unit_name`` of ``unit`` bytes.
    """
    widest = max(sum(size for _, size, _ in parts) for parts in rows.values())
    across = 1.22 * max(widest, capacity or 0)  # room for the totals at the right
    ax.set(xlim=(0, across / unit), ylim=(0.5 - len(rows), 1.0 if capacity else 0.5), xlabel=unit_name)
    ax.set_yticks([-float(i) for i in range(len(rows))], list(rows))
    ax.grid(axis="y", visible=False)
    unnamed: dict[str, str] = {}
    for row, parts in enumerate(rows.values()):
        begin = 0.0
        for part, size, name in parts:
            end = begin + size
            edge = end if capacity is None else min(max(begin, capacity), end)
            look: dict[str, Any] = {"facecolor": tint(colors[name]), "edgecolor": colors[name], "linewidth": 1.2}
            for low, high, hatch in ((begin, edge, ""), (edge, end, "////")):
                if high > low:
                    ax.barh(-row, (high - low) / unit, 0.6, left=low / unit, hatch=hatch, **look)
            if size > 0.018 * len(part) * across:  # as wide as its name, in this font and column
                behind = {"facecolor": tint(colors[name]), "edgecolor": "none", "pad": 1.5}
                ax.text((begin + end) / 2 / unit, -row, part, ha="center", va="center", bbox=behind)
            else:
                unnamed[part] = name
            begin = end
        total = f"{begin / unit:,.0f} {unit_name}" + (" ✗" if capacity is not None and begin > capacity else "")
        note(ax, total, (begin / unit, -row), (5, -4))
    if capacity is not None:
        ax.plot([capacity / unit] * 2, [0.5 - len(rows), 0.5], color=ink, linewidth=1.4, linestyle="-", marker="")
        ax.text(capacity / unit, 0.58, f"holds {capacity / unit:,.0f} {unit_name}", ha="center", va="bottom")
    if unnamed:
        handles = [Patch(facecolor=tint(colors[n]), edgecolor=colors[n], label=part) for part, n in unnamed.items()]
        ax.legend(handles=handles, loc="lower right")


# --- Colour ------------------------------------------------------------------------------------------


def tint(color: str, amount: float = 0.22) -> str:
    """A colour laid thinly on paper, opaque, so that words in ink stay readable on it."""
    mix = (round(amount * c + (1 - amount) * p) for c, p in zip(_rgb(color), _rgb(paper), strict=True))
    return "#" + "".join(f"{channel:02X}" for channel in mix)


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, 1 to 21 (WCAG 2.2, success criterion 1.4.3: 4.5 for words)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _rgb(color))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
