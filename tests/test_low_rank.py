"""The experiment that cuts SmolLM2's cache to a low rank: its algebra on a small model, and its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import T_LLAMA, random_tokens

import tokenbytoken as tbt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "experiments"))

import low_rank  # noqa: E402

RECORD: dict[str, Any] = json.loads((ROOT / "book" / "experiments" / "low_rank.json").read_text(encoding="utf-8"))
CASES = {name: entry["perplexity"] for name, entry in RECORD["cases"].items()}


@pytest.fixture
def layer() -> low_rank.Layer:
    """A layer with 2 KV heads of 16 (64 rows on 64 columns) that has seen 96 tokens."""
    torch.manual_seed(0)
    config = tbt.DecoderConfig.from_hf({**T_LLAMA, "model_type": "llama"})
    model = tbt.Decoder(config).requires_grad_(False)
    found = low_rank.Layer(model.layers[1].mixer)
    hook = found.attention.k_proj.register_forward_pre_hook(found.see)
    model(random_tokens(2, 48), logits="none")
    hook.remove()
    return found


def joint(layer: low_rank.Layer) -> torch.Tensor:
    return torch.cat((layer.attention.k_proj.weight, layer.attention.v_proj.weight)).double()


@pytest.mark.parametrize("way", low_rank.WAYS)
def test_a_cut_has_the_rank_asked_for_and_at_full_rank_changes_nothing(layer: low_rank.Layer, way: str) -> None:
    layer.truncate(way, 64)
    assert torch.allclose(joint(layer), layer.joint, atol=1e-6)
    layer.truncate(way, 20)
    values = torch.linalg.svdvals(joint(layer))
    assert values[19] > 1e-3 * values[0]
    assert values[20] < 1e-5 * values[0]


def test_the_cut_of_outputs_loses_least_on_the_text_it_saw(layer: low_rank.Layer) -> None:
    lost = {}
    for way in ("weights", "outputs"):
        layer.truncate(way, 20)
        gap = joint(layer) - layer.joint
        lost[way] = float((gap @ layer.inputs @ gap.T).trace())
    values = torch.linalg.svdvals(layer.moments)
    assert lost["outputs"] == pytest.approx(float(values[20:].sum()), rel=1e-3)  # Eckart and Young's bound
    assert lost["outputs"] < lost["weights"]


def test_merged_heads_are_equal_and_dropped_ones_are_gone(layer: low_rank.Layer) -> None:
    layer.merge(1)
    first, second = layer.attention.v_proj.weight.chunk(2)
    assert torch.equal(first, second)
    layer.drop(1)
    norms = [float(half.abs().sum()) for half in layer.attention.v_proj.weight.chunk(2)]
    assert min(norms) == 0 < max(norms)


def test_the_record_is_complete_and_falls_with_the_rank() -> None:
    assert list(CASES) == [name for name, _, _ in low_rank.cases()]
    assert RECORD["minutes"] > 0
    for way in low_rank.WAYS:
        values = [CASES[f"{way} {rank}"] for rank in low_rank.RANKS]
        assert values[0] == pytest.approx(RECORD["perplexity"], rel=1e-3)
        assert values == sorted(values)
