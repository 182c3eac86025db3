"""How many parameters a model has, and how many bytes hold them.

Everything rests on one inventory, ``config.weights()``: every tensor of a model with its shape and its role.
Parameters are its areas, bytes are its areas times a recipe.

>>> from tokenbytoken.models import published
>>> count_parameters(published["llama-3.1-405b"]).total
405853388800
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..config import DecoderConfig, Model, Weight
from .recipes import BLOCK, GROUP, Recipe, packs_eight, packs_four, recipe_named

__all__ = ["ParameterCount", "count_parameters", "mtp_weights", "weight_bytes", "weights"]


def weights(config: Model) -> tuple[Weight, ...]:
    """Every tensor of the model, layer by layer; a tied head is not listed a second time.

    Raises ValueError for a model of which only the attention is known.
    """
    return known(config).weights()


def mtp_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """The multi-token-prediction modules' tensors, see :meth:`~tokenbytoken.config.DecoderConfig.mtp_weights`."""
    return config.mtp_weights()


def known(config: Model) -> Model:
    """The config, if it is one. Raises ValueError for anything else."""
    if not hasattr(config, "mixers"):
        raise ValueError(f"the config must be a DecoderConfig, not {config!r}")
    return config


def whole_decoder(config: Model) -> DecoderConfig:
    """The config as that of a decoder all of whose weights are known. Raises ValueError for any other."""
    weights(config)
    assert isinstance(config, DecoderConfig)
    return config


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model: all of them, and those that one token passes through.

    ``active`` counts embedding and head whole; publishers differ, so the two narrower counts stand beside
    it. ``router_bias`` is part of ``total`` and ``active``; ``mtp`` (multi-token prediction) of neither.
    """

    total: int
    active: int
    active_without_embedding: int
    active_without_embedding_and_head: int
    router_bias: int
    mtp: int


def count_parameters(config: Model) -> ParameterCount:
    """Count the parameters of a config, exactly.

    With tied embeddings the one table serves as head as well: ``active_without_embedding`` then still
    holds it, because the head multiplies by all of it, and ``active_without_embedding_and_head`` does not.
    Raises ValueError for an :class:`~tokenbytoken.models.AttentionShape`.
    """
    return _count(whole_decoder(config))


@lru_cache(maxsize=64)
def _count(config: DecoderConfig) -> ParameterCount:
    total = sum(w.area * w.copies for w in weights(config))
    active = sum(w.area * w.used for w in weights(config))
    table = config.vocab_size * config.hidden_size
    inside = active - (table if config.tie_embeddings else 2 * table)
    return ParameterCount(
        total=total,
        active=active,
        active_without_embedding=inside + table,
        active_without_embedding_and_head=inside,
        router_bias=sum(w.area for w in weights(config) if w.role == "router_bias"),
        mtp=sum(w.area * w.copies for w in mtp_weights(config)),
    )


def is_one_byte(weight: Weight, recipe: Recipe, last_layer: int) -> bool:
    if weight.role not in recipe.one_byte:
        return False
    return not (recipe.skip_first_and_last_layer and weight.layer in (0, last_layer))


def bytes_of_copy(weight: Weight, recipe: Recipe, last_layer: int) -> int:
    """Bytes of one copy of a tensor, its scales included."""
    if is_one_byte(weight, recipe, last_layer):
        scales = {
            "none": 0,
            "row": weight.rows,
            "block": math.ceil(weight.rows / BLOCK) * math.ceil(weight.columns / BLOCK),
        }[recipe.scales]
        return weight.area + 4 * scales
    if weight.role in recipe.four_bits and packs_four(weight.rows, weight.columns):
        return weight.area // 2 + 4 * (weight.area // GROUP)
    if weight.role in recipe.eight_bits and packs_eight(weight.columns):
        return weight.area + 2 * weight.rows
    if weight.role == "router_bias" and recipe.float32_router_bias:
        return 4 * weight.area
    return recipe.bytes * weight.area


def weight_bytes(config: Model, recipe: str = "bf16") -> int:
    """Bytes that hold all weights of a model, its scales included.

    ``fp32``, ``bf16``
        4 or 2 bytes for every parameter.
    ``fp8-all``
        1 byte for every parameter, no scales: the rule of thumb, which no release follows.
    ``fp8-ffn``
        Llama 3.1's: feed-forward matrices of all layers but the first and the last in 1 byte with a
        float32 scale a row; attention, embedding, head and norms in 2 (arXiv 2407.21783, section 6.2).
    ``fp8-block``
        DeepSeek-V3's checkpoint: all linear layers of the blocks in 1 byte with a float32 scale for each
        128 x 128 block; embedding, head, routers and norms in 2, router biases in 4; with the
        multi-token-prediction module and its own copy of embedding and head.
    ``int8``
        The same linear layers in 1 byte with a float32 scale a row; the rest in 2.
    ``int8-experts``
        Jamba's ExpertsInt8: experts and dense feed-forwards in 1 byte, the rest in 2; their scales, one a
        row and 0.03 % of the whole, are not counted (arXiv 2408.12570, section 3.1).
    ``packed``
        What ``load(…, weights="packed")`` gives: linear layers in half a byte with a scale and a zero of 2 bytes
        each for 32 numbers, embedding and head in 1 byte with a scale of 2 a row; what does not fit, and norms, in 4.
    ``packed-int8``
        What ``load(…, weights="int8")`` gives: linear layers, embedding and head in 1 byte with a scale of 2 a row.

    Raises ValueError for an unknown recipe and for an :class:`~tokenbytoken.models.AttentionShape`.
    """
    return _weight_bytes(whole_decoder(config), recipe_named(recipe))


@lru_cache(maxsize=256)
def _weight_bytes(config: DecoderConfig, chosen: Recipe) -> int:
    last = config.num_layers - 1
    total = sum(w.copies * bytes_of_copy(w, chosen, last) for w in weights(config))
    if chosen.with_mtp and config.mtp_layers:
        total += sum(w.copies * bytes_of_copy(w, chosen, last) for w in mtp_weights(config))
        total += config.mtp_layers * 2 * config.vocab_size * config.hidden_size * chosen.bytes
    return total
