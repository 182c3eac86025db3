"""The published models: complete, sourced, and equal to configs that this project did not write."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tokenbytoken.config import DecoderConfig, LatentAttentionConfig, MambaConfig
from tokenbytoken.cost import count_parameters, state_bytes_per_token
from tokenbytoken.models import AttentionShape, provenance, published

NAMES = [
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "llama-3.2-1b",
    "llama-2-7b",
    "llama-2-70b",
    "smollm2-135m",
    "mixtral-8x7b",
    "deepseek-67b",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "jamba-v0.1",
    "jamba-1.5-mini",
    "jamba-1.5-large",
    "mamba-130m",
    "mamba-2.8b",
    "gpt-3",
    "falcon-7b",
    "falcon-40b",
]
SHAPES = {"gpt-3", "falcon-7b", "falcon-40b"}


def test_every_promised_name_is_there() -> None:
    assert list(published) == NAMES
    assert {name for name, entry in published.items() if isinstance(entry, AttentionShape)} == SHAPES
    assert all(entry.name == name for name, entry in published.items())


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_says_where_it_comes_from(name: str) -> None:
    source = provenance[name]
    assert len(source.source) > 20
    assert not re.search(r"/(?:work|tmp|root)\b", source.source + source.note)
    weak = {field for field, confidence in source.fields.items() if confidence != "confirmed"}
    assert not weak or source.note, "a field that nobody confirmed needs a note that says why it is believed"
    # a field inferred from a total must lead to that total: the tests of arithmetic hold the published counts
    assert source.confidence("a field not listed") == source.default


def _defaults(kind: str) -> DecoderConfig:
    """transformers' own default sizes of a model family, read by our reader."""
    import transformers

    return DecoderConfig.from_hf(getattr(transformers, f"{kind}Config")().to_dict())


def test_jamba_equals_transformers_defaults() -> None:
    assert replace(_defaults("Jamba"), name="jamba-v0.1") == published["jamba-v0.1"]


def test_mixtral_equals_transformers_defaults() -> None:
    ours = published["mixtral-8x7b"]
    assert isinstance(ours, DecoderConfig)
    # transformers allows 131,072 positions, the released config 32,768
    assert replace(_defaults("Mixtral"), name=ours.name, max_positions=32768) == ours


def test_mamba_130m_equals_transformers_defaults() -> None:
    ours = published["mamba-130m"]
    assert isinstance(ours, DecoderConfig)
    theirs = _defaults("Mamba")  # the default has 32 layers, mamba-130m has 24
    assert replace(theirs, name=ours.name, layers=theirs.layers[:24]) == ours


def test_deepseek_v3_equals_transformers_defaults() -> None:
    ours, theirs = published["deepseek-v3"], _defaults("DeepseekV3")
    assert isinstance(ours, DecoderConfig)
    assert len(ours.layers) == len(theirs.layers)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.feed_forward == other.feed_forward
        assert isinstance(mine.mixer, LatentAttentionConfig)
        assert isinstance(other.mixer, LatentAttentionConfig)
        assert replace(mine.mixer, rope=other.mixer.rope) == other.mixer  # the default leaves YaRN out
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)


@pytest.mark.parametrize(("hidden", "rank"), [(32, 2), (40, 3), (4096, 256)])
def test_c59_dt_rank_auto_rounds_up(hidden: int, rank: int) -> None:
    fields = {
        "model_type": "jamba",
        "vocab_size": 8,
        "hidden_size": hidden,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "mamba_dt_rank": "auto",
    }
    mixer = DecoderConfig.from_hf(fields).layers[0].mixer
    assert isinstance(mixer, MambaConfig)
    assert mixer.dt_rank == rank


def test_a_multi_token_prediction_module_is_stored_beside_the_model() -> None:
    v3, v2 = published["deepseek-v3"], published["deepseek-v2"]
    assert isinstance(v3, DecoderConfig)
    assert isinstance(v2, DecoderConfig)
    assert (v3.mtp_layers, v3.num_layers, v2.mtp_layers) == (1, 61, 0)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_have_a_state_and_no_parameters(name: str) -> None:
    assert state_bytes_per_token(published[name]) > 0
    with pytest.raises(
        ValueError, match=rf"^{name} is known here by the shape of its attention only \(.+\): its state"
    ):
        count_parameters(published[name])
