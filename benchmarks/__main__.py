"""This package beside transformers, llama.cpp and the machine's own limit, in interleaved runs.

    python -m benchmarks            everything (about six minutes on two cores)

Each line is one kind of work; the ways to do it run in turn, and their results are first shown equal. What can be
compared between machines are the ratios. *Products alone* pushes the same rows through every weight matrix that the
pass needs and does nothing else: no pass that uses these weights can be faster on this machine. llama.cpp takes part
where its wheel is installed (pip install --no-deps xllamacpp). With TBT_RECORD=1 the lines are kept as a record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tokenbytoken as tbt
from benchmarks import architectures, packed
from benchmarks.lines import Line, Ways, line, products
from tokenbytoken.measure import busy, device, machine, record

SOURCE = "smollm2-135m"


def reference(where: torch.device) -> Any:
    """transformers' model on the same file."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = tbt.checkpoints.find(SOURCE)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval().to(where)


def passes(model: tbt.Decoder, theirs: Any, batch: int, context: int, new: int) -> Ways:
    """The same pass three ways: ``new`` tokens for each of ``batch`` sequences that hold ``context``."""
    from transformers import DynamicCache

    where = model.embed.weight.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, context + new), generator=generator).to(where)
    state = model.new_state(batch, context + new)
    cache = DynamicCache(config=theirs.config)
    if context:
        model(tokens[:, :context], state, logits="none")
        theirs(input_ids=tokens[:, :context], cache=cache, use_cache=True, logits_to_keep=1)
    mark = state.mark()

    def ours() -> torch.Tensor:
        state.rewind(mark)
        return model(tokens[:, context:], state, logits="last")

    def other() -> torch.Tensor:
        if held := cache.get_seq_length() - context:
            cache.crop(-held)
        return theirs(input_ids=tokens[:, context:], cache=cache, use_cache=True, logits_to_keep=1).logits

    ways = architectures.equal(ours, other, tolerance=1e-5)
    return {**ways, "products alone": products(model, batch * new, batch)}


def dense(where: torch.device) -> Iterator[Line]:
    model, theirs = tbt.load(SOURCE, device=where), reference(where)
    for work, batch, context, new in (
        ("decode, 1 sequence of 16", 1, 16, 1),
        ("decode, 1 sequence of 1,024", 1, 1024, 1),
        ("decode, 8 sequences of 256", 8, 256, 1),
        ("prefill of 512", 1, 0, 512),
        ("chunk of 64 on 1,024", 1, 1024, 64),
    ):
        yield line("SmolLM2", work, passes(model, theirs, batch, context, new), where, repeats=9)


def others(where: torch.device) -> Iterator[Line]:
    for name, fields in architectures.SHAPES.items():
        ours, theirs = architectures.pair(fields, where)
        long = {"decode, 1 sequence of 4,000": 4000} if name.startswith("latent") else {}
        for work, context in {"decode, 1 sequence of 256": 256, **long}.items():
            repeats = 15 if context == 256 else 5
            ways = architectures.decode(ours, theirs, context, steps=repeats + 4)
            ways["products alone"] = products(ours, 1, 1)
            yield line(name, work, ways, where, repeats=repeats)
        for length in (256, 2048) if name == "Mamba" else (256,):
            ways = architectures.prefill(ours, theirs, length)
            yield line(name, f"prefill of {length:,}", ways, where, repeats=3 if length > 256 else 7)


@torch.inference_mode()
def main() -> int:
    where = device()
    print(machine())
    if disturbed := busy():
        print(disturbed)
    sources: list[Callable[[torch.device], Iterator[Line]]] = [packed.lines, dense, others]
    lines = []
    for source in sources:
        for found in source(where):
            lines.append(found)
            print("\n" + str(found), flush=True)
    record("benchmarks", {"lines": [found.as_data() for found in lines]}, command="TBT_RECORD=1 make bench")
    return 0


if __name__ == "__main__":
    sys.exit(main())
