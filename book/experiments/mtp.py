"""Train a multi-token-prediction module on the MLA + MoE sibling, and record how often it guesses right.

    python book/experiments/mtp.py
    python book/experiments/mtp.py --quick     a few steps, to see that it works; writes nothing

The sibling is frozen: only the module learns, by DeepSeek-V3's objective (arXiv 2412.19437, section 2.2). Its guess is
compared with the sibling's own choice on held-out text, then used as a draft. Everything goes to mtp.json.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import siblings
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.run.mtp import MTP

HERE = Path(__file__).resolve().parent
STEPS, WINDOW, ROWS, RATE = 300, 128, 16, 4e-3


def fresh(target: tbt.Decoder) -> MTP:
    """A module with random weights of variance 1 / fan-in."""
    torch.manual_seed(0)
    module = MTP(replace(target.config, mtp_layers=1))
    for weight in module.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return module


@torch.no_grad()
def inputs(target: tbt.Decoder, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of tokens 0 … T − 3, embeddings of 1 … T − 2, and tokens 2 … T − 1, from batch (B, T)."""
    return target.norm(target(batch[:, :-2], logits="none")), target.embed(batch[:, 1:-1]), batch[:, 2:]


def train(target: tbt.Decoder, data: np.ndarray, steps: int) -> tuple[MTP, list[float]]:
    """The trained module and its loss, in nats a byte, for each twentieth of the training."""
    module, rng = fresh(target), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        starts = rng.integers(0, len(data) - WINDOW - 2, ROWS)
        batch = torch.from_numpy(np.stack([data[s : s + WINDOW + 2] for s in starts]).astype(np.int64))
        hidden, embedded, wanted = inputs(target, batch)
        loss = F.cross_entropy(target.head(module(hidden, embedded)).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    each = max(1, steps // 20)
    return module.eval(), [round(float(np.mean(losses[i : i + each])), 4) for i in range(0, steps, each)]


@torch.no_grad()
def acceptance(target: tbt.Decoder, module: MTP, text: np.ndarray) -> dict[str, float]:
    """How a guess fares on text (windows of 128): the same first choice, and Σ min(p, q)."""
    rows = len(text) // (WINDOW + 2)
    batch = torch.from_numpy(text[: rows * (WINDOW + 2)].astype(np.int64)).view(rows, -1)
    hidden, embedded, _ = inputs(target, batch)
    q = target.head(module(hidden, embedded)).softmax(-1)
    p = target(batch[:, :-1])[:, 1:].softmax(-1)
    return {
        "greedy": round(float((p.argmax(-1) == q.argmax(-1)).double().mean()), 4),
        "sampled": round(float(torch.minimum(p, q).sum(-1).mean()), 4),
    }


def as_draft(target: tbt.Decoder, module: MTP, prompt: list[int]) -> list[dict[str, Any]]:
    """Speculation of 120 bytes with 1 and 2 guesses in a pass, sampled at temperature 1 and greedy."""
    found = []
    for temperature in (0.0, 1.0):
        for guesses in (1, 2):
            run = tbt.speculate(target, prompt, 120, draft=module, num_draft=guesses, temperature=temperature, seed=1)
            found.append({"temperature": temperature, "guesses": guesses, "acceptance": round(run.acceptance, 4),
                          "tokens_per_pass": round(run.tokens_per_pass, 4)})  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    began = time.perf_counter()
    target = tbt.load("sibling-mla-moe")
    data, held_out = siblings.texts()
    passage = np.frombuffer(tbt.measure.book_file("data/passage.txt").read_bytes(), np.uint8)
    module, losses = train(target, data, 5 if quick else STEPS)
    record = {
        "target": "sibling-mla-moe",
        "parameters": sum(p.numel() for p in module.parameters()),
        "bytes_seen": STEPS * ROWS * WINDOW,
        "loss": losses,
        "untrained": acceptance(target, fresh(target).eval(), held_out[:4000]),
        "held_out": acceptance(target, module, held_out[:4000]),
        "passage": acceptance(target, module, passage[:4000]),
        "draft": as_draft(target, module, list(passage[:100].tolist())),
        "text": siblings.provenance(data, held_out),
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    print(json.dumps(record, indent=1))
    if not quick:
        (HERE / "mtp.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
