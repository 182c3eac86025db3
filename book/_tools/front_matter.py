"""Draw the front matter's figures and write its table of full-size results, all from the package's own numbers.

    python book/_tools/front_matter.py            write book/_static/*.svg and book/_generated/*.md
    python book/_tools/front_matter.py --check    say which of them are out of date, and fail if any is

SVG stays sharp at any size. It is made the same byte for byte, so that a changed number shows as a changed file.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import tokenbytoken as tbt
from tokenbytoken import plot
from tokenbytoken.config import AttentionConfig, LatentAttentionConfig, MambaConfig, MoEConfig
from tokenbytoken.measure import kit

BOOK = Path(__file__).resolve().parents[1]
MODELS = {
    "llama-3.1-405b": ("Llama 3.1 405B", "llama"),
    "deepseek-v3": ("DeepSeek-V3", "deepseek"),
    "jamba-1.5-large": ("Jamba 1.5 Large", "jamba"),
}


# --- the cover: three stacks, layer by layer ---------------------------------------------------------

MIXERS = {AttentionConfig: "llama", LatentAttentionConfig: "deepseek", MambaConfig: "jamba"}
KEY = {
    "attention": ("llama", ""), "latent attention": ("deepseek", ""), "Mamba": ("jamba", ""),
    "dense feed-forward": ("baseline", ""), "mixture of experts": ("baseline", "////"),
}  # fmt: skip


def cover() -> Figure:
    """126, 61 and 72 tiles, coloured by mixer and feed-forward; beneath, what one token leaves behind, to scale."""
    fig, ax = plot.canvas("text", 8.3)
    ax.text(0.5, 80.5, "Three models, layer by layer", weight="bold", size=12)
    ax.text(0.5, 18.5, "What each token leaves in memory, to scale", weight="bold", size=12)
    sizes = {key: tbt.state_bytes_per_token(tbt.published[key]) for key in MODELS}
    for i, (key, (title, name)) in enumerate(MODELS.items()):
        tiles = [
            (MIXERS[type(layer.mixer)], "baseline/" if isinstance(layer.feed_forward, MoEConfig) else "baseline")
            for layer in tbt.published[key].layers
        ]
        top = plot.stack(ax, 0.5 + 20 * i, 23, tiles, width=14, height=0.32, gap=0.08)[-1]
        ax.text(top.x, top.y + 3, title, weight="bold", size=11, color=plot.colors[f"{name}-dark"])
        ax.text(top.x, top.y + 1, f"{len(tiles)} layers")
        y = 12.2 - 4.6 * i
        ax.text(0.5, y + 2.2, f"{title}: {sizes[key]:,} bytes")
        plot.tensor(ax, 0.5, y, 55 * sizes[key] / max(sizes.values()), 1.5, name=name)
    constant = tbt.state_bytes(tbt.published["jamba-1.5-large"], 1, 0)
    ax.text(0.5, 0.6, f"and, once for each reader, Jamba's constant {constant / 1e6:.1f} MB")
    handles = [
        Patch(label=label, facecolor=plot.colors[name], edgecolor=plot.paper, hatch=hatch)
        for label, (name, hatch) in KEY.items()
    ]
    ax.legend(handles=handles, loc=(0.42, 0.72))
    return fig


# --- the factor map ----------------------------------------------------------------------------------

FACTORS = (
    ("attention\nlayers", "Jamba", "1 in 8\nchapter 15", "jamba"),
    ("tokens\nheld", "windows", "the last W", "baseline"),
    ("cache\nwidth", "GQA, MLA", "fewer, smaller\nchapters 6, 10", "deepseek"),
    ("bytes\na number", "FP8", "2 → 1\nchapter 8", "llama"),
)
TERMS = (
    ("weights read / n", "MoE reads fewer\n(11); a batch\nraises n (1, 5)", "deepseek", 2.5, 16.5),
    ("state read", "the product\nabove", "baseline", 22.5, 11.5),
    ("bandwidth", "tensor parallel:\neight memories\nat once (9)", "llama", 40, 15.5),
)


def factor_map() -> Figure:
    """State as a product of four factors, and which technique turns which."""
    fig, ax = plot.canvas("text", 4.35)
    middle = partial(ax.text, ha="center", va="center")
    ax.text(0.5, 41, "state of one reader  =", weight="bold", size=12)
    for i, (factor, who, how, name) in enumerate(FACTORS):
        box = plot.tensor(ax, 0.5 + 14.5 * i, 32, 11.5, 6.8, factor, name=name, size=11)
        x = box.center[0]
        plot.arrow(ax, (x, 28.5), box.bottom)
        middle(x, 27.2, who, weight="bold", size=11, color=plot.colors[f"{name}-dark"])
        middle(x, 26, how, va="top")
        if i:
            middle(box.x - 1.5, box.center[1], "×", size=14)
    mamba = "Mamba (13, 14) replaces the product by a constant."
    ax.text(0.5, 19, mamba, weight="bold", color=plot.colors["jamba-dark"])
    ax.plot([0.5, 55.5], [17.4, 17.4], color=plot.grid, linestyle="-", marker="")
    ax.text(0.5, 13.8, "time per token  ≥", weight="bold", size=12)
    for term, how, name, x, width in TERMS:
        box = plot.tensor(ax, x, 6.5, width, 4.8, term, name=name, size=11)
        middle(box.center[0], 5.6, how, va="top")
    for x, sign in ((1.2, "("), (20.8, "+"), (35.2, ")"), (37.8, "÷")):
        middle(x, 8.9, sign, size=14)
    return fig


# --- the dependency graph ------------------------------------------------------------------------------

# Title, hue, first chapter, chapters; then the frame's place and size, and the size of a chapter.
PARTS = (
    ("I: One token at a time", "baseline", 1, ("memory\nwall", "attention", "naive\ndecoder", "KV\ncache", "serving"),
     (0.5, 44, 55, 10), (9, 6)),
    ("II: Llama", "llama", 6, ("grouped queries", "Llama 3.1", "FP8", "tensor parallel"),
     (0.5, 12.5, 17, 28), (15, 4.4)),
    ("III: DeepSeek-V3", "deepseek", 10, ("latent attention", "experts", "DeepSeek-V3"),
     (19.5, 18.9, 17, 21.6), (15, 4.4)),
    ("IV: Jamba", "jamba", 13, ("state space", "Mamba", "Jamba"), (38.5, 18.9, 17, 21.6), (15, 4.4)),
    ("V: Judgement", "reader", 16, ("limits", "head to head", "reality check"), (0.5, 0.5, 55, 8.6), (15, 4.4)),
)  # fmt: skip


def dependencies() -> Figure:
    """Which chapter needs which: each the one before it, Parts II to IV Part I, Part V all; and 15 also 11."""
    fig, ax = plot.canvas("text", 5.45)
    frames: list[plot.Box] = []
    chapters: dict[int, plot.Box] = {}
    for title, name, first, words, (x, y, width, height), (across, high) in PARTS:
        frames.append(plot.tensor(ax, x, y, width, height, name=name, filled=False))
        ax.text(x + 1, y + height - 1, title, va="top", weight="bold", color=plot.colors[f"{name}-dark"])
        row = width > height
        step = ((width - 2 - across) / (len(words) - 1), 0) if row else (0, -high - 2)
        for i, label in enumerate(words):
            corner = (x + 1 + step[0] * i, y + height - 3.2 - high + step[1] * i)
            box = plot.tensor(ax, *corner, across, high, f"$\\mathbf{{{first + i}}}$\n{label}", name=name)
            if i:
                before = chapters[first + i - 1]
                plot.arrow(ax, *((before.right, box.left) if row else (before.bottom, box.top)))
            chapters[first + i] = box
    for frame in frames[1:4]:
        plot.arrow(ax, (frame.center[0], frames[0].y), frame.top)
        plot.arrow(ax, frame.bottom, (frame.center[0], frames[4].top[1]))
    plot.arrow(ax, chapters[11].right, chapters[15].left)
    return fig


# --- the ledger as bars of the node's memory ---------------------------------------------------------------


def ledger_bars() -> Figure:
    """For each row: weights, then the state of one reader; what lies past the node's memory is hatched."""
    rows = [row for row in tbt.ledger().rows if row.accelerator.name == "H100"]
    bars = {
        fill(f"{row.label}: {row.readers or 'no'}\u00a0readers", 20, break_on_hyphens=False): [
            ("weights", row.weight_bytes, MODELS[row.config.name][1]),
            ("one reader's state", row.reader_bytes, "reader"),
        ]
        for row in rows
    }
    fig, ax = plot.figure("text", 4.4)
    ax.set_title("Eight H100, one reader of 131,072 tokens")
    plot.memory(ax, bars, rows[0].gpus * rows[0].accelerator.memory_bytes)
    ax.set_xlabel("GB; hatched: does not fit")
    return fig


