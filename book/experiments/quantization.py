"""What one byte a weight does to SmolLM2: formats, granularities, outliers, activations, caches.

    python book/experiments/quantization.py             runs what is missing; writes quantization.json beside it
    python book/experiments/quantization.py --again     forgets what was recorded

Each case quantises the model, pushes the first 512 tokens of the book's passage through it, and compares the logits
with those of the model as the file has it: perplexity, and the mean KL divergence in nats a token. The file is a
4-bit one, so every figure is damage that is added to an already 4-bit model. The run can be interrupted at any case;
"minutes" adds up the time of all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from resumable import Record, asked_again
from torch import Tensor

import tokenbytoken as tbt
from tokenbytoken.decoder import Layer
from tokenbytoken.layers import Attention, SwiGLU

HERE = Path(__file__).resolve().parent
RECORD = HERE / "quantization.json"
TOKENS = 512
FORMATS, GRANULARITIES = ("e4m3", "e5m2", "int8"), ("tensor", "row", "tile", "block")
FACTORS = (3, 6, 9, 12, 15, 18)  # an outlier is 2 to this power times as large as its channel was


def add_outlier(model: tbt.Decoder, power: int, channel: int = 0) -> None:
    """Make one input channel of every linear layer 2^power times as large, and what feeds it as much smaller.

    The model stays the same function, to the last bit, because powers of two round nothing: it is only written down
    in less even numbers. The norm before the projections is divided for q, k, v, gate and up; the row of v that
    feeds o, and the row of up that feeds down. A KV head feeds the same channel of all its query heads.
    """
    factor = 2.0**power
    for layer in model.layers:
        assert isinstance(layer, Layer)
        attention, feed_forward = layer.mixer, layer.feed_forward
        assert isinstance(attention, Attention)
        assert isinstance(feed_forward, SwiGLU)
        K, D = attention.config.num_kv_heads, attention.config.head_dim
        group = attention.config.num_heads // K
        for norm, readers in (
            (layer.mixer_norm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.feed_forward_norm, (feed_forward.gate_proj, feed_forward.up_proj)),
        ):
            norm.weight[channel] /= factor
            for reader in readers:
                reader.weight[:, channel] *= factor
        feed_forward.up_proj.weight[channel] /= factor
        feed_forward.down_proj.weight[:, channel] *= factor
        attention.v_proj.weight[channel] /= factor
        for head in range(group):
            attention.o_proj.weight[:, head * D + channel] *= factor


def cases() -> Iterator[tuple[str, Callable[[tbt.Decoder], tuple[tbt.Decoder, bool]]]]:
    """(name, what makes of the model the one to be measured, and whether it is fed through a state)."""

    def weights(model: tbt.Decoder, power: int = 0, **options: Any) -> tuple[tbt.Decoder, bool]:
        if power:
            add_outlier(model, power)
        return tbt.quantize_model(model, **options), False

    def cache(model: tbt.Decoder, format: str) -> tuple[tbt.Decoder, bool]:
        return tbt.quantize_cache(model, format), True

    options: dict[str, Any]
    for format in FORMATS:
        for granularity in GRANULARITIES:
            yield f"weights {format} {granularity}", partial(weights, format=format, granularity=granularity)
    for format in FORMATS:
        yield f"cache {format}", partial(cache, format=format)
        yield f"ffn {format} row", partial(weights, format=format, include="ffn")
        for activations in ("tensor", "row", "tile"):
            options = {"format": format, "activations": activations, "matmul": "dequantised"}
            yield f"activations {format} {activations}", partial(weights, **options)
    options = {"include": "ffn", "activations": "row", "matmul": "dequantised"}
    yield "llama 3.1 recipe", partial(weights, **options, activation_bound=1200.0)
    yield "llama 3.1 recipe without bound", partial(weights, **options)
    for format in FORMATS:
        for granularity in ("row", "block"):
            for power in FACTORS:
                options = {"format": format, "granularity": granularity, "power": power}
                yield f"outlier {format} {granularity} {power}", partial(weights, **options)


def nats(logits: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-probability of each next token."""
    return -logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def measure(make: Callable[[tbt.Decoder], tuple[tbt.Decoder, bool]], tokens: Tensor, base: Tensor) -> dict[str, float]:
    model = tbt.load("smollm2-135m")
    changed, with_state = make(model)
    state = changed.new_state(1, TOKENS) if with_state else None
    logits = changed(tokens[None], state)[0]
    p, q = base.log_softmax(-1), logits.log_softmax(-1)
    return {
        "perplexity": nats(logits, tokens).double().mean().exp().item(),
        "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
        "other greedy tokens": (base.argmax(-1) != logits.argmax(-1)).float().mean().item(),
        "bytes": state.nbytes_used if state is not None else tbt.stored_bytes(changed),
    }


def main() -> None:
    again = asked_again(__doc__)
    passage = tbt.measure.book_file("data/passage.txt").read_text(encoding="utf-8")
    tokens = torch.tensor(tbt.load_tokenizer("smollm2-135m").encode(passage)[:TOKENS])
    model = tbt.load("smollm2-135m")
    base = model(tokens[None])[0]
    state = model.new_state(1, TOKENS)
    model(tokens[None], state, logits="none")
    whole = {
        "perplexity": nats(base, tokens).double().mean().exp().item(),
        "bytes": tbt.stored_bytes(model),
        "cache bytes": state.nbytes_used,
    }
    record = Record(RECORD, again=again, tokens=TOKENS, base=whole)
    for name, make in cases():
        if name in record:
            continue
        found = measure(make, tokens, base)
        rounded = {key: float(f"{value:.5g}") for key, value in found.items()}
        record.keep({name: {**rounded, "bytes": int(found["bytes"])}})
        print(f"{name:28} perplexity {found['perplexity']:8.2f}  KL {found['kl']:.5f}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
