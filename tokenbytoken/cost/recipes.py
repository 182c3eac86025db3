"""Recipes: how the weights of a model are stored, and which products run in FP8.

One table serves both sides: :func:`tokenbytoken.cost.weight_bytes` counts by it, and
:func:`tokenbytoken.checkpoints.quantized_layers.quantize_as` and :func:`tokenbytoken.checkpoints.sources.load` store
real weights by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BLOCK", "GROUP", "Recipe", "packs_eight", "packs_four", "recipe_named", "recipes"]

#: Rows and columns of a block with one scale (arXiv 2412.19437, 3.3.2).
BLOCK = 128

#: Numbers of a row with one scale and one zero where weights are packed in four bits: those of a block of GGUF's Q4_1.
GROUP = 32


def packs_four(rows: int, columns: int) -> bool:
    """Whether PyTorch's product from four bits takes a weight (out, in), in groups of :data:`GROUP`."""
    return rows % 16 == 0 and columns % GROUP == 0


def packs_eight(columns: int) -> bool:
    """Whether PyTorch's product from eight bits takes a weight of that inner width."""
    return columns % 16 == 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How many bytes each weight takes, and which products run in FP8.

    Weights with a role in ``one_byte`` take one byte and, by ``scales``, a float32 scale for each row or
    each 128 x 128 block that is counted; all others take ``bytes``. ``fp8_products`` says that activations are FP8
    too, with a scale for each row of them, or for each 1 x 128 tile where weights have blocks; no scale looks at a
    magnitude above ``activation_bound``. Otherwise one-byte weights are INT8 and widened before the product: they
    save bytes but no arithmetic.

    ``four_bits`` and ``eight_bits`` are the roles of weights that products read packed, where their shape fits
    (``packs_four``, ``packs_eight``): half a byte with a scale and a zero of two bytes each for a group of 32,
    or a byte with a scale of two bytes for each row.
    """

    bytes: int
    one_byte: frozenset[str] = frozenset()  # the roles of such weights
    scales: Literal["none", "row", "block"] = "none"
    skip_first_and_last_layer: bool = False
    float32_router_bias: bool = False
    with_mtp: bool = False
    fp8_products: bool = False
    activation_bound: float | None = None
    four_bits: frozenset[str] = frozenset()
    eight_bits: frozenset[str] = frozenset()


_FEED_FORWARDS = frozenset({"feed_forward", "expert"})
_TABLES = frozenset({"embedding", "head"})
_LINEARS = _FEED_FORWARDS | {"attention", "mamba", "mixer"}

#: The recipes that the book uses; :func:`~tokenbytoken.cost.weight_bytes` says what each keeps at two bytes.
#:
#: :meta hide-value:
recipes: dict[str, Recipe] = {
    "fp32": Recipe(bytes=4),
    "bf16": Recipe(bytes=2),
    "fp8-all": Recipe(bytes=1, fp8_products=True),
    "fp8-ffn": Recipe(
        bytes=2,
        one_byte=_FEED_FORWARDS,
        scales="row",
        skip_first_and_last_layer=True,
        fp8_products=True,
        activation_bound=1200.0,
    ),
    "fp8-block": Recipe(
        bytes=2, one_byte=_LINEARS, scales="block", float32_router_bias=True, with_mtp=True, fp8_products=True
    ),
    "int8": Recipe(bytes=2, one_byte=_LINEARS, scales="row"),
    "packed": Recipe(bytes=4, four_bits=_LINEARS, eight_bits=_TABLES),
    "packed-int8": Recipe(bytes=4, eight_bits=_LINEARS | _TABLES),
    "int8-experts": Recipe(bytes=2, one_byte=_FEED_FORWARDS),
}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError, with the list of those there are, for another name."""
    if name not in recipes:
        raise ValueError(f"unknown recipe {name!r}: one of {', '.join(recipes)}")
    return recipes[name]
