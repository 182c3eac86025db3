"""DeepSeek-V3 under fuzz against transformers in float32, and its relatives DeepSeek-V2 and Mixtral.

The tolerance is relative to the largest logit, and is that of test_parity_llama.py, for the reason given there. A
router is discontinuous: where two experts' scores differ by less than the rounding of what came before, either
choice is right, and all that follows differs. Such draws are left out (``clear_choice``); test_moe.py compares the
routers themselves, index by index, on equal inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from families import (
    assert_close,
    assert_differs,
    assert_rows_close,
    deepseek_v2,
    deepseek_v3,
    feed,
    in_form,
    mixtral,
    random_tokens,
    reference_logits,
)
from fuzz import cut, fuzz, left_padded, pair
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import tokenbytoken as tbt
from tokenbytoken.layers.latent_attention import LatentAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Form = Literal["auto", "absorbed", "expanded"]

TOLERANCE, MISS = 1e-4, 1e-2
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # n_shared_experts: 0
FORMS = ("absorbed", "expanded", "auto")

# Draws without a clear choice are left out, and there may be many of them.
fuzz = settings(fuzz, suppress_health_check=[*fuzz.suppress_health_check, HealthCheck.filter_too_much])

YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
ROPES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "plain": st.just({"rope_type": "default"}),
    "yarn, equal mscales": st.sampled_from([0.707, 1.0]).map(lambda m: {**YARN, "mscale": m, "mscale_all_dim": m}),
    "yarn, different mscales": st.sampled_from([(1.0, 0.707), (0.5, 1.0)]).map(
        lambda m: {**YARN, "mscale": m[0], "mscale_all_dim": m[1]}
    ),
    "yarn, no mscale_all_dim": st.sampled_from([0.707, 1.0]).map(lambda m: {**YARN, "mscale": m}),
    "yarn, no mscale": st.just(YARN),
}


@st.composite
def rope(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    chosen = {"rope_theta": draw(st.sampled_from([1e4, 5e5])), **draw(ROPES[kind])}
    if kind != "plain":  # an original so short that the tokens below stand on both sides of it
        chosen |= {"factor": draw(st.sampled_from([4.0, 40.0])), "original_max_position_embeddings": 16}
    return chosen


@st.composite
def deepseeks(draw: st.DrawFn, kind: str, *, v3: bool = True) -> dict[str, Any]:
    """A config of transformers: any widths, with and without q compression, groups, shared experts, dense layers."""
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = groups * draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    layers = draw(st.integers(1, 3))
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    return {
        "hidden_size": draw(st.sampled_from([32, 48])),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw(st.sampled_from([None, 12, 24])),
        "kv_lora_rank": draw(st.sampled_from([8, 16, 20])),
        "qk_nope_head_dim": draw(st.sampled_from([4, 10, 16])),
        "qk_rope_head_dim": draw(st.sampled_from([4, 8, 12])),
        "v_head_dim": draw(st.sampled_from([6, 12, 24])),
        "attention_bias": draw(st.booleans()),
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": draw(st.integers(1, min(4, kept * experts // groups))),
        "n_shared_experts": draw(st.integers(0, 2)),
        "moe_intermediate_size": draw(st.sampled_from([8, 16])),
        "intermediate_size": 40,
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": 1024,
        "rope_parameters": draw(rope(kind)),
        **(
            {
                "norm_topk_prob": draw(st.booleans()),
                "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
                "rope_interleave": draw(st.booleans()),
            }
            if v3
            else {
                "topk_method": draw(st.sampled_from(["greedy", "group_limited_greedy"])),
                "routed_scaling_factor": draw(st.sampled_from([1.0, 16.0])),
            }
        ),
    }


def gap(scores: torch.Tensor, k: int) -> float:
    """The smallest distance, in any row, of the last score that is chosen to the first that is not."""
    ordered = scores.sort(descending=True).values
    return float((ordered[..., k - 1] - ordered[..., k]).min()) if k < scores.shape[-1] else torch.inf


def gaps(gate: Any, logits: torch.Tensor) -> Iterator[float]:
    """How clearly one router of transformers chooses groups and experts."""
    v3 = hasattr(gate, "e_score_correction_bias")
    scores = logits.sigmoid() + gate.e_score_correction_bias if v3 else logits.log_softmax(-1)
    if getattr(gate, "num_group", 1) > 1 and getattr(gate, "topk_method", "") != "greedy":
        grouped = scores.unflatten(-1, (gate.num_group, -1))
        of_group = grouped.topk(2 if v3 else 1, dim=-1).values.sum(-1)
        yield gap(of_group, gate.topk_group)
        kept = F.one_hot(of_group.topk(gate.topk_group).indices, gate.num_group).sum(-2).bool()
        scores = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    yield gap(scores, gate.top_k)


def clear_choice(reference: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The reference's logits, if all its routers choose by a margin that rounding cannot turn."""
    margins: list[float] = []
    gates = [module for name, module in reference.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda gate, _, out: margins.extend(gaps(gate, out[0]))) for gate in gates]
    logits = reference_logits(reference, tokens)
    for hook in hooks:
        hook.remove()
    assume(all(margin > 3e-5 for margin in margins))
    return logits


def check(
    data: st.DataObject, family: Callable[..., PreTrainedModel], config: dict[str, Any], seed: int, forms: Any
) -> None:
    reference, model = pair(family, config, seed)
    batch, length = data.draw(st.integers(1, 2)), data.draw(st.integers(18, 28))
    tokens = random_tokens(batch, length, seed=seed)
    want = clear_choice(reference, tokens)
    assert want.abs().max() > 0.5  # real numbers, not noise around zero
    chunks = cut(data, length)
    for form in forms:
        in_form(model, form)
        assert_close(model(tokens), want, TOLERANCE)
        assert_close(feed(model, tokens, chunks), want, TOLERANCE)
        if form != "auto":
            assert_close(feed(model, tokens, [1] * length), want, TOLERANCE)