# --- the table of full-size results ------------------------------------------------------------------------


def full_size() -> str:
    """Parameters, bytes and the smallest node for the published models of the ladder."""
    keys = ("smollm2-135m", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "deepseek-v3", "jamba-1.5-large")
    lines = [
        "| model | parameters | active | weights, bf16 | state a token, bf16 | one reader of 131,072 tokens |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for key in keys:
        config = tbt.published[key]
        count = tbt.count_parameters(config)
        lines.append(
            f"| {key} | {count.total:,} | {count.active:,} | {tbt.weight_bytes(config) / 1e9:,.1f} GB "
            f"| {tbt.state_bytes_per_token(config):,} bytes | {tbt.state_bytes(config, 1, 131_072) / 1e9:.2f} GB |"
        )
    return "\n".join(lines) + "\n"


def ledger_table() -> str:
    """The ledger as it prints, in a block of its own."""
    return f"```text\n{tbt.ledger()}\n```\n"


# --- the table of reference runs ---------------------------------------------------------------------------


def measurements() -> str:
    """Every record under book/measurements, with where, when and how it was made; then the chapters' run times."""
    folder = BOOK / "measurements"
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    times = {record["name"]: record for record in records}.get("run_times")
    lines = ["| run | device | software | date | made by |", "|---|---|---|---|---|"]
    for run in records:
        device = f"{run['cpu']}, {run['threads']} threads" if run["device"] == "cpu" else run["device"]
        device += f", driver {run['driver']}" if run["driver"] else ""
        device += ", busy" if run["busy"] else ""
        software = f"torch {run['torch']}, Python {run['python']}" + (f", CUDA {run['cuda']}" if run["cuda"] else "")
        lines.append(f"| {run['name']} | {device} | {software} | {run['date']} | `{run['command']}` |")
    lines += ["", "## Run time of each chapter", ""]
    if times:
        lines += [f"Top to bottom, kernel start included, on {times['cpu']}, {times['threads']} threads.", ""]
        lines += ["| chapter | seconds |", "|---|--:|"]
        lines += [f"| {name} | {seconds:.0f} |" for name, seconds in sorted(times["payload"]["seconds"].items())]
    lines += ["", *machines_side_by_side([run for run in records if run.get("format") == kit.FORMAT])]
    return "\n".join(lines) + "\n"


def machines_side_by_side(runs: list[dict[str, Any]]) -> list[str]:
    """What `python -m tokenbytoken measure` measures, a column for each machine; nothing is filled in."""
    columns: list[tuple[str, dict[str, Any] | None]] = []
    for kind, some in (
        ("CPU", [run for run in runs if run["device"] == "cpu"]),
        ("GPU", [run for run in runs if run["device"] != "cpu"]),
    ):
        names = [run["device"] if kind == "GPU" else f"{run['cpu']}, {run['threads']} threads" for run in some]
        columns += list(zip(names, some, strict=True)) or [(kind, None)]
    lines = ["## Machines side by side", ""]
    lines += ["Milliseconds, medians; in brackets measured ÷ predicted by the machine's own calibration.", ""]
    lines += [f"| | {' | '.join(name for name, _ in columns)} |", f"|---|{'--:|' * len(columns)}"]
    for one in kit.MEASUREMENTS:
        held = [None if run is None else run["payload"].get(one.name) for _, run in columns]
        labels = dict.fromkeys(label for entry in held if entry for label in entry.get("seconds", {})) or {"": None}
        for label in labels:
            name = f"{one.chapter}: {one.title}" + (f"; {one.across} = {label}" if label else "")
            lines.append(f"| {name} | {' | '.join(cell(entry, label) for entry in held)} |")
    return lines


def cell(entry: dict[str, Any] | None, label: str) -> str:
    """One time of one machine, or why there is none."""
    if entry is None:
        return "not measured yet"
    time = entry.get("seconds", {}).get(label)
    if time is None:
        return str(entry.get("unavailable") or ("failed" if "failed" in entry else "not measured yet"))
    ratio = f" ({time['median'] / time['predicted']:.1f})" if time["predicted"] else ""
    return f"{1e3 * time['median']:.3g}{ratio}{', disturbed' if entry['disturbed'] else ''}"


def svg(fig: Figure) -> str:
    """Without a date or random names, and with letters as outlines, which need no font."""
    page = io.StringIO()
    with plt.rc_context({"svg.hashsalt": "token by token", "svg.fonttype": "path"}):
        bare = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        fig.savefig(page, format="svg", bbox_inches="tight", metadata=bare)
    plt.close(fig)
    drawn = page.getvalue()[page.getvalue().index("<svg") :]
    return re.sub(r"(?<!scale\()(\d\.\d\d)\d+", r"\1", drawn)  # hundredths of a point suffice


def drawn(draw: Callable[[], Figure]) -> Callable[[], str]:
    return lambda: svg(draw())


FIGURES = {"cover": cover, "factor_map": factor_map, "dependencies": dependencies, "ledger": ledger_bars}
FILES = {
    **{f"_static/{name}.svg": drawn(draw) for name, draw in FIGURES.items()},
    "_generated/full_size.md": full_size,
    "_generated/ledger.md": ledger_table,
    "_generated/measurements.md": measurements,
}


def stale() -> list[str]:
    """The files that differ from what the package's numbers give now."""
    return [
        name
        for name, make in FILES.items()
        if not (BOOK / name).exists() or (BOOK / name).read_text(encoding="utf-8") != make()
    ]


def main() -> int:
    if "--check" in sys.argv[1:]:
        for name in stale():
            print(f"book/{name} is out of date: run python book/_tools/front_matter.py")
        return bool(stale())
    for name, make in FILES.items():
        (BOOK / name).parent.mkdir(exist_ok=True)
        (BOOK / name).write_text(make(), encoding="utf-8")
        print(f"wrote book/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
