"""One byte a number in mixtures, latent attention and hybrids: experts and whole recipes.

Formats, scales and single layers are in test_quantize.py, caches in test_cache.py.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import families
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_gpu import check_nothing_is_read, fake_gpu
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.checkpoints import QuantizedExperts, QuantizedLinear, QuantizedTensor, probe, quantize
from tokenbytoken.checkpoints.number_formats import Granularity
from tokenbytoken.cost.recipes import recipes
from tokenbytoken.layers import LatentAttention
from tokenbytoken.layers.feed_forward import Experts, MoE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMATS = ["e4m3", "e5m2", "int8"]
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
GRANULARITIES: list[Granularity] = ["tensor", "row", "tile", "block"]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def config_of(kind: str, **changes: Any) -> tbt.DecoderConfig:
    shape = {"deepseek_v3": families.T_DSV3, "jamba": families.T_JAMBA, "mixtral": families.T_MIXTRAL}[kind]
    config = tbt.DecoderConfig.from_hf({"model_type": kind, **shape, **changes})
    return dataclasses.replace(config, mtp_layers=0)  # a Decoder holds no prediction module


def decoder(config: tbt.DecoderConfig, seed: int = 0) -> tbt.Decoder:
    return families.redraw(tbt.Decoder(config), seed)


def stack(E: int = 3, width: int = 144, M: int = 200) -> Experts:
    """Experts whose rows and columns are no multiples of 128, the second a hundred times as large as the others."""
    experts = Experts(E, width, M).requires_grad_(False)
    for i, weight in enumerate(experts.parameters()):
        weight.copy_(0.25 * normal(*weight.shape, seed=i))
        weight[1] *= 100
    return experts


# --- stacks of matrices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_stack_is_a_loop_over_its_matrices_and_their_ragged_blocks(format: str, granularity: Granularity) -> None:
    x = stack().up_proj.detach()
    rows, columns = {"tensor": (144, 200), "row": (1, 200), "tile": (1, 128), "block": (128, 128)}[granularity]
    q = quantize(x, format, granularity, stacked=True)
    assert q.scales.shape == (3, math.ceil(144 / rows), math.ceil(200 / columns))
    assert q.nbytes == x.numel() + 4 * q.scales.numel()
    back = q.dequantize(torch.float64)
    for e in range(3):
        alone = quantize(x[e], format, granularity)
        assert torch.equal(q[e].values.view(torch.uint8), alone.values.view(torch.uint8))
        assert torch.equal(q[e].scales, alone.scales)
        for i in range(0, 144, rows):
            for j in range(0, 200, columns):
                part = x[e, i : i + rows, j : j + columns]
                scale = part.abs().max() / LARGEST[format]
                assert q.scales[e, i // rows, j // columns] == scale
                ratio = (part / scale).clamp(-LARGEST[format], LARGEST[format])
                codes = (ratio.round() if format == "int8" else ratio).to(DTYPES[format])  # PyTorch's own cast
                want = codes.double() * scale.double()
                assert torch.allclose(back[e, i : i + rows, j : j + columns], want, rtol=2**-23, atol=0)


def test_no_block_reaches_into_the_next_expert() -> None:
    x = torch.ones(2, 100, 100)  # a block of 128 rows of the flattened stack would hold 28 rows of the second
    x[1] *= 1000
    apart, together = (quantize(x, "int8", "block", stacked=stacked) for stacked in (True, False))
    assert apart.scales.flatten().tolist() == pytest.approx([1 / 127, 1000 / 127])
    assert torch.equal(apart.dequantize()[0], torch.ones(100, 100))
    assert together.dequantize()[0].abs().max() == 0  # its rows share the scale of larger ones, and vanish


def test_transformers_dequantises_our_blocks_to_the_same_numbers() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    for shape in ((2, 256, 384), (3, 144, 200)):  # whole blocks, ragged ones
        x = 0.25 * normal(*shape)
        q = quantize(x, "e4m3", "block", stacked=True)
        assert torch.equal(
            finegrained._dequantize_fp8_weight(q.values, q.scales, [128, 128], torch.float32), q.dequantize()
        )
        if shape[1] % 128 == 0:
            convert = finegrained.Fp8Dequantize(None)
            assert torch.equal(convert._dequantize_one(q.values, q.scales, torch.float32), q.dequantize())
            other = QuantizedTensor(q.values, 1 / q.scales, q.block)  # "scale_inv", read as its name suggests
            families.assert_differs(other.dequantize(), x)


def test_what_is_no_stack_is_refused() -> None:
    for shape in ((4, 4), (2, 2, 2, 2)):
        with pytest.raises(ValueError, match="a stack of matrices has three axes"):
            quantize(torch.ones(shape), stacked=True)
    with pytest.raises(ValueError, match="cannot quantise"):
        quantize(torch.ones(0, 4, 4), stacked=True)


def test_shapes_on_the_meta_device_are_those_of_real_numbers() -> None:
    for x, stacked in ((normal(130, 257), False), (normal(3, 130, 257), True), (normal(2, 5, 257), False)):
        for format in FORMATS:
            for granularity in GRANULARITIES:
                real, ghost = (quantize(t, format, granularity, stacked=stacked) for t in (x, x.to("meta")))
                assert (ghost.values.shape, ghost.values.dtype) == (real.values.shape, real.values.dtype)
                assert (ghost.scales.shape, ghost.scales.dtype) == (real.scales.shape, real.scales.dtype)
                assert ghost.block == real.block


# --- experts ----------------------------------------------------------------------------------------------


def derived(experts: QuantizedExperts, x: Tensor, expert: int) -> Tensor:
    """What one expert makes of x, in float64, from its codes and scales: float32 only where inputs are rounded."""
    weights = {}
    for name in PROJECTIONS:
        q = experts.weight(name)
        height, width = q.block
        scales = q.scales[expert].double().repeat_interleave(height, 0).repeat_interleave(width, 1)
        weights[name] = q.values[expert].double() * scales[: q.shape[1], : q.shape[2]]

    def rounded(t: Tensor) -> Tensor:
        if experts.activations is None:
            return t
        width = {"tensor": t.shape[1], "row": t.shape[1], "tile": 128}[experts.activations]
        parts = []
        for part in t.split(width, 1):
            size = part.abs().amax() if experts.activations == "tensor" else part.abs().amax(1, keepdim=True)
            scale = (size / LARGEST[experts.format]).float().double()
            codes = (part / scale).float().clamp(-LARGEST[experts.format], LARGEST[experts.format])
            codes = codes.round() if experts.format == "int8" else codes
            parts.append(codes.to(DTYPES[experts.format]).double() * scale)
        return torch.cat(parts, 1)

    inputs = rounded(x.double())
    hidden = F.silu(inputs @ weights["gate_proj"].T) * (inputs @ weights["up_proj"].T)
    return rounded(hidden) @ weights["down_proj"].T


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantised_experts_equal_a_derivation_in_float64(format: str, granularity: Granularity) -> None:
    plain, x = stack(), normal(5, 200)
    q = QuantizedExperts.from_experts(plain, format, granularity)
    for expert in range(3):
        families.assert_close(q(x, expert).double(), derived(q, x, expert), 1e-5)
        error = (q(x, expert) - plain(x, expert)).norm() / plain(x, expert).norm()
        usual = {"e4m3": 0.045, "e5m2": 0.09, "int8": 0.018}[format]
        assert usual / 3 < error < usual * 2  # of three products


@pytest.mark.parametrize("activations", ["row", "tile"])
@pytest.mark.parametrize("format", ["e4m3", "int8"])
def test_the_input_of_each_product_is_quantised(format: str, activations: Granularity) -> None:
    x = normal(5, 200)
    x[3, :128] *= 100  # its other tile is not affected
    q = QuantizedExperts.from_experts(stack(), format, "block", activations=activations)
    weight_only = QuantizedExperts.from_experts(stack(), format, "block")
    for expert in range(3):
        # a number between two codes may be rounded to the one here and to the other there: a step of a code apart
        families.assert_close(q(x, expert).double(), derived(q, x, expert), 2e-3)
        error = (q(x, expert) - weight_only(x, expert)).norm() / weight_only(x, expert).norm()
        assert 1e-3 < error < 0.1
        alone = torch.cat([q(token[None], expert) for token in x])
        families.assert_close(alone, q(x, expert), 1e-5)  # no token depends on another


@pytest.mark.parametrize("activations", ["tensor", "row"])
def test_the_scaled_product_where_there_is_one_equals_the_dequantised_product(activations: Granularity) -> None:
    options: dict[str, Any] = {"granularity": "tensor" if activations == "tensor" else "row"}
    plain, x = stack(width=160, M=208), normal(5, 208)
    q = QuantizedExperts.from_experts(plain, **options, activations=activations, matmul="dequantised")
    if options["granularity"] not in probe():
        with pytest.raises(ValueError, match="no scaled product here for QuantizedExperts"):
            QuantizedExperts.from_experts(plain, **options, activations=activations, matmul="scaled")
        return
    scaled = QuantizedExperts.from_experts(plain, **options, activations=activations, matmul="scaled")
    for expert in range(3):
        families.assert_close(scaled(x, expert), q(x, expert), 2e-2)
    with pytest.raises(ValueError, match="no scaled product here"):  # blocks have none
        QuantizedExperts.from_experts(plain, granularity="block", activations=activations, matmul="scaled")


def mixture(**changes: Any) -> MoE:
    defaults = {"num_experts": 8, "experts_per_token": 3, "intermediate_size": 16, "scoring": "sigmoid", "scale": 2.5,
                "selection_bias": True, "shared_intermediate_size": 16}  # fmt: skip
    return families.redraw(MoE(tbt.MoEConfig(**{**defaults, **changes}), 24))


def one_byte(block: MoE, **options: Any) -> MoE:
    """The mixture with its experts, and only these, in one byte."""
    block = copy.deepcopy(block)
    block.experts = QuantizedExperts.from_experts(block.experts, **options)  # type: ignore[assignment]
    return block


@pytest.mark.parametrize("tokens", [0, 1, 2, 50])
@pytest.mark.parametrize("activations", [None, "tile"])
def test_a_mixture_of_quantised_experts_is_the_loop_over_tokens(tokens: int, activations: Granularity | None) -> None:
    block = one_byte(mixture(), granularity="block", activations=activations)
    x = normal(tokens, 24)
    want = torch.zeros(tokens, 24, dtype=torch.float64)
    for i, token in enumerate(x):
        weights, chosen = block.router(token[None])
        for weight, expert in zip(weights[0], chosen[0].tolist(), strict=True):
            want[i] += weight.double() * derived(block.experts, token[None], expert)[0]  # type: ignore[arg-type]
        assert block.shared is not None
        want[i] += block.shared(token)
    if tokens:
        families.assert_close(block(x).double(), want, 1e-5 if activations is None else 2e-3)
    assert block(x).shape == (tokens, 24)
    assert block(x.view(tokens, 1, 24)).shape == (tokens, 1, 24)


@pytest.mark.parametrize("tokens", [0, 1, 2, 50])  # two choose six experts, of which one may be the same
@pytest.mark.parametrize("activations", [None, "tensor", "row", "tile"])
@pytest.mark.parametrize("format", FORMATS)
def test_mixing_without_the_host_equals_expert_by_expert(
    tokens: int, activations: Granularity | None, format: str
) -> None:
    block = one_byte(mixture(), format=format, activations=activations)
    x = normal(tokens, 24)
    x[1:2] = x[:1]  # the same experts
    weights, chosen = block.router(x)
    got, want = block.experts.mixed(x, weights, chosen), block._expert_by_expert(x, weights, chosen)
    assert got.shape == want.shape
    if tokens:
        families.assert_close(got, want, 1e-6)
        families.assert_differs(block.experts.mixed(x, weights, (chosen + 1) % 8), want)


@pytest.mark.parametrize("activations", [None, "tensor", "row", "tile"])
def test_a_gpu_is_never_asked_who_was_chosen(activations: Granularity | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = mixture().config
    with fake_gpu(monkeypatch):
        block = MoE(config, 24).requires_grad_(False)
        weights = {
            name: QuantizedTensor(torch.empty(8, *shape, dtype=torch.int8), torch.empty(8, shape[0], 1), (1, shape[1]))
            for name, shape in zip(PROJECTIONS, [(16, 24), (16, 24), (24, 16)], strict=True)
        }
        block.experts = QuantizedExperts(weights, format="int8", activations=activations)  # type: ignore[assignment]
        check_nothing_is_read(block, 2, 3)  # as many pairs as experts at most, and more


def test_a_pass_expands_the_chosen_experts_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    block = one_byte(mixture(shared_intermediate_size=0), granularity="row", format="int8")
    expanded: list[tuple[int, ...]] = []
    original = QuantizedTensor.dequantize

    def watched(q: QuantizedTensor, *args: torch.dtype) -> Tensor:
        expanded.append(tuple(q.shape))
        return original(q, *args)

    monkeypatch.setattr(QuantizedTensor, "dequantize", watched)
    for tokens in (0, 1, 2, 40):
        x = normal(tokens, 24)
        distinct = len(block.router(x)[1].unique())
        expanded.clear()
        cost = tbt.measure.count(lambda: block(x), weights=block)  # noqa: B023 (called at once)
        assert sorted(expanded) == [(16, 24)] * 2 * distinct + [(24, 16)] * distinct
        of_an_expert = 3 * 16 * 24 + 4 * (16 + 16 + 24)
        router = 4 * (8 * 24 + 8) if tokens else 0
        assert cost.weight_bytes - distinct * of_an_expert in (router, 4 * (8 * 24 + 8))
        assert cost.flops == 2 * tokens * (8 * 24 + 3 * 3 * 16 * 24)  # expanding multiplies, but it is no product


def test_an_expert_of_zeros_gives_zeros_and_leaves_the_others_alone() -> None:
    plain, x = stack(), normal(4, 200)
    want = QuantizedExperts.from_experts(plain, granularity="block")
    for weight in plain.parameters():
        weight[1] = 0
    q = QuantizedExperts.from_experts(plain, granularity="block")
    assert torch.equal(q(x, 1), torch.zeros(4, 200))
    for expert in (0, 2):
        assert torch.equal(q(x, expert), want(x, expert))


def test_an_outlier_costs_its_own_block_and_not_its_tensor() -> None:
    width, M = 256, 384  # of DeepSeek's shape: whole blocks, 2 × 3 of them
    plain = Experts(4, width, M).requires_grad_(False)
    for i, weight in enumerate(plain.parameters()):
        weight.copy_(0.25 * normal(*weight.shape, seed=i))
    clean = plain.up_proj.clone()

    def error(format: str, granularity: Granularity) -> Tensor:
        back = quantize(plain.up_proj, format, granularity, stacked=True).dequantize()
        back[2, 7, 300] = plain.up_proj[2, 7, 300] = clean[2, 7, 300]  # the outlier itself is held well
        return (back - clean).flatten(1).norm(dim=1) / clean.flatten(1).norm(dim=1)  # of each expert

    before = {(f, g): error(f, g) for f in ("e4m3", "int8") for g in ("tensor", "block")}
    assert (before["e4m3", "tensor"] / before["e4m3", "block"] - 1).abs().max() < 0.02  # FP8 hardly cares …
    after = {}
    for format, outlier in (("int8", 100.0), ("e4m3", 1e6)):  # INT8 has no exponent, and minds far smaller ones
        for granularity in ("tensor", "block"):
            plain.up_proj[2, 7, 300] = outlier
            after[format, granularity] = error(format, granularity)
        for e in (0, 1, 3):  # the other experts have scales of their own
            assert after[format, "tensor"][e] == before[format, "tensor"][e]
        assert after[format, "tensor"][2] > 0.5  # … until numbers underflow: most of the expert is zero
        # One of six blocks is lost, √(1/6) of the norm; beside it, errors are what they were.
        lost = after[format, "tensor"][2] / after[format, "block"][2]
        assert 2.0 < lost < 3.0
        rest = error_elsewhere(plain, clean, format, outlier)
        assert rest == pytest.approx(before[format, "block"][2].item(), rel=0.05)


def error_elsewhere(plain: Experts, clean: Tensor, format: str, outlier: float) -> float:
    """Relative error of expert 2 in the five blocks that do not hold the outlier."""
    plain.up_proj[2, 7, 300] = outlier
    back = quantize(plain.up_proj, format, "block", stacked=True).dequantize()[2]
    beside = torch.ones(256, 384, dtype=torch.bool)
    beside[:128, 256:] = False
    plain.up_proj.copy_(clean)
    return ((back - clean[2])[beside].norm() / clean[2][beside].norm()).item()


def test_casting_saving_and_copying_leave_codes_and_scales_as_they_are(tmp_path: Path) -> None:
    q, x = QuantizedExperts.from_experts(stack(), granularity="block"), normal(3, 200)
    held = {name: tensor.clone() for name, tensor in q.named_buffers()}
    assert set(held) == {f"{name}_{part}" for name in PROJECTIONS for part in ("values", "scales")}
    assert not list(q.parameters())
    assert tbt.stored_bytes(q) == 3 * (3 * 144 * 200 + 4 * 3 * 2 * 2)
    want = q(x, 1)
    narrow = copy.deepcopy(q).to(torch.bfloat16)
    for name, tensor in narrow.named_buffers():
        assert tensor.dtype == held[name].dtype
        assert torch.equal(tensor.view(torch.uint8), held[name].view(torch.uint8))
    assert narrow(x.bfloat16(), 1).dtype == torch.bfloat16
    fresh = QuantizedExperts.from_experts(Experts(3, 144, 200), granularity="block")
    torch.save(q.state_dict(), tmp_path / "experts.pt")
    fresh.load_state_dict(torch.load(tmp_path / "experts.pt", weights_only=True))
    assert torch.equal(fresh(x, 1), want)
    other = QuantizedExperts.from_experts(stack(), "e5m2", "block")
    with pytest.raises(ValueError, match=r"gate_proj_values are torch\.float8_e4m3fn, but this layer stores e5m2"):
        other.load_state_dict(q.state_dict())


# --- whole models -----------------------------------------------------------------------------------------


def rounded_reference(reference: nn.Module, format: str, granularity: Granularity, only: Callable[[str], bool]) -> None:
    """Round the weights of a model of transformers in place, an expert or a fused half at a time."""

    def through(weight: Tensor) -> Tensor:
        return quantize(weight, format, granularity, (32, 32)).dequantize()

    for name, parameter in reference.named_parameters():
        if ".layers." not in name or not only(name):
            continue
        if ".experts.gate_up_proj" in name:
            for matrix in parameter.data:
                for half in matrix.chunk(2):
                    half.copy_(through(half))
        elif ".experts.down_proj" in name:
            for matrix in parameter.data:
                matrix.copy_(through(matrix))
        elif parameter.dim() == 2 and not any(kept in name for kept in ("gate.weight", "router", "A_log")):
            parameter.data.copy_(through(parameter))


REFERENCES: dict[str, Callable[..., PreTrainedModel]] = {
    "deepseek_v3": families.deepseek_v3, "deepseek_v2": families.deepseek_v2, "mixtral": families.mixtral,
    "jamba": families.jamba,
}  # fmt: skip


# Rows of DeepSeek's attention are read in another order (its rotary pairs): a row keeps its scale, a block would not.
CHOICES = [("deepseek_v3", "e4m3", "row", "all"), ("deepseek_v3", "e4m3", "block", "all-ffn"),
           ("deepseek_v2", "e5m2", "row", "all"), ("deepseek_v2", "int8", "block", "all-ffn"),
           ("mixtral", "int8", "block", "all"), ("jamba", "int8", "row", "all-ffn"),
           ("jamba", "e4m3", "block", "all")]  # fmt: skip


@pytest.mark.parametrize(("family", "format", "granularity", "include"), CHOICES)
def test_a_quantised_model_is_the_reference_with_dequantised_weights(
    family: str, format: str, granularity: Any, include: Any, tmp_path: Path
) -> None:
    reference = REFERENCES[family]()
    model = families.ours(reference, tmp_path)
    tokens = families.random_tokens(2, 12)
    plain = model(tokens)
    q = tbt.quantize_model(model, format, granularity, block=(32, 32), include=include)
    feed_forward = ("mlp.", "feed_forward.", "block_sparse_moe.")
    rounded_reference(
        reference, format, granularity, lambda name: include == "all" or any(part in name for part in feed_forward)
    )
    families.assert_close(q(tokens), families.reference_logits(reference, tokens), 5e-5)
    families.assert_differs(q(tokens), plain, 2e-3)
    assert torch.equal(model(tokens), plain)  # and the model is what it was


def test_both_forms_of_latent_attention_read_the_same_one_byte_weight() -> None:
    q = tbt.quantize_model(decoder(config_of("deepseek_v3")), granularity="block")
    tokens, logits = families.random_tokens(2, 12), {}
    forms: tuple[Literal["absorbed", "expanded"], ...] = ("absorbed", "expanded")
    for form in forms:
        for mixer in q.mixers:
            assert isinstance(mixer, LatentAttention)
            mixer.form = form
        logits[form] = q(tokens)
    families.assert_close(logits["absorbed"], logits["expanded"])


def quantised(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, (QuantizedLinear, QuantizedExperts))}


def test_a_recipe_quantises_what_it_says_and_shares_the_rest() -> None:
    model = decoder(config_of("deepseek_v3"))
    q = tbt.quantize_as(model, "fp8-block")
    attention = {f"mixer.{name}_proj" for name in ("q_a", "q_b", "kv_a", "kv_b", "o")}
    dense = {f"feed_forward.{name}" for name in PROJECTIONS}
    moe = {f"feed_forward.shared.{name}" for name in PROJECTIONS} | {"feed_forward.experts"}
    want = {f"layers.{i}.{name}" for i in range(3) for name in attention | (moe if i else dense)}
    assert quantised(q) == want
    assert not quantised(model)
    held = dict(model.named_parameters())
    kept = dict(q.named_parameters())
    assert {name for name in held if not any(name.startswith(f"{part}.") for part in want)} == set(kept)
    for name, parameter in kept.items():
        assert parameter.data_ptr() == held[name].data_ptr(), name

    jamba = decoder(config_of("jamba"))
    names = quantised(tbt.quantize_as(jamba, "int8-experts"))
    dense = {f"layers.{i}.feed_forward.{name}" for i in (0, 2, 4) for name in PROJECTIONS}
    assert names == dense | {f"layers.{i}.feed_forward.experts" for i in (1, 3, 5)}
    names = quantised(tbt.quantize_as(jamba, "int8"))
    assert {f"layers.0.mixer.{name}_proj" for name in ("in", "x", "dt", "out")} <= names
    assert {f"layers.1.mixer.{name}_proj" for name in "qkvo"} <= names
    assert quantised(tbt.quantize_as(jamba, "fp8-ffn")) == {
        name for name in quantised(tbt.quantize_as(jamba, "int8-experts")) if name[7] not in "05"
    }


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek_v3", {}),
    "deepseek, ragged": ("deepseek_v3", {"hidden_size": 200, "moe_intermediate_size": 130, "intermediate_size": 300,
                                         "kv_lora_rank": 129, "n_shared_experts": 2}),
    "deepseek, no query compression": ("deepseek_v3", {"q_lora_rank": None}),
    "jamba": ("jamba", {}),
    "jamba, ragged": ("jamba", {"hidden_size": 144, "intermediate_size": 200, "mamba_dt_rank": 9}),
    "mixtral": ("mixtral", {}),
}  # fmt: skip


@pytest.mark.parametrize("recipe", [name for name, recipe in recipes.items() if recipe.one_byte])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_of_a_quantised_model_equal_the_closed_form_to_the_byte(shape: str, recipe: str) -> None:
    kind, changes = SHAPES[shape]
    config = config_of(kind, **changes)
    q = tbt.quantize_as(decoder(config).to(torch.bfloat16), recipe)
    scales = 0
    if recipe == "int8-experts":  # which the closed form leaves out
        rows = (w.rows * w.copies for w in tbt.cost.weights(config) if w.role in ("expert", "feed_forward"))
        scales = 4 * sum(rows)
    assert tbt.stored_bytes(q) == tbt.weight_bytes(config, recipe) + scales
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*q.parameters(), *q.buffers())}
    assert sum(held.values()) == tbt.stored_bytes(q)  # nothing else hangs behind the views
    logits = q(families.random_tokens(1, 5))
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


def test_the_bytes_of_deepseek_v3_at_full_size() -> None:
    config = tbt.published["deepseek-v3"]
    with torch.device("meta"):
        model = tbt.Decoder(config).to(torch.bfloat16)
    q = tbt.quantize_as(model, "fp8-block")
    held = tbt.stored_bytes(q)
    assert held == tbt.weight_bytes(dataclasses.replace(config, mtp_layers=0), "fp8-block") == 673_150_611_808
    # The released file holds the prediction module as well: one more layer, what joins its two inputs, three norms,
    # and an embedding and a head of its own.
    module = tbt.stored_bytes(q.layers[-1]) + 2 * (7168 * 2 * 7168 + 3 * 7168) + 2 * 2 * 129_280 * 7168
    assert held + module == tbt.weight_bytes(config, "fp8-block")
    assert f"{(held + module) / 1e9:.1f}" == "688.6"


def test_the_bytes_of_jamba_1_5_at_full_size() -> None:
    for name, gigabytes, scales in (("jamba-1.5-large", 427, 140_378_112), ("jamba-1.5-mini", 55, 35_651_584)):
        with torch.device("meta"):
            model = tbt.Decoder(tbt.published[name]).to(torch.bfloat16)
        held = tbt.stored_bytes(tbt.quantize_as(model, "int8-experts"))
        assert held - scales == tbt.weight_bytes(model.config, "int8-experts")
        assert round((held - scales) / 1e9) == gigabytes


def test_the_router_bias_is_float32_in_a_half_precision_model_of_blocks() -> None:
    model = decoder(config_of("deepseek_v3")).to(torch.bfloat16)
    dtypes = {
        recipe: tbt.quantize_as(model, recipe).get_parameter("layers.1.feed_forward.router.selection_bias").dtype
        for recipe in ("fp8-block", "int8")
    }
    assert dtypes == {"fp8-block": torch.float32, "int8": torch.bfloat16}


def test_a_recipe_runs_a_model_generates_and_keeps_near_it() -> None:
    for kind, recipe, largest in (("deepseek_v3", "fp8-block", 0.6), ("jamba", "int8-experts", 0.1)):
        model = decoder(config_of(kind))
        q = tbt.quantize_as(model, recipe)
        tokens = families.random_tokens(1, 12)
        error = ((q(tokens) - model(tokens)).norm() / model(tokens).norm()).item()
        assert 1e-3 < error < largest
        answer = tbt.generate(q, tokens[0].tolist(), 5)
        assert len(answer) == 5
    cost, formula = (
        tbt.measure.count(lambda: q(torch.tensor([[5]])), weights=q),  # of Jamba
        tbt.pass_cost(q.config, 1, 0, recipe="int8-experts"),
    )
    assert cost.flops == formula.flops
    half = tbt.quantize_as(model.to(torch.bfloat16), "int8-experts")
    cost = tbt.measure.count(lambda: half(torch.tensor([[5]])), weights=half)
    rows = 3 * 2 * (48 + 48 + 32) + 3 * (48 + 48 + 32)  # in three layers two of four experts, in three a dense one
    assert cost.weight_bytes == formula.weight_bytes + 4 * rows


def test_what_a_recipe_cannot_do_is_refused_by_name() -> None:
    model = decoder(config_of("deepseek_v3"))
    for recipe in ("bf16", "fp8-all", "int4"):
        with pytest.raises(ValueError, match=f"unknown recipe '{recipe}': one of fp8-ffn, fp8-block, int8"):
            tbt.quantize_as(model, recipe)
    with pytest.raises(ValueError, match=r"unknown recipe \['int8'\]"):
        tbt.quantize_as(model, ["int8"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="activations"):
        tbt.quantize_as(model, "fp8-block", activations=None)
    q = tbt.quantize_as(model, "int8-experts")
    with pytest.raises(ValueError, match="already"):
        tbt.quantize_as(q, "fp8-block")
    with pytest.raises(ValueError, match="unknown include 'experts'"):
        tbt.quantize_model(model, include="experts")  # type: ignore[arg-type]
    for bad in (math.nan, math.inf):
        broken = decoder(config_of("deepseek_v3"))
        broken.get_parameter("layers.2.feed_forward.experts.down_proj")[5, 3, 1] = bad
        with pytest.raises(ValueError, match=r"layer 2, feed_forward\.experts: the weight holds NaN or infinity"):
            tbt.quantize_as(broken, "fp8-block")


@pytest.mark.parametrize(("format", "outlier"), [("int8", 300.0), ("e4m3", 3e5)])
def test_an_outlier_among_the_experts_of_a_model_tells_blocks_from_tensors(format: str, outlier: float) -> None:
    shape = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    block = decoder(config_of("deepseek_v3", **shape)).layers[1].feed_forward
    assert isinstance(block, MoE)
    x, experts = normal(20, 256), block.experts
    chosen = block.router(x)[1]
    busiest = int(chosen.flatten().bincount().argmax())
    its = (chosen == busiest).any(-1)
    assert 5 < its.sum() < 20

    def errors() -> dict[tuple[str, bool], float]:
        want, found = block(x), {}
        for granularity in ("tensor", "block"):
            got = one_byte(block, format=format, granularity=granularity)(x)
            for mine in (True, False):
                rows = its if mine else ~its
                found[granularity, mine] = ((got - want)[rows].norm() / want[rows].norm()).item()
        return found

    clean = errors()
    experts.gate_proj[busiest, 200] = 0  # silu(0): this channel is off, so that the outlier itself adds nothing
    experts.down_proj[busiest, 9, 200] = outlier
    planted = errors()
    for granularity in ("tensor", "block"):  # tokens of other experts never meet that scale
        assert planted[granularity, False] == clean[granularity, False]
    assert clean["tensor", True] < 1.5 * clean["block", True]
    assert planted["tensor", True] > 10 * clean["tensor", True]  # nearly all of the matrix became zero
    assert planted["tensor", True] > 1.5 * planted["block", True]  # of its four blocks, one is lost
