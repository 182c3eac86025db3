"""One byte a number: formats, scales, layers and models, against float64 derivations and PyTorch's casts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.checkpoints import QuantizedLinear, QuantizedTensor, number_formats, probe, quantize
from tokenbytoken.checkpoints.number_formats import Granularity

FP8 = {"e4m3": (4, 3, torch.float8_e4m3fn, 448.0), "e5m2": (5, 2, torch.float8_e5m2, 57344.0)}
FORMATS = ["e4m3", "e5m2", "int8"]
GRANULARITIES: list[Granularity] = ["tensor", "row", "tile", "block"]


def decoded(format: str) -> np.ndarray:
    """All 256 codes by the definition of the format, in float64."""
    exponent_bits, mantissa_bits, *_ = FP8[format]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(256):
        sign = -1.0 if code >> 7 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
        if format == "e4m3" and (exponent, mantissa) == (15, 7):
            values.append(math.nan)
        elif format == "e5m2" and exponent == 31:
            values.append(math.nan if mantissa else sign * math.inf)
        elif exponent == 0:
            values.append(sign * mantissa / 2**mantissa_bits * 2.0 ** (1 - bias))
        else:
            values.append(sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
    return np.array(values)


def nearest(x: np.ndarray, format: str) -> np.ndarray:
    """The code nearest to each finite |x| ≤ largest, a tie to the even code; the sign bit is x's own."""
    largest = FP8[format][3]
    table = decoded(format)[:128]
    table = table[np.isfinite(table)]  # codes of positive numbers are in order
    size = np.abs(x)
    assert (size <= largest).all()
    above = np.searchsorted(table, size)  # the first code that is not smaller
    below = np.maximum(above - 1, 0)
    up, down = table[above] - size, size - table[below]  # exact: few bits each
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.where(np.signbit(x), code + 128, code).astype(np.uint8)


def every_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FP8)
def test_all_256_codes_mean_what_the_definition_says(format: str) -> None:
    got = torch.arange(256, dtype=torch.uint8).view(FP8[format][2]).double().numpy()
    np.testing.assert_array_equal(got, decoded(format))
    finite, infinite = np.isfinite(got).sum(), np.isinf(got).sum()
    assert (finite, infinite, np.isnan(got).sum()) == ((254, 0, 2) if format == "e4m3" else (248, 2, 6))
    assert got[np.isfinite(got)].max() == FP8[format][3] == number_formats.LARGEST[format]


@pytest.mark.parametrize("format", FP8)
def test_rounding_is_exact_on_every_bfloat16_value_in_range(format: str) -> None:
    _, _, dtype, largest = FP8[format]
    x = every_bfloat16()
    x = x[x.float().abs() <= largest]
    assert len(x) == {"e4m3": 34_754, "e5m2": 36_546}[format]
    want = nearest(x.double().numpy(), format)
    for overflow in ("saturate", "nan"):
        np.testing.assert_array_equal(tbt.to_fp8(x, format, overflow).view(torch.uint8).numpy(), want)
    np.testing.assert_array_equal(x.to(dtype).view(torch.uint8).numpy(), want)  # PyTorch's own cast


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_rounding_is_exact_at_and_beside_every_tie(format: str, dtype: torch.dtype) -> None:
    table = decoded(format)
    table = np.sort(table[np.isfinite(table)])
    ties = torch.from_numpy((table[1:] + table[:-1]) / 2).to(dtype)
    step = torch.finfo(torch.float32).eps if dtype == torch.float64 else torch.finfo(dtype).eps
    x = torch.cat((ties, ties * (1 + 2 * step), ties * (1 - 2 * step)))
    x = x[x.double().abs() <= FP8[format][3]]
    np.testing.assert_array_equal(tbt.to_fp8(x, format).view(torch.uint8).numpy(), nearest(x.double().numpy(), format))


