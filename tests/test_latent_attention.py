"""Latent attention: two forms of one result, what is cached, what is counted, which form is picked.

Equality with transformers under fuzz is in test_parity_deepseek.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from families import T_DSV3, assert_close, caches_of, deepseek_v3, feed, in_form, ours, random_tokens, reference_logits

import tokenbytoken as tbt
from tokenbytoken.decoder import Pass
from tokenbytoken.layers.latent_attention import LatentAttention

V3 = tbt.published["deepseek-v3"]
MLA: Any = V3.layers[0].mixer


def toy(**changes: Any) -> tbt.Decoder:
    """A small DeepSeek-V3 with weights so large that a wrong score shows."""
    torch.manual_seed(0)
    model = tbt.Decoder(tbt.DecoderConfig.from_hf({**T_DSV3, "model_type": "deepseek_v3", **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, 0, 0.25)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, tbt.Decoder]:
    reference = deepseek_v3()
    return reference, ours(reference, tmp_path_factory.mktemp("t-dsv3"))


# --- two forms, one result -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[24], [7, 5, *[1] * 12], [1] * 24, [3, 20, 1]])
@pytest.mark.parametrize("padding", [None, [0, 9]])
def test_absorbed_equals_expanded_to_1e_10_in_float64(chunks: list[int], padding: list[int] | None) -> None:  # C33
    model = toy().double()
    tokens = random_tokens(2, 24)
    got = [feed(in_form(model, form), tokens, chunks, padding=padding) for form in ("absorbed", "expanded", "auto")]
    for row, pads in enumerate(padding or [0, 0]):
        scale = got[1][row, pads:].abs().max()
        assert scale > 1
        assert (got[0][row, pads:] - got[1][row, pads:]).abs().max() <= 1e-10 * scale
        assert (got[2][row, pads:] - got[1][row, pads:]).abs().max() <= 1e-10 * scale


def test_the_form_may_change_between_two_passes_over_one_state() -> None:
    model = toy().double()
    tokens = random_tokens(1, 24)
    want = in_form(model, "expanded")(tokens)
    state = model.new_state(1, 24)
    got = []
    for i, chunk in enumerate(tokens.split([7, 5, 6, 6], dim=1)):
        got.append(in_form(model, ("expanded", "absorbed")[i % 2])(chunk, state))
    assert (torch.cat(got, 1) - want).abs().max() <= 1e-10 * want.abs().max()


def test_an_unknown_form_is_refused_by_name() -> None:
    config = toy().config.layers[0].mixer
    assert isinstance(config, tbt.LatentAttentionConfig)
    with pytest.raises(ValueError, match="naive"):
        LatentAttention(config, 48, form="naive")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="naive"):
        in_form(toy(), "naive")


def test_forms_agree_when_the_projection_is_stored_in_one_byte() -> None:
    model = tbt.quantize_model(toy(first_k_dense_replace=3), "e4m3", "block")
    assert isinstance(model.get_submodule("layers.0.mixer.kv_b_proj"), tbt.QuantizedLinear)
    tokens = random_tokens(1, 20)
    want = in_form(model, "expanded")(tokens)
    assert_close(feed(in_form(model, "absorbed"), tokens, [12, *[1] * 8]), want, 5e-5)


# --- what is cached --------------------------------------------------------------------------------------


def test_the_cache_is_the_normed_latent_and_one_rotated_key_as_transformers_has_them(  # C34, C35
    both: tuple[torch.nn.Module, tbt.Decoder],
) -> None:
    reference, model = both
    tokens = random_tokens(2, 24)
    state = model.new_state(2, 24)
    model(tokens, state)
    theirs = reference(input_ids=tokens, use_cache=True).past_key_values
    for layer, held in zip(theirs.layers, caches_of(state), strict=True):
        assert list(held.parts) == ["latent"]
        assert held["latent"].shape == (2, 24, 16 + 8)  # and no head axis
        latent, rotary_key = held["latent"].split([16, 8], dim=-1)
        assert_close(latent, layer.keys.squeeze(1), 1e-4)
        # transformers turns interleaved pairs and leaves them apart: first halves, then second halves
        pairs = rotary_key.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        assert_close(pairs, layer.values.squeeze(1), 1e-4)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3"])
def test_bytes_allocated_are_those_of_the_arithmetic_at_full_size(name: str) -> None:
    config = tbt.published[name]
    with torch.device("meta"):
        caches = caches_of(tbt.Decoder(config).to(torch.bfloat16).new_state(2, 100))
    assert sum(cache.nbytes() for cache in caches) == tbt.state_bytes(config, 2, 100)
    assert sum(cache.nbytes(1) for cache in caches) == 2 * tbt.state_bytes_per_token(config)
    assert sum(cache["latent"].untyped_storage().nbytes() for cache in caches) == tbt.state_bytes(config, 2, 100)
    published = {"deepseek-v2-lite": 31_104, "deepseek-v2": 69_120, "deepseek-v3": 70_272}
    assert tbt.state_bytes_per_token(config) == published[name]


def test_a_state_of_the_whole_model_has_the_bytes_of_the_arithmetic() -> None:
    model = toy()
    state = model.new_state(3, 20)
    model(random_tokens(3, 11), state)
    assert state.nbytes == tbt.state_bytes(model.config, 3, 20, 4)
    assert state.nbytes_used == tbt.state_bytes(model.config, 3, 11, 4)


def test_the_norm_of_the_latent_leaves_the_rotary_key_alone() -> None:  # C35
    model = toy()
    tokens = random_tokens(1, 12)
    kept = []
    for _ in range(2):
        state = model.new_state(1, 12)
        model(tokens, state)
        kept.append(caches_of(state)[0])
        model.get_parameter("layers.0.mixer.kv_a_norm.weight").mul_(1.3)
    (latent, rotary_key), (scaled, same) = (cache["latent"].split([16, 8], dim=-1) for cache in kept)
    assert torch.equal(rotary_key, same)
    assert_close(scaled, latent * 1.3, 1e-6)


def test_caches_are_cut_back_forked_chosen_and_joined() -> None:
    model = toy()
    tokens = random_tokens(3, 20)
    want = model(tokens)
    state = model.new_state(3, 20)
    model(tokens[:, :8], state)
    mark = state.mark()
    model(random_tokens(3, 9, seed=5), state)  # a draft that is thrown away
    state.rewind(mark)
    fork = state.copy()
    assert_close(model(tokens[:, 8:], state), want[:, 8:])
    picked = fork.select([2, 0])
    assert_close(model(tokens[[2, 0], 8:], picked), want[[2, 0], 8:])
    short = model.new_state(1, 20)
    model(tokens[:1, 3:8], short)  # five tokens join eight: three pads
    joined = tbt.DecoderState.concat([short, fork])
    got = model(torch.cat([tokens[:1, 8:], tokens[:, 8:]]), joined)
    assert_close(got[1:], want[:, 8:])
    assert_close(got[:1], model(tokens[:1, 3:])[:, 5:])


def test_everything_stays_in_the_models_dtype() -> None:  # C44
    model = toy().to(torch.bfloat16)
    state = model.new_state(1, 12)
    for form in ("expanded", "absorbed"):
        assert in_form(model, form)(random_tokens(1, 5), state).dtype == torch.bfloat16
    assert {cache["latent"].dtype for cache in caches_of(state)} == {torch.bfloat16}


# --- the scale of the softmax ----------------------------------------------------------------------------


def meta_mixer(config: Any = MLA, hidden: int = V3.hidden_size, **changes: Any) -> LatentAttention:
    with torch.device("meta"):
        return LatentAttention(dataclasses.replace(config, **changes), hidden)


def test_the_softmax_scale_is_that_of_a_heads_own_key_times_mscale_squared() -> None:  # C36
    assert meta_mixer().scale == pytest.approx(0.135233779, rel=1e-6)
    lite = tbt.published["deepseek-v2-lite"]
    assert meta_mixer(lite.layers[0].mixer, lite.hidden_size).scale == pytest.approx(0.114721387, rel=1e-6)
    plain = dataclasses.replace(MLA.rope, scaling=None)
    assert meta_mixer(rope=plain).scale == pytest.approx(192**-0.5, rel=1e-12)
    no_all_dim = dataclasses.replace(MLA.rope.scaling, mscale_all_dim=None)
    assert meta_mixer(rope=dataclasses.replace(MLA.rope, scaling=no_all_dim)).scale == pytest.approx(192**-0.5)


def test_the_two_rotation_layouts_differ_everywhere_but_at_position_0(tmp_path: Path) -> None:  # C38
    logits = []
    for interleaved in (True, False):
        reference = deepseek_v3(rope_interleave=interleaved)
        model = ours(reference, tmp_path / str(interleaved))
        logits.append(model(random_tokens(1, 20)))
        assert_close(logits[-1], reference_logits(reference, random_tokens(1, 20)), 5e-5)
    apart = (logits[0] - logits[1]).abs().amax(-1)[0]
    assert apart[0] == 0
    assert apart[1:].min() > 0.1


def test_an_odd_rotary_width_is_refused_by_name() -> None:  # C39
    with pytest.raises(ValueError, match="qk_rope_head_dim"):
        toy(qk_rope_head_dim=7)


# --- what is counted, and the form that is picked --------------------------------------------------------


def cost(S: int, T: int, form: Any, config: Any = MLA, hidden: int = V3.hidden_size, B: int = 1) -> tbt.measure.Count:
    """Count one layer's attention for the last T of S tokens, at full size on the meta device."""
    mixer = meta_mixer(config, hidden)
    mixer.form = form
    cache = mixer.new_state(B, S, torch.bfloat16, torch.device("meta"))
    mixer.to(torch.bfloat16)
    x = torch.empty(B, T, hidden, device="meta", dtype=torch.bfloat16)
    step = Pass(torch.empty(B, T, device="meta"), S - T, None, torch.bfloat16)
    return tbt.measure.count(lambda: mixer(x, step, cache), state=cache)


