"""Train the siblings again, until context matters: four epochs of the corpus instead of an eighth of one.

    python book/experiments/siblings_long.py                          every run that siblings_long.json lacks
    python book/experiments/siblings_long.py --names mha --seeds 0 1  these only
    python book/experiments/siblings_long.py --report                 what was found so far, as a table
    python book/experiments/siblings_long.py --quick --folder F       a few steps of each, to see that it works

A run is one (name, seed); all architectures of a seed see the same bytes in the same order. A run that is stopped
(SIGTERM, or worse) goes on from its last checkpoint and ends with the same weights. Weights are kept in 8 bits with a
scale for each row, under the names of Hugging Face's library; ``expanded`` makes a directory of them that
``tbt.load`` reads. The mark to pass is an n-gram table of the same bytes, see kneser_ney.py. One thread is the
fastest use of a core: set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import siblings
import torch
import torch.nn.functional as F
from fast_training import quicken
from kneser_ney import MAX_ORDER, KneserNey
from safetensors.torch import load_file, save_file
from siblings import BIAS_STEP, SEEDS, SIBLINGS
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.layers.feed_forward import Router

HERE = Path(__file__).resolve().parent
RECIPE: dict[str, Any] = {
    "lengths": [128, 128, 128, 256],  # of the sequences, epoch by epoch: attention costs less over short ones
    "batch_bytes": 512,
    "learning_rate": 4e-3,
    "warmup": 200,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],  # with 0.99, a trial of 1,000 steps of MHA ended at 1.78 instead of 1.74 nats a byte
    "clip": 1.0,
}
CUT = 8  # bytes of context that the short-sighted evaluation leaves
WINDOW = 256  # bytes a model sees at most
WORTH = 0.002  # nats a byte that keeping the weights in 8 bits may cost
TINY = 2.0**-14  # the least scale: below it float16 has fewer digits
SAVE_SECONDS = 240.0
# 97.5 % points of Student's t, by degrees of freedom
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


class Stopped(Exception):
    """SIGTERM came; the checkpoint is written."""


# --- Bytes and steps ---------------------------------------------------------------------------------


def steps(size: int, recipe: dict[str, Any]) -> int:
    """Of a whole run over ``size`` training bytes."""
    return sum(steps_of_epoch(size, length, recipe) for length in recipe["lengths"])


def steps_of_epoch(size: int, length: int, recipe: dict[str, Any]) -> int:
    return (size - 1 - (length - 1)) // length // (recipe["batch_bytes"] // length)


def batches(data: np.ndarray, recipe: dict[str, Any], seed: int) -> Iterator[Tensor]:
    """(B, T + 1) of bytes for each step. In an epoch each byte is seen once, but for a rest of less than a batch.

    The text is cut into sequences at an offset that each epoch draws anew, and they are shuffled. Nothing depends on
    the architecture, so that the runs of a seed are paired.
    """
    for epoch, length in enumerate(recipe["lengths"]):
        rng = np.random.default_rng([seed, epoch])
        starts = np.arange(rng.integers(length), len(data) - length, length)
        rng.shuffle(starts)
        rows = recipe["batch_bytes"] // length
        for step in range(steps_of_epoch(len(data), length, recipe)):
            chosen = starts[step * rows : (step + 1) * rows]
            yield torch.from_numpy(np.stack([data[s : s + length + 1] for s in chosen]).astype(np.int64))


class Training:
    """One run that can be stopped and taken up again: model, optimizer, step, and what was observed."""

    def __init__(self, name: str, seed: int, data: np.ndarray, recipe: dict[str, Any]) -> None:
        self.seed, self.data, self.recipe = seed, data, recipe
        self.step, self.seconds, self.recent = 0, 0.0, [0.0, 0]
        self.curve: list[list[float]] = []
        self.total = steps(len(data), recipe)
        self.model = siblings.fresh(SIBLINGS[name], seed)
        quicken(self.model)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe["weight_decay"]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=tuple(recipe["betas"]), fused=True)
        self.routers = [m for m in self.model.modules() if isinstance(m, Router) and m.selection_bias is not None]
        self.loads = [torch.zeros(router.config.num_experts) for router in self.routers]
        for router, load in zip(self.routers, self.loads, strict=True):
            router.register_forward_hook(partial(siblings.count_choices, load))

    def rate(self) -> float:
        return siblings.rate(self.step, {**self.recipe, "steps": self.total})

    def advance(self, batch: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe["clip"])
        self.optimizer.step()
        for router, load in zip(self.routers, self.loads, strict=True):
            assert router.selection_bias is not None
            router.selection_bias.data.add_((load.mean() - load).sign_(), alpha=BIAS_STEP)
            load.zero_()
        self.step += 1
        self.recent = [self.recent[0] + loss.item(), self.recent[1] + 1]
        if self.step % max(1, self.total // 64) == 0:
            self.curve.append([self.step * self.recipe["batch_bytes"], round(self.recent[0] / self.recent[1], 4)])
            self.recent = [0.0, 0]

    def run(self, checkpoint: Path, every: float = SAVE_SECONDS, stop: Iterator[bool] | None = None) -> tbt.Decoder:
        """Train to the end. ``stop`` is asked after each step: true raises Stopped, with all that was done saved."""
        if checkpoint.exists():
            self.load(checkpoint)
        spent, saved = time.process_time(), time.monotonic()
        for batch in islice(batches(self.data, self.recipe, self.seed), self.step, None):
            self.advance(batch)
            stopped = stop is not None and next(stop)
            if stopped or time.monotonic() - saved >= every:
                now = time.process_time()
                self.seconds, spent, saved = self.seconds + now - spent, now, time.monotonic()
                self.save(checkpoint)
            if stopped:
                raise Stopped
        self.seconds += time.process_time() - spent
        return plain(self.model)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_ = path.with_suffix(".partial")
        torch.save(
            {
                "recipe": self.recipe,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "seconds": self.seconds,
                "recent": self.recent,
                "curve": self.curve,
            },
            partial_,
        )
        os.replace(partial_, path)

    def load(self, path: Path) -> None:
        kept = torch.load(path, weights_only=True)
        if kept["recipe"] != self.recipe:
            raise SystemExit(f"{path.name} was made by another recipe; move it away to begin anew")
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.step, self.seconds, self.recent, self.curve = (kept[n] for n in ("step", "seconds", "recent", "curve"))


def plain(model: tbt.Decoder) -> tbt.Decoder:
    """The same weights in a model without the hooks and the hand-written forms of the training."""
    fresh = tbt.Decoder(model.config)
    fresh.load_state_dict(model.state_dict())
    return fresh.eval().requires_grad_(False)


# --- What it learnt ----------------------------------------------------------------------------------


@torch.no_grad()
def nats_per_byte(model: tbt.Decoder, text: np.ndarray, window: int = WINDOW, rows: int = 8) -> float:
    """Mean cross-entropy of text[1:], in windows that each begin with nothing before them."""
    count = (len(text) - 1) // window
    whole = torch.from_numpy(text[: count * window + 1].astype(np.int64))
    parts = [*whole.unfold(0, window + 1, window).split(rows)] if count else []
    if len(text) - 1 > count * window:
        parts.append(torch.from_numpy(text[count * window :].astype(np.int64))[None])
    total = 0.0
    for part in parts:
        logits = model(part[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total / (len(text) - 1)


@torch.no_grad()
def cut_nats_per_byte(model: tbt.Decoder, text: np.ndarray, context: int = CUT, rows: int = 256) -> float:
    """The same bytes, each predicted from the last ``context`` bytes before it alone."""
    early = torch.from_numpy(text[: context + 1].astype(np.int64))[None]
    total = F.cross_entropy(model(early[:, :-1])[0], early[0, 1:], reduction="sum").item()
    later = torch.from_numpy(text[1:].astype(np.int64)).unfold(0, context + 1, 1)
    for part in later.split(rows):
        total += F.cross_entropy(model(part[:, :-1], logits="last")[:, 0], part[:, -1], reduction="sum").item()
    return total / (len(text) - 1)


def table(train: np.ndarray, tests: dict[str, np.ndarray]) -> dict[str, Any]:
    """Nats a byte of the n-gram tables on text[1:], by kind, text and order (from 1).

    A table looks across the borders of the windows, where a model begins with nothing: the table has the advantage.
    """
    found: dict[str, Any] = {}
    for kind, modified in (("plain", False), ("modified", True)):
        tables = KneserNey(train, modified=modified)
        orders = range(1, MAX_ORDER + 1)
        found[kind] = {what: [round(tables.nats_per_byte(text, n), 5) for n in orders] for what, text in tests.items()}
    return found


# --- 8 bits ------------------------------------------------------------------------------------------


def in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers (…, n) int8 and a float16 scale for each row (…), of weight (…, n): of some scales the best.

    That is the one with the least squared error: clipping a row's largest numbers may round all others less.
    """
    largest = weight.abs().amax(-1) / 127
    best, scale = torch.full_like(largest, math.inf), largest
    for shrink in torch.linspace(0.7, 1, 31):
        tried = (largest * shrink).half().float().clamp(min=TINY)
        error = (quantized(weight, tried) * tried[..., None] - weight).square().sum(-1)
        scale = torch.where(error < best, tried, scale)
        best = torch.minimum(error, best)
    return quantized(weight, scale).to(torch.int8), scale.half()


