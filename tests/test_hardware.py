"""The roofline against hand computation, and the data of accelerators against the figures they must give.

``Cnn`` in a name is the number of a publicly reported bug whose right value the test holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbytoken.config import AttentionConfig, DecoderConfig
from tokenbytoken.cost import (
    Accelerator,
    Placement,
    accelerators,
    communication_seconds,
    count_parameters,
    crossover_batch,
    find_accelerator,
    footprint_per_gpu,
    max_batch,
    max_context,
    pass_cost,
    predict,
    roofline,
    state_bytes,
    state_share,
    weight_bytes,
    working_memory_per_gpu,
)
from tokenbytoken.models import published

CONFIGS = {name: config for name, config in published.items() if isinstance(config, DecoderConfig)}
READER = 131_072


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


# --- data --------------------------------------------------------------------------------------------


def test_c68_dense_peaks() -> None:
    h100, a100 = accelerators["h100"], accelerators["a100-80"]
    assert h100.flops["bf16"] == 989.5e12  # 1,979 is with 2:4 sparsity
    assert f"{h100.ridge():.1f} {a100.ridge():.1f}" == "295.4 153.0"


@pytest.mark.parametrize(
    ("name", "ridge", "ridge_fp8"),
    [
        ("t4", 203, None),
        ("l4", 403, 807),
        ("a100-40", 201, None),
        ("a100-80", 153, None),
        ("h100", 295, 591),
        ("h200", 206, 412),
        ("b200", 281, 562),
    ],
)
def test_ridges_and_crossing_batches(name: str, ridge: int, ridge_fp8: int | None) -> None:
    gpu = accelerators[name]
    assert round(gpu.ridge("bf16")) == ridge
    assert round(crossover_batch(name)) == ridge
    # 8-bit weights that are widened to 16 bits, 4-bit weights: half and a quarter of the tokens
    assert crossover_batch(name, 1, "bf16") == gpu.ridge("bf16") / 2
    assert crossover_batch(name, 0.5, "bf16") == gpu.ridge("bf16") / 4
    if ridge_fp8 is None:
        assert gpu.compute_dtype("fp8") in ("bf16", "fp16")  # no FP8 tensor cores: FP8 weights are widened
    else:
        assert round(gpu.ridge("fp8")) == ridge_fp8
        assert crossover_batch(name, 1, "fp8") == pytest.approx(gpu.ridge("bf16"), rel=0.001)  # half and twice cancel


def test_c66_what_the_driver_reports_is_not_less_than_the_data_sheet() -> None:
    for gpu in accelerators.values():
        assert gpu.source
        assert gpu.link is not None
        assert gpu.link.source
        if gpu.visible_bytes is not None:
            assert gpu.memory_bytes <= gpu.visible_bytes < 1.08 * gpu.memory_bytes
    assert accelerators["h100"].visible_bytes == 81_559 * 2**20


@pytest.mark.parametrize(
    ("name", "key"),
    [("H100", "h100"), ("h100-SXM", "h100"), ("NVIDIA A100 80GB", "a100-80"), ("A100_40GB", "a100-40"), ("T4", "t4")],
)
def test_names_are_found_in_any_spelling(name: str, key: str) -> None:
    assert find_accelerator(name) is accelerators[key]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="an accelerator is a name or an Accelerator, not 100"):
        find_accelerator(100)  # type: ignore[arg-type]
    for name in ("a100", "h1000", ""):
        with pytest.raises(ValueError, match=r"unknown accelerator .*: one of t4, l4, a100-40"):
            find_accelerator(name)


# --- one GPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpu", "milliseconds"),
    [
        ("llama-3.1-8b", "a100-80", "7.36"),  # C69: without the embedding table, of which one row is read
        ("llama-3.1-8b", "h100", "4.48"),
        ("smollm2-135m", "t4", "0.841"),
        ("llama-3.2-1b", "t4", "7.72"),
    ],
)
def test_c69_lower_bound_of_one_token(name: str, gpu: str, milliseconds: str) -> None:
    prediction = predict(CONFIGS[name], gpu, 1, 0)
    assert _milliseconds(prediction.seconds) == milliseconds
    assert prediction.binds == "memory"


def test_c69_compute_binds_from_about_295_rows() -> None:
    config = CONFIGS["llama-3.1-8b"]
    assert [predict(config, "h100", n, 0).binds for n in (1, 280, 320)] == ["memory", "memory", "compute"]


def test_a_prediction_is_its_cost_over_the_rates() -> None:
    config, gpu = CONFIGS["llama-3.1-70b"], accelerators["h200"]
    cost = pass_cost(config, 4, 1000, 3, logits="all")
    prediction = predict(config, gpu, 4, 1000, new_tokens=3, logits="all")
    assert prediction.memory_seconds == pytest.approx(cost.bytes / 4.8e12)
    assert prediction.compute_seconds == pytest.approx(cost.flops / 989.5e12)
    assert prediction.seconds == max(prediction.memory_seconds, prediction.compute_seconds)
    assert prediction.tokens_per_second == 12 / prediction.seconds
    assert prediction.bytes_needed == weight_bytes(config) + state_bytes(config, 4, 1003)
    half = predict(config, gpu, 4, 1000, new_tokens=3, logits="all", efficiency=0.5)
    assert half.seconds == pytest.approx(2 * prediction.seconds)


def test_a_recurrent_state_is_read_and_written_but_held_once() -> None:
    config, gpu = CONFIGS["mamba-2.8b"], accelerators["h100"]
    held = state_bytes(config, 8, 0)
    prediction = predict(config, gpu, 8, 10_000)
    read = pass_cost(config, 8, 10_000).weight_bytes
    assert prediction.memory_seconds == pytest.approx((read + 2 * held) / 3.35e12)
    assert prediction.bytes_needed == weight_bytes(config) + held
    assert predict(config, gpu, 8, 0).seconds == prediction.seconds


def test_fp8_products_need_fp8_tensor_cores() -> None:
    config = CONFIGS["llama-3.1-8b"]
    here, there = (predict(config, gpu, 1000, 0, recipe="fp8-all") for gpu in ("h100", "a100-80"))
    assert (here.dtype, there.dtype) == ("fp8", "bf16")
    cost = pass_cost(config, 1000, 0, recipe="fp8-all")
    assert here.compute_seconds == pytest.approx(cost.flops_fp8 / 1979e12 + cost.flops_attention / 989.5e12)
    assert there.compute_seconds == pytest.approx(cost.flops / 312e12)
    assert predict(config, "t4", 1, 0).dtype == "fp16"  # no bf16 tensor cores
    # weights that are widened before the product save bytes, not arithmetic
    assert predict(config, "h100", 1000, 0, recipe="int8").compute_seconds == pytest.approx(cost.flops / 989.5e12)


def test_rates_may_be_curves() -> None:
    config = CONFIGS["smollm2-135m"]
    machine = Accelerator(
        name="machine",
        memory_bytes=8e9,
        bandwidth=lambda working_set: 20e9 if working_set < 1e8 else 10e9,
        flops={"fp32": lambda rows: 1e9 * rows},
        operation_seconds=1e-5,
        measured=True,
    )
    prediction = predict(config, machine, 2, 0, new_tokens=8, recipe="fp32", state_bytes_per_element=4, operations=300)
    cost = pass_cost(config, 2, 0, 8, recipe="fp32", state_bytes_per_element=4)
    assert prediction.memory_seconds == pytest.approx(cost.bytes / 10e9)
    assert prediction.compute_seconds == pytest.approx(cost.flops / 16e9)
    assert prediction.overhead_seconds == pytest.approx(3e-3)
    assert prediction.seconds == pytest.approx(prediction.compute_seconds + 3e-3)
    assert prediction.dtype == "fp32"
    with pytest.raises(ValueError, match="no single ridge"):
        machine.ridge("fp32")
    with pytest.raises(ValueError, match="no link to other GPUs"):
        predict(config, machine, 1, 0, gpus=2)


def test_a_roofline_by_hand() -> None:
    gpu = replace(accelerators["h100"], operation_seconds=1e-6)
    time = roofline(gpu, 3.35e9, {"fp8": 1979e9, "bf16": 989.5e9}, 64, state=6.7e9, messages=5e-3, efficiency=0.5)
    assert time.memory_seconds == pytest.approx(2e-3)
    assert time.compute_seconds == pytest.approx(2 * (1e-3 + 1e-3))
    assert time.state_seconds == pytest.approx(4e-3)
    assert time.seconds == pytest.approx(4e-3 + 4e-3 + 5e-3)
    assert time.binds == "memory", "the state counts with the bytes"
    started = roofline(gpu, 3.35e9, {}, 1, operations=5000, overlapped=True)
    assert started.seconds == pytest.approx(5e-3)  # the starts run ahead of the millisecond of reading
    assert started.binds == "overhead"
    assert replace(started, overlapped=False).seconds == pytest.approx(6e-3)
    with pytest.raises(ValueError, match="H100 has no rate for fp32"):
        roofline(gpu, 1, {"fp32": 1}, 1)


# --- several GPUs ------------------------------------------------------------------------------------


def test_lower_bounds_of_405b() -> None:
    config = CONFIGS["llama-3.1-405b"]
    assert _milliseconds(weight_bytes(config) / (16 * 3.35e12)) == "15.1"
    assert _milliseconds(weight_bytes(config, "fp8-ffn") / (8 * 3.35e12)) == "18.2"  # all, the embedding included
    empty = predict(config, "h100", 1, 0, gpus=8, recipe="fp8-ffn")
    long = predict(config, "h100", 1, READER, gpus=8, recipe="fp8-ffn")
    assert _milliseconds(empty.memory_seconds) == "18"  # of the embedding one row is read
    assert _milliseconds(long.memory_seconds - empty.memory_seconds) == "2.52"
    assert _milliseconds(predict(config, "h100", 1, 0, gpus=16).memory_seconds) == "15.1"
    assert not predict(config, "h100", 1, 0, gpus=8).fits
    assert predict(config, "h100", 1, 0, gpus=16).fits


def test_tensor_parallel_sends_two_all_reduces_a_layer() -> None:
    config, gpu = CONFIGS["llama-3.1-405b"], accelerators["h100"]
    assert gpu.link is not None
    message = 16384 * 2
    assert 252 * message == 8_257_536  # the report's 8.26 MB a token
    reduce = gpu.link.latency + 7 * message / gpu.link.bandwidth  # so small a message is sent to all at once
    gather = gpu.link.latency + 7 / 8 * 128256 * 2 / gpu.link.bandwidth
    assert communication_seconds(config, gpu, 1, gpus=8) == pytest.approx((252 + 1) * reduce + gather)
    prompt = 8192 * message  # so large a one is added up in the switch: each GPU sends it once, and an eighth again
    reduce = 2 * gpu.link.latency + 9 / 8 * prompt / gpu.link.bandwidth
    assert communication_seconds(config, gpu, 8192, gpus=8) == pytest.approx((252 + 1) * reduce + gather)
    assert communication_seconds(config, gpu, 1) == 0
    # three all-reduces for a Mamba layer with a feed-forward, two for one without
    jamba, mamba = CONFIGS["jamba-1.5-large"], CONFIGS["mamba-2.8b"]
    link = replace(gpu.link, bandwidth=float("inf"))
    free = replace(gpu, link=link)
    assert communication_seconds(jamba, free, 1, gpus=8) == pytest.approx((9 * 2 + 63 * 3 + 2) * link.latency)
    assert communication_seconds(mamba, free, 1, gpus=8) == pytest.approx((64 * 2 + 2) * link.latency)


def test_groups_larger_than_a_node_run_at_the_pace_of_the_network() -> None:
    config, gpu = CONFIGS["llama-3.1-405b"], accelerators["h100"]
    inside, across = (communication_seconds(config, gpu, 1, gpus=n) for n in (8, 16))
    assert across > 2 * inside


def test_pipeline_stages_add_memory_and_no_speed() -> None:
    config = CONFIGS["llama-3.1-405b"]
    eight = predict(config, "h100", 1, READER, gpus=8)
    staged = predict(config, "h100", 1, READER, gpus=16, tensor_parallel=8)
    assert (eight.fits, staged.fits) == (False, True)
    assert staged.memory_seconds == eight.memory_seconds
    assert staged.compute_seconds == eight.compute_seconds
    assert staged.communication_seconds > eight.communication_seconds
    assert staged.bytes_needed == eight.bytes_needed
    assert predict(config, "h100", 1, READER, gpus=16).memory_seconds < staged.memory_seconds


def test_state_shares() -> None:
    llama, v3, jamba = CONFIGS["llama-3.1-405b"], CONFIGS["deepseek-v3"], CONFIGS["jamba-1.5-large"]
    assert [state_share(llama, t)[0] for t in (1, 4, 8, 16)] == [1, 1 / 4, 1 / 8, 1 / 8]  # from 16 on, each head twice
    assert state_share(v3, 8) == (1, 1 / 8)  # one latent, on every GPU
    assert state_share(v3, 8, "sequence") == (1 / 8, 1 / 8)
    assert state_share(v3, 8, "readers") == (1, 1)  # of those readers that the GPU has
    assert state_share(jamba, 8) == (1 / 8, 1 / 8)
    assert state_share(llama, 12, "sequence") == (1 / 12, 1 / 12)  # what is split by token needs no even heads
    assert state_share(CONFIGS["smollm2-135m"], 2) == (2 / 3, 1 / 2)  # 3 KV heads: 2 and 1
    with pytest.raises(ValueError, match=r"tensor_parallel = 12 .* must be a multiple of 8 and divide 128"):
        state_share(llama, 12)
    with pytest.raises(ValueError, match="cache must be"):
        state_share(llama, 8, "split")


def test_what_a_gpu_holds() -> None:
    v3 = CONFIGS["deepseek-v3"]
    found = {}
    for cache in ("heads", "readers", "sequence"):
        size = footprint_per_gpu(v3, gpus=8, recipe="fp8-block", cache=cache)
        found[cache] = (size.per_token, size.max_batch(141e9, READER))
        assert size.max_batch(80e9, READER) == 0
    assert found == {"heads": (70_272, 5), "readers": (70_272, 32), "sequence": (70_272 / 8, 47)}
    # Five readers would fit beside the weights an eighth of which each GPU has; but it has all of the attention's.
    free = 141e9 - weight_bytes(v3, "fp8-block") / 8
    assert 8 * math.floor(free / (READER * 70_272)) == 40
    attention = sum(
        w.area + 4 * math.ceil(w.rows / 128) * math.ceil(w.columns / 128) if w.role == "attention" else 2 * w.area
        for layer in v3.layers
        for w in layer.mixer.weights(v3.hidden_size)
    )
    assert footprint_per_gpu(v3, gpus=8, recipe="fp8-block", cache="readers").weights == pytest.approx(
        (weight_bytes(v3, "fp8-block") - attention) / 8 + attention
    )
    # 70B with one KV head: copied to every GPU, or dealt by reader, or by token.
    whole = CONFIGS["llama-3.1-70b"]
    mixer = whole.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    one = replace(mixer, num_kv_heads=1)
    one_head = replace(whole, layers=tuple(replace(layer, mixer=one) for layer in whole.layers))
    readers = [footprint_per_gpu(one_head, gpus=8, cache=c).max_batch(80e9, READER) for c in found]
    assert readers == [11, 64, 93]


def test_experts_dealt_whole_are_what_a_published_service_does() -> None:
    """18 nodes of H800, 128 readers a GPU, 4,989 tokens each: times by hand from the published figures."""
    v3 = CONFIGS["deepseek-v3"]
    options: dict[str, Any] = {"gpus": 144, "recipe": "fp8-block", "cache": "readers", "experts": "whole"}
    got = predict(v3, "h100", 128 * 144, 4989, **options)
    # 58 layers: 128 tokens go to 8 of 256 experts each, which lie on 6.6 of 18 nodes; one in eighteen needs no network
    nodes = 18 * (1 - (17 / 18) ** 8)
    bytes_out = 58 * 128 * nodes * 17 / 18 * 7168 * 3  # a byte a number on the way there, two on the way back
    assert got.communication_seconds == pytest.approx(bytes_out / 50e9 + 58 * 2 * (16e-6 + 3.6e-6))
    # its two experts of 44 M weights a layer, attention and all that is dense, and 128 latents
    experts = 58 * 256 / 144 * 3 * 7168 * 2048
    one_byte = ("attention", "feed_forward")
    others = sum((1 if w.role in one_byte else 2) * w.area for w in v3.weights()[1:] if w.copies == 1)
    latents = 128 * 4990 * 70_272
    assert got.memory_seconds == pytest.approx((experts + others + latents) / 3.35e12, rel=0.002)
    slower = predict(v3, "h100", 128 * 144, 4989, **options, busiest=1.5)
    assert slower.compute_seconds > got.compute_seconds
    assert slower.communication_seconds == got.communication_seconds
    few = predict(v3, "h100", 144, 4989, **options)
    assert few.memory_seconds < got.memory_seconds
    with pytest.raises(ValueError, match="experts='whole' sends tokens to experts"):
        predict(v3, "h100", 1, 0, gpus=8, experts="whole")


def test_a_lone_reader_in_each_layout() -> None:
    v3 = CONFIGS["deepseek-v3"]
    step = {
        cache: predict(v3, "h200", 1, READER, gpus=8, recipe="fp8-block", cache=cache)
        for cache in ("heads", "readers", "sequence")
    }
    attention = sum(w.area for layer in v3.layers for w in layer.mixer.weights(v3.hidden_size))
    # by readers one GPU reads all of its attention weights, and by sequence an eighth of the latents
    assert step["readers"].memory_seconds - step["heads"].memory_seconds == pytest.approx(
        7 / 8 * attention / 4.8e12, rel=0.01
    )
    assert step["heads"].memory_seconds - step["sequence"].memory_seconds == pytest.approx(
        7 / 8 * (READER + 1) * 70_272 / 4.8e12
    )
    assert step["sequence"].communication_seconds > step["heads"].communication_seconds
    # a full house: every GPU has as much to do as every other, and little is gained or lost
    even = predict(v3, "h200", 32, READER, gpus=8, recipe="fp8-block", cache="readers")
    assert even.compute_seconds == pytest.approx(
        predict(v3, "h200", 32, READER, gpus=8, recipe="fp8-block").compute_seconds
    )


def test_operations_take_their_time() -> None:
    config = CONFIGS["llama-3.1-8b"]
    plain, graphed, eager = (predict(config, "h100", 1, 1, launched=how) for how in (None, "graphed", "eager"))
    # 4 + 3 products, 2 norms, attention and gate in 32 layers; embedding, norm, head
    assert graphed.launches == eager.launches == 32 * 11 + 3
    assert graphed.seconds == pytest.approx(plain.seconds + 355 * 1.3e-6)
    assert eager.seconds == plain.seconds  # the host is ahead
    small = predict(CONFIGS["smollm2-135m"], "h100", 1, 1, launched="eager")
    assert small.seconds == pytest.approx(333 * 5e-6)  # and here it is not
    assert small.binds == "overhead"
    with pytest.raises(ValueError, match="launched must be 'eager', 'graphed' or None"):
        predict(config, "h100", 1, 1, launched="lazy")  # type: ignore[arg-type]
    own = replace(accelerators["h100"], launch=None)
    with pytest.raises(ValueError, match="H100 has no published time of a launch"):
        predict(config, own, 1, 1, launched="eager")


def test_working_memory_of_published_servers() -> None:
    """What others found to fit, against an estimate that saw none of it."""
    def longest(name: str, gpu: str, gpus: int, recipe: str, chunk: int | None = None) -> float:
        config, placement = CONFIGS[name], Placement(gpus=gpus, recipe=recipe)
        size = footprint_per_gpu(config, gpus=gpus, recipe=recipe)
        working = working_memory_per_gpu(config, gpu, placement, chunk)
        return size.max_context(max(0, accelerators[gpu].memory_bytes - working.bytes))

    # Jamba 1.5 Mini reads prompts whole: up to 200K tokens on two A100 (its model card), 3.1M by weights and state
    assert longest("jamba-1.5-mini", "a100-80", 2, "bf16", 200_000) > 200_000
    assert longest("jamba-1.5-mini", "a100-80", 2, "bf16", 240_000) < 240_000
    # 405B in FP8 on eight H100: the cache was full at 70K to 104K tokens (dstack, 2024), 172K by weights and state
    assert 104_000 < longest("llama-3.1-405b", "h100", 8, "fp8-ffn") < 130_000


@given(
    st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "deepseek-v2-lite", "jamba-v0.1", "mamba-130m"]),
    st.integers(1, 64),
    st.integers(0, 10**5),
    st.integers(1, 64),
)
@settings(max_examples=100, deadline=None)
def test_more_of_anything_is_never_faster(name: str, batch: int, context: int, new_tokens: int) -> None:
    config = CONFIGS[name]
    base: dict[str, Any] = {"batch_size": batch, "context": context, "new_tokens": new_tokens}
    one = predict(config, "h100", **base)
    for key, value in base.items():
        assert predict(config, "h100", **(base | {key: value + 1})).seconds >= one.seconds
    eight = predict(config, "h100", **base, gpus=8)
    assert eight.memory_seconds <= one.memory_seconds
    assert eight.compute_seconds == pytest.approx(one.compute_seconds / 8)
    assert eight.bytes_needed >= one.bytes_needed - 8  # never less in all: what is kept twice adds up


@given(st.sampled_from(sorted(CONFIGS)), st.integers(1, 20), st.integers(1, 10**5))
@settings(max_examples=60, deadline=None)
def test_one_gpu_holds_what_the_closed_forms_say(name: str, batch: int, context: int) -> None:
    config = CONFIGS[name]
    size = footprint_per_gpu(config)
    assert size.bytes(batch, context) == weight_bytes(config) + state_bytes(config, batch, context)
    assert size.max_batch(141e9, context) == max_batch(config, 141e9, context)
    assert size.max_context(141e9, batch) == max_context(config, 141e9, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 0}, "gpus must be a positive integer, not 0"),
        ({"gpus": 8, "tensor_parallel": 3}, r"tensor_parallel \(3\) must divide gpus \(8\)"),
        ({"efficiency": 0}, "efficiency must be above 0 and at most 1"),
        ({"usable": 1.5}, "usable must be above 0 and at most 1"),
        *(
            ({name: bad}, f"^{name} must be ")
            for name in (
                *("batch_size", "context", "new_tokens", "operations", "gpus", "tensor_parallel"),
                *("efficiency", "usable", "state_bytes_per_element"),
            )
            for bad in (-1, True, math.nan, math.inf, "1", 2.5 if name != "state_bytes_per_element" else 0)
        ),
        ({"gpus": 31, "tensor_parallel": 1}, "31 pipeline stages, but the model has 30 layers"),
        ({"efficiency": 1e-320}, r"efficiency must lie between 2\^-63"),
        ({"config": None}, "the config must be a DecoderConfig, not None"),
        ({"accelerator": "h1"}, "unknown accelerator 'h1'"),
        ({"config": published["falcon-7b"]}, "falcon-7b is known here by the shape"),
    ],
)
def test_bad_predictions_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"config": CONFIGS["smollm2-135m"], "accelerator": "t4", "batch_size": 1, "context": 0}
    with pytest.raises(ValueError, match=message):
        predict(**(good | change))


def test_more_pipeline_stages_than_layers_are_refused() -> None:
    config, gpu = CONFIGS["smollm2-135m"], accelerators["h100"]
    assert predict(config, gpu, 1, 0, gpus=30, tensor_parallel=1).memory_seconds > 0  # one layer on each
    for call in (
        lambda n: predict(config, gpu, 1, 0, gpus=n, tensor_parallel=1),
        lambda n: footprint_per_gpu(config, gpus=n, tensor_parallel=1),
        lambda n: communication_seconds(config, gpu, 1, gpus=n, tensor_parallel=1),
    ):
        call(30)
        with pytest.raises(ValueError, match="gpus / tensor_parallel = 60 pipeline stages, but the model has 30"):
            call(60)


def test_messages_of_a_wrong_size_are_refused() -> None:
    config = CONFIGS["llama-3.1-8b"]
    good: dict[str, Any] = {"config": config, "gpu": "h100", "rows": 1, "gpus": 8}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"rows": 0}, "rows must be a positive integer, not 0"),
        ({"rows": True}, "rows must be a positive integer, not True"),
        ({"logit_rows": -1}, "logit_rows must be an integer of at least 0, not -1"),
        ({"bytes_per_element": math.nan}, "bytes_per_element must be a number above 0, not nan"),
    ]
    for change, message in refused:
        with pytest.raises(ValueError, match=message):
            communication_seconds(**good | change)
    state_share(config, 1)
    for bad in (True, 0, 1.0):  # the good call first: `True` equals 1, and is not to be found in a cache of answers
        with pytest.raises(ValueError, match="tensor_parallel must be a positive integer"):
            state_share(config, bad)
    with pytest.raises(ValueError, match="bytes_per_weight must be a number above 0"):
        crossover_batch("h100", -1)


def test_integers_of_numpy_count_as_integers() -> None:
    config = CONFIGS["llama-3.1-8b"]
    n: Callable[[int], Any] = np.int64
    want = predict(config, "h100", 3, 1000, new_tokens=2, gpus=16, tensor_parallel=8, operations=9)
    got = predict(config, "h100", n(3), n(1000), new_tokens=n(2), gpus=n(16), tensor_parallel=n(8), operations=n(9))
    assert got == want
    assert type(got.bytes_needed) is int


def test_usable_memory() -> None:
    config = CONFIGS["llama-3.1-8b"]  # 16.06 GB
    assert [predict(config, "l4", 1, 0, usable=share).fits for share in (1.0, 0.5)] == [True, False]
    assert predict(config, "l4", 1, 0, usable=0.5).bytes_available == 12e9


def test_active_parameters_set_the_time_and_all_of_them_the_memory() -> None:
    config = CONFIGS["deepseek-v3"]
    prediction = predict(config, "h200", 1, 0, gpus=8, recipe="fp8-all")
    read = count_parameters(config).active_without_embedding
    assert prediction.memory_seconds == pytest.approx(read / (8 * 4.8e12), rel=0.001)
    assert prediction.bytes_needed == pytest.approx(671.0e9, rel=0.001)
