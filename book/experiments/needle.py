"""A needle in the real model: does SmolLM2 find a number that was said once, far back in its context?

    python book/experiments/needle.py               every point that needle.json lacks (about 40 minutes, one thread)
    python book/experiments/needle.py --needles 1   the first needle of each length alone

Filler is the book's own passage, over and over. One sentence, "The secret number of the harbour is 4182.", stands at
a depth of 0 (oldest) to 1 (newest). The text ends with "The secret number of the harbour is", and eight four-digit
numbers are scored by the probability of their digits; the seven wrong ones belong to other places. ``found`` says
whether the right one is the likeliest, ``written`` whether greedy decoding writes it. The control is the same text
without the needle. Each text is read once. Then its cache is rounded in place: as it is, FP8 (E4M3, a scale for each
head and token), INT8 in the same way, and four bits (a scale for 32 numbers of a head). Resumable: all depths of a
length and needle are written together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tokenbytoken as tbt
from tokenbytoken.layers import Attention
from tokenbytoken.layers.cache import Cache

BOOK = Path(__file__).resolve().parents[1]
RECORD = BOOK / "experiments" / "needle.json"
SOURCE = "smollm2-135m"
LENGTHS = (512, 1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PLACES = ("harbour", "library", "garden", "station", "museum", "bakery", "theatre", "market")
NUMBERS = ("4182", "7350", "2961", "8047", "5613", "3928", "9574", "1706")
CHUNK = 512


def as_it_is(x: Tensor) -> Tensor:
    return x


def one_byte(dtype: str) -> Callable[[Tensor], Tensor]:
    """Rounds keys or values (B, K, S, D) as :func:`tokenbytoken.quantize_cache` keeps them."""
    mixer = tbt.quantize_cache(tbt.load(SOURCE), dtype).mixers[0]
    assert isinstance(mixer, Attention)
    form = mixer.cache_format
    return lambda x: form.decode(form.encode(x), x.dtype)


def four_bits(x: Tensor) -> Tensor:
    """Whole numbers from −7 to 7, with one scale for each 32 numbers of a head and token."""
    groups = x.unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-12)
    return ((groups / scale).round() * scale).flatten(-2)


def texts(encode: Callable[[str], list[int]], length: int, needle: int) -> tuple[list[int], list[int], list[int]]:
    """Filler, the needle's sentence and the question, as tokens: together ``length``."""
    passage = encode((BOOK / "data" / "passage.txt").read_text(encoding="utf-8"))
    sentence = encode(f" The secret number of the {PLACES[needle]} is {NUMBERS[needle]}.")
    question = encode(f" The secret number of the {PLACES[needle]} is")
    room = length - len(sentence) - len(question) - len(encode(" " + NUMBERS[0]))
    start = needle * 211  # another stretch of the passage for each needle
    filler = (passage * (room // len(passage) + 2))[start : start + room]
    return filler, sentence, question


def read(model: tbt.Decoder, tokens: list[int], state: tbt.DecoderState) -> None:
    for first in range(0, len(tokens), CHUNK):
        model(torch.tensor([tokens[first : first + CHUNK]]), state, logits="none")


def asked(model: tbt.Decoder, question: list[int], state: tbt.DecoderState, numbers: list[list[int]]) -> dict[str, Any]:
    """Log-probability of each number after the question, and what greedy decoding writes; the state comes back."""
    mark = state.mark()
    first = model(torch.tensor([question]), state, logits="last")[0, -1].log_softmax(-1)
    after = state.mark()
    scores = []
    for digits in numbers:
        rows = model(torch.tensor([digits[:-1]]), state, logits="all")[0].log_softmax(-1)
        scores.append(float(first[digits[0]]) + sum(float(row[d]) for row, d in zip(rows, digits[1:], strict=True)))
        state.rewind(after)
    written: list[int] = [int(first.argmax())]
    for _ in range(len(numbers[0]) - 1):
        written.append(int(model(torch.tensor([written[-1:]]), state, logits="last")[0, -1].argmax()))
    state.rewind(mark)
    return {"log_probabilities": [round(score, 4) for score in scores], "written": written}


def points(
    model: tbt.Decoder, length: int, needle: int, forms: dict[str, Callable[[Tensor], Tensor]]
) -> Iterator[dict[str, Any]]:
    """All depths of one length and needle, and the control, with every form of the cache."""
    encode = tbt.load_tokenizer(SOURCE).encode
    filler, sentence, question = texts(encode, length, needle)
    numbers = [encode(" " + number) for number in NUMBERS]
    before = model.new_state(1, length)
    done = 0
    for depth in (*DEPTHS, None):
        start = time.process_time()
        if depth is None:
            place, put = len(filler), []
        else:
            place, put = round(depth * len(filler)), sentence
        read(model, filler[done:place], before)  # what stands before the needle is read once for all depths
        done = place
        state = before.copy()
        read(model, put + filler[place:], state)
        caches = [layer for layer in state.layers if isinstance(layer, Cache)]
        held = [{name: part.clone() for name, (part,) in cache.parts.items()} for cache in caches]
        for form, rounded in forms.items():
            for cache, parts in zip(caches, held, strict=True):
                for name, part in parts.items():
                    cache.parts[name][0].copy_(rounded(part))
            answer = asked(model, question, state, numbers)
            scores = answer["log_probabilities"]
            yield {
                "length": length, "needle": needle, "depth": depth, "cache": form,
                "found": max(range(len(scores)), key=scores.__getitem__) == needle,
                "written": answer["written"] == numbers[needle],
                "log_probability": scores[needle], "best_other": max(s for i, s in enumerate(scores) if i != needle),
                "seconds": round(time.process_time() - start, 1),
            }  # fmt: skip


def save(record: dict[str, Any]) -> None:
    partial = RECORD.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, RECORD)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--needles", type=int, default=4, choices=range(1, len(PLACES) + 1))
    arguments = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {"points": []}
    known = {(point["length"], point["needle"]) for point in record["points"]}
    model = tbt.load(SOURCE)
    forms = {"float32": as_it_is, "fp8": one_byte("e4m3"), "int8": one_byte("int8"), "4 bits": four_bits}
    for needle in range(arguments.needles):
        for length in LENGTHS:
            if (length, needle) in known:
                continue
            found = list(points(model, length, needle, forms))
            record["points"] += found
            record.update(
                model=SOURCE, trained_length=8192, lengths=LENGTHS, depths=DEPTHS, needles=arguments.needles,
                cpu=tbt.measure.machine(), torch=torch.__version__, python=platform.python_version(),
                date=datetime.now(timezone.utc).date().isoformat(), command="python book/experiments/needle.py",
                minutes=round(sum(p["seconds"] for p in record["points"] if p["cache"] == "4 bits") / 60, 1),
            )  # fmt: skip
            save(record)
            print(length, needle, [(p["depth"], p["cache"], p["found"], p["written"]) for p in found][:3], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
