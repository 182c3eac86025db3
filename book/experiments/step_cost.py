"""What one more token costs after a long context, and what a prompt costs: attention and Mamba of equal size.

    python book/experiments/step_cost.py            runs what is missing; writes step_cost.json beside it
    python book/experiments/step_cost.py --again    forgets what was recorded

Two decoders of width 512 with random weights and exactly as many parameters: four layers of attention and SwiGLU, or
eight Mamba layers. A decode step is timed at contexts of 16 to 65,536 tokens, in rounds that run each of them once;
the cache holds random numbers, for the clock does not care. A prefill is timed at 256 to 16,384 tokens, and beside it
the scans alone. The run can be interrupted after any case; "minutes" adds up the time of all runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from resumable import Record, asked_again

import tokenbytoken as tbt
from tokenbytoken.layers.cache import Cache
from tokenbytoken.layers.mamba import MambaState, selective_scan

RECORD = Path(__file__).resolve().parent / "step_cost.json"
DECODE = (16, 64, 256, 1024, 4096, 16384, 65536)
PREFILL = (256, 1024, 4096, 16384)
COMMON: dict[str, Any] = {"vocab_size": 256, "hidden_size": 512, "tie_word_embeddings": True}
DECODERS: dict[str, dict[str, Any]] = {
    "attention": {
        "model_type": "llama", **COMMON, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "intermediate_size": 1524, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 65536,
    },
    "mamba": {
        "model_type": "mamba", **COMMON, "num_hidden_layers": 8, "state_size": 16, "conv_kernel": 4, "expand": 2,
        "time_step_rank": "auto", "layer_norm_epsilon": 1e-5,
    },
}  # fmt: skip


def decoders() -> dict[str, tbt.Decoder]:
    torch.manual_seed(0)
    models = {name: tbt.Decoder(tbt.DecoderConfig.from_hf(hf)) for name, hf in DECODERS.items()}
    return {name: model.eval().requires_grad_(False).to(tbt.measure.device()) for name, model in models.items()}


def step(model: tbt.Decoder, context: int) -> Callable[[], object]:
    """One more token for a sequence of ``context`` tokens, the newest included."""
    state = model.new_state(1, context)
    for layer in state.layers:
        assert isinstance(layer, Cache | MambaState)
        for tensor in layer.tensors:
            tensor.uniform_()
    token = torch.full((1, 1), 5, device=tbt.measure.device())

    def run() -> None:
        state.length = context - 1
        model(token, state, logits="last")

    return run


def prompt(model: tbt.Decoder, tokens: int) -> Callable[[], object]:
    ids = torch.arange(tokens, device=tbt.measure.device())[None] % 256
    return lambda: model(ids, logits="last")


def scans(model: tbt.Decoder, tokens: int) -> Callable[[], object]:
    """The scans of all layers, on inputs of the same sizes."""
    mixer = model.mixers[0].config
    assert isinstance(mixer, tbt.MambaConfig)
    I, N, where = mixer.inner_size, mixer.state_size, tbt.measure.device()
    x, delta = torch.randn(1, tokens, I, device=where), torch.full((1, tokens, I), 0.01, device=where)
    b, c = (torch.randn(1, tokens, N, device=where) for _ in range(2))
    A, h = -torch.rand(I, N, device=where), torch.zeros(1, I, N, device=where)
    return lambda: [selective_scan(x, delta, A, b, c, h) for _ in model.layers]


def entry(timing: tbt.measure.Timing) -> dict[str, Any]:
    values = {"ms": timing.median, "low": timing.low, "high": timing.high}
    return {name: float(f"{1e3 * seconds:.4g}") for name, seconds in values.items()} | {"busy": timing.busy}


def main() -> None:
    record = Record(RECORD, again=asked_again(__doc__))
    models = decoders()

    def keep(timings: dict[str, tbt.measure.Timing]) -> None:
        record.keep({name: entry(timing) for name, timing in timings.items()})
        for name, timing in timings.items():
            print(f"{name:24} {1e3 * timing.median:10.1f} ms", flush=True)

    for context in DECODE:  # both decoders in the same rounds: the load of the machine falls on both alike
        names = {f"decode {name} {context}": name for name in models}
        if not all(name in record for name in names):
            steps = {case: step(models[name], context) for case, name in names.items()}
            keep(tbt.measure.interleaved(steps, repeats=15 if context < 4096 else 7, warmup=2))
    for tokens in PREFILL:
        cases = {f"prefill {name} {tokens}": prompt(model, tokens) for name, model in models.items()}
        cases[f"scan mamba {tokens}"] = scans(models["mamba"], tokens)
        if not all(name in record for name in cases):
            keep(tbt.measure.interleaved(cases, repeats=5 if tokens < 4096 else 1, warmup=tokens < 4096))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
