"""Time SmolLM2's passes three ways, in turn: this package, transformers, and the model's products alone.

    python -m benchmarks            everything (about three minutes on two cores)

Times are medians of interleaved runs on one machine; what can be compared between machines are the ratios.
*Products alone* pushes the same number of rows through every weight matrix of the model and does nothing else:
no pass that uses these weights can be faster on this machine. Logits are first shown equal. The other architectures
follow on random weights, beside transformers alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tokenbytoken as tbt
from benchmarks import architectures
from tokenbytoken.measure import busy, device, interleaved, machine

SOURCE = "smollm2-135m"


def reference(where: torch.device) -> Any:
    """transformers' model on the same file."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = tbt.checkpoints.find(SOURCE)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval().to(where)


def products(model: tbt.Decoder, rows: int) -> Callable[[], object]:
    """A call that pushes ``rows`` rows through each matrix of the layers, and one row a sequence through the head."""
    weights = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith(("embed", "head"))]
    inputs = {w.shape[1]: torch.ones(rows, w.shape[1], device=w.device) for w in weights}
    last = torch.ones(1, model.config.hidden_size, device=weights[0].device)

    def run() -> None:
        for w in weights:
            F.linear(inputs[w.shape[1]], w)
        F.linear(last, model.head.weight)

    return run


def passes(model: tbt.Decoder, theirs: Any, batch: int, context: int, new: int) -> dict[str, Callable[[], object]]:
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

    error = (ours() - other()).abs().max() / ours().abs().max()
    if not error <= 1e-5:
        raise SystemExit(f"the logits differ by {error:.1e} of their scale: nothing is timed")
    return {"this package": ours, "transformers": other, "products alone": products(model, batch * new)}


@torch.inference_mode()
def main() -> int:
    where = device()
    print(machine())
    if disturbed := busy():
        print(disturbed)
    model, theirs = tbt.load(SOURCE, device=where), reference(where)
    print(f"\n{'pass':34}{'this package':>14}{'÷ transformers':>16}{'÷ products alone':>18}")
    for label, batch, context, new in (
        ("decode, 1 sequence of 16", 1, 16, 1),
        ("decode, 1 sequence of 1,024", 1, 1024, 1),
        ("decode, 8 sequences of 256", 8, 256, 1),
        ("prefill of 512", 1, 0, 512),
        ("chunk of 64 on 1,024", 1, 1024, 64),
    ):
        times = interleaved(passes(model, theirs, batch, context, new), repeats=9, warmup=2, device=where)
        mine, other, limit = (times[name].median for name in ("this package", "transformers", "products alone"))
        print(f"{label:34}{1e3 * mine:11.1f} ms{mine / other:16.2f}{mine / limit:18.2f}", flush=True)
    for name, fields in architectures.SHAPES.items():
        print(f"\n{name}")
        ours, other_model = architectures.pair(fields, where)
        for label, ways in (
            ("prefill of 256", architectures.prefill(ours, other_model, 256)),
            ("decode, 1 sequence of 256", architectures.decode(ours, other_model, 256, steps=16)),
        ):
            times = interleaved(ways, repeats=9, warmup=2, device=where)
            mine, other = (times[way].median for way in ("this package", "transformers"))
            print(f"{label:34}{1e3 * mine:11.1f} ms{mine / other:16.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
