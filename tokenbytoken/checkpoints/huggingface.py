"""Hugging Face directories: config.json and safetensors, whose names and stacks of experts become the model's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._paths import read_json
from ..config import DecoderConfig
from .tensors import Part, Stored

__all__ = ["open_directory", "open_safetensors"]

_HF_NAMES = [
    (r"model\.embed_tokens\.", "embed."),
    (r"backbone\.embeddings?\.", "embed."),
    (r"(?:model\.norm|model\.final_layernorm|backbone\.norm_f)\.", "norm."),
    (r"lm_head\.", "head."),
    (r"model\.layers\.(\d+)\.input_layernorm\.", r"layers.\1.mixer_norm."),
    (r"backbone\.layers\.(\d+)\.norm\.", r"layers.\1.mixer_norm."),
    (r"model\.layers\.(\d+)\.(?:post_attention|pre_ff)_layernorm\.", r"layers.\1.feed_forward_norm."),
    (r"(?:model|backbone)\.layers\.(\d+)\.(?:mamba|mixer)\.dt_proj\.bias$", r"layers.\1.mixer.dt_bias"),
    (r"model\.layers\.(\d+)\.mamba\.(dt|b|c)_layernorm\.", r"layers.\1.mixer.\2_norm."),
    (r"(?:model|backbone)\.layers\.(\d+)\.(?:mamba|mixer)\.", r"layers.\1.mixer."),
    (r"model\.layers\.(\d+)\.self_attn\.(q_a|kv_a)_layernorm\.", r"layers.\1.mixer.\2_norm."),
    (r"model\.layers\.(\d+)\.self_attn\.kv_a_proj_with_mqa\.", r"layers.\1.mixer.kv_a_proj."),
    (r"model\.layers\.(\d+)\.self_attn\.", r"layers.\1.mixer."),
    (r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias$", r"layers.\1.feed_forward.router.selection_bias"),
    (r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.gate\.", r"layers.\1.feed_forward.router."),
    (r"model\.layers\.(\d+)\.mlp\.shared_experts\.", r"layers.\1.feed_forward.shared."),
    (r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe|feed_forward)\.", r"layers.\1.feed_forward."),
]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")  # a table, recomputed here in float64


def _own_name(name: str) -> str:
    for pattern, replacement in _HF_NAMES:
        new, hits = re.subn("^" + pattern, replacement, name)
        if hits:
            return new
    return name


def _read_slice(file: Any, name: str, part: Part | None) -> Tensor:
    if part is None:
        return file.get_tensor(name)
    return file.get_slice(name)[(slice(None),) * part.dim + (slice(part.start, part.stop),)]


# Experts are stored one by one (Mixtral's with names of their own), or as transformers 5 keeps them in memory: all
# in one tensor, the rows of gate_proj above those of up_proj.
_ONE_EXPERT = re.compile(r"(layers\.\d+\.feed_forward\.experts\.)(\d+)\.(\w+)\.weight")
_FUSED_EXPERTS = re.compile(r"(layers\.\d+\.feed_forward\.experts\.)gate_up_proj")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _read_experts(experts: Sequence[Stored], part: Part | None) -> Tensor:
    if part is None:
        return torch.stack([expert.read(None) for expert in experts])
    if part.dim == 0:
        return torch.stack([expert.read(None) for expert in experts[part.start : part.stop]])
    return torch.stack([expert.read(Part(part.dim - 1, part.start, part.stop)) for expert in experts])


def _read_half(fused: Stored, half: Part, part: Part | None) -> Tensor:
    if part is None:
        return fused.read(half)
    if part.dim == half.dim:
        return fused.read(Part(half.dim, half.start + part.start, half.start + part.stop))
    return half.of(fused.read(part))


def _gather_experts(tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """The same tensors, with those of experts as the model has them: one for each projection of a layer."""
    alone: dict[str, dict[int, Stored]] = {}
    for name, stored in tensors:
        if one := _ONE_EXPERT.fullmatch(name):
            projection = _PROJECTIONS.get(one[3], one[3])
            experts = alone.setdefault(one[1] + projection, {})
            if int(one[2]) in experts:
                raise ValueError(f"the checkpoint holds tensor {name} twice")
            experts[int(one[2])] = stored
        elif (fused := _FUSED_EXPERTS.fullmatch(name)) and len(stored.shape) == 3:
            E, rows, M = stored.shape
            for i, projection in enumerate(("gate_proj", "up_proj")):
                half = Part(1, i * (rows // 2), (i + 1) * (rows // 2))
                yield fused[1] + projection, Stored((E, rows // 2, M), partial(_read_half, stored, half))
        else:
            yield name, stored
    for name, experts in alone.items():
        shapes = {expert.shape for expert in experts.values()}
        prefix, _, projection = name.rpartition(".")
        if lacking := set(range(max(experts) + 1)) - set(experts):
            raise ValueError(f"the checkpoint lacks tensor {prefix}.{min(lacking)}.{projection}.weight")
        if len(shapes) > 1:
            raise ValueError(f"tensors {prefix}.*.{projection}.weight have different shapes: {sorted(shapes)}")
        inside = [experts[i] for i in range(len(experts))]
        yield name, Stored((len(inside), *inside[0].shape), partial(_read_experts, inside))


def open_safetensors(path: Path) -> Iterator[tuple[str, Stored]]:
    """The tensors of one file, under the names they have there. Raises ValueError for a file that is none."""
    from safetensors import safe_open

    try:
        file = safe_open(path, framework="pt")
    except Exception as error:
        raise ValueError(f"{path.name} is not a readable safetensors file: {error}") from None
    for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
        yield name, Stored(tuple(file.get_slice(name).get_shape()), partial(_read_slice, file, name))


def open_directory(
    path: Path, mtp: bool = False, config: DecoderConfig | None = None
) -> tuple[DecoderConfig, Iterator[tuple[str, Stored]]]:
    """The config of a directory, unless one is handed in, and its tensors under the model's own names.

    ``mtp``: those of multi-token prediction instead. Raises ValueError for files that are missing or damaged.
    """
    config = config or DecoderConfig.from_hf(read_json(path / "config.json"), name=path.name)
    if (index := path / "model.safetensors.index.json").exists():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed or not all(isinstance(shard, str) for shard in placed.values()):
            raise ValueError(f"{index.name} has no weight_map that names the file of each tensor")
        shards = sorted(set(placed.values()))
    else:
        shards = ["model.safetensors"]
    for shard in shards:
        if Path(shard).name != shard or not (path / shard).exists():
            raise ValueError(f"{path.name}/ lacks the weights file {shard}")

    def tensors() -> Iterator[tuple[str, Stored]]:
        for name, stored in (found for shard in shards for found in open_safetensors(path / shard)):
            # A shared expert of no width (n_shared_experts: 0) is stored as tensors without numbers.
            if not _NOT_WEIGHTS.search(name) and 0 not in stored.shape and is_mtp(name) == mtp:
                yield _own_name(name), stored

    def is_mtp(name: str) -> bool:
        """Multi-token-prediction modules are stored as layers past the last; they are opened instead, if ``mtp``."""
        layer = _LAYER.match(name)
        return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.mtp_layers

    return config, _gather_experts(tensors())