def test_overflow_follows_the_rule_that_was_asked_for() -> None:
    x = torch.tensor([448.0, 449.0, 464.0, 465.0, 480.0, 1000.0, -1000.0, math.inf, -math.inf])
    assert tbt.to_fp8(x).float().tolist() == [448.0] * 6 + [-448.0, 448.0, -448.0]
    kept = tbt.to_fp8(x, overflow="nan").float()
    assert kept[:3].tolist() == [448.0] * 3  # rounded, they are still the largest number
    assert kept[3:].isnan().all()
    y = torch.tensor([57344.0, 61439.0, 61440.0, -1e30, math.inf])
    assert tbt.to_fp8(y, "e5m2").float().tolist() == [57344.0] * 3 + [-57344.0, 57344.0]
    assert tbt.to_fp8(y, "e5m2", "nan").float().isnan().tolist() == [False, False, True, True, True]
    for format in FP8:
        for overflow in ("saturate", "nan"):
            assert tbt.to_fp8(torch.tensor([math.nan]), format, overflow).float().isnan().all()
    beside = torch.tensor([464 * (1 + 1e-12), 57344.0], dtype=torch.float64)  # float32 knows it as 464
    assert tbt.to_fp8(beside, "e4m3", "nan").float().isnan().tolist() == [False, True]
    assert tbt.to_fp8(torch.tensor([57344.0, 1.5]).to(torch.float8_e5m2)).float().tolist() == [448.0, 1.5]


def test_unknown_formats_rules_and_granularities_are_refused() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="unknown FP8 format 'int8'"):
        tbt.to_fp8(x, "int8")
    with pytest.raises(ValueError, match="unknown overflow rule 'inf'"):
        tbt.to_fp8(x, overflow="inf")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown format 'e3m4'"):
        quantize(x, "e3m4")
    with pytest.raises(ValueError, match="unknown granularity 'column'"):
        quantize(x, granularity="column")  # type: ignore[arg-type]
    for block in ((0, 128), (128,), (128, 128, 128), 128, (True, 2), (2.0, 2)):
        with pytest.raises(ValueError, match="two positive integers"):
            quantize(x, granularity="block", block=block)  # type: ignore[arg-type]
    for bound in (0, -1.0, math.nan, math.inf, "1200"):
        with pytest.raises(ValueError, match="bound must be a number above 0"):
            quantize(x, bound=bound)  # type: ignore[arg-type]
    for wrong in (torch.ones(2, 2, dtype=torch.int64), torch.ones(0, 2), torch.ones(2, 0), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="cannot quantise"):
            quantize(wrong)


