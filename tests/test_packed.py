"""Packed weights against float64 derivations of the same blocks; what a kernel cannot take, and what a model may not.

How a product rounds on its way differs by processor, so each bound is that of bfloat16, of whatever is rounded to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.__main__ import main
from tokenbytoken.checkpoints.gguf_fast import four_bit_blocks
from tokenbytoken.checkpoints.packed import FourBitLinear, has_kernel, kernels, layers
from tokenbytoken.checkpoints.packed.layers import EightBitLinear, rows_of_eight_bits
from tokenbytoken.checkpoints.tensors import Blocks
from tokenbytoken.layers import Attention
from tokenbytoken.measure import book_file

CPU = torch.device("cpu")
HALF = 2**-8  # twice what rounding to bfloat16 changes of a number, at most
SHAPES = [(16, 32), (48, 96), (80, 160), (192, 576), (576, 64)]
needs_four = pytest.mark.skipif(not has_kernel(4, (16, 32), CPU), reason="this torch has no product from four bits")
needs_eight = pytest.mark.skipif(not has_kernel(8, (16, 32), CPU), reason="this torch has no product from eight bits")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def blocks(rows: int, columns: int, kind: Kind = Kind.Q4_1) -> tuple[Blocks, Tensor]:
    """Blocks as they are read, and the numbers that the gguf library makes of them, in float64."""
    data = quantize(normal(rows, columns, seed=1).numpy() + np.float32(0.3), kind)
    want = torch.from_numpy(dequantize(data, kind)).double().view(rows, columns)
    return four_bit_blocks(data, kind, rows), want


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q4_0])
def test_blocks_are_read_as_they_are_stored(kind: Kind) -> None:
    (codes, scales, minima), want = blocks(48, 96, kind)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) <= 15
    scale, minimum = (t.double().repeat_interleave(32, 1) for t in (scales, minima))
    assert torch.equal((codes * scale + minimum).float(), want.float())


@needs_four
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 40, 130])
def test_four_bits_are_the_float64_product_of_the_same_blocks(shape: tuple[int, int], rows: int) -> None:
    held, weight = blocks(*shape)
    bias, x = normal(shape[0]), normal(rows, shape[1], seed=2)
    got = FourBitLinear(held, bias)(x).double()
    want = x.double() @ weight.T + bias
    # What is rounded: activations, scales, zeros (of the middle of a block), the result, and in some kernels weights.
    scale, minimum = (t.double().repeat_interleave(32, 1) for t in (held.scales, held.minima))
    middle = minimum + 8 * scale
    rounded = x.double().abs() @ (weight.abs() + (weight - middle).abs() + middle.abs()).T
    assert bool(((got - want).abs() <= HALF * (rounded + want.abs())).all())
    families.assert_differs(got, torch.zeros_like(got))


@needs_four
@pytest.mark.parametrize("shape", SHAPES)
def test_the_expanded_matrix_is_the_packed_one(shape: tuple[int, int]) -> None:
    held, _ = blocks(*shape)
    layer = FourBitLinear(held)
    scale, middle = ((t.bfloat16()).double().repeat_interleave(32, 1)
                     for t in (held.scales, held.minima + 8 * held.scales))  # fmt: skip
    want = (held.codes.double() - 8) * scale + middle
    families.assert_close(layer.matrix(torch.float32).double(), want, 1e-6)
    assert layer.matrix(torch.bfloat16).dtype == torch.bfloat16


@needs_eight
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (97, 64), (192, 576)])
@pytest.mark.parametrize("rows", [1, 3, 130])
def test_eight_bits_are_the_float64_product_and_off_by_half_a_step(shape: tuple[int, int], rows: int) -> None:
    weight, x = normal(*shape), normal(rows, shape[1], seed=2)
    weight[0] = 0  # a row without a scale
    values, scales = rows_of_eight_bits(weight)
    layer = EightBitLinear(values, scales)
    exact = values.double() * scales.double()[:, None]
    assert bool(((exact - weight).abs() <= scales.double()[:, None] * (0.5 + 127 * HALF)).all())
    assert torch.equal(layer.matrix(torch.float64), exact)
    got, want = layer(x).double(), x.double() @ exact.T
    assert bool(((got - want).abs() <= HALF * (x.double().abs() @ exact.abs().T + want.abs())).all())


@needs_four
def test_layers_take_no_tokens_and_any_layout() -> None:
    layer = FourBitLinear(blocks(48, 96)[0])
    assert layer(torch.zeros(0, 96)).shape == (0, 48)
    assert layer(torch.zeros(2, 0, 96)).shape == (2, 0, 48)
    assert layer(normal(96)).shape == (48,)
    x = normal(96, 6).t().unflatten(0, (2, 3))
    assert torch.equal(layer(x), layer(x.contiguous()))
    assert layer(x.double()).dtype == torch.float64


def test_what_a_product_cannot_take_is_known_from_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_works", lambda bits, kind: True)
    for bits, shape, fits in (
        (4, (16, 32), True), (4, (8, 32), False), (4, (24, 32), False), (4, (16, 48), False), (4, (16, 16), False),
        (8, (1, 16), True), (8, (7, 48), True), (8, (16, 8), False), (8, (16, 24), False), (8, (3, 5, 40), False),
    ):  # fmt: skip
        assert has_kernel(bits, shape, CPU) is fits, (bits, shape)  # type: ignore[arg-type]
    assert not has_kernel(4, (16, 32 * 3), torch.device("cuda")) or kernels._tiles(96)
    assert [kernels._tiles(width) for width in (32, 64, 128, 576, 1536, 48)] == [2, 4, 8, 4, 8, 0]


def test_a_weight_that_is_not_finite_has_no_scale() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        rows_of_eight_bits(torch.tensor([[1.0, float("nan")]]))


def test_a_lone_rows_norm_is_the_norm() -> None:
    plain, quick = nn.RMSNorm(576, eps=1e-5), layers.LoneRowNorm(576, eps=1e-5)
    quick.weight = plain.weight = nn.Parameter(normal(576))
    for shape in ((1, 1, 576), (576,), (2, 3, 576)):
        for size in (1.0, 1e-4):
            families.assert_close(quick(size * normal(*shape)), plain(size * normal(*shape)), 1e-6)


# --- files whose widths fit, and others -------------------------------------------------------------


def write_gguf(path: Path, hidden: int, heads: int, kv_heads: int, width: int) -> None:
    """A Llama of two layers with untied head, its matrices in Q4_1."""
    kv = hidden // heads * kv_heads
    shapes = {"token_embd": (53, hidden), "output": (53, hidden), "output_norm": (hidden,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm": (hidden,), f"blk.{i}.ffn_norm": (hidden,), f"blk.{i}.attn_q": (hidden, hidden),
            f"blk.{i}.attn_k": (kv, hidden), f"blk.{i}.attn_v": (kv, hidden), f"blk.{i}.attn_output": (hidden, hidden),
            f"blk.{i}.ffn_gate": (width, hidden), f"blk.{i}.ffn_up": (width, hidden),
            f"blk.{i}.ffn_down": (hidden, width),
        }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "embedding_length": hidden, "block_count": 2, "feed_forward_length": width, "context_length": 64,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads,
    }.items():  # fmt: skip
        writer.add_int32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = (0.25 * draw.standard_normal(shape)).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values + 1)
        else:
            kind = Kind.Q4_1 if name.startswith("blk") else Kind.Q8_0
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WIDTHS = {"all fit": (64, 4, 2, 96), "keys do not": (64, 8, 1, 96)}  # 8 rows of keys, which come in sixteens
FORMS = ["packed", "int8"]


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_file_of_any_widths_runs_and_takes_the_bytes_of_the_closed_form(
    widths: str, form: Any, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", *WIDTHS[widths])
    plain, small = tbt.load(tmp_path / "model.gguf"), tbt.load(tmp_path / "model.gguf", weights=form)
    tokens = families.random_tokens(2, 12, 53)
    assert error(small(tokens), plain(tokens)) < {"packed": 0.03, "int8": 0.1}[form]
    assert error(families.feed(small, tokens, [5, 1, 6]), small(tokens)) < 0.02
    assert small.kind == plain.kind
    if has_kernel(4, (16, 32), CPU) and has_kernel(8, (16, 32), CPU):
        recipe = {"packed": "packed", "int8": "packed-int8"}[form]
        assert tbt.stored_bytes(small) == tbt.weight_bytes(small.config, recipe)
    if widths != "all fit" and form == "packed":
        mixer = small.layers[0].mixer
        assert isinstance(mixer, Attention)
        assert isinstance(mixer.k_proj, nn.Linear)  # expanded
        assert isinstance(mixer.get_submodule("q_proj"), FourBitLinear) or not has_kernel(4, (16, 32), CPU)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3", "mamba", "jamba"])
@pytest.mark.parametrize("width", [64, 40])
def test_eight_bits_serve_every_architecture_and_width(kind: str, width: int, tmp_path: Path) -> None:
    reference = getattr(families, kind)(hidden_size=width)
    plain = families.ours(reference, tmp_path)
    small = tbt.load(tmp_path, weights="int8")
    tokens = families.random_tokens(2, 9)
    assert error(small(tokens), plain(tokens)) < 0.25  # experts may be chosen otherwise
    assert len(tbt.generate(small, tokens[0].tolist(), 3)) == 3
    if has_kernel(8, (16, 32), CPU):
        assert tbt.stored_bytes(small) == tbt.weight_bytes(small.config, "packed-int8")
        assert layers.is_packed(small) or width == 40


def test_a_torch_without_these_products_expands_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_works", lambda bits, kind: False)
    write_gguf(tmp_path / "model.gguf", *WIDTHS["all fit"])
    plain, tokens = tbt.load(tmp_path / "model.gguf"), families.random_tokens(2, 12, 53)
    for form in FORMS:
        assert torch.equal(tbt.load(tmp_path / "model.gguf", weights=form)(tokens), plain(tokens))  # type: ignore[arg-type]


def test_a_probe_finds_a_product_that_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> Tensor:
        raise RuntimeError("not implemented")

    def wrong(x: Tensor, *_: object) -> Tensor:
        return torch.zeros(len(x), 32)

    for broken in (refuses, wrong):
        for name, bits in (("product_four", 4), ("product_eight", 8)):
            monkeypatch.setattr(kernels, name, broken)
            assert not kernels._works.__wrapped__(bits, "cpu")


def test_only_what_is_stored_in_four_bits_can_stay_so(tmp_path: Path) -> None:
    families.ours(families.llama(), tmp_path)
    with pytest.raises(ValueError, match="nothing to keep packed"):
        tbt.load(tmp_path, weights="packed")
    with pytest.raises(ValueError, match="unknown weights"):
        tbt.load(tmp_path, weights="int4")  # type: ignore[arg-type]
    assert not tbt.checkpoints.stores_four_bits(tmp_path)
    assert tbt.checkpoints.stores_four_bits("smollm2-135m")


# --- the real model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> tbt.Decoder:
    return tbt.load("smollm2-135m")


@pytest.fixture(scope="module")
def small() -> tbt.Decoder:
    return tbt.load("smollm2-135m", weights="packed")


@pytest.fixture(scope="module")
def passage() -> Tensor:
    text = book_file("data/passage.txt").read_text(encoding="utf-8")
    return torch.tensor([tbt.load_tokenizer("smollm2-135m").encode(text)[:160]])


@needs_four
@needs_eight
def test_the_packed_model_is_near_the_float32_model_of_the_same_blocks(
    plain: tbt.Decoder, small: tbt.Decoder, passage: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        log_p = plain(passage)[0].log_softmax(-1)
        for threshold in (layers.EXPAND_ROWS, 10**6):  # expanded for so many rows, and by the products of few
            monkeypatch.setattr(layers, "EXPAND_ROWS", threshold)
            log_q = small(passage)[0].log_softmax(-1)
            kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
            assert 0 < kl <= 0.005


@needs_four
@needs_eight
def test_bytes_are_those_of_the_accounting(small: tbt.Decoder, plain: tbt.Decoder, passage: Tensor) -> None:
    config = small.config
    table, matrices, norms = 49152 * 576, 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536), 61 * 576
    assert tbt.weight_bytes(config, "packed") == table + 2 * 49152 + matrices * 5 // 8 + 4 * norms
    assert tbt.stored_bytes(small) == tbt.weight_bytes(config, "packed")
    counts = []
    for model in (small, plain):
        state = model.new_state(1, 16)
        model(passage[:, :8], state, logits="none")
        with tbt.measure.count(weights=model, state=state) as cost:
            model(passage[:, 8:9], state, logits="last")
        counts.append(cost)
    want = tbt.pass_cost(config, 1, 8, recipe="packed", state_bytes_per_element=4)
    assert counts[0].weight_bytes == want.weight_bytes
    assert counts[0].bytes == want.bytes
    assert counts[0].flops == counts[1].flops == want.flops


@needs_four
def test_a_packed_model_writes_drafts_and_shares_its_state(
    small: tbt.Decoder, plain: tbt.Decoder, passage: Tensor
) -> None:
    prompt = passage[0, :20].tolist()
    text = tbt.generate(small, prompt, 8)
    guessed = tbt.speculate(small, prompt, 8, draft=tbt.DraftModel(tbt.first_layers(small, 4)))
    assert len(text) == len(guessed.tokens) == 8
    state = plain.new_state(1, 32)
    plain(passage[:, :20], state)
    assert error(small(passage[:, 20:24], state), plain(passage[:, :24])[:, 20:]) < 0.05


def four_bits_of(model: tbt.Decoder) -> FourBitLinear:
    """What projects to the first layer's queries, keys and values."""
    mixer = model.layers[0].mixer
    assert isinstance(mixer, layers.PackedAttention)
    assert isinstance(mixer.qkv_proj, FourBitLinear)
    return mixer.qkv_proj


