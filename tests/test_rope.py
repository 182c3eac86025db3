"""RoPE against hand values, transformers' tables and a complex-number derivation in float64."""

from __future__ import annotations

import pytest
import torch

import tokenbytoken as tbt
from tokenbytoken.layers.rope import frequencies, rotate, rotation, yarn_mscale

X = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
LLAMA31 = tbt.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


@pytest.mark.parametrize(
    ("interleaved", "position", "want"),
    [
        (False, 1, [-1.984111, 1.959901, 2.462378, 4.019800]),
        (False, 100, [2.381416, -2.285279, 2.080591, 3.844151]),
        (True, 1, [-1.142640, 1.922076, 2.959851, 4.029800]),
        (True, 100, [1.875050, 1.218272, -1.744977, 4.685622]),
    ],
)
def test_c05_both_pairings_by_hand(interleaved: bool, position: int, want: list[float]) -> None:
    rope = tbt.RopeConfig(dim=4, interleaved=interleaved)
    cos, sin = rotation(rope, torch.tensor([position]), torch.float64)
    assert torch.allclose(rotate(X, cos[0], sin[0], interleaved), torch.tensor(want, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved: bool) -> None:
    rope = tbt.RopeConfig(dim=64, theta=100_000.0, interleaved=interleaved)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 64, generator=generator, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 50, 1000, 8191, 131_071])
    cos, sin = rotation(rope, positions, torch.float64)
    got = rotate(x, cos, sin, interleaved)
    pairs = (lambda t: t.view(7, 32, 2)) if interleaved else (lambda t: t.view(7, 2, 32).transpose(1, 2))
    z = torch.view_as_complex(pairs(x).contiguous())
    plain = 100_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    want = z * torch.polar(torch.ones(7, 32, dtype=torch.float64), positions[:, None] * plain)
    assert torch.allclose(pairs(got), torch.view_as_real(want), atol=1e-10)


@pytest.mark.parametrize("interleaved", [False, True])
def test_score_depends_on_the_distance_alone(interleaved: bool) -> None:
    rope = tbt.RopeConfig(dim=32, interleaved=interleaved)
    q, k = torch.randn(2, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def score(m: int, n: int) -> float:
        cos, sin = rotation(rope, torch.tensor([m, n]), torch.float64)
        return float(rotate(q, cos[0], sin[0], interleaved) @ rotate(k, cos[1], sin[1], interleaved))

    assert score(9, 4) == pytest.approx(score(1009, 1004), abs=1e-10)
    assert abs(score(9, 4) - score(9, 3)) > 1e-2  # and does depend on the distance


def test_c06_llama31_frequencies() -> None:
    plain = frequencies(tbt.RopeConfig(dim=128, theta=5e5))
    scaled = frequencies(tbt.RopeConfig(dim=128, theta=5e5, scaling=LLAMA31))
    ratio = scaled / plain
    assert torch.equal(ratio[:29], torch.ones(29, dtype=torch.float64))
    blended = torch.tensor([0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211], dtype=torch.float64)
    assert torch.allclose(ratio[29:35], blended, rtol=1e-5)
    assert torch.allclose(ratio[35:], torch.full((29,), 0.125, dtype=torch.float64), rtol=1e-12)
    assert float(scaled[31]) == pytest.approx(8.567515e-4, rel=1e-5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_table_equals_transformers(factor: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    block = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, head_dim=64, rope_parameters=block)
    want, amplitude = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    hf = {**config.to_dict(), "model_type": "llama"}
    mixer = tbt.DecoderConfig.from_hf(hf).layers[0].mixer
    assert isinstance(mixer, tbt.AttentionConfig)
    assert mixer.rope is not None
    assert amplitude == 1.0
    # transformers computes in float32 throughout; ours is float64, so agreement is to float32's last bits.
    assert torch.allclose(frequencies(mixer.rope).float(), want, rtol=2e-6)


def test_c37_yarn_ramp() -> None:
    yarn = tbt.YarnScaling(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    ratio = frequencies(tbt.RopeConfig(dim=64, scaling=yarn)) / frequencies(tbt.RopeConfig(dim=64))
    want = torch.cat([torch.ones(11), torch.linspace(0.925, 0.1, 12), torch.full((9,), 0.025)]).double()
    assert torch.allclose(ratio, want, rtol=1e-5)


def test_c36_yarn_softmax_scale() -> None:
    assert 192**-0.5 * yarn_mscale(40.0, 1.0) ** 2 == pytest.approx(0.135233779, rel=1e-6)
    assert 192**-0.5 * yarn_mscale(40.0, 0.707) ** 2 == pytest.approx(0.114721387, rel=1e-6)
    for mscale in (1.0, 0.707):  # equal values cancel in cos and sin
        yarn = tbt.YarnScaling(factor=40.0, original_max_positions=4096, mscale=mscale, mscale_all_dim=mscale)
        cos, _ = rotation(tbt.RopeConfig(dim=64, scaling=yarn), torch.tensor([0]))
        assert torch.equal(cos, torch.ones_like(cos))


def test_angles_keep_float32_in_low_precision() -> None:
    rope = tbt.RopeConfig(dim=64)
    positions = torch.tensor([100_003])
    got, _ = rotation(rope, positions, torch.bfloat16)
    want, _ = rotation(rope, positions, torch.float64)
    assert (got.double() - want).abs().max() < 0.02  # bfloat16's own rounding of a cosine, plus float32's angle


@pytest.mark.parametrize("dim", [0, 7, -2])
def test_bad_dimensions_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=r"RopeConfig\.dim"):
        tbt.RopeConfig(dim=dim)
