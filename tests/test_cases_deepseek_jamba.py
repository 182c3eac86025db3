"""Public bug reports turned into checks, for mixtures, latent attention, Mamba and hybrids.

Each number, C01 and so on, stands for a kind of fault that other projects had. Those that have a test of their own
beside the module that they are about (test_moe.py, test_latent_attention.py, test_mamba.py, test_rope.py,
test_config.py, test_quantize.py) are not repeated here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from families import (
    assert_close,
    assert_differs,
    deepseek_v2,
    deepseek_v3,
    feed,
    held_by,
    jamba,
    mamba,
    mixtral,
    ours,
    random_tokens,
    reference_logits,
    uneven,
)
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.layers.cache import Cache
from tokenbytoken.layers.feed_forward import MoE
from tokenbytoken.layers.mamba import Mamba, MambaState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = {"deepseek_v3": deepseek_v3, "deepseek_v2": deepseek_v2, "mixtral": mixtral, "mamba": mamba, "jamba": jamba}
NEW = ("deepseek_v3", "mamba", "jamba")  # one of each kind of state
Pair = tuple["PreTrainedModel", tbt.Decoder]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    found: dict[str, Pair] = {}
    for name, build in FAMILIES.items():
        reference = build()
        found[name] = (reference, ours(reference, tmp_path_factory.mktemp(name)))
    return found


def hidden_states(model: nn.Module) -> tuple[list[Tensor], Any]:
    """What each layer gives, filled in by every pass until the handles are removed."""
    seen: list[Tensor] = []
    layers: Any = model.layers
    handles = [layer.register_forward_hook(lambda *call: seen.append(call[2])) for layer in layers]
    return seen, handles


# --- every family: batches, chunks, steps, forks ------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_batch_equals_each_prompt_alone_and_goes_on_alike(pairs: dict[str, Pair], family: str) -> None:
    reference, model = pairs[family]  # C01
    rows = [random_tokens(1, n, seed=n) for n in (33, 38)]
    batch = torch.cat([F.pad(rows[0], (5, 0)), rows[1]])
    state = model.new_state(2, 46, padding=[5, 0])
    logits = [model(batch, state)]
    for _ in range(8):
        logits.append(model(logits[-1][:, -1:].argmax(-1), state))
    got = torch.cat(logits[:-1], 1)
    chosen = torch.cat([step[:, -1:].argmax(-1) for step in logits[:-1]], 1)
    for i, pads in enumerate((5, 0)):
        alone = torch.cat([rows[i], chosen[i : i + 1]], 1)
        want = reference_logits(reference, alone)
        assert_close(got[i : i + 1, pads:], want[:, :-1], 5e-5)
        assert chosen[i].tolist() == want[0, rows[i].shape[1] - 1 : -1].argmax(-1).tolist()
    assert tbt.generate(model, [row[0].tolist() for row in rows], 8) == chosen.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_uneven_chunks_equal_one_pass_at_every_position(pairs: dict[str, Pair], family: str) -> None:
    reference, model = pairs[family]  # C02
    tokens = random_tokens(1, 33)
    assert_close(feed(model, tokens, uneven(33)), reference_logits(reference, tokens), 5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", NEW)
def test_rows_of_pads_poison_no_token(pairs: dict[str, Pair], family: str, dtype: torch.dtype) -> None:
    _, model = pairs[family]  # C08
    if dtype == torch.float16:
        model = copy.deepcopy(model)
        for parameter in model.parameters():  # half of each: numbers grow less on their way
            parameter.mul_(0.5)
        model.to(dtype)
    rows = [random_tokens(1, n, seed=n) for n in (7, 12)]
    batch = torch.cat([F.pad(rows[0], (5, 0)), rows[1]])
    seen, handles = hidden_states(model)
    for chunks in ([12], [4, 3, 5], [1] * 12):  # in the second, a chunk of the first row is all pads
        got = feed(model, batch, chunks, padding=[5, 0])
        for i, pads in enumerate((5, 0)):
            assert_close(
                got[i : i + 1, pads:].float(), model(rows[i]).float(), 5e-5 if dtype == torch.float32 else 0.03
            )
    for handle in handles:
        handle.remove()
    assert len(seen) >= (1 + 3 + 12) * len(model.layers)
    assert all(hidden.isfinite().all() for hidden in seen)


@pytest.mark.parametrize("family", NEW)
def test_a_fork_leaves_the_prefix_as_it_was_to_the_bit(pairs: dict[str, Pair], family: str) -> None:
    _, model = pairs[family]  # C09
    prefix, first, second = (random_tokens(1, n, seed=n) for n in (9, 4, 5))
    state = model.new_state(1, 20)
    model(prefix, state)
    answers = [model(suffix, state.copy()) for suffix in (first, second, first)]
    assert torch.equal(answers[0], answers[2])
    assert state.length == 9
    assert torch.equal(model(first, state), answers[0])


@pytest.mark.parametrize("family", NEW)
def test_tokens_that_do_not_fit_are_refused_before_anything_is_written(pairs: dict[str, Pair], family: str) -> None:
    _, model = pairs[family]  # C10
    tokens = random_tokens(1, 17)
    state = model.new_state(1, 16)
    model(tokens[:, :12], state)
    held = [t.clone() for t in held_by(state)]
    for wrong in (tokens[:, :5], tokens, torch.full((1, 2), 97)):
        with pytest.raises(ValueError, match=r"at most 16|outside the vocabulary"):
            model(wrong, state)
    assert state.length == 12
    now = held_by(state)
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))
    with pytest.raises(ValueError, match="16"):
        tbt.generate(model, tokens[0, :12].tolist(), 8, max_length=16)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [1, 2, 17])
def test_64_greedy_tokens_with_a_cache_are_those_without(pairs: dict[str, Pair], family: str, prompt: int) -> None:
    reference, model = pairs[family]  # C13
    tokens = random_tokens(1, prompt, seed=prompt)
    answer = tbt.generate(model, tokens[0].tolist(), 64)
    whole = torch.cat([tokens, torch.tensor([answer])], 1)
    want = reference_logits(reference, whole)  # one pass, no cache: each token must be the best after those before it
    assert want[0, prompt - 1 : -1].argmax(-1).tolist() == answer
    assert_close(feed(model, whole, [prompt] + [1] * 64), want, 5e-5)


@pytest.mark.parametrize("family", NEW)
def test_nothing_of_one_answer_is_left_for_the_next(pairs: dict[str, Pair], family: str, tmp_path: Path) -> None:
    reference, model = pairs[family]  # C54
    a, b = (random_tokens(1, n, seed=n)[0].tolist() for n in (11, 6))
    fresh = ours(reference, tmp_path)
    want = tbt.generate(fresh, b, 12), fresh(torch.tensor([b]))
    tbt.generate(model, a, 12)
    assert (tbt.generate(model, b, 12), tbt.generate(model, b, 12)) == (want[0], want[0])
    assert torch.equal(model(torch.tensor([b])), want[1])


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "jamba"])
def test_hidden_states_and_caches_keep_bfloat16_in_every_layer(pairs: dict[str, Pair], family: str) -> None:
    model = copy.deepcopy(pairs[family][1]).to(torch.bfloat16)  # C44
    seen, handles = hidden_states(model)
    state = model.new_state(1, 12)
    for chunk in random_tokens(1, 12).split([7, 1, 4], 1):
        model(chunk, state)
    for handle in handles:
        handle.remove()
    assert {hidden.dtype for hidden in seen} == {torch.bfloat16}
    held = {t.dtype for t in held_by(state)}
    sums = {layer.ssm.dtype for layer in state.layers if isinstance(layer, MambaState)}
    assert held - sums == {torch.bfloat16}
    assert sums == ({torch.float32} if family == "jamba" else set())


# --- latent attention and mixtures --------------------------------------------------------------------------


def test_expanded_keys_and_values_would_take_nine_times_the_latent_of_v2_lite() -> None:  # C34
    config = tbt.published["deepseek-v2-lite"]
    with torch.device("meta"):
        mixers: list[Any] = [layer.mixer for layer in tbt.Decoder(config).layers]
    # Each head's own key and value, as kv_b_proj makes them, and its copy of the rotated key; two bytes a number.
    expanded = sum(2 * (m.kv_b_proj.out_features + m.config.num_heads * m.config.qk_rope_head_dim) for m in mixers)
    assert expanded == 276_480
    held = sum(m.new_state(1, 1, torch.bfloat16, torch.device("meta")).nbytes() for m in mixers)
    assert held == 31_104
    assert round(expanded / held, 1) == 8.9


def test_two_shared_experts_are_one_of_twice_the_width_behind_dense_first_layers(tmp_path: Path) -> None:  # C46
    reference = deepseek_v3(n_shared_experts=2, moe_intermediate_size=8)
    model = ours(reference, tmp_path)
    feed_forwards: list[Any] = [layer.feed_forward for layer in model.layers]
    assert [isinstance(f, MoE) for f in feed_forwards] == [False, True, True]
    assert feed_forwards[0].gate_proj.out_features == 64
    assert {f.shared.gate_proj.out_features for f in feed_forwards[1:]} == {16}
    biases = 2 * 8  # buffers there, parameters here
    assert sum(p.numel() for p in model.parameters()) == biases + sum(p.numel() for p in reference.parameters())
    tokens = random_tokens(2, 9)
    assert_close(model(tokens), reference_logits(reference, tokens), 5e-5)


# --- Mamba and hybrids --------------------------------------------------------------------------------------


def test_without_zeroed_pads_a_convolutions_bias_would_reach_the_scan(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:  # C49
    reference, model = pairs["mamba"]
    mixers: list[Any] = [layer.mixer for layer in model.layers]
    assert all(mixer.conv1d.bias.abs().max() > 0.1 for mixer in mixers)
    rows = [random_tokens(1, n, seed=n) for n in (7, 12)]
    batch = torch.cat([F.pad(rows[0], (5, 0)), rows[1]])
    want = reference_logits(reference, rows[0])
    mask = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
    theirs = reference(input_ids=batch, attention_mask=mask, use_cache=False).logits
    assert_close(theirs[:1, 5:], want)
    assert_close(feed(model, batch, [12], padding=[5, 0])[:1, 5:], want)
    monkeypatch.setattr("tokenbytoken.decoder.Pass.without_pads", lambda step, x: x)
    assert_differs(feed(model, batch, [12], padding=[5, 0])[:1, 5:], want, 0.1)


def scanned(mixer: Mamba, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Δ and A as a mixer of this dtype hands them to its scan."""
    seen = []

    def spy(x: Tensor, delta: Tensor, A: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append((delta, A))
        return x, rest[-1]

    monkeypatch.setattr("tokenbytoken.layers.mamba.selective_scan", spy)
    x = torch.ones(1, 1, mixer.in_proj.in_features, dtype=dtype)
    mixer.to(dtype)(x, tbt.decoder.Pass(torch.zeros(1, 1), 0, None, dtype))
    return seen[0]


@pytest.mark.parametrize(("dtype", "raw"), [(torch.float32, 100.0), (torch.float16, 30.0)])
def test_softplus_of_a_large_step_is_that_step(dtype: torch.dtype, raw: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.log(1 + torch.tensor(raw, dtype=dtype).exp()).isinf()  # C51: what a softplus by hand gives
    mixer = Mamba(tbt.MambaConfig(inner_size=1, state_size=1, conv_size=1, dt_rank=1), 1).requires_grad_(False)
    mixer.dt_proj.weight.zero_()
    mixer.dt_bias.fill_(raw)
    delta, _ = scanned(mixer, dtype, monkeypatch)
    assert delta.item() == raw


def test_decays_are_exponentials_of_the_float32_copy(monkeypatch: pytest.MonkeyPatch) -> None:  # C52
    mixer = Mamba(tbt.MambaConfig(inner_size=2, state_size=16, conv_size=2, dt_rank=1), 2).requires_grad_(False)
    _, A = scanned(mixer, torch.bfloat16, monkeypatch)
    want = -mixer.A_log.double().exp()  # log(n) was rounded once, to eight bits; its exponential is not
    assert (A.double() - want).abs().max() < 1e-5
    assert ((-mixer.A_log.exp()).double() - want).abs().max() > 0.02  # as bfloat16 would have it


@pytest.mark.parametrize("offset", [1, 5])
def test_the_length_of_a_hybrids_state_does_not_come_from_its_first_layer(offset: int, tmp_path: Path) -> None:  # C58
    reference = jamba(attn_layer_period=6 if offset == 5 else 3, attn_layer_offset=offset)
    model = ours(reference, tmp_path)
    kinds = [isinstance(layer.mixer, Mamba) for layer in model.layers]
    assert kinds == ([True] * 5 + [False] if offset == 5 else [True, False, True] * 2)
    tokens = random_tokens(1, 33)
    state = model.new_state(1, 40)
    got = [model(tokens[:, :5], state)]
    for i in range(5, 33):
        assert state.length == i
        got.append(model(tokens[:, i : i + 1], state))
    assert state.length == 33
    assert_close(torch.cat(got, 1), reference_logits(reference, tokens), 5e-5)
    for layer in state.layers:  # what past tokens left: 33 keys, and nothing behind them
        if isinstance(layer, Cache):
            assert layer["k"][:, :, :33].abs().amax(-1).min() > 0
            assert layer["k"][:, :, 33:].abs().max() == 0


def test_only_the_attention_layers_of_a_hybrid_hold_keys() -> None:  # C63
    config = tbt.published["jamba-v0.1"]
    with torch.device("meta"):
        state = tbt.Decoder(config).to(torch.bfloat16).new_state(1, 262_144)
    caches = [layer for layer in state.layers if isinstance(layer, Cache)]
    assert len(caches) == 4
    assert sum(cache.nbytes(1) for cache in caches) == 16_384
    assert sum(cache.nbytes() for cache in caches) == 4 * 2**30
