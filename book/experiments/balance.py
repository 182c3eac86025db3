"""What keeps a router from sending every token to the same few experts, and what that costs.

    python book/experiments/balance.py            every run that balance.json lacks
    python book/experiments/balance.py --quick    a few steps of each, kept nowhere

A byte is predicted from the eight before it, by one layer with sixteen experts, two for each byte. The same start
and the same bytes in the same order, without a cure, with an auxiliary loss of several weights, and with
DeepSeek-V3's bias (arXiv 2412.19437, 2.1.2) at several speeds; three seeds. All runs take a few minutes on one core.
A run is written to balance.json as soon as it ends, so that a run that was stopped is the only one repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.layers.feed_forward import MoE

HERE = Path(__file__).resolve().parent
SEEN = 8  # bytes that the next one is predicted from
RECIPE: dict[str, Any] = {
    "experts": 16,
    "experts_per_token": 2,
    "expert_width": 32,
    "hidden_size": 64,
    "steps": 300,
    "batch_bytes": 256,
    "learning_rate": 5e-3,
}
CURES: dict[str, tuple[str, float]] = {
    "none": ("none", 0.0),
    **{f"loss {weight:g}": ("loss", weight) for weight in (0.001, 0.01, 0.1, 1.0, 10.0)},
    **{f"bias {speed:g}": ("bias", speed) for speed in (0.001, 0.01, 0.1)},
}
SEEDS = (0, 1, 2)


class NextByte(nn.Module):
    """Logits of the next byte from the last eight: (n, 8) → (n, 256)."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        super().__init__()
        M = recipe["hidden_size"]
        config = tbt.MoEConfig(
            num_experts=recipe["experts"],
            experts_per_token=recipe["experts_per_token"],
            intermediate_size=recipe["expert_width"],
            scoring="sigmoid",
            selection_bias=True,
        )
        self.embed = nn.Embedding(256, 16)
        self.join = nn.Linear(16 * SEEN, M)
        self.before, self.after = nn.RMSNorm(M), nn.RMSNorm(M)
        self.moe = MoE(config, M)
        self.head = nn.Linear(M, 256, bias=False)

    def enter(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state and its normed form, which the router sees: both (n, M)."""
        h = self.join(self.embed(seen).flatten(1))
        return h, self.before(h)

    def forward(self, seen: Tensor) -> Tensor:
        h, x = self.enter(seen)
        return self.head(self.after(h + self.moe(x)))


def text(name: str) -> np.ndarray:
    return np.frombuffer(tbt.measure.book_file(name).read_bytes(), np.uint8).astype(np.int64)


def windows(data: np.ndarray, starts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Eight bytes from each start, (n, 8), and the byte after them, (n,)."""
    bytes_ = torch.from_numpy(data[starts[:, None] + np.arange(SEEN + 1)])
    return bytes_[:, :SEEN], bytes_[:, SEEN]


def shares(moe: MoE, x: Tensor) -> Tensor:
    """The share of all choices that each expert gets, (E,)."""
    with torch.no_grad():
        chosen = moe.router(x)[1].flatten()
    return chosen.bincount(minlength=moe.config.num_experts) / len(chosen)


def uneven(moe: MoE, x: Tensor, share: Tensor) -> Tensor:
    """The auxiliary loss: E Σ (share of choices) (mean normed score), 1 when both are even (V3, equations 17 to 20)."""
    scores = F.linear(x, moe.router.weight).sigmoid()
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return moe.config.num_experts * (share * mean).sum()


def run(cure: str, seed: int, data: np.ndarray, test: np.ndarray, recipe: dict[str, Any]) -> dict[str, Any]:
    how, strength = CURES[cure]
    began = time.process_time()
    torch.manual_seed(seed)
    model, rng = NextByte(recipe), np.random.default_rng(seed)
    bias = model.moe.router.selection_bias
    assert bias is not None
    bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    curve, recent = [], []
    for step in range(recipe["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = recipe["learning_rate"] * (1 - step / recipe["steps"])
        seen, following = windows(data, rng.integers(0, len(data) - SEEN, recipe["batch_bytes"]))
        x = model.enter(seen)[1]
        share = shares(model.moe, x)
        loss = F.cross_entropy(model(seen), following)
        if how == "loss":
            loss = loss + strength * uneven(model.moe, x, share)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if how == "bias":
            bias.add_(strength * (1 / len(share) - share).sign())
        recent.append(len(share) * share.max().item())
        if (step + 1) % 10 == 0:
            curve.append([step + 1, round(float(np.mean(recent)), 2)])
            recent.clear()
    with torch.no_grad():
        seen, following = windows(test, np.arange(len(test) - SEEN))
        nats = F.cross_entropy(model(seen), following).item()
        load = len(share) * shares(model.moe, model.enter(seen)[1])
    return {
        "passage_nats": round(nats, 4),
        "load": [round(value, 2) for value in sorted(load.tolist(), reverse=True)],
        "largest_load_while_training": curve,
        "minutes": round((time.process_time() - began) / 60, 2),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="twenty steps of each with one seed, kept nowhere")
    quick = parser.parse_args(arguments).quick
    recipe = {**RECIPE, "steps": 20} if quick else RECIPE
    data, test = text("experiments/siblings_prose.txt"), text("data/passage.txt")
    path = HERE / "balance.json"
    kept: dict[str, Any] = {"recipe": recipe, "runs": {}}
    if not quick and path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["recipe"] != recipe:
            raise SystemExit(f"{path.name} was made by another recipe; move it away to begin anew")
    for seed in SEEDS[:1] if quick else SEEDS:
        for cure in CURES:
            key = f"{cure}/{seed}"
            if key in kept["runs"]:
                continue
            kept["runs"][key] = entry = run(cure, seed, data, test, recipe)
            if not quick:
                kept["minutes"] = round(sum(each["minutes"] for each in kept["runs"].values()), 1)
                path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(f"{key}: {entry['passage_nats']} nats a byte, largest load {entry['load'][0]} times an even one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
