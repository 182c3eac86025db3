"""Mamba and Jamba under fuzz: random configs, layer plans, chunkings and paddings against transformers in float32.

The reference is always one pass over the whole sequence, without a cache: fed in chunks, transformers 5.24 loses the
state that the chunks before it left. Both sides compute the same sums in another order, over up to six layers: the
tolerance is 5e-5 of the largest logit, and a wrong variant is asked to miss by a hundred times as much.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from families import (
    assert_close,
    assert_differs,
    assert_rows_close,
    feed,
    jamba,
    mamba,
    random_tokens,
    reference_logits,
)
from fuzz import cut, equals_however_fed, fuzz, left_padded, pair
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tokenbytoken as tbt
from tokenbytoken.decoder import Pass
from tokenbytoken.layers.attention import Attention
from tokenbytoken.layers.feed_forward import MoE
from tokenbytoken.layers.mamba import Mamba, MambaState, selective_scan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE, MISS = 5e-5, 5e-3


@st.composite
def mambas(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "hidden_size": draw(st.sampled_from([8, 20, 32])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "state_size": draw(st.sampled_from([1, 3, 8, 16])),
        "conv_kernel": draw(st.integers(1, 6)),
        "expand": draw(st.integers(1, 3)),
        "time_step_rank": draw(st.sampled_from(["auto", 1, 4])),
        "use_conv_bias": draw(st.booleans()),
        "use_bias": draw(st.booleans()),
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def jambas(draw: st.DrawFn) -> dict[str, Any]:
    """Any plan: attention first, last, everywhere or nowhere; experts in some layers, in all or in none."""
    kv_heads, period, expert_period = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    experts = draw(st.sampled_from([1, 2, 4, 5]))
    return {
        "hidden_size": heads * draw(st.sampled_from([4, 8, 12])),  # its experts want rows of 16 bytes
        "intermediate_size": draw(st.sampled_from([12, 24])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": draw(st.integers(1, 5)),
        "attn_layer_period": period,
        "attn_layer_offset": draw(st.integers(0, period - 1)),
        "expert_layer_period": expert_period,
        "expert_layer_offset": draw(st.integers(0, expert_period - 1)),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "mamba_d_state": draw(st.sampled_from([2, 8])),
        "mamba_d_conv": draw(st.integers(1, 5)),
        "mamba_expand": draw(st.integers(1, 2)),
        "mamba_dt_rank": draw(st.sampled_from(["auto", 1, 3])),
        "mamba_conv_bias": draw(st.booleans()),
        "mamba_proj_bias": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
    }


FAMILIES: dict[str, tuple[Callable[..., PreTrainedModel], st.SearchStrategy[dict[str, Any]]]] = {
    "mamba": (mamba, mambas()),
    "jamba": (jamba, jambas()),
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(fuzz, max_examples=50)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_random_models_equal_transformers_however_they_are_fed(family: str, data: st.DataObject, seed: int) -> None:
    reference, model = pair(FAMILIES[family][0], data.draw(FAMILIES[family][1]), seed)
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(9, 18))
    tokens = random_tokens(batch, length, seed=seed)
    equals_however_fed(reference, model, tokens, cut(data, length, 1, 7), TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@settings(fuzz, max_examples=25)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_left_padded_rows_equal_their_solo_runs(family: str, data: st.DataObject, seed: int) -> None:
    reference, model = pair(FAMILIES[family][0], data.draw(FAMILIES[family][1]), seed)
    length = data.draw(st.integers(9, 18))
    padding = [0, *data.draw(st.lists(st.integers(1, length - 1), min_size=1, max_size=2))]
    rows, batch = left_padded(length, padding, seed)
    want = [reference_logits(reference, row) for row in rows]
    pads_alone = [padding[-1], length - padding[-1]]  # the first chunk of the last row is all pads
    for sizes in ([length - 3, 1, 1, 1], pads_alone, cut(data, length, 1, 7)):
        got = feed(model, batch, sizes, padding=padding)
        assert got.isfinite().all()
        assert_rows_close(got, want, padding, TOLERANCE)


def test_the_fuzz_reaches_every_kind() -> None:
    kinds: set[str] = set()

    @settings(fuzz, max_examples=100)
    @given(jambas(), mambas())
    def collect(config: dict[str, Any], pure: dict[str, Any]) -> None:
        layers = tbt.DecoderConfig.from_hf({"model_type": "jamba", "vocab_size": 97, **config}).layers
        plan = "".join("A" if isinstance(layer.mixer, tbt.AttentionConfig) else "m" for layer in layers)
        kinds.add("hybrid" if len(set(plan)) == 2 else plan[0])
        if len(set(plan)) == 2:
            kinds.add(f"{plan[0]} first")
            kinds.add(f"{plan[-1]} last")
        mixtures = sum(isinstance(layer.feed_forward, tbt.MoEConfig) for layer in layers)
        kinds.add("dense" if mixtures == 0 else "all experts" if mixtures == len(layers) else "some experts")
        kinds.update(f"convolution of {size}" for size in (config["mamba_d_conv"], pure["conv_kernel"]) if size < 3)
        kinds.update(f"{name} {pure[name]}" for name in ("use_bias", "use_conv_bias", "tie_word_embeddings"))

    collect()
    assert kinds == {"hybrid", "A", "m", "A first", "m first", "A last", "m last", "dense", "all experts",
                     "some experts", "convolution of 1", "convolution of 2", "use_bias True", "use_bias False",
                     "use_conv_bias True", "use_conv_bias False", "tie_word_embeddings True",
                     "tie_word_embeddings False"}  # fmt: skip


# --- wrong variants: each is put into the package or the model, and the comparison above must fail ------


def change(kind: type, alter: Callable[[Any], None]) -> Callable[[tbt.Decoder, pytest.MonkeyPatch], None]:
    def apply(model: tbt.Decoder, _: pytest.MonkeyPatch) -> None:
        found = [module for module in model.modules() if isinstance(module, kind)]
        assert found
        for module in found:
            alter(module)

    return apply


def replace(name: str, value: Any) -> Callable[[tbt.Decoder, pytest.MonkeyPatch], None]:
    return lambda _, patch: patch.setattr(f"tokenbytoken.layers.mamba.{name}", value)


def growing(x: Any, delta: Any, A: torch.Tensor, *rest: Any, **options: Any) -> Any:
    return selective_scan(x, delta, -A, *rest, **options)


def short_cache(self: Mamba, x: torch.Tensor, state: MambaState | None) -> torch.Tensor:
    if state is not None:
        state.conv[..., 0] = 0  # what a cache of one column less would not hold
    return CONVOLVE(self, x, state)


def flipped_step(self: Mamba, x: torch.Tensor, state: MambaState | None) -> torch.Tensor:
    if x.shape[1] > 1:
        return CONVOLVE(self, x, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self.conv1d.weight, "data", self.conv1d.weight.flip(-1))
        return CONVOLVE(self, x, state)


def blind(without_pads: Callable[..., torch.Tensor]) -> Callable[[tbt.Decoder, pytest.MonkeyPatch], None]:
    return lambda model, patch: patch.setattr(Pass, "without_pads", without_pads)


def masked_once() -> Callable[..., torch.Tensor]:
    calls = itertools.count()
    return lambda step, x: WITHOUT_PADS(step, x) if next(calls) % 2 == 0 else x


def rotate(mixer: Attention) -> None:
    mixer.config = dataclasses.replace(mixer.config, rope=tbt.RopeConfig(dim=mixer.config.head_dim))


def renormalize(moe: MoE) -> None:
    moe.config = moe.router.config = dataclasses.replace(moe.config, normalize=True)


CONVOLVE = Mamba._convolve
WITHOUT_PADS = Pass.without_pads
WRONG: dict[str, Callable[[tbt.Decoder, pytest.MonkeyPatch], None]] = {
    "Δ's bias added twice": change(Mamba, lambda mixer: mixer.dt_bias.mul_(2)),
    "Δ's bias left out": change(Mamba, lambda mixer: mixer.dt_bias.zero_()),
    "A with the wrong sign": replace("selective_scan", growing),
    "pads enter convolution and scan": blind(lambda step, x: x),
    "pads enter the scan, by the convolution's bias": blind(masked_once()),
    "convolution cache one column short": replace("Mamba._convolve", short_cache),
    "taps reversed in the step": replace("Mamba._convolve", flipped_step),
    "no norm on Δ": change(Mamba, lambda mixer: setattr(mixer, "dt_norm", nn.Identity())),
    "no norm on B": change(Mamba, lambda mixer: setattr(mixer, "b_norm", nn.Identity())),
    "no norm on C": change(Mamba, lambda mixer: setattr(mixer, "c_norm", nn.Identity())),
    "attention with rotary positions": change(Attention, rotate),
    "router weights renormalised": change(MoE, renormalize),
}


@pytest.mark.parametrize("wrong", WRONG)
@settings(fuzz, max_examples=3)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_a_wrong_variant_is_caught_on_every_config(wrong: str, data: st.DataObject, seed: int) -> None:
    # Every part that a variant touches is there: two kinds of layer, biases, taps to reverse, a choice to make.
    config = data.draw(jambas()) | {
        "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_expand": 2, "mamba_d_state": 8,
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": data.draw(st.integers(0, 1)),
        "expert_layer_period": 1, "expert_layer_offset": 0, "num_experts": 4, "num_experts_per_tok": 2,
        "mamba_d_conv": data.draw(st.integers(2, 5)), "mamba_conv_bias": True, "mamba_dt_rank": 3,
    }  # fmt: skip
    reference, model = pair(jamba, config, seed)
    length, pads = 20, 5
    tokens = random_tokens(1, length, seed=seed)
    want = reference_logits(reference, tokens)
    batch = torch.cat([random_tokens(1, length + pads, seed=seed + 1), F.pad(tokens, (pads, 0))])

    def run(some: tbt.Decoder) -> torch.Tensor:
        chunks = [pads + 9, 1, 1, 3, 1, 5]
        return feed(some, batch, chunks, padding=[0, pads])[1:, pads:]

    assert_close(run(model), want, TOLERANCE)
    with pytest.MonkeyPatch.context() as patch:
        altered = copy.deepcopy(model)
        WRONG[wrong](altered, patch)
        # A state that grows ends in NaN, which is no equal either.
        assert_differs(run(altered).nan_to_num(1e9, 1e9, -1e9), want, MISS)
    assert_close(run(model), want, TOLERANCE)  # nothing was left patched