def kinds(config: dict[str, Any]) -> set[str]:
    """What a config is, of all that a DeepSeek may be."""
    dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    return {
        "no q compression" if config["q_lora_rank"] is None else "q compression",
        "one group" if config["n_group"] == 1 else "groups",
        "all groups kept" if config["n_group"] == config["topk_group"] else "groups dropped",
        "shared experts" if config["n_shared_experts"] else "no shared expert",
        "all dense" if dense == layers else "no dense layer" if dense == 0 else "dense first layers",
    }


EVERY_KIND = {"no q compression", "q compression", "one group", "groups", "all groups kept", "groups dropped",
              "shared experts", "no shared expert", "all dense", "no dense layer", "dense first layers"}  # fmt: skip
# Where the random draws of each rope begin (interleaved, half-split): so that 7 configs reach every kind.
SEEDS = {"plain": (0, 3), "yarn, equal mscales": (1, 2), "yarn, different mscales": (4, 6),
         "yarn, no mscale_all_dim": (7, 8), "yarn, no mscale": (9, 10)}  # fmt: skip


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("kind", ROPES)
def test_random_deepseek_v3s_equal_transformers_however_they_are_fed(kind: str, interleave: bool) -> None:
    """Ten times six or more different configs, and in each ten every kind of them."""
    passed: dict[str, set[str]] = {}

    @hypothesis.seed(SEEDS[kind][0 if interleave else 1])
    @settings(fuzz, max_examples=7)
    @given(data=st.data(), seed=st.integers(0, 2**16))
    def fuzzed(data: st.DataObject, seed: int) -> None:
        config = {**data.draw(deepseeks(kind)), "rope_interleave": interleave}
        check(data, deepseek_v3, config, seed, FORMS)
        passed[repr(config)] = kinds(config)

    fuzzed()
    assert len(passed) >= 6
    assert set().union(*passed.values()) == EVERY_KIND


@pytest.mark.parametrize("kind", ["plain", "yarn, different mscales"])
@settings(fuzz, max_examples=5)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_random_deepseek_v2s_equal_transformers(kind: str, data: st.DataObject, seed: int) -> None:
    check(data, deepseek_v2, data.draw(deepseeks(kind, v3=False)), seed, FORMS)


@settings(fuzz, max_examples=8)
@given(data=st.data(), seed=st.integers(0, 2**16), experts=st.integers(1, 8))
def test_random_mixtrals_equal_transformers(data: st.DataObject, seed: int, experts: int) -> None:
    chosen = data.draw(st.integers(1, min(experts, 4)))
    check(data, mixtral, {"num_local_experts": experts, "num_experts_per_tok": chosen}, seed, ["absorbed"])


@settings(fuzz, max_examples=8)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_left_padded_rows_of_random_deepseek_v3s_equal_their_solo_runs(data: st.DataObject, seed: int) -> None:
    reference, model = pair(deepseek_v3, data.draw(deepseeks(data.draw(st.sampled_from(list(ROPES))))), seed)
    length = data.draw(st.integers(20, 32))
    padding = [0, *data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=2))]
    rows, batch = left_padded(length, padding, seed)
    want = [clear_choice(reference, row) for row in rows]
    chunks = [length - 5, 1, 1, 1, 1, 1]  # a prefill and steps, then any chunks
    for form in ("absorbed", "expanded"):
        in_form(model, form)
        for got in (feed(model, batch, sizes, padding=padding) for sizes in (chunks, cut(data, length))):
            assert_rows_close(got, want, padding, TOLERANCE)


# --- wrong variants of the attention: each must fail the comparison above (those of the router: test_moe.py) ----


def rescale(factor: Callable[[LatentAttention], float]) -> Callable[[tbt.Decoder], None]:
    def change(model: tbt.Decoder) -> None:
        for mixer in model.mixers:
            assert isinstance(mixer, LatentAttention)
            mixer.scale *= factor(mixer)

    return change


def other_rotation(model: tbt.Decoder) -> None:
    for layer in model.layers:
        mixer: Any = layer.mixer
        turned = dataclasses.replace(mixer.config.rope, interleaved=not mixer.config.rope.interleaved)
        mixer.config = dataclasses.replace(mixer.config, rope=turned)


def without_norm(model: tbt.Decoder) -> None:
    for layer in model.layers:
        mixer: Any = layer.mixer
        mixer.kv_a_norm = torch.nn.Identity()


def mscale(mixer: Any) -> float:
    return tbt.layers.rope.yarn_mscale(mixer.config.rope.scaling.factor, mixer.config.rope.scaling.mscale_all_dim)


WRONG: dict[str, Callable[[tbt.Decoder], None]] = {
    "scale of the latent's width": rescale(
        lambda m: ((m.config.qk_nope_head_dim + m.config.qk_rope_head_dim) / m.kv_a_proj.out_features) ** 0.5
    ),
    "mscale forgotten": rescale(lambda m: mscale(m) ** -2),
    "mscale applied once": rescale(lambda m: 1 / mscale(m)),
    "the other rotation layout": other_rotation,
    "the latent without its norm": without_norm,
}


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_variant_of_the_attention_is_caught(wrong: str, form: Form) -> None:
    reference, model = pair(deepseek_v3, {}, 0)
    tokens = random_tokens(1, 33)
    want = reference_logits(reference, tokens)
    in_form(model, form)
    assert_close(feed(model, tokens, [7, 1, 20, 5]), want, TOLERANCE)
    WRONG[wrong](model)
    assert_differs(feed(model, tokens, [7, 1, 20, 5]), want, MISS)
