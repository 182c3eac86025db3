"""GGUF files of Llama's architecture: the config in their fields, and their tensors under the model's own names.

GGUF stores the query and key rows of a head for the interleaved rotation; here they become halves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import AttentionConfig, DecoderConfig, Fields, LayerConfig, RopeConfig, SwiGLUConfig
from .gguf_fast import FOUR_BITS, expand, four_bit_blocks, gguf_reader
from .tensors import Blocks, Part, Stored

if TYPE_CHECKING:
    import gguf

__all__ = ["field_value", "open_gguf"]

_GGUF_NAMES = {
    "attn_norm": "mixer_norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_norm": "feed_forward_norm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "token_embd": "embed",
    "output_norm": "norm",
    "output": "head",
}


def field_value(reader: gguf.GGUFReader, key: str, default: Any = ...) -> Any:
    field = reader.fields.get(key)
    if field is None:
        if default is ...:
            raise ValueError(f"GGUF field {key} is missing")
        return default
    try:
        if [kind.name for kind in field.types] == ["ARRAY", "STRING"]:  # as the library does, in a third of the time
            return [str(field.parts[i].tobytes(), "utf-8") for i in field.data]
        return field.contents()
    except UnicodeDecodeError:
        raise ValueError(f"GGUF field {key} is not valid UTF-8") from None


def _config(reader: gguf.GGUFReader, name: str) -> DecoderConfig:
    architecture = field_value(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"GGUF field general.architecture = {architecture!r} cannot be represented (only 'llama' can)")

    prefix = "llama."
    values = {key.removeprefix(prefix): field_value(reader, key) for key in reader.fields if key.startswith(prefix)}
    f = Fields(values, f"GGUF field {prefix}")
    names = {tensor.name for tensor in reader.tensors}
    if f("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in names:
        raise ValueError("GGUF rope scaling (llama.rope.scaling.type, rope_freqs.weight) cannot be represented")
    f.only("expert_count", 0)
    hidden, num_heads = f.integer("embedding_length"), f.integer("attention.head_count")
    if hidden % num_heads and f("attention.key_length", None) is None:
        raise ValueError(f"GGUF field llama.embedding_length ({hidden}) is no multiple of head_count ({num_heads})")
    head_dim = f.integer("attention.key_length", hidden // num_heads)
    f.only("attention.value_length", head_dim)
    f.only("rope.dimension_count", head_dim)
    layer = LayerConfig(
        mixer=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=f.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope=RopeConfig(dim=head_dim, theta=f.number("rope.freq_base", 10_000.0)),
        ),
        feed_forward=SwiGLUConfig(intermediate_size=f.integer("feed_forward_length")),
    )
    table = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if table is None or len(table.shape) != 2:
        raise ValueError("the file lacks tensor token_embd.weight, a matrix with a row for each token")
    return DecoderConfig(
        vocab_size=int(table.shape[1]),
        hidden_size=hidden,
        layers=(layer,) * f.integer("block_count"),
        # The file stores the epsilon in float32; six digits give back the decimal it was written as.
        norm_eps=float(f"{f.number('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_embeddings="output.weight" not in names,
        max_positions=f.integer("context_length", None),
        name=name,
    )


def _half_split(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a head from GGUF's interleaved pairs (0, 1), (2, 3) … to halves (i, i + D/2)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def open_gguf(path: Path) -> tuple[DecoderConfig, Iterator[tuple[str, Stored]]]:
    reader = gguf_reader(path)
    config = _config(reader, path.stem)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)

    def tensors() -> Iterator[tuple[str, Stored]]:
        for tensor in reader.tensors:
            match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", tensor.name)
            if match is None:
                raise ValueError(f"tensor {tensor.name!r} of the checkpoint has no place in the model")
            layer, key, leaf = match.groups()
            name = f"{_GGUF_NAMES.get(key, key)}.{leaf}"
            heads = {"attn_q": mixer.num_heads, "attn_k": mixer.num_kv_heads}.get(key)

            shape = tuple(tensor.shape[::-1].tolist())

            def read(
                part: Part | None, tensor: Any = tensor, shape: tuple[int, ...] = shape, heads: int | None = heads
            ) -> Tensor:
                rows = slice(part.start, part.stop) if part and part.dim == 0 else slice(None)
                values = expand(tensor.data[rows], tensor.tensor_type).view(-1, *shape[1:])
                if heads is not None:
                    values = _half_split(values, heads * len(values) // shape[0])
                return part.of(values).clone() if part and part.dim else values

            def blocks(
                codes: Tensor | None, tensor: Any = tensor, shape: tuple[int, ...] = shape, heads: int | None = heads
            ) -> Blocks:
                if heads is None:
                    return four_bit_blocks(tensor.data, tensor.tensor_type, shape[0], codes)
                codes = torch.empty(shape, dtype=torch.uint8) if codes is None else codes
                pairs = codes.view(heads, 2, -1, shape[1]).transpose(1, 2)  # halves, in the order of GGUF's rows
                found = four_bit_blocks(tensor.data, tensor.tensor_type, shape[0], pairs)
                return Blocks(codes, _half_split(found.scales, heads), _half_split(found.minima, heads))

            packed = blocks if tensor.tensor_type.name in FOUR_BITS and len(shape) == 2 else None
            yield (name if layer is None else f"layers.{layer}.{name}"), Stored(shape, read, packed)

    return config, tensors()
