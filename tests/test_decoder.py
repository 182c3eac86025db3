"""The decoder and its state: equal to transformers however the tokens are fed, and honest about bad input.

Tolerances are relative to the largest logit (about 5 to 7): float32 sums taken in another order (another chunking,
another kernel) differ by a few units in the last place per layer, 2e-5 of the scale at most for three layers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import (
    T_LLAMA,
    assert_close,
    assert_differs,
    caches_of,
    feed,
    held_by,
    llama,
    ours,
    random_tokens,
    reference_logits,
    uneven,
)

import tokenbytoken as tbt
from tokenbytoken.layers.attention import attend
from tokenbytoken.layers.norm import RMSNorm

LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32},  # C11: 4 heads of 32 are not the hidden size of 64
    "llama3_rope": {"rope_parameters": LLAMA31},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "six_heads": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, tbt.Decoder]:
    reference = llama()
    return reference, ours(reference, tmp_path_factory.mktemp("t-llama"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_however_the_tokens_are_fed(variant: str, tmp_path: Path) -> None:
    reference = llama(**VARIANTS[variant])
    model = ours(reference, tmp_path)
    tokens = random_tokens(3, 70)  # rope scaling: positions on both sides of the original 32
    want = reference_logits(reference, tokens)
    assert want.abs().max() > 2  # real numbers, not noise around zero
    assert_close(model(tokens), want)
    assert_close(model(tokens, model.new_state(3, 70)), want)
    assert_close(feed(model, tokens, [1] * 70, 3), want)
    assert_close(feed(model, tokens, uneven(70), 3), want)
    assert_close(feed(model, tokens, [69, 1], 3), want)


def test_c02_uneven_chunks(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    tokens = random_tokens(1, 33)
    assert_close(feed(model, tokens, uneven(33), 3), reference_logits(reference, tokens))


def test_c02_mask_is_aligned_bottom_right() -> None:
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 4, 4)
    rows = attend(q, k, torch.eye(4).view(1, 1, 4, 4), scale=0.5)[0, 0]
    assert torch.allclose(rows, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0], [0.25] * 4]))
    top_left = F.scaled_dot_product_attention(q, k, torch.eye(4).view(1, 1, 4, 4), is_causal=True)[0, 0]
    assert not torch.allclose(rows, top_left)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])
def test_attend_equals_a_float64_derivation(T: int) -> None:
    B, H, K, D, S = 2, 6, 2, 8, 200
    generator = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(B, heads, n, D, generator=generator) for heads, n in ((H, T), (K, S), (K, S)))
    padding = torch.tensor([0, 17])
    wide_k, wide_v = (t.double().repeat_interleave(H // K, dim=1) for t in (k, v))
    scores = q.double() @ wide_k.transpose(-1, -2) / D**0.5
    visible = torch.arange(S) <= torch.arange(S - T, S)[:, None]
    for pads in (None, padding):
        allowed = visible.expand(B, 1, T, S)
        if pads is not None:
            allowed = allowed & (torch.arange(S) >= pads[:, None])[:, None, None, :]
        want = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num() @ wide_v
        got = attend(q, k, v, scale=D**-0.5, padding=pads)
        real = allowed.any(-1).expand(B, H, T)  # a row that sees nothing is a pad: finite, otherwise unspecified
        assert torch.isfinite(got).all()
        assert (got.double() - want)[real].abs().max() < 2e-6


def test_c03_query_head_reads_its_group() -> None:
    q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 5, 8)
    v = torch.arange(2.0).view(1, 2, 1, 1).expand(1, 2, 5, 8)
    for padding in (None, torch.tensor([1])):  # both code paths
        assert attend(q, k, v, scale=1.0, padding=padding)[0, :, 0, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("time", [2, 5])
def test_c04_sequence_as_long_as_the_kv_heads(time: int, pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    tokens = random_tokens(2, time)
    assert_close(feed(model, tokens, [1] * time), reference_logits(reference, tokens))


@pytest.mark.parametrize("wrong", ["tile", "top_left"])
def test_wrong_variants_would_be_caught(
    wrong: str, pair: tuple[torch.nn.Module, tbt.Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, model = pair

    def bad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, padding: Any = None) -> torch.Tensor:
        G = q.shape[1] // k.shape[1]
        wide = (lambda t: t.repeat(1, G, 1, 1)) if wrong == "tile" else (lambda t: t.repeat_interleave(G, dim=1))
        T, S = q.shape[2], k.shape[2]
        offset = S - T if wrong == "tile" else 0
        mask = torch.arange(S) <= torch.arange(T)[:, None] + offset
        return F.scaled_dot_product_attention(q, wide(k), wide(v), attn_mask=mask, scale=scale)

    monkeypatch.setattr("tokenbytoken.layers.attention.attend", bad)
    tokens = random_tokens(1, 33)
    assert_differs(feed(model, tokens, uneven(33), 3), reference_logits(reference, tokens))


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[38], [3, 35], uneven(38), [1] * 38])
def test_c01_left_padded_rows_equal_their_solo_runs(
    chunks: list[int], pair: tuple[torch.nn.Module, tbt.Decoder]
) -> None:
    reference, model = pair
    short, long = random_tokens(1, 33, seed=1), random_tokens(1, 38, seed=2)
    batch = torch.cat([F.pad(short, (5, 0)), long])
    got = feed(model, batch, chunks, 3, padding=[5, 0])  # [3, …]: the first chunk of row 0 is all pads
    assert torch.isfinite(got).all()
    assert_close(got[:1, 5:], reference_logits(reference, short))
    assert_close(got[1:], reference_logits(reference, long))


def test_c01_decode_after_a_padded_prefill(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (33, 38)]
    solo = [tbt.generate(model, prompt, 8) for prompt in prompts]
    assert tbt.generate(model, prompts, 8) == solo
    for prompt, new in zip(prompts, solo, strict=True):
        assert greedy_by_reference(reference, prompt, 8) == new


def greedy_by_reference(reference: torch.nn.Module, prompt: list[int], steps: int) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(reference_logits(reference, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_positions_counted_from_the_padded_length_would_be_caught(
    pair: tuple[torch.nn.Module, tbt.Decoder],
) -> None:
    reference, model = pair
    short = random_tokens(1, 34, seed=1)
    state = model.new_state(1, 39, padding=[5])
    model(F.pad(short[:, :-1], (5, 0)), state)
    keys = caches_of(state)[0]["k"]
    keys[:, :, :38] = keys[:, :, :38].roll(1, dims=2)  # one position off
    assert_differs(model(short[:, -1:], state), reference_logits(reference, short)[:, -1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_c08_padding_never_makes_nan(dtype: torch.dtype, pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    model = tbt.Decoder(pair[1].config).to(dtype)
    model.load_state_dict({name: t.to(dtype) for name, t in pair[1].state_dict().items()})
    seen: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: seen.append(out)) for layer in model.layers]
    state = model.new_state(2, 20, padding=[5, 0])
    model(random_tokens(2, 12), state)
    model(random_tokens(2, 1), state)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 6
    assert all(torch.isfinite(x).all() for x in seen)


# --- state ----------------------------------------------------------------------------------------


def test_state_bytes_equal_the_closed_form(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    state = model.new_state(3, 40)
    assert state.nbytes == tbt.state_bytes(model.config, 3, 40, bytes_per_element=4)
    assert state.nbytes == sum(t.numel() * t.element_size() for t in held_by(state))
    assert state.nbytes_used == 0
    model(random_tokens(3, 7), state)
    assert state.length == 7
    assert state.nbytes_used == tbt.state_bytes(model.config, 3, 7, bytes_per_element=4)
    assert state.nbytes_used == 3 * 7 * tbt.state_bytes_per_token(model.config, bytes_per_element=4)


def test_cached_keys_are_not_expanded(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    state = pair[1].new_state(1, 8)
    assert caches_of(state)[0]["k"].shape == (1, 2, 8, 16)  # 2 key/value heads, not 4 query heads


def test_c09_a_fork_leaves_the_original_alone(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    prefix, first, second = random_tokens(1, 9), random_tokens(1, 5, seed=1), random_tokens(1, 6, seed=2)
    state = model.new_state(1, 16)
    model(prefix, state)
    kept = [t.clone() for t in held_by(state)]
    one = model(first, state.copy())
    model(second, state.copy())
    again = model(first, state.copy())
    assert torch.equal(one, again)
    assert state.length == 9
    assert all(map(torch.equal, held_by(state), kept))


def test_rewind_forgets_what_came_after(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    tokens = random_tokens(2, 20)
    state = model.new_state(2, 24, padding=[3, 0])
    model(tokens[:, :8], state)
    mark = state.mark()
    want = model(tokens[:, 8:], state)
    state.rewind(mark)
    model(random_tokens(2, 9, seed=5), state)
    state.rewind(mark)
    assert state.length == 8
    assert torch.equal(model(tokens[:, 8:], state), want)


def test_select_and_concat_keep_every_row(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    lengths = [4, 11, 7]
    rows = [random_tokens(1, n + 1, seed=n) for n in lengths]
    states = []
    for row, n in zip(rows, lengths, strict=True):
        state = model.new_state(1, 16)
        model(row[:, :n], state)
        states.append(state)
    joined = tbt.DecoderState.concat(states)
    assert (joined.length, joined.padding.tolist()) == (11, [7, 0, 4])
    newest = torch.cat([row[:, -1:] for row in rows])
    got = model(newest, joined.copy())
    for i, row in enumerate(rows):
        assert_close(got[i : i + 1, -1], reference_logits(reference, row)[:, -1])
    chosen = joined.select([2, 0])
    assert (chosen.length, chosen.padding.tolist()) == (7, [0, 3])  # columns nobody needs are gone
    got = model(newest[[2, 0]], chosen)
    for i, row in enumerate((rows[2], rows[0])):
        assert_close(got[i : i + 1, -1], reference_logits(reference, row)[:, -1])
    # A state with padding can join another batch.
    again = tbt.DecoderState.concat([joined.select([0]), joined.select([1, 2])], max_length=12)
    assert (again.length, again.max_length, again.padding.tolist()) == (11, 12, [7, 0, 4])
    assert_close(model(newest, again), model(newest, joined))


def test_a_failing_pass_leaves_the_state_as_it_was(
    pair: tuple[torch.nn.Module, tbt.Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair
    tokens = random_tokens(1, 9)
    state = model.new_state(1, 12)
    model(tokens[:, :4], state)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[2].feed_forward, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens[:, 4:], state)
    assert state.length == 4
    assert_close(model(tokens[:, 4:], state), model(tokens)[:, 4:])


def test_c54_calls_do_not_leak_into_each_other(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    a, b = random_tokens(1, 6, seed=1), random_tokens(1, 6, seed=2)
    fresh = model(b)
    model(a)
    model(a, model.new_state(1, 6))
    assert torch.equal(model(b), fresh)


# --- logits, norms, dtypes ------------------------------------------------------------------------


def test_logits_modes(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    tokens = random_tokens(2, 6)
    every = model(tokens)
    assert every.shape == (2, 6, 97)
    assert_close(model(tokens, logits="last"), every[:, -1:])
    hidden = model(tokens, logits="none")
    assert hidden.shape == (2, 6, 64)
    assert_close(model.head(model.norm(hidden)), every)
    heads: list[int] = []
    hook = model.head.register_forward_hook(lambda _m, inputs, _o: heads.append(inputs[0].shape[1]))
    state = model.new_state(2, 20)
    model(tokens, state, logits="none")
    model(tokens, state, logits="last")
    hook.remove()
    assert heads == [1]  # no row more than is used


def test_c07_norm_in_low_precision() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator).bfloat16()
    theirs = LlamaRMSNorm(128, eps=1e-5).bfloat16()
    theirs.weight.data = (torch.rand(128, generator=generator) + 0.5).bfloat16()
    mine = RMSNorm(128, eps=1e-5).bfloat16()
    mine.weight.data = theirs.weight.data.clone()
    assert torch.equal(mine(x), theirs(x))
    late = F.rms_norm(x.float(), (128,), mine.weight.float(), 1e-5).bfloat16()
    assert (late != theirs(x)).float().mean() > 0.1  # the other order of rounding is another function

    half = RMSNorm(8, eps=1e-5).half()
    assert torch.allclose(half(torch.full((8,), 300.0).half()).float(), torch.ones(8), atol=1e-3)
    assert torch.equal(half(torch.zeros(8).half()), torch.zeros(8).half())
    tiny = RMSNorm(8, eps=1e-5)(torch.full((8,), 1e-4))
    assert torch.allclose(tiny, torch.full((8,), 0.0316070), atol=1e-6)


def test_bfloat16_follows_transformers(tmp_path: Path) -> None:
    reference = llama().bfloat16()
    reference.save_pretrained(tmp_path)
    model = tbt.load(tmp_path, dtype=torch.bfloat16)
    tokens = random_tokens(2, 24)
    got, want = model(tokens).float(), reference_logits(reference, tokens).float()
    assert model(tokens).dtype == torch.bfloat16
    # Eight bits of mantissa: 2⁻⁸ per rounding, a few dozen roundings on the way.
    assert_close(got, want, relative=0.05)
    assert_differs(got, reference_logits(llama(seed=1), tokens), relative=0.2)


def test_float64_is_exact_to_1e_10(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    import copy

    model = copy.deepcopy(pair[1]).double()
    tokens = random_tokens(2, 40)
    whole = model(tokens)
    for chunks in ([1] * 40, uneven(40)):
        assert (feed(model, tokens, chunks) - whole).abs().max() < 1e-10


# --- structure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b", "llama-2-7b",
                                 "llama-2-70b", "smollm2-135m", "deepseek-67b"])  # fmt: skip
def test_published_sizes_from_modules_on_the_meta_device(key: str) -> None:
    config = tbt.published[key]
    with torch.device("meta"):
        model = tbt.Decoder(config)
        assert sum(p.numel() for p in model.parameters()) == tbt.count_parameters(config).total
        state = model.new_state(2, 1000)
    assert state.nbytes == tbt.state_bytes(config, 2, 1000, bytes_per_element=4)


def test_decoder_knows_no_architecture() -> None:
    @dataclasses.dataclass(frozen=True)
    class EchoConfig:
        module: str = f"{__name__}:Echo"

    config = tbt.DecoderConfig.from_hf({"model_type": "llama", **T_LLAMA})
    layer = tbt.LayerConfig(mixer=EchoConfig(), feed_forward=None)  # type: ignore[arg-type]
    model = tbt.Decoder(dataclasses.replace(config, layers=(layer,)))
    assert model(random_tokens(1, 3)).shape == (1, 3, 97)
    nowhere = EchoConfig(module="tokenbytoken.nowhere:Nothing")
    missing = dataclasses.replace(layer, mixer=nowhere)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="EchoConfig"):
        tbt.Decoder(dataclasses.replace(config, layers=(missing,)))


class Echo(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, step: Any, layer_state: Any) -> torch.Tensor:
        return x


# --- bad input ------------------------------------------------------------------------------------


def test_bad_passes_are_refused_and_change_nothing(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    state = model.new_state(2, 10)
    model(random_tokens(2, 6), state)
    before = [t.clone() for t in held_by(state)]
    for tokens, words in [
        (random_tokens(2, 5), "holds 6 of at most 10"),  # C10
        (random_tokens(3, 1), "made for 2"),
        (torch.zeros(2, 0, dtype=torch.int64), "empty"),
        (torch.zeros(0, 2, dtype=torch.int64), "empty"),
        (torch.tensor([[1], [97]]), "token id 97 .* vocabulary of 97"),
        (torch.tensor([[1], [-1]]), "token id -1"),
        (torch.zeros(2, dtype=torch.int64), r"\(batch, time\)"),
        (torch.zeros(2, 1), "int64"),
        ([[1], [2]], "a tensor of ids, not list"),
    ]:
        with pytest.raises(ValueError, match=words):
            model(tokens, state)
    with pytest.raises(ValueError, match="logits"):
        model(random_tokens(2, 1), state, logits="some")
    assert state.length == 6
    assert all(map(torch.equal, held_by(state), before))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0, "max_length": 4}, "batch_size"),
        ({"batch_size": 1, "max_length": 0}, "max_length"),
        ({"batch_size": 2, "max_length": 4, "padding": [-1, 0]}, "negative"),
        ({"batch_size": True, "max_length": 4}, "batch_size must be a positive integer, not True"),
        ({"batch_size": 1, "max_length": 2**50}, "no memory for a state of 1 × 1125899906842624 tokens"),
        ({"batch_size": 1, "max_length": 4.0}, "max_length must be a positive integer, not 4.0"),
        ({"batch_size": 2, "max_length": 4, "padding": [4, 0]}, "no room"),
        ({"batch_size": 2, "max_length": 4, "padding": [1]}, "2 rows"),
        ({"batch_size": 1, "max_length": 4, "padding": [0.5]}, "integers"),
    ],
)
def test_bad_states_are_refused(
    arguments: dict[str, Any], words: str, pair: tuple[torch.nn.Module, tbt.Decoder]
) -> None:
    with pytest.raises(ValueError, match=words):
        pair[1].new_state(**arguments)


def test_integers_of_numpy_make_a_state(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    numbers: list[Any] = [np.int64(2), np.int32(10), np.int64(7)]
    two, ten, seven = numbers
    state = model.new_state(two, ten)
    model(random_tokens(2, 6), state)
    fork = state.copy(seven)
    assert [type(n) for n in (state.batch_size, state.max_length, fork.max_length)] == [int, int, int]
    assert (fork.nbytes, fork.length) == (state.nbytes * 7 // 10, 6)
    for bad in (True, 8.0):
        with pytest.raises(ValueError, match="max_length must be a positive integer"):
            state.copy(bad)  # type: ignore[arg-type]


def test_bad_marks_copies_and_joins_are_refused(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    state = model.new_state(2, 10)
    start = state.mark()
    model(random_tokens(2, 6), state)
    late = state.mark()
    state.rewind(start)
    for call, words in [
        (lambda: state.rewind(late), "holds only 0"),
        (lambda: state.rewind(model.new_state(2, 10).mark()), "another state's"),
        (lambda: state.select([]), "non-empty"),
        (lambda: state.select([2]), "0 … 1"),
        (lambda: tbt.DecoderState.concat([]), "empty"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    model(random_tokens(2, 6), state)
    for call in (lambda: state.copy(5), lambda: state.select([0], 5), lambda: tbt.DecoderState.concat([state], 5)):
        with pytest.raises(ValueError, match="max_length 5 is too short"):
            call()
    assert state.length == 6


def test_marks_are_void_after_a_deeper_rewind(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    state = model.new_state(1, 12)
    start = state.mark()
    model(random_tokens(1, 3), state)
    stale = state.mark()
    state.rewind(start)
    model(random_tokens(1, 4, seed=1), state)  # length 4 ≥ 3, but what the mark described is gone
    with pytest.raises(ValueError, match="another state's, or lies behind"):
        state.rewind(stale)
    state.rewind(start)
    assert state.length == 0


def test_states_serve_only_models_like_theirs(pair: tuple[torch.nn.Module, tbt.Decoder], tmp_path: Path) -> None:
    _, model = pair
    mqa = ours(llama(num_key_value_heads=1), tmp_path)
    with pytest.raises(ValueError, match="other layers or another dtype"):
        mqa(random_tokens(1, 2), model.new_state(1, 4))
    half = tbt.load(tmp_path, dtype=torch.float16)
    with pytest.raises(ValueError, match="different layers or dtype"):
        tbt.DecoderState.concat([mqa.new_state(1, 4), half.new_state(1, 4)])


def test_padding_and_rows_are_taken_by_value(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    padding = torch.tensor([0, 2])
    state = model.new_state(2, 8, padding)
    padding.zero_()
    assert state.padding.tolist() == [0, 2]
    model(random_tokens(2, 4), state)
    rows: Any = torch.tensor([1, 0])
    assert state.select(rows).padding.tolist() == [2, 0]
    with pytest.raises(ValueError, match="rows"):
        state.select([True, False])