def derived(S: int, T: int) -> dict[str, int]:
    """FLOPs of one layer of DeepSeek-V3, added up by hand: every multiply-add is 2."""
    H, R, rope, nope, v, rank, M = 128, 512, 64, 128, 128, 1536, 7168
    projections = T * (M * rank + rank * H * (nope + rope) + M * (R + rope) + H * v * M)
    absorbed = T * H * (nope * R + R * v) + H * T * S * ((R + rope) + R)
    expanded = S * H * R * (nope + v) + H * T * S * ((nope + rope) + v)
    return {"absorbed": 2 * (projections + absorbed), "expanded": 2 * (projections + expanded)}


def last_absorbed(S: int) -> int:
    """The most new tokens for which the counted FLOPs choose the absorbed form."""
    return max(T for T in range(1, S + 1) if MLA.cheaper_form(S - T, T) == "absorbed")


@pytest.mark.parametrize("S", [171, 250, 400])
def test_the_form_picked_is_the_cheaper_one_on_both_sides_of_the_threshold(S: int) -> None:
    last = last_absorbed(S)
    for T in (1, last, last + 1, 171):
        counted = {form: cost(S, T, form).flops for form in ("absorbed", "expanded", "auto")}
        assert counted["auto"] == min(counted["absorbed"], counted["expanded"])
        assert (counted["absorbed"] < counted["expanded"]) == (last >= T)
        assert {form: counted[form] for form in ("absorbed", "expanded")} == derived(S, T)


