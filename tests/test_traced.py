"""Closed forms run on symbols as on numbers: an expression, evaluated, is what the function itself says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tokenbytoken as tbt
from tokenbytoken.config import DecoderConfig, Symbol, maximum, minimum, where
from tokenbytoken.cost import footprint_per_gpu
from tokenbytoken.models import published

MODELS = [name for name, config in published.items() if isinstance(config, DecoderConfig)]
N: dict[str, Any] = {name: Symbol(name) for name in ("batch", "context", "new", "gpus", "parallel", "bytes")}
traced_like_direct = settings(derandomize=True, database=None, deadline=None, max_examples=60)


def decoder(name: str) -> DecoderConfig:
    config = published[name]
    assert isinstance(config, DecoderConfig)
    return config


@traced_like_direct
@given(
    name=st.sampled_from(MODELS),
    recipe=st.sampled_from(["bf16", "fp8-all", "fp8-ffn", "fp8-block", "int8", "int8-experts"]),
    gpu=st.sampled_from(["a100-80", "h100", "h200", "b200"]),
    causal=st.booleans(),
    logits=st.sampled_from(["all", "last", "none"]),
    batch=st.integers(1, 300),
    context=st.integers(0, 300_000),
    new=st.sampled_from([1, 2, 170, 171, 172, 8192]),
    parallel=st.sampled_from([1, 2, 4, 8]),
    stages=st.sampled_from([1, 2, 3]),
    bytes_=st.sampled_from([0.5, 1, 2]),
)
def test_a_traced_prediction_is_the_prediction(
    name: str, recipe: str, gpu: str, causal: bool, logits: Any, batch: int, context: int, new: int,
    parallel: int, stages: int, bytes_: float,
) -> None:  # fmt: skip
    def predicted(batch: Any, context: Any, new: Any, gpus: Any, parallel: Any, bytes_: Any) -> tbt.Prediction:
        return tbt.predict(
            decoder(name), gpu, batch, context, new_tokens=new, gpus=gpus, tensor_parallel=parallel, recipe=recipe,
            state_bytes_per_element=bytes_, causal=causal, logits=logits,
        )  # fmt: skip

    values = {
        "batch": batch, "context": context, "new": new, "gpus": parallel * stages, "parallel": parallel,
        "bytes": bytes_,
    }  # fmt: skip
    try:
        direct = predicted(*values.values())
    except ValueError:  # heads that cannot be dealt to so many GPUs
        assume(False)
    traced = predicted(*N.values())
    for field in ("bytes_needed", "bytes_available"):
        assert getattr(traced, field).evaluate(**values) == getattr(direct, field)
    for field in ("flops", "flops_linear", "flops_attention", "bytes", "weight_bytes", "state_bytes"):
        told = getattr(traced.cost, field)
        assert (told.evaluate(**values) if hasattr(told, "evaluate") else told) == getattr(direct.cost, field)
    for field in ("seconds", "memory_seconds", "compute_seconds", "communication_seconds"):
        got = getattr(traced, field).evaluate(**values)
        assert got == pytest.approx(getattr(direct, field), rel=1e-12)


def test_readers_and_state_are_traced_too() -> None:
    for name in ("llama-3.1-405b", "deepseek-v3", "jamba-1.5-large", "mamba-2.8b"):
        config, values = decoder(name), {"batch": 3, "context": 70_001, "bytes": 1}
        told: Any = tbt.state_bytes(config, N["batch"], N["context"], N["bytes"])
        assert told.evaluate(**values) == tbt.state_bytes(config, 3, 70_001, 1)
        size = footprint_per_gpu(config, gpus=8, state_bytes_per_element=N["bytes"])
        readers: Any = size.max_batch(80e9 * 8, N["context"])
        direct = footprint_per_gpu(config, gpus=8, state_bytes_per_element=1).max_batch(80e9 * 8, 70_001)
        assert readers.evaluate(**values) == direct


def test_the_fields_of_a_mixer_may_be_symbols() -> None:
    K: Any = Symbol("K")
    D: Any = Symbol("D")
    mixer = tbt.AttentionConfig(num_heads=64, num_kv_heads=K, head_dim=D)
    llama = decoder("llama-3.1-70b").mixers[0]
    assert mixer.state().per_token.evaluate(K=8, D=128) == llama.state().per_token
    area: Any = sum(weight.area for weight in mixer.weights(8192))
    assert area.evaluate(K=8, D=128) == sum(weight.area for weight in llama.weights(8192))
    flops = mixer.flops(100, 7, causal=True).attention
    assert flops.evaluate(K=8, D=128) == llama.flops(100, 7, causal=True).attention


def test_branches_and_roundings() -> None:
    x = Symbol("x")
    form = where(x < 3, math.ceil(x / 2), maximum(minimum(x, 9), -x)) + round(x / 4) - math.floor(x / 3)

    def by_hand(value: float) -> float:
        chosen = math.ceil(value / 2) if value < 3 else max(min(value, 9), -value)
        return chosen + round(value / 4) - math.floor(value / 3)

    for value in (-7, 0, 2, 2.5, 3, 8, 14, 100):
        assert form.evaluate(x=value) == by_hand(value)
    assert where(x > 0, 1 / x, 0).evaluate(x=0) == 0  # the branch not taken is not computed
    assert (2**x // 3).evaluate(x=5) == 10
    assert repr(minimum(3 * x, 100)) == "min(3 * x, 100)"


def test_what_cannot_be_traced_says_so() -> None:
    x = Symbol("x")
    with pytest.raises(TypeError, match=r"x < 3 has no truth value: in a closed form choose with where"):
        bool(x < 3)
    with pytest.raises(ValueError, match="the symbol x has no value"):
        (x + 1).evaluate(y=2)
    assert x + 1 == Symbol("x") + 1
    assert hash(x + 1) == hash(Symbol("x") + 1)
    assert x + 1 != x + 2
