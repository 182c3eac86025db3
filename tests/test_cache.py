"""The one cache: series that grow along time, in any format, of keys and values and of latents alike."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import families
import pytest
import torch
from torch import Tensor

import tokenbytoken as tbt
from tokenbytoken.checkpoints import OneByte
from tokenbytoken.decoder import LayerState
from tokenbytoken.layers.cache import PLAIN, Cache, Format

FORMATS = ["e4m3", "e5m2", "int8"]
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
SHAPES = {
    "heads": {"model_type": "llama", **families.T_LLAMA},
    "latents": {"model_type": "deepseek_v3", **families.T_DSV3, "kv_lora_rank": 200},  # two tiles, the second ragged
    "hybrid": {"model_type": "jamba", **families.T_JAMBA},
}
RANK, ROPE = 200, 8


def decoder(kind: str) -> tbt.Decoder:
    return families.redraw(tbt.Decoder(tbt.DecoderConfig.from_hf(SHAPES[kind])))


@pytest.fixture(scope="module", params=["heads", "latents"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str) -> tbt.Decoder:
    return decoder(kind)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


# --- a cache by itself ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Halves:
    """A format of the test's own: the rounded number, and in bfloat16 what rounding left over."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return torch.zeros(*shape, dtype=torch.int16, device=device), torch.zeros(*shape, dtype=torch.bfloat16)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.round().to(torch.int16), (x - x.round()).to(torch.bfloat16)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype) + parts[1].to(dtype)


# Of one cache, with and without a head axis.
SERIES: dict[str, tuple[int, ...]] = {"k": (2, 3, 9, 4), "v": (2, 3, 9, 6), "index": (2, 9, 5)}


def filled(format: Format, tokens: int = 7, rows: int = 2, seed: int = 0) -> tuple[Cache, dict[str, Tensor]]:
    shapes = {name: (rows, *shape[1:]) for name, shape in SERIES.items()}
    cache = Cache.empty(torch.float32, "cpu", format, **shapes)
    new = {
        name: normal(*shape[:-2], tokens, shape[-1], seed=seed + i) for i, (name, shape) in enumerate(shapes.items())
    }
    cache.append(0, **new)
    return cache, new


def test_a_plain_cache_is_the_tensors_themselves_and_reading_copies_nothing() -> None:
    cache, new = filled(PLAIN)
    end = {name: normal(*x.shape[:-2], 2, x.shape[-1], seed=9) for name, x in new.items()}
    held = cache.append(7, v=end["v"], index=end["index"], k=end["k"])  # in an order of the caller's
    for name, x in zip(("v", "index", "k"), held, strict=True):
        assert torch.equal(x, torch.cat((new[name], end[name]), dim=-2))
        assert x.data_ptr() == cache[name].data_ptr() == cache.parts[name][0].data_ptr()
        assert cache[name].shape == SERIES[name]
    assert cache.nbytes() == 4 * 2 * 9 * (3 * 4 + 3 * 6 + 5)
    assert cache.nbytes(2) * 9 == cache.nbytes() * 2
    layer: LayerState = cache
    layer.rewind(layer.mark())
    assert torch.equal(cache["k"][:, :, 7:], end["k"])