def test_the_threshold_rises_from_85_at_171_tokens_towards_171() -> None:
    thresholds = [last_absorbed(S) for S in (171, 300, 1_000, 10_000)]
    assert thresholds == sorted(thresholds)
    assert thresholds[0] == 85
    for S, chosen in ((10**6, 170), (10**9, 170)):
        assert MLA.cheaper_form(S - chosen, chosen) == "absorbed"
        assert MLA.cheaper_form(S - chosen - 1, chosen + 1) == "expanded"  # 171 × 768 > 512 × 256


@pytest.mark.parametrize(("batch", "context", "new"), [(1, 0, 1), (1, 99, 1), (3, 90, 10), (2, 0, 60), (2, 40, 100)])
@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
def test_flops_and_bytes_are_those_of_the_formula(batch: int, context: int, new: int, form: Any) -> None:
    one = dataclasses.replace(V3, layers=V3.layers[:1])
    dense: Any = one.layers[0].feed_forward
    formula = tbt.pass_cost(one, batch, context, new, form=form, logits="none")
    counted = cost(context + new, new, form, B=batch)
    assert counted.flops == formula.flops - batch * new * 2 * 3 * V3.hidden_size * dense.intermediate_size
    assert counted.state_bytes == formula.state_bytes  # each cached token read once, each new one written once
    # every weight once, in either form: absorbing moves brackets, it does not multiply the weights together
    assert counted.weight_bytes == 2 * sum(p.numel() for p in meta_mixer().parameters())


@pytest.mark.parametrize(("name", "intensity"), [("deepseek-v3", 241.8), ("deepseek-v2-lite", 30.2)])
def test_absorbed_decoding_does_as_many_flops_for_each_cached_byte_as_the_book_says(
    name: str, intensity: float
) -> None:
    config = tbt.published[name]
    mixer: Any = config.layers[0].mixer
    short, long = (cost(S, 1, "absorbed", mixer, config.hidden_size) for S in (1_000, 3_000))
    counted = (long.flops - short.flops) / (long.state_bytes - short.state_bytes)  # what 2,000 tokens more cost
    assert counted == pytest.approx(tbt.attention_intensity(config))
    assert round(counted, 1) == intensity


def test_results_do_not_depend_on_how_the_query_rows_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_form(toy().double(), "expanded")
    tokens = random_tokens(2, 50)
    want = model(tokens)
    monkeypatch.setattr("tokenbytoken.layers.attention.BLOCK_SCORES", 2 * 4 * 50 * 3)  # three rows at a time
    for form in ("expanded", "absorbed"):
        got = in_form(model, form)(tokens)
        assert (got - want).abs().max() <= 1e-10 * want.abs().max()


def test_counts_of_parameters_equal_transformers_with_and_without_query_compression(tmp_path: Path) -> None:  # C40
    for rank, bias in ((24, False), (None, False), (24, True), (None, True)):
        reference = deepseek_v3(q_lora_rank=rank, attention_bias=bias)
        model = ours(reference, tmp_path / f"{rank}-{bias}")
        biases = 2 * 8  # of two routers: buffers there, parameters here
        assert sum(p.numel() for p in model.parameters()) == biases + sum(p.numel() for p in reference.parameters())
        assert sum(p.numel() for p in model.parameters()) == tbt.count_parameters(model.config).total
