"""What the chapters measure, as cases to time: random weights of real shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import nn

from ...config import AttentionConfig, DecoderConfig, MambaConfig, MixerConfig
from ...layers import devices
from ...layers.attention import attend
from ...models import published
from .bench import Bench, Case, Unavailable

__all__ = [
    "attention", "batch", "context", "formats", "fp8", "graphs", "heads", "hybrid", "latent", "layer", "mamba",
    "prompt", "rows", "verify",
]  # fmt: skip

Cases = Mapping[str, Case]


def some(bench: Bench, *sizes: int) -> tuple[int, ...]:
    """The sizes, or about half of them, without the largest, where it has to be quick."""
    return sizes[: math.ceil(len(sizes) / 2)] if bench.quick else sizes


def cut(name: str, layers: int) -> DecoderConfig:
    """The first layers of a published model, with a small vocabulary: what is timed is the layers."""
    config = published[name]
    return dataclasses.replace(config, layers=config.layers[:layers], vocab_size=512)


def rows(bench: Bench) -> Cases:
    model = bench.smollm2()
    return {f"{n}": bench.passes(model, 1, 0, n) for n in some(bench, 1, 2, 4, 8, 16, 32, 64, 128, 256)}


def formats(bench: Bench) -> Cases:
    cases = {}
    for dtype in (torch.float32, bench.kind.half):
        weights = [bench.random(2048, 1024, dtype=dtype) for _ in range(16)]
        for n in (1, 16):
            x = bench.random(n, 1024, dtype=dtype)
            name = f"{str(dtype).removeprefix('torch.')}, {n}"
            cases[name] = Case(lambda x=x, w=weights: [nn.functional.linear(x, one) for one in w])  # type: ignore[misc]
    return cases


def attention(bench: Bench) -> Cases:
    cases = {}
    for T in some(bench, 256, 512, 1024, 2048):
        q, k, v = (bench.random(1, heads, T, 64) for heads in (9, 3, 3))
        cases[f"{T}"] = Case(lambda q=q, k=k, v=v: attend(q, k, v, scale=0.125))  # type: ignore[misc]
    return cases


def prompt(bench: Bench) -> Cases:
    model = bench.smollm2()
    return {f"{n}": bench.passes(model, 1, 0, n) for n in some(bench, 16, 64, 256, 512)}


def context(bench: Bench) -> Cases:
    model = bench.smollm2()
    return {f"{S}": bench.passes(model, 1, S, 1) for S in some(bench, 16, 256, 1024, 4096)}


def batch(bench: Bench) -> Cases:
    model = bench.smollm2()
    return {f"{B}": bench.passes(model, B, 256, 1) for B in some(bench, 1, 4, 16, 64)}


def heads(bench: Bench) -> Cases:
    cases = {}
    for K in (32, 8, 1):
        q, k, v = bench.random(1, 32, 1, 128), bench.random(1, K, 8192, 128), bench.random(1, K, 8192, 128)
        cases[f"{K}"] = Case(lambda q=q, k=k, v=v: attend(q, k, v, scale=128**-0.5))  # type: ignore[misc]
    return cases


def layer(bench: Bench) -> Cases:
    model = bench.model(cut("llama-3.1-8b", 1))
    return {f"{n}": bench.passes(model, 1, 0, n) for n in (1, 16)}


def fp8(bench: Bench) -> Cases:
    if not bench.kind.multiplies(torch.float8_e4m3fn):
        has = "this is no GPU of that kind"
        if bench.kind.capability is not None:
            has = f"this device has {'.'.join(map(str, bench.kind.capability))}"
        raise Unavailable(f"needs products in FP8, from compute capability {'.'.join(map(str, devices.FP8))} on; {has}")
    half, eight, cases = bench.kind.half, torch.float8_e4m3fn, {}
    one = torch.ones((), device=bench.where)
    w = bench.random(8192, 8192, dtype=half)
    w8 = w.to(eight)
    for n in (16, 4096):
        x = bench.random(n, 8192, dtype=half)
        x8 = x.to(eight)
        cases[f"{str(half).removeprefix('torch.')}, {n}"] = Case(lambda x=x: nn.functional.linear(x, w))  # type: ignore[misc]
        cases[f"float8, {n}"] = Case(
            lambda x8=x8: torch._scaled_mm(x8, w8.t(), scale_a=one, scale_b=one, out_dtype=half)  # type: ignore[misc]
        )
    return cases


def latent(bench: Bench) -> Cases:
    model = bench.model(cut("deepseek-v2-lite", 1))
    return {f"{S}": bench.passes(model, 1, S, 1) for S in some(bench, 256, 2048, 8192)}


def verify(bench: Bench) -> Cases:
    model = bench.smollm2()
    return {f"{n}": bench.passes(model, 1, 256, n) for n in (1, 3, 5)}


def mamba(bench: Bench) -> Cases:
    model = bench.model(published["mamba-130m"])
    return {f"{S}": bench.passes(model, 1, S, 1) for S in some(bench, 256, 4096, 16384)}


def hybrid(bench: Bench) -> Cases:
    """Jamba's order of layers at an eighth of its width, and the same with attention in each."""
    block = published["jamba-v0.1"]
    block = dataclasses.replace(block, layers=block.layers[:8], hidden_size=512, vocab_size=512)
    small = tuple(dataclasses.replace(one, feed_forward=None, mixer=narrower(one.mixer)) for one in block.layers)
    hybrid = dataclasses.replace(block, layers=small)
    twin = dataclasses.replace(block, layers=(small[4],) * 8)
    cases = {}
    for name, config in (("hybrid", hybrid), ("attention", twin)):
        model = bench.model(config)
        for S in some(bench, 64, 16384, 65536):
            cases[f"{name}, {S}"] = bench.passes(model, 1, S, 1)
    return cases


def narrower(mixer: MixerConfig) -> MixerConfig:
    """A mixer of the same kind at a width of 512."""
    if isinstance(mixer, AttentionConfig):
        return dataclasses.replace(mixer, num_heads=8, num_kv_heads=2, head_dim=64)
    assert isinstance(mixer, MambaConfig)
    return dataclasses.replace(mixer, inner_size=1024)


def graphs(bench: Bench) -> Cases:
    """A step that starts each operation, and the same replayed as one CUDA graph."""
    if bench.where.type != "cuda":
        raise Unavailable("needs CUDA graphs")
    eager = bench.passes(bench.smollm2(), 1, 256, 1)
    eager.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager.run()
    return {"eager": eager, "graph": Case(graph.replay)}