@pytest.mark.parametrize("format", [PLAIN, Halves(), OneByte("int8", 4), OneByte("e4m3", 3, 1)], ids=str)
def test_series_of_any_shape_and_format_are_cut_moved_and_joined(format: Format) -> None:
    cache, new = filled(format)
    whole, parts = Cache.empty(torch.float32, "cpu", format, **SERIES), []
    for start, end in ((0, 3), (3, 4), (4, 7)):
        parts = list(whole.append(start, **{name: x[..., start:end, :] for name, x in new.items()}))
    for name, read in zip(new, parts, strict=True):
        assert torch.equal(read, cache[name][..., :7, :])  # chunks equal the whole
        families.assert_close(read, new[name], 0.1)
        assert cache[name][..., 7:, :].eq(0).all()
    moved = cache.gather([1, 0, 1], 2, 7, 8, 1)
    for name, old in ((name, cache[name]) for name in SERIES):
        assert moved[name].shape == (3, *old.shape[1:-2], 8, old.shape[-1])
        assert torch.equal(moved[name][..., 1:6, :], old[[1, 0, 1]][..., 2:7, :])
        assert moved[name][..., :1, :].eq(0).all()
        assert moved[name][..., 6:, :].eq(0).all()
    other, _ = filled(format, rows=1, seed=5)
    joined = Cache.concat([cache, other])
    for name in SERIES:
        assert torch.equal(joined[name], torch.cat((cache[name], other[name])))
    assert joined.nbytes() == cache.nbytes() + other.nbytes()
    for made in (moved, joined):
        assert (made.format, made.dtype) == (format, torch.float32)
        for name in SERIES:
            assert [part.dtype for part in made.parts[name]] == [part.dtype for part in cache.parts[name]]


def test_a_token_without_one_of_its_series_is_refused() -> None:
    cache, new = filled(PLAIN)
    with pytest.raises(ValueError, match="a token has k, v, index in this cache, not k, v"):
        cache.append(7, k=new["k"][:, :, :1], v=new["v"][:, :, :1])
    with pytest.raises(ValueError, match="not k, v, index, x"):
        cache.append(7, **new, x=new["k"])
    assert cache["k"][:, :, 7:].eq(0).all()


def test_each_token_and_head_has_the_scale_of_its_own_largest_number() -> None:
    cache = Cache.empty(torch.float32, format=OneByte("int8", 16), k=(1, 2, 4, 16))
    k = normal(1, 2, 3, 16)
    k[0, 1, 2] *= 1000
    (got,) = cache.append(0, k=k)
    assert torch.equal(cache.parts["k"][1][:, :, :3, 0], k.abs().amax(-1) / 127)
    assert ((got - k).abs() <= k.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-6)).all()


# --- of a model -------------------------------------------------------------------------------------------


def test_another_cache_is_another_decoder_on_the_same_weights(kind: str) -> None:
    model = decoder(kind)
    tokens = families.random_tokens(1, 9)
    plain_kind, want = model.kind, model(tokens)
    small = tbt.quantize_cache(model, "int8")
    assert model.kind == plain_kind
    assert small.kind != plain_kind
    assert {cache.format for cache in families.caches_of(model.new_state(1, 4))} == {PLAIN}
    assert tbt.quantize_cache(small, None).kind == plain_kind
    assert small.kind == tbt.quantize_cache(model, "int8").kind  # formats are equal when their values are
    assert [p.data_ptr() for p in small.parameters()] == [p.data_ptr() for p in model.parameters()]
    half = small.to(torch.bfloat16)  # a cast makes memory of its own
    assert torch.equal(model(tokens), want)
    assert half(tokens).dtype == torch.bfloat16


def test_weights_that_are_trained_stay_trainable_and_tied_ones_tied() -> None:
    shape = {"model_type": "llama", **families.T_LLAMA, "tie_word_embeddings": True}
    model = tbt.Decoder(tbt.DecoderConfig.from_hf(shape))
    small = tbt.quantize_cache(model)
    assert small.head.weight is small.embed.weight
    assert all(p.requires_grad for p in small.parameters())
    assert not any(p.requires_grad for p in tbt.quantize_model(model).parameters())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("format", FORMATS)
def test_a_one_byte_cache_holds_the_bytes_of_the_formula(model: tbt.Decoder, kind: str, format: str) -> None:
    small = tbt.quantize_cache(model, format)
    state = small.new_state(3, 50)
    if kind == "heads":
        scales = 4 * 2 * 3 * 2 * 50 * 3  # float32, keys and values, 3 layers, 2 KV heads, tokens, rows
        one_byte = tbt.state_bytes(small.config, 3, 50, bytes_per_element=1)
        assert state.nbytes == one_byte + scales == tbt.state_bytes(small.config, 3, 50, 1 + 4 / 16)
    else:
        assert state.nbytes == 3 * 3 * 50 * (RANK + 4 * 2 + 4 * ROPE)
    held = sum(t.nbytes for t in families.held_by(state))
    assert held == state.nbytes
    state.length = 7
    assert state.nbytes_used * 50 == state.nbytes * 7