@needs_four
def test_packed_weights_stay_where_they_are(small: tbt.Decoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="packed for this processor"):
        tbt.save(small, tmp_path)
    assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match="not kept"):
        small.state_dict()
    with pytest.raises(ValueError, match="quantised layers already"):
        tbt.quantize_model(small)
    first = four_bits_of(small)
    coded = tbt.quantize_cache(small, "int8")  # shares the weights
    assert four_bits_of(coded).packed is first.packed
    half = tbt.quantize_cache(small, None).to(torch.bfloat16)
    assert four_bits_of(half).scales.dtype == torch.bfloat16
    assert half(torch.tensor([[5, 6]])).dtype == torch.bfloat16


@needs_four
@pytest.mark.parametrize("weights", ["packed", "auto"])
def test_the_command_names_what_it_chose(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "The capital of France is", "--max-new-tokens", "2", "--weights", weights]
    assert main(["generate", *options]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("The capital of France is Paris")
    chosen = told.err.rpartition("; weights ")[2]
    if weights == "packed":
        assert chosen.strip() == "packed"
    else:  # as fast as it is here
        assert chosen.startswith(("packed (a packed product takes 1/", "float32 (a packed product takes 1/"))


def test_the_command_refuses_packed_weights_among_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "x", "--tensor-parallel", "--weights", "packed"]) == 2
    assert "packed weights are not shared among ranks" in capsys.readouterr().err