# --- scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_and_codes_equal_a_loop_over_blocks_with_ragged_ends(format: str, granularity: Granularity) -> None:
    x = normal(192, 300)  # neither is a multiple of 128
    size = {"tensor": (192, 300), "row": (1, 300), "tile": (1, 128), "block": (128, 128)}[granularity]
    q = quantize(x, format, granularity)
    largest = {"e4m3": 448, "e5m2": 57344, "int8": 127}[format]
    back = q.dequantize(torch.float64).numpy()
    for i in range(0, 192, size[0]):
        for j in range(0, 300, size[1]):
            part = x[i : i + size[0], j : j + size[1]]
            scale = part.abs().max() / largest
            assert q.scales[i // size[0], j // size[1]] == scale
            ratio = (part / scale).double().numpy()
            if format == "int8":
                want = np.round(ratio)
            else:
                want = decoded(format)[nearest(ratio.clip(-largest, largest), format)]
            codes = q.values[i : i + size[0], j : j + size[1]].double().numpy()
            np.testing.assert_array_equal(codes, want)
            got = back[i : i + size[0], j : j + size[1]]
            np.testing.assert_allclose(got, want * float(scale), rtol=2**-23, atol=0)
    assert q.scales.shape == (math.ceil(192 / size[0]), math.ceil(300 / size[1]))
    assert q.values.element_size() == 1
    assert q.nbytes == 192 * 300 + 4 * q.scales.numel()


LAYOUTS = {
    "vector": lambda x: x[0],
    "one column": lambda x: x[:, :1],
    "transposed": lambda x: x.t(),
    "every third": lambda x: x[::2, ::3],
    "one row for all": lambda x: x[:1].expand(4, -1),
    "axes permuted": lambda x: x.view(5, 26, 257).permute(1, 0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_shape_layout_and_dtype_of_the_input_change_no_number(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](normal(130, 257)).to(dtype)
    for format in FORMATS:
        for granularity in GRANULARITIES:
            q = quantize(x, format, granularity)
            assert q.shape == x.shape
            assert q.values.is_contiguous()
            plain = x.float().contiguous().reshape(-1, x.shape[-1])
            want = quantize(plain, format, granularity)
            assert torch.equal(q.scales, want.scales)
            assert torch.equal(q.dequantize().reshape(plain.shape), want.dequantize())
            assert q.dequantize(dtype).dtype == dtype


def test_a_block_larger_than_the_tensor_costs_no_memory() -> None:
    x = normal(4, 6)
    huge = quantize(x, "int8", "block", (10**7, 10**7))
    assert torch.equal(huge.dequantize(), quantize(x, "int8", "tensor").dequantize())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_come_back_as_zeros_and_leave_their_neighbours_alone(format: str, granularity: Granularity) -> None:
    zeros = quantize(torch.zeros(4, 8), format, granularity)
    assert zeros.scales.eq(1).all()
    assert zeros.dequantize().eq(0).all()
    x = normal(6, 8)
    x[2] = 0
    q = quantize(x, format, granularity, block=(1, 4))
    assert q.dequantize().isfinite().all()
    assert q.dequantize()[2].eq(0).all()
    if granularity == "row":
        alone = quantize(x[[0, 1, 3, 4, 5]], format, "row")
        assert torch.equal(q.dequantize()[[0, 1, 3, 4, 5]], alone.dequantize())


def test_one_scale_a_row_survives_a_row_of_outliers() -> None:
    w = normal(8, 64)
    w[3] *= 1000
    others = [0, 1, 2, 4, 5, 6, 7]

    def error(granularity: Granularity) -> float:
        back = quantize(w, "int8", granularity).dequantize()
        return ((back - w)[others].norm() / w[others].norm()).item()

    assert error("tensor") == 1.0  # all of them became zero
    assert error("row") <= 0.01


def test_int8_rounds_half_to_even_is_symmetric_and_errs_by_half_a_step() -> None:
    row = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -127]])
    q = quantize(row, "int8")
    assert q.scales.item() == 1
    assert q.values.tolist() == [[127, 0, 2, 2, 0, -127]]
    x = normal(1000, 100)
    q = quantize(x, "int8")
    assert q.values.min() >= -127
    assert ((q.dequantize() - x).abs() <= q.scales / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize(("format", "bits"), [("e4m3", 3), ("e5m2", 2)])
def test_fp8_errs_by_at_most_half_a_unit_of_its_mantissa_and_really_has_so_few_bits(format: str, bits: int) -> None:
    x = normal(256, 256)
    q = quantize(x, format)
    error = (q.dequantize() - x).abs() / x.abs()
    in_range = x.abs() / q.scales >= 2.0**-6
    worst, bound = error[in_range].max().item(), 2.0 ** -(bits + 1)
    assert 0.8 * bound < worst <= bound
    assert torch.equal(q.dequantize().sign(), x.sign())


def test_a_stored_scale_multiplies() -> None:
    q = quantize(torch.full((4, 4), 2.0))
    assert q.dequantize().eq(2).all()
    swapped = QuantizedTensor(torch.full((4, 4), 8.0).to(torch.float8_e4m3fn), torch.full((4, 1), 0.25), (1, 4))
    assert swapped.dequantize().eq(2).all()


def test_a_bound_on_the_largest_number_saturates_what_exceeds_it_and_saves_the_rest() -> None:
    x = torch.tensor([[0.004, 1.0, 20_000.0]])
    free, bounded = quantize(x), quantize(x, bound=1200)
    assert free.dequantize()[0, 0] == 0  # below half of the smallest number, 2⁻⁹ × 20,000 ÷ 448
    assert bounded.dequantize()[0, 0] > 0
    assert bounded.dequantize()[0, 2].item() == pytest.approx(1200)
    x[0, 2] = math.inf
    assert torch.equal(quantize(x, bound=1200).dequantize(), bounded.dequantize())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_comes_back_as_nan_and_spoils_no_other(format: str, bad: float) -> None:
    x = normal(3, 8)
    x[1, 4] = bad
    back = quantize(x, format).dequantize()
    assert back[1].isnan().any()
    assert back[[0, 2]].isfinite().all()


# --- linear layers --------------------------------------------------------------------------------


def linear(out_features: int = 64, in_features: int = 160, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias=bias)
    layer.weight.data = normal(out_features, in_features, seed=1)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_quantised_layer_is_the_layer_of_its_dequantised_weight(format: str, granularity: Granularity) -> None:
    layer, x = linear(), normal(2, 5, 160)
    q = QuantizedLinear.from_linear(layer, format, granularity)
    want = F.linear(x, q.weight.dequantize(), layer.bias)
    assert torch.equal(q(x), want)
    error = (q(x) - layer(x)).norm() / layer(x).norm()
    usual = {"e4m3": 0.026, "e5m2": 0.053, "int8": 0.008}[format]
    assert usual / 2 < error < usual * 2


def test_the_weight_of_a_quantised_layer_is_really_one_byte_a_number() -> None:
    q = QuantizedLinear.from_linear(linear(576, 192), granularity="block")
    assert q.values.untyped_storage().nbytes() == 576 * 192
    assert tbt.stored_bytes(q) == 576 * 192 + 4 * (5 * 2) + 4 * 576  # codes, ragged blocks of scales, bias
    assert not list(q.parameters())


@pytest.mark.parametrize("activations", ["tensor", "row", "tile"])
@pytest.mark.parametrize("format", FORMATS)
def test_activations_are_quantised_anew_for_each_call(format: str, activations: Granularity) -> None:
    layer, x = linear(), normal(2, 5, 160)
    x[1, 3] *= 100
    q = QuantizedLinear.from_linear(layer, format, activations=activations, matmul="dequantised")
    want_x = quantize(x.view(10, 160), format, activations).dequantize().view(x.shape)
    assert torch.equal(q(x), F.linear(want_x, q.weight.dequantize(), layer.bias))
    alone, among_others = q(x[:1, 2:3]), q(x)[:1, 2:3]
    if activations == "tensor":  # the outlier in another token has taken the range
        families.assert_differs(alone, among_others)
    else:
        families.assert_close(alone, among_others)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("activations", ["tensor", "row"])
@pytest.mark.parametrize("format", FP8)
def test_the_scaled_product_where_there_is_one_equals_the_dequantised_product(
    format: str, activations: Granularity, granularity: Granularity
) -> None:
    layer, x = linear(), normal(2, 5, 160)
    options: dict[str, Any] = {"format": format, "granularity": granularity, "activations": activations}
    q = QuantizedLinear.from_linear(layer, **options, matmul="dequantised")
    kind = "tensor" if (granularity, activations) == ("tensor", "tensor") else "row"
    if kind not in probe("cpu", format):
        assert q.scaled_granularity is None
        with pytest.raises(ValueError, match="no scaled product here"):
            QuantizedLinear.from_linear(layer, **options, matmul="scaled")
        return
    scaled = QuantizedLinear.from_linear(layer, **options, matmul="scaled")
    families.assert_close(scaled(x), q(x), 1e-2)


def test_a_device_without_the_product_is_found_out_and_served_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear(), normal(3, 160)
    options: dict[str, Any] = {"activations": "row", "matmul": "auto"}
    want = QuantizedLinear.from_linear(layer, activations="row", matmul="dequantised")(x)

    def refuses(*_: object, **__: object) -> Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    def wrong(a: Tensor, b: Tensor, **_: object) -> Tensor:
        return a.float() @ b.float()  # forgets the scales

    try:
        for broken in (refuses, wrong):
            probe.cache_clear()
            monkeypatch.setattr(torch, "_scaled_mm", broken)
            assert probe("cpu") == frozenset()
            assert torch.equal(QuantizedLinear.from_linear(layer, **options)(x), want)
            with pytest.raises(ValueError, match="no scaled product here"):
                QuantizedLinear.from_linear(layer, activations="row", matmul="scaled")
    finally:
        probe.cache_clear()


def test_casting_a_layer_widens_neither_codes_nor_scales() -> None:
    q = QuantizedLinear.from_linear(linear())
    codes, scales = q.values.view(torch.uint8).clone(), q.scales.clone()
    q = q.to(torch.bfloat16)
    assert torch.equal(q.values.view(torch.uint8), codes)
    assert torch.equal(q.scales, scales)
    assert q.bias is not None
    assert q.bias.dtype == torch.bfloat16
    assert q(normal(2, 160).bfloat16()).dtype == torch.bfloat16
    other = QuantizedLinear.from_linear(linear()).to("meta").to(torch.float16)
    assert other.values.is_meta
    assert other.values.dtype == torch.float8_e4m3fn


def test_a_quantised_layer_survives_its_state_dict() -> None:
    q, x = QuantizedLinear.from_linear(linear()), normal(2, 160)
    fresh = QuantizedLinear.from_linear(nn.Linear(160, 64))
    fresh.load_state_dict(q.state_dict())
    assert torch.equal(fresh(x), q(x))


def test_codes_of_another_format_are_refused_instead_of_rounded() -> None:
    layers = {format: QuantizedLinear.from_linear(linear(), format) for format in FORMATS}
    for held, layer in layers.items():
        for format in FORMATS:
            if format != held:
                with pytest.raises(ValueError, match=f"this layer stores {held}"):
                    layer.load_state_dict(layers[format].state_dict())


@pytest.mark.parametrize("activations", [None, "tensor", "row", "tile"])
def test_a_layer_takes_no_tokens_one_token_and_any_layout(activations: Granularity | None) -> None:
    for matmul in ("dequantised", "scaled") if activations in ("tensor", "row") and probe() else ("dequantised",):
        q = QuantizedLinear.from_linear(linear(), activations=activations, matmul=matmul)
        assert q(torch.zeros(0, 160)).shape == (0, 64)
        assert q(torch.zeros(2, 0, 160)).shape == (2, 0, 64)
        assert q(normal(160)).shape == (64,)
        x = normal(160, 10).t().unflatten(0, (2, 5))
        families.assert_close(q(x), q(x.contiguous()))


def test_a_bound_that_bounds_nothing_is_refused() -> None:
    for bound in (0, -1200, math.nan):
        with pytest.raises(ValueError, match="activation_bound must be a number above 0"):
            QuantizedLinear.from_linear(linear(), activations="row", activation_bound=bound)
    with pytest.raises(ValueError, match="say how to quantise"):
        QuantizedLinear.from_linear(linear(), activation_bound=1200)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    layer = linear()
    layer.weight[3, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        QuantizedLinear.from_linear(layer)


# --- models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tbt.Decoder:
    return families.ours(families.llama(), tmp_path_factory.mktemp("llama"))


def quantised(model: tbt.Decoder) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantised_model_is_the_reference_with_dequantised_weights(format: str, tmp_path: Path) -> None:
    reference = families.llama()
    model = families.ours(reference, tmp_path)
    q = tbt.quantize_model(model, format, "block", block=(32, 32))
    for module in reference.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = quantize(module.weight, format, "block", (32, 32)).dequantize()
    tokens = families.random_tokens(2, 12)
    families.assert_close(q(tokens), families.reference_logits(reference, tokens))
    families.assert_differs(q(tokens), model(tokens))  # and it is not the model that it was


def test_all_or_only_the_inner_feed_forwards_are_quantised_and_the_model_stays_as_it_was(model: tbt.Decoder) -> None:
    tokens = families.random_tokens(1, 8)
    want = model(tokens)
    every, inner = tbt.quantize_model(model), tbt.quantize_model(model, include="ffn")
    assert len(quantised(every)) == 3 * 7
    assert quantised(inner) == {f"layers.1.feed_forward.{name}_proj" for name in ("gate", "up", "down")}
    assert torch.equal(model(tokens), want)
    assert not quantised(model)
    assert inner.embed.weight.data_ptr() == model.embed.weight.data_ptr()  # shared, not copied
    every.to(torch.bfloat16)
    assert model.embed.weight.dtype == torch.float32
    assert torch.equal(model(tokens), want)


def test_tied_heads_stay_tied_and_whole() -> None:
    config = tbt.DecoderConfig.from_hf({"model_type": "llama", **families.T_LLAMA, "tie_word_embeddings": True})
    model = tbt.Decoder(config).requires_grad_(False)
    q = tbt.quantize_model(model, "int8")
    assert q.head.weight is q.embed.weight
    assert q.head.weight is not model.head.weight
    state = q.new_state(1, 8)
    tokens = families.random_tokens(1, 8)
    parts = torch.cat([q(tokens[:, :5], state), q(tokens[:, 5:], state)], 1)
    families.assert_close(parts, q(tokens))
    with pytest.raises(ValueError, match="other layers or another dtype"):
        q.to(torch.bfloat16)(tokens, state)


@pytest.mark.parametrize(
    ("name", "options", "recipe"),
    [
        ("llama-3.1-405b", {"include": "ffn"}, "fp8-ffn"),
        ("llama-3.1-8b", {"format": "int8"}, "int8"),
        ("smollm2-135m", {"granularity": "block"}, "fp8-block"),  # 576 and 192: ragged blocks
    ],
)
def test_bytes_on_the_meta_device_equal_the_closed_form(name: str, options: dict[str, Any], recipe: str) -> None:
    with torch.device("meta"):
        model = tbt.Decoder(tbt.published[name]).to(torch.bfloat16)
    held = tbt.stored_bytes(tbt.quantize_model(model, **options))
    assert held == tbt.weight_bytes(model.config, recipe)
    if name == "llama-3.1-8b":
        assert held == 6_979_321_856 + 4 * 1_376_256 + 2 * 1_050_939_392 == 9_086_705_664
    if name == "llama-3.1-405b":
        assert round(held / 1e9) == 487


def test_what_cannot_be_quantised_is_refused_by_name(model: tbt.Decoder) -> None:
    bad: list[dict[str, Any]]
    bad = [{"format": "int4"}, {"granularity": "column"}, {"include": "heads"}, {"activations": "block"}]
    for wrong in bad:
        with pytest.raises(ValueError, match=f"unknown {next(iter(wrong))}"):
            tbt.quantize_model(model, **wrong)
    with pytest.raises(ValueError, match="already"):
        tbt.quantize_model(tbt.quantize_model(model, include="ffn"))
    broken = tbt.Decoder(model.config).requires_grad_(False)
    broken.get_parameter("layers.1.feed_forward.up_proj.weight")[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"layer 1, feed_forward\.up_proj: the weight holds NaN"):
        tbt.quantize_model(broken)


def test_w8a8_runs_a_whole_model_and_generates(model: tbt.Decoder) -> None:
    q = tbt.quantize_model(model, include="ffn", activations="row", activation_bound=1200)
    tokens = families.random_tokens(1, 12)
    error = (q(tokens) - model(tokens)).norm() / model(tokens).norm()
    assert 1e-3 < error < 0.2
    answer = tbt.generate(q, tokens[0].tolist(), 5)
    whole = torch.tensor([tokens[0].tolist() + answer])
    assert q(whole)[0, 11:-1].argmax(-1).tolist() == answer


def test_counting_a_pass_sees_one_byte_a_weight(model: tbt.Decoder) -> None:
    def cost(m: tbt.Decoder) -> tbt.measure.Count:
        return tbt.measure.count(lambda: m(torch.tensor([[5]])), weights=m)

    q = tbt.quantize_model(model)
    plain, small = cost(model), cost(q)
    linears = [m for m in model.layers.modules() if isinstance(m, nn.Linear)]
    saved = sum(m.weight.nbytes - m.weight.numel() - 4 * m.out_features for m in linears)
    assert plain.flops == small.flops
    assert plain.weight_bytes - small.weight_bytes == saved
