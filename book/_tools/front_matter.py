"""Draw the front matter's figures and write its table of full-size results, all from the package's own numbers.

    python book/_tools/front_matter.py            write book/_static/*.svg and book/_generated/*.md
    python book/_tools/front_matter.py --check    say which of them are out of date, and fail if any is

SVG is written by hand rather than plotted: the files stay small, sharp at any size, and the same byte for byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

import tokenbytoken as tbt
from tokenbytoken.config import AttentionConfig, LatentAttentionConfig, MoEConfig
from tokenbytoken.page.plot import colors, faint, grid, ink, paper, tint
from tokenbytoken.world import Row

BOOK = Path(__file__).resolve().parents[1]
THREE = ("llama-3.1-405b", "deepseek-v3", "jamba-1.5-large")
TITLES = ("Llama 3.1 405B", "DeepSeek-V3", "Jamba 1.5 Large")
HUES = ("llama", "deepseek", "jamba")


# --- a small SVG vocabulary --------------------------------------------------------------------------


def text(
    x: float, y: float, words: str, *, size: int = 20, fill: str = ink, anchor: str = "start", weight: int = 400,
    halo: str = "none",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}" paint-order="stroke" stroke="{halo}" stroke-width="6">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none", radius: float = 0) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
    )


def arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    return (
        f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{faint}" stroke-width="2" '
        'marker-end="url(#head)"/>'
    )


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    defs = (
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{faint}"/></marker>'
        f'<pattern id="over" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="8" height="8" fill="{paper}"/><rect width="3" height="8" fill="{ink}"/></pattern></defs>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif">',
            f"<title>{escape(title)}</title>",
            defs,
            box(0, 0, width, height, paper, radius=8),
            *parts,
            "</svg>",
            "",
        ]
    )


# --- the cover: three stacks, layer by layer ---------------------------------------------------------


def cover() -> str:
    """126, 61 and 72 tiles, coloured by mixer and feed-forward; beneath, what one token leaves behind, to scale."""
    parts = [
        text(40, 44, "Three models, layer by layer", size=24, weight=600),
    ]
    tile, gap, floor, width = 3.6, 1.0, 700, 150
    for column, (key, title, hue) in enumerate(zip(THREE, TITLES, HUES, strict=True)):
        config = tbt.published[key]
        x = 40 + column * 220
        top = floor - config.num_layers * (tile + gap)
        parts.append(text(x, top - 34, title, size=21, weight=600, fill=colors[f"{hue}-dark"]))
        parts.append(text(x, top - 10, f"{config.num_layers} layers", size=20, fill=faint))
        for i, layer in enumerate(config.layers):
            y = floor - (i + 1) * (tile + gap)
            match layer.mixer:
                case AttentionConfig():
                    mixer = colors["llama"]
                case LatentAttentionConfig():
                    mixer = colors["deepseek"]
                case _:
                    mixer = colors["jamba"]
            parts.append(box(x, y, width * 0.45, tile, mixer))
            if isinstance(layer.feed_forward, MoEConfig):  # broken into experts: not told by colour alone
                parts += [box(x + width * (0.5 + 0.1 * j), y, width * 0.06, tile, colors["baseline"]) for j in range(5)]
            else:
                parts.append(box(x + width * 0.5, y, width * 0.46, tile, colors["baseline"]))
    y = floor + 34
    for x, label, fill in ((40, "attention", "llama"), (240, "latent attention", "deepseek"), (490, "Mamba", "jamba")):
        parts += [box(x, y - 15, 28, 15, colors[fill]), text(x + 38, y, label)]
    y += 34
    parts += [box(40, y - 15, 28, 15, colors["baseline"]), text(78, y, "dense feed-forward")]
    parts += [box(310 + 8 * j, y - 15, 5, 15, colors["baseline"]) for j in range(5)]
    parts.append(text(358, y, "mixture of experts"))

    y += 66
    parts.append(text(40, y, "What each token leaves in memory, to scale", size=24, weight=600))
    most = max(tbt.state_bytes_per_token(tbt.published[key]) for key in THREE)
    for key, title, hue in zip(THREE, TITLES, HUES, strict=True):
        y += 52
        size = tbt.state_bytes_per_token(tbt.published[key])
        parts += [
            text(40, y, f"{title}: {size:,} bytes"),
            box(40, y + 8, 640 * size / most, 16, colors[hue]),
        ]
    constant = tbt.state_bytes(tbt.published[THREE[2]], 1, 0)
    parts.append(text(40, y + 52, f"and, once for each reader, Jamba's constant {constant / 1e6:.1f} MB", fill=faint))
    return svg(720, int(y + 80), "Three model stacks, layer by layer, and their state per token to scale", parts)


# --- the factor map ----------------------------------------------------------------------------------

FACTORS = (
    ("attention", "layers", "Jamba", "1 in 8", "15", "jamba"),
    ("tokens", "held", "windows", "the last W", "", "baseline"),
    ("cache", "width", "GQA, MLA", "fewer, smaller", "6, 10", "deepseek"),
    ("bytes", "a number", "FP8", "2 → 1", "8", "llama"),
)


def factor_map() -> str:
    """State as a product of four factors, and which technique turns which."""
    parts = [text(40, 48, "state of one reader  =", size=24, weight=600)]
    for i, (top, bottom, who, how, where, hue) in enumerate(FACTORS):
        x = 40 + i * 166
        parts += [
            box(x, 74, 136, 84, tint(colors[hue]), stroke=colors[hue], radius=6),
            text(x + 68, 110, top, anchor="middle", weight=600),
            text(x + 68, 138, bottom, anchor="middle"),
            arrow(x + 68, 212, x + 68, 166),
            text(x + 68, 238, who, anchor="middle", weight=600, fill=colors[f"{hue}-dark"]),
            text(x + 68, 264, how, anchor="middle", fill=faint),
        ]
        if where:
            parts.append(text(x + 68, 290, f"chapter {where}", anchor="middle", size=18, fill=faint))
        if i:
            parts.append(text(x - 15, 124, "×", size=26, anchor="middle"))
    parts += [
        text(40, 336, "Mamba (13, 14) replaces the product by a constant.", fill=colors["jamba-dark"], weight=600),
        f'<line x1="40" y1="362" x2="680" y2="362" stroke="{grid}" stroke-width="2"/>',
        text(40, 404, "time per token  ≥", size=24, weight=600),
    ]
    terms = (
        ("weights read / n", "MoE reads fewer", "(11); a batch", "raises n (1, 5)", "deepseek", 58, 200),
        ("state read", "the product", "above", "", "baseline", 290, 140),
        ("bandwidth", "tensor parallel:", "eight memories", "at once (9)", "llama", 486, 194),
    )
    for name, *lines, hue, x, width in terms:
        parts += [
            box(x, 428, width, 56, tint(colors[hue]), stroke=colors[hue], radius=6),
            text(x + width / 2, 463, name, anchor="middle", weight=600),
            *(text(x + width / 2, 516 + 26 * j, line, anchor="middle", fill=faint) for j, line in enumerate(lines)),
        ]
    parts += [
        text(x, 466, sign, size=30, anchor="middle") for x, sign in ((46, "("), (274, "+"), (442, ")"), (468, "÷"))
    ]
    return svg(720, 590, "The four factors of the state, and the terms of the time per token", parts)


# --- the dependency graph ------------------------------------------------------------------------------

CHAPTERS = {
    1: "memory wall", 2: "attention", 3: "naive decoder", 4: "KV cache", 5: "serving",
    6: "grouped queries", 7: "Llama 3.1", 8: "FP8", 9: "tensor parallel",
    10: "latent attention", 11: "experts", 12: "DeepSeek-V3",
    13: "state space", 14: "Mamba", 15: "Jamba",
    16: "limits", 17: "head to head", 18: "reality check",
}  # fmt: skip
PARTS = (
    ("I", "One token at a time", (1, 2, 3, 4, 5), "baseline"),
    ("II", "Llama 3.1", (6, 7, 8, 9), "llama"),
    ("III", "DeepSeek-V3", (10, 11, 12), "deepseek"),
    ("IV", "Jamba 1.5", (13, 14, 15), "jamba"),
    ("V", "Judgement", (16, 17, 18), "reader"),
)


def dependencies() -> str:
    """Which chapter needs which: down a column in order, from Part I to each column, 15 from 11 as well."""
    parts: list[str] = []
    place: dict[int, tuple[float, float]] = {}
    columns = {"II": 40, "III": 266, "IV": 492}
    for name, title, chapters, hue in PARTS:
        across = name in ("I", "V")
        x0, y0 = (40, {"I": 62, "V": 582}[name]) if across else (columns[name], 230)
        step, width = (131, 116) if name == "I" else (226, 188)
        short = title if across else title.split()[0]
        parts.append(text(x0, y0 - 16, f"{name}: {short}", weight=600, fill=colors[f"{hue}-dark"]))
        for i, chapter in enumerate(chapters):
            x, y = (x0 + step * i, y0) if across else (x0, y0 + 76 * i)
            place[chapter] = (x, y)
            parts += [
                box(x, y, width, 58, tint(colors[hue]), stroke=colors[hue], radius=6),
                text(x + width / 2, y + 24, f"{chapter}", anchor="middle", weight=600),
                text(x + width / 2, y + 47, CHAPTERS[chapter], anchor="middle", size=17 if name == "I" else 19),
            ]
            if i:
                before = (x - step + width, y + 29, x - 3, y + 29) if across else (x + 94, y - 18, x + 94, y - 3)
                parts.append(arrow(*before))
    down = [x + 94 for x in columns.values()]
    parts += [arrow(x, 160, x, 190) for x in down]
    parts += [arrow(x, 536, x, 556) for x in down[1:]]
    parts += [
        f'<line x1="{down[0]}" y1="160" x2="{down[2]}" y2="160" stroke="{faint}" stroke-width="2"/>',
        f'<path d="M40 128v10h640v-10M360 138v22" fill="none" stroke="{faint}" stroke-width="2"/>',
    ]
    (x11, y11), (x15, y15) = place[11], place[15]
    parts.append(arrow(x11 + 190, y11 + 46, x15 - 4, y15 + 14))
    return svg(720, 662, "The dependencies between the chapters", parts)


# --- the ledger as bars of the node's memory ---------------------------------------------------------------


def ledger_bars() -> str:
    """For each row: weights, then the state of one reader; what lies past the node's memory is hatched."""
    rows = [row for row in tbt.ledger().rows if row.accelerator.name == "H100"]
    scale = 640 / max(row.weight_bytes + row.reader_bytes for row in rows)
    capacity = 40 + scale * rows[0].gpus * rows[0].accelerator.memory_bytes
    parts = [text(40, 44, "Eight H100, one reader of 131,072 tokens", size=24, weight=600)]
    captions = []
    y = 70.0
    for row in rows:
        y += 28
        x = 40.0
        hue = _hue(row)
        for size, fill in ((row.weight_bytes, colors[hue]), (row.reader_bytes, colors["reader"])):
            parts.append(box(x, y + 9, max(size * scale, 1.5), 22, fill))
            x += size * scale
        if x > capacity:
            parts.append(box(capacity, y + 9, x - capacity, 22, "url(#over)", stroke=ink))
        captions.append(text(40, y, _caption(row), size=19, halo=paper))
        y += 40
    parts += [
        f'<line x1="{capacity:g}" y1="66" x2="{capacity:g}" y2="{y:g}" stroke="{ink}" stroke-width="2" '
        'stroke-dasharray="6 4"/>',
        *captions,  # over the line
        text(capacity, y + 24, "640 GB", anchor="middle", weight=600),
        box(40, y + 46, 28, 15, colors["llama"]),
        box(68, y + 46, 14, 15, colors["deepseek"]),
        box(82, y + 46, 14, 15, colors["jamba"]),
        text(106, y + 60, "weights"),
        box(206, y + 46, 28, 15, colors["reader"]),
        text(244, y + 60, "one reader's state"),
        box(440, y + 46, 28, 15, "url(#over)", stroke=ink),
        text(478, y + 60, "does not fit"),
    ]
    return svg(720, int(y + 84), "The ledger as bars of the node's memory", parts)


def _hue(row: Row) -> str:
    return HUES[THREE.index(row.config.name)]


def _caption(row: Row) -> str:
    words = f"{TITLES[THREE.index(row.config.name)]}, {row.recipe}"
    if row.kv_heads is not None:
        words = f"{TITLES[0]}, bf16, if all {row.kv_heads} heads were cached"
    if row.state_bytes_per_element == 1:
        words += ", 1-byte cache"
    if not row.readers:
        return f"{words}: no"
    return f"{words}: {row.readers} readers"


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
    return "\n".join(lines) + "\n"


FILES = {
    "_static/cover.svg": cover,
    "_static/factor_map.svg": factor_map,
    "_static/dependencies.svg": dependencies,
    "_static/ledger.svg": ledger_bars,
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