def test_a_token_of_deepseek_v3_takes_656_bytes_a_layer_as_in_flashmla() -> None:
    config = tbt.published["deepseek-v3"]
    with torch.device("meta"):
        model = tbt.quantize_cache(tbt.Decoder(config).to(torch.bfloat16))
        state = model.new_state(3, 50)
    assert {layer.nbytes(1) for layer in state.layers} == {3 * (512 + 4 * 4 + 2 * 64)} == {3 * 656}
    assert state.nbytes == 3 * 50 * 40_016
    assert sum(t.nbytes for t in families.held_by(state)) == state.nbytes
    state.length = 7
    assert state.nbytes_used * 50 == state.nbytes * 7


@pytest.mark.parametrize("format", FORMATS)
def test_the_latent_cache_holds_torchs_own_casts_and_the_rotated_key_untouched(format: str) -> None:
    model = decoder("latents")
    tokens = families.random_tokens(2, 9)
    small = tbt.quantize_cache(model, format)
    plain, state = model.new_state(2, 12), small.new_state(2, 12)
    model(tokens, plain), small(tokens, state)
    # The first layer sees the same input in both; later ones already read rounded latents.
    first, first_plain = families.caches_of(state)[0], families.caches_of(plain)[0]
    codes, scales, rotary_key = first.parts["latent"]
    read, want = (cache["latent"][:, :9] for cache in (first, first_plain))
    assert torch.equal(rotary_key[:, :9], want[..., RANK:])
    assert torch.equal(read[..., RANK:], want[..., RANK:])
    for tile, width in ((0, 128), (1, 72)):
        span = slice(128 * tile, 128 * tile + width)
        scale = want[..., span].abs().amax(-1) / LARGEST[format]
        assert torch.equal(scales[:, :9, tile], scale)
        ratio = want[..., span] / scale[..., None]
        rounded = ratio.round() if format == "int8" else ratio.clamp(-LARGEST[format], LARGEST[format])
        assert torch.equal(codes[:, :9, span].float(), rounded.to(DTYPES[format]).float())
        assert torch.equal(read[..., span], codes[:, :9, span].float() * scale[..., None])
    assert codes.dtype == DTYPES[format]


@pytest.mark.parametrize("format", FORMATS)
def test_chunks_equal_the_whole_and_the_error_is_that_of_one_byte(model: tbt.Decoder, kind: str, format: str) -> None:
    tokens = families.random_tokens(2, 20)
    want = model(tokens)
    small = tbt.quantize_cache(model, format).double()  # in float32 a last bit moves a number to the next code
    logits = []
    for form in ("absorbed", "expanded") if kind == "latents" else ("",):
        for layer in small.layers if form else ():
            mixer: Any = layer.mixer
            mixer.form = form
        logits.append(small(tokens, small.new_state(2, 20)))
        families.assert_close(families.feed(small, tokens, families.uneven(20)), logits[-1], 1e-9)
    families.assert_close(logits[0], logits[-1], 1e-9)
    error = ((logits[0] - want).norm() / want.norm()).item()
    largest = {"heads": {"e4m3": 0.25, "e5m2": 0.5, "int8": 0.08}, "latents": {"e4m3": 0.3, "e5m2": 0.6, "int8": 0.15}}
    assert 1e-3 < error < largest[kind][format]


