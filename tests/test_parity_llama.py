"""Llama under fuzz: random configs, chunkings, paddings and rope scalings against transformers in float32.

The tolerance is relative to the largest logit, and is 1e-4 where one fixed shape (test_decoder.py) needs 2e-5:
transformers forms its frequencies in float32, this package in float64. A frequency then differs in its last place
(6e-8), an angle at position 90 by 5e-6, and a score by that much of its size, which is ten and more in the wider of
these models. A test below shows that this is all: with the other table's frequencies the difference is gone. A wrong
variant is asked to miss by a thousand times the tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import assert_close, assert_differs, assert_rows_close, feed, llama, random_tokens, reference_logits
from fuzz import cut, equals_however_fed, fuzz, left_padded, pair
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenbytoken as tbt
from tokenbytoken.layers.rope import rotate, rotation

TOLERANCE, MISS = 1e-4, 1e-1

ROPES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "plain": st.just({"rope_type": "default"}),
    # Originals so short that the tokens below stand on both sides of them.
    "llama3-8": st.fixed_dictionaries(
        {"rope_type": st.just("llama3"), "factor": st.just(8.0), "low_freq_factor": st.just(1.0),
         "high_freq_factor": st.sampled_from([2.0, 4.0]), "original_max_position_embeddings": st.sampled_from([16, 32])}
    ),
    "llama3-32": st.fixed_dictionaries(  # Llama 3.2's
        {"rope_type": st.just("llama3"), "factor": st.just(32.0), "low_freq_factor": st.just(1.0),
         "high_freq_factor": st.just(4.0), "original_max_position_embeddings": st.sampled_from([16, 32])}
    ),
    "yarn": st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": st.sampled_from([4.0, 40.0]),
         "beta_fast": st.sampled_from([4.0, 32.0]), "original_max_position_embeddings": st.sampled_from([16, 32])}
    ),
}  # fmt: skip


@st.composite
def llamas(draw: st.DrawFn, rope: str, *, grouped: bool = False, least_head_dim: int = 4) -> dict[str, Any]:
    """A config of transformers: MHA, GQA or MQA (``grouped``: only GQA), tied or not, any head width."""
    kv_heads = draw(st.integers(2 if grouped else 1, 4))
    heads = kv_heads * draw(st.integers(2 if grouped else 1, 4))
    width = draw(st.sampled_from([d for d in (4, 6, 8, 10, 16, 32) if least_head_dim <= d <= 128 // heads]))
    explicit = draw(st.booleans())
    return {
        "hidden_size": heads * draw(st.sampled_from([4, 6, 8])) if explicit else heads * width,
        "head_dim": width if explicit else None,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "intermediate_size": draw(st.sampled_from([24, 40, 96])),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_theta": draw(st.sampled_from([1e4, 5e5])), **draw(ROPES[rope])},
    }


@pytest.mark.parametrize("rope", ROPES)
@settings(fuzz, max_examples=20)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_random_llamas_equal_transformers_however_they_are_fed(rope: str, data: st.DataObject, seed: int) -> None:
    reference, model = pair(llama, data.draw(llamas(rope)), seed)
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(40, 90))
    tokens = random_tokens(batch, length, seed=seed)
    equals_however_fed(reference, model, tokens, cut(data, length), TOLERANCE)


@pytest.mark.parametrize("rope", ROPES)
@settings(fuzz, max_examples=12)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_left_padded_rows_of_random_llamas_equal_their_solo_runs(rope: str, data: st.DataObject, seed: int) -> None:
    reference, model = pair(llama, data.draw(llamas(rope)), seed)
    length = data.draw(st.integers(36, 70))
    padding = [0, *data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=2))]
    rows, batch = left_padded(length, padding, seed)
    want = [reference_logits(reference, row) for row in rows]
    chunks = [length - 5, 1, 1, 1, 1, 1]  # a prefill and steps, then any chunks
    for got in (feed(model, batch, sizes, padding=padding) for sizes in (chunks, cut(data, length))):
        assert_rows_close(got, want, padding, TOLERANCE)


@pytest.mark.parametrize("rope", ROPES)
@settings(fuzz, max_examples=6)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_nothing_but_the_rounding_of_frequencies_is_left(rope: str, data: st.DataObject, seed: int) -> None:
    reference, model = pair(llama, data.draw(llamas(rope)), seed)
    tokens = random_tokens(2, 90, seed=seed)
    theirs = reference.get_buffer("model.rotary_emb.inv_freq")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenbytoken.layers.rope._frequencies_on", lambda *_: theirs)
        assert_close(model(tokens), reference_logits(reference, tokens), 5e-6)


def test_the_fuzz_reaches_every_kind_of_llama() -> None:
    kinds: set[str] = set()

    @settings(fuzz, max_examples=80)
    @given(llamas("plain"))
    def collect(config: dict[str, Any]) -> None:
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        kinds.add("MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else "GQA")
        kinds.add("tied" if config["tie_word_embeddings"] else "untied")
        kinds.add("own head_dim" if config["head_dim"] else "hidden size ÷ heads")
        if config["head_dim"] and config["head_dim"] * heads != config["hidden_size"]:  # C11
            kinds.add("heads × head_dim is not the hidden size")

    collect()
    assert kinds == {"MHA", "GQA", "MQA", "tied", "untied", "own head_dim", "hidden size ÷ heads",
                     "heads × head_dim is not the hidden size"}  # fmt: skip


# --- wrong variants: each is patched into the package, and the comparison above must fail --------------


def attention(*, tiled: bool = False, top_left: bool = False) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, padding: Any = None) -> torch.Tensor:
        assert padding is None
        T, S, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        k, v = (t.repeat(1, group, 1, 1) if tiled else t.repeat_interleave(group, 1) for t in (k, v))
        seen = torch.arange(S) <= torch.arange(T)[:, None] + (0 if top_left else S - T)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)

    return attend


def unscaled(rope: tbt.RopeConfig, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return rotation(dataclasses.replace(rope, scaling=None), *args)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, _: bool = False) -> torch.Tensor:
    return rotate(x, cos, sin, interleaved=True)


WRONG: dict[str, tuple[str, Any, str]] = {  # what is replaced, by what, on which rope
    "key/value heads tiled (repeat for repeat_interleave)": ("layers.attention.attend", attention(tiled=True), "plain"),
    "mask aligned top-left": ("layers.attention.attend", attention(top_left=True), "plain"),
    "interleaved for half-split rotation": ("decoder.rotate", interleaved, "plain"),
    "Llama 3.1's scaling forgotten": ("decoder.rotation", unscaled, "llama3-8"),
    "Llama 3.2's scaling forgotten": ("decoder.rotation", unscaled, "llama3-32"),
    "YaRN forgotten": ("decoder.rotation", unscaled, "yarn"),
}


@pytest.mark.parametrize("wrong", WRONG)
@settings(fuzz, max_examples=10)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_a_wrong_variant_is_caught_on_every_config(wrong: str, data: st.DataObject, seed: int) -> None:
    name, replacement, rope = WRONG[wrong]
    # Only GQA tells tiled from grouped; pairs (0, 1) and (0, d/2) are other pairs from four numbers on.
    config = data.draw(llamas(rope, grouped=True, least_head_dim=8))
    reference, model = pair(llama, config, seed)
    tokens = random_tokens(1, 60, seed=seed)
    want = reference_logits(reference, tokens)
    chunks = [33, 1, 7, 19]
    assert_close(feed(model, tokens, chunks), want, TOLERANCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"tokenbytoken.{name}", replacement)
        assert_differs(feed(model, tokens, chunks), want, MISS)
    assert_close(feed(model, tokens, chunks), want, TOLERANCE)  # nothing was left patched


def test_the_attention_that_the_wrong_variants_change_is_right_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, model = pair(llama, {}, 0)
    tokens = random_tokens(2, 60)
    monkeypatch.setattr("tokenbytoken.layers.attention.attend", attention())
    assert_close(feed(model, tokens, [33, 1, 7, 19]), reference_logits(reference, tokens), TOLERANCE)