def quantized(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale[..., None]).round_().clamp_(-127, 127)


def compact(model: tbt.Decoder, hf: dict[str, Any], bits: int = 8) -> dict[str, Tensor]:
    """The tensors of a file. In 8 bits: matrices whose rows are at least 24 long, as ``name`` and ``name.scale``.

    Of the others, matrices in float16 and vectors in float32. The names are Hugging Face's, experts one by one.
    """
    tensors: dict[str, Tensor] = {}
    for own, parameter in model.named_parameters():
        name, weight = siblings.hf_name(own, hf["model_type"]), parameter.detach()
        before, _, after = name.partition(".experts.")
        parts = {f"{before}.experts.{e}.{after}.weight": w for e, w in enumerate(weight)} if after else {name: weight}
        for part, values in parts.items():
            if values.dim() < 2:
                tensors[part] = values.float().clone()
            elif bits == 8 and values.shape[-1] >= 24:
                tensors[part], tensors[f"{part}.scale"] = in_8_bits(values)
            else:
                tensors[part] = values.half()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def expanded(file: Path, hf: dict[str, Any], folder: Path) -> Path:
    """A Hugging Face directory, in float32, of a file that ``compact`` made: ``tbt.load(folder)`` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = load_file(file)
    tensors = {name: tensor.float() for name, tensor in stored.items() if not name.endswith(".scale")}
    for name in tensors:
        if f"{name}.scale" in stored:
            tensors[name] *= stored[f"{name}.scale"].float()[..., None]
    (folder / "config.json").write_text(json.dumps({**hf, "torch_dtype": "float32"}, indent=1) + "\n", encoding="utf-8")
    siblings.byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- All runs ----------------------------------------------------------------------------------------


def finish(name: str, training: Training, tests: dict[str, np.ndarray], file: Path, scratch: Path) -> dict[str, Any]:
    """Write the weights, and say what they are worth as they were written."""
    model, hf = plain(training.model), SIBLINGS[name]
    exact = nats_per_byte(model, tests["held_out"])
    file.parent.mkdir(parents=True, exist_ok=True)
    for bits in (8, 16):
        save_file(compact(model, hf, bits), file, metadata={"format": "pt"})
        stored = tbt.load(expanded(file, hf, scratch))
        kept = nats_per_byte(stored, tests["held_out"])
        if kept - exact < WORTH:
            break
    nats = {"held_out": kept, "held_out_exact": exact, "passage": nats_per_byte(stored, tests["passage"])}
    nats |= {f"{what}_cut": cut_nats_per_byte(stored, text) for what, text in tests.items()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **{f"{what}_nats": round(value, 5) for what, value in nats.items()},
        "bits": bits,
        "file_bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "cpu_seconds": round(training.seconds),
        "machine": tbt.measure.machine("cpu").strip("⟨⟩").split(";")[0],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "curve": training.curve,
    }


def paired(runs: dict[str, Any], name: str, other: str, what: str = "held_out_nats") -> tuple[float, float, int]:
    """Mean of name − other over the seeds that both have, half its 95 % interval (Student's t), and their number."""
    differences = [
        runs[f"{name}/{seed}"][what] - runs[f"{other}/{seed}"][what]
        for seed in SEEDS
        if f"{name}/{seed}" in runs and f"{other}/{seed}" in runs
    ]
    n = len(differences)
    if n < 2:
        return (differences[0] if n else math.nan), math.inf, n
    return statistics.fmean(differences), STUDENT[n - 1] * statistics.stdev(differences) / math.sqrt(n), n


def report(record: dict[str, Any]) -> str:
    """Held-out text first; differences to MHA paired by seed, with their 95 % interval; the n-gram beside them."""
    runs, lines = record["runs"], []
    for kind, by_text in record["kneser_ney"].items():
        for what, by_order in by_text.items():
            order = int(np.argmin(by_order)) + 1
            lines.append(f"Kneser–Ney, {kind:9}{what:9} best order {order}: {by_order[order - 1]:.4f} nats a byte")
    lines.append(f"{'run':11}{'held out':>9}{'cut to 8':>10}{'passage':>9}{'8 bits cost':>13}{'minutes':>9}")
    for key, run in runs.items():
        cost, minutes = run["held_out_nats"] - run["held_out_exact_nats"], run["cpu_seconds"] / 60
        cut = run["held_out_cut_nats"] - run["held_out_nats"]
        lines.append(
            f"{key:11}{run['held_out_nats']:9.4f}{cut:+10.4f}{run['passage_nats']:9.4f}{cost:+13.5f}{minutes:9.1f}"
        )
    for name in SIBLINGS:
        mean, half, n = paired(runs, name, "mha")
        if n and name != "mha":
            lines.append(f"{name} − mha, held out: {mean:+.4f} ± {half:.4f} ({n} seed{'s' * (n > 1)})")
    return "\n".join(lines)


def opened(path: Path, recipe: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The record so far, or a new one; SystemExit if its runs could not be compared with new ones."""
    return {"versions": {}, "kneser_ney": {}, **siblings.opened(path, recipe, text)}


def write(path: Path, record: dict[str, Any]) -> None:
    """All or nothing, so that a stop in the middle loses no earlier run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[[\d.,\s-]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)  # numbers on one line
    text = text.replace("[ ", "[").replace(" ]", "]")
    partial_ = path.with_suffix(".partial")
    partial_.write_text(text + "\n", encoding="utf-8")
    os.replace(partial_, path)


def stops() -> Iterator[bool]:
    """Whether SIGTERM has come, each time it is asked."""
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    while True:
        yield bool(came)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(SIBLINGS), choices=list(SIBLINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--report", action="store_true", help="print what the record holds, and train nothing")
    parser.add_argument("--quick", action="store_true", help="a few steps and a little text, into --folder")
    parser.add_argument("--folder", type=Path, default=HERE, help="where record, weights and checkpoints go")
    chosen = parser.parse_args(arguments)
    if chosen.quick and chosen.folder == HERE:
        parser.error("--quick needs a --folder: its runs must not replace the book's")
    path = chosen.folder / "siblings_long.json"
    if chosen.report:
        print(report(json.loads(path.read_text(encoding="utf-8"))))
        return 0
    recipe = {**RECIPE, "warmup": 4} if chosen.quick else RECIPE
    data, held = siblings.texts()
    tests = {"held_out": held, "passage": siblings.passage()}
    if chosen.quick:
        data, tests = data[:4096], {what: text[:1024] for what, text in tests.items()}
    record = opened(path, recipe, siblings.provenance(data, held))
    record["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    if not record["kneser_ney"]:
        record["kneser_ney"] = table(data, tests)
        write(path, record)
    weights, checkpoints = chosen.folder / "siblings_long", chosen.folder / "siblings_long_checkpoints"
    stop = stops()
    for seed in chosen.seeds:  # all architectures of a seed before the next seed
        for name in chosen.names:
            key, file = f"{name}/{seed}", f"{name}-seed{seed}"
            if key in record["runs"]:
                continue
            training = Training(name, seed, data, recipe)
            checkpoint = checkpoints / f"{file}.pt"
            print(f"{key}: {training.total} steps", flush=True)
            try:
                training.run(checkpoint, stop=stop)
            except Stopped:
                print(f"{key}: stopped after step {training.step}", flush=True)
                return 0
            entry = finish(name, training, tests, weights / f"{file}.safetensors", checkpoints / "expanded")
            record["runs"] = dict(sorted({**record["runs"], key: entry}.items()))
            write(path, record)
            checkpoint.unlink(missing_ok=True)
            print(f"{key}: held out {entry['held_out_nats']}, {entry['cpu_seconds'] / 60:.1f} min", flush=True)
    print(report(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