@pytest.mark.parametrize("format", FORMATS)
def test_states_are_marked_copied_selected_joined_and_padded(model: tbt.Decoder, format: str) -> None:
    small = tbt.quantize_cache(model, format).double()
    a, b, more = (families.random_tokens(*shape, seed=i) for i, shape in enumerate(((2, 6), (1, 9), (1, 3))))
    one, two = small.new_state(2, 16), small.new_state(1, 16)
    small(a, one), small(b, two)
    want = [small(more, one.copy().select([i])) for i in (0, 1)]
    mark = one.mark()
    small(more.expand(2, -1), one)
    one.rewind(mark)
    joined = tbt.DecoderState.concat([one, two])
    assert joined.nbytes == one.nbytes + two.nbytes
    assert joined.padding.tolist() == [3, 3, 0]
    unpadded = joined.select([1])  # three columns of pads are dropped
    assert unpadded.length == 6
    families.assert_close(small(more, unpadded), want[1], 1e-9)
    got = small(more.expand(3, -1), joined)
    for i in (0, 1):
        families.assert_close(got[i : i + 1], want[i], 1e-9)
    families.assert_close(got[2:], small(more, two), 1e-9)
    held = families.caches_of(joined)
    assert {parts[0].dtype for cache in held for parts in cache.parts.values()} == {DTYPES[format]}


def test_a_state_is_refused_by_a_model_with_another_cache(model: tbt.Decoder) -> None:
    tokens = families.random_tokens(1, 4)
    models = {format: tbt.quantize_cache(model, format) for format in (None, *FORMATS)}
    states = {format: small.new_state(1, 8) for format, small in models.items()}
    for held, state in states.items():
        for format, small in models.items():
            if format == held:
                small(tokens, state)
            else:
                with pytest.raises(ValueError, match="cache"):
                    small(tokens, state)
        assert state.length == 4
    with pytest.raises(ValueError, match="other caches"):
        tbt.DecoderState.concat([states["e4m3"], states["int8"]])
    with pytest.raises(ValueError, match="unknown format 'fp4'"):
        tbt.quantize_cache(model, "fp4")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("small", [tbt.quantize_model, tbt.quantize_as], ids=["linears", "recipe"])
def test_a_quantised_model_keeps_the_cache_that_was_chosen(
    model: tbt.Decoder, format: str, small: Callable[..., tbt.Decoder]
) -> None:
    one_byte = small(tbt.quantize_cache(model, format), "int8")  # torch does not pickle FP8
    again = pickle.loads(pickle.dumps(one_byte))
    prompts = families.random_tokens(2, 5).tolist()
    state = again.new_state(2, 12)
    batch = tbt.generate(again, prompts, 4, state=state)
    assert {parts[0].dtype for cache in families.caches_of(state) for parts in cache.parts.values()} == {DTYPES[format]}
    assert batch == [tbt.generate(one_byte, prompt, 4) for prompt in prompts]
    assert families.caches_of(tbt.quantize_cache(one_byte, None).new_state(1, 4))[0].format == PLAIN


def test_a_hybrid_quantises_the_cache_of_its_attention_layers_alone() -> None:
    model = decoder("hybrid")
    small = tbt.quantize_cache(model, "int8")
    plain, state = model.new_state(2, 40), small.new_state(2, 40)
    pairs = zip(plain.layers, state.layers, strict=True)
    caches = [(a, b) for a, b in pairs if isinstance(a, Cache) and isinstance(b, Cache)]
    assert [i for i, a in enumerate(plain.layers) if isinstance(a, Cache)] == [1, 4]
    assert [(a.format, b.format) for a, b in caches] == [(PLAIN, OneByte("int8", 8))] * 2
    attention = 2 * 2 * 2 * 2 * 40  # layers, keys and values, KV heads, rows, tokens
    assert plain.nbytes - state.nbytes == attention * (4 * 8 - 8 - 4)  # 8 numbers a head, a scale
    tokens = families.random_tokens(2, 20)
    want, got = model(tokens), small(tokens, state)
    assert 1e-4 < ((got - want).norm() / want.norm()).item() < 0.05
    with pytest.raises(ValueError, match="no cache to quantise"):
        tbt.quantize_cache(tbt.Decoder(tbt.DecoderConfig.from_hf({"model_type": "mamba", **families.T_MAMBA})))
