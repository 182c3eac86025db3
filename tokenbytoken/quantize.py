"""Numbers in one byte: FP8 and INT8 with their scales, linear layers and caches that are stored that way.

A stored number is code × scale. The scale is shared by a block of numbers: all of a tensor, a row, or 128 × 128 of
them; it sets the range, and the format of the code sets how finely the range is divided. Scales are float32 and
*multiply* when a number is read (DeepSeek's checkpoints call the same thing ``weight_scale_inv``).

Sources: Micikevicius et al. 2022 (arXiv 2209.05433) for the FP8 formats; the Llama 3 paper (arXiv 2407.21783),
section 6.2, for row-wise scales; DeepSeek-V3 (arXiv 2412.19437), section 3.3, for blocks and 1 × 128 tiles.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._numbers import positive, whole
from .attention import Attention, KVCache
from .config import AttentionConfig
from .decoder import Decoder
from .feed_forward import MoE

__all__ = [
    "QuantizedKVCache",
    "QuantizedLinear",
    "QuantizedTensor",
    "probe",
    "quantize",
    "quantize_cache",
    "quantize_model",
    "stored_bytes",
    "to_fp8",
]

Granularity = Literal["tensor", "row", "tile", "block"]

DTYPES: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
LARGEST: dict[str, float] = {"e4m3": 448.0, "e5m2": 57_344.0, "int8": 127.0}  # −128 is not used: codes are symmetric
_ROUNDS_UP = {"e4m3": 464.0, "e5m2": 61_440.0}  # half way to what would come next; a tie goes to the even mantissa
GRANULARITIES = ("tensor", "row", "tile", "block")
BLOCK = (128, 128)


def to_fp8(x: Tensor, format: str = "e4m3", overflow: Literal["saturate", "nan"] = "saturate") -> Tensor:
    """Round to the nearest number of an FP8 format, ties to even: ``"e4m3"`` (±448) or ``"e5m2"`` (±57,344).

    Versions of PyTorch differ in what an overflowing cast gives, so the rule is chosen here. ``"saturate"``: what
    is too large, infinities included, becomes the largest number of its sign. ``"nan"``: what would be rounded
    beyond the largest number becomes NaN, infinities included, in E5M2 too. NaN stays NaN. What is neither float16
    nor bfloat16 is rounded to float32 first. Raises ValueError for another format or rule.
    """
    _known("FP8 format", format, _ROUNDS_UP)
    _known("overflow rule", overflow, ("saturate", "nan"))
    if x.dtype not in (torch.float16, torch.bfloat16):
        x = x.to(torch.float32)
    largest = LARGEST[format]
    held = x.clamp(-largest, largest)  # NaN passes
    if overflow == "nan":
        size = x.abs()
        # 464 lies between 448 (mantissa 110) and 480 (111): to the even one. 61,440 lies between 57,344 (11) and 2¹⁶.
        lost = size > _ROUNDS_UP[format] if format == "e4m3" else size >= _ROUNDS_UP[format]
        held = held.masked_fill(lost, torch.nan)
    return held.to(DTYPES[format])


@dataclass(frozen=True)
class QuantizedTensor:
    """``values`` (…, columns) of one byte each, and one float32 scale for each block of ``block`` = (rows, columns).

    Leading axes count as rows; ``scales`` is (row blocks, column blocks), the last blocks may be ragged.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes held, scales included."""
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code × scale, multiplied in float32 and then rounded to ``dtype``."""
        wide = self.values.reshape(-1, self.shape[-1]).to(torch.float32)
        return wide.mul_(_spread(self.scales, self.block, wide)).to(dtype).view(self.shape)


def quantize(
    x: Tensor,
    format: str = "e4m3",
    granularity: Granularity = "row",
    block: tuple[int, int] = BLOCK,
    *,
    bound: float | None = None,
) -> QuantizedTensor:
    """Store x (…, columns) in one byte a number, with scale = largest magnitude of the block ÷ largest code.

    ``granularity``: one scale for the ``"tensor"``, for each ``"row"``, for each ``"tile"`` of 1 × ``block[1]``, or
    for each ``"block"``. A block of zeros has scale 1. ``bound`` caps the magnitude that a scale looks at; what
    exceeds it saturates, infinities included. Without a bound, a block with NaN or infinity comes back as NaN.
    Raises ValueError for what it does not know and for a tensor that is empty or holds no floats.
    """
    _known("format", format, DTYPES)
    _known("granularity", granularity, GRANULARITIES)
    if x.dim() == 0 or not x.numel() or not x.is_floating_point():
        raise ValueError(f"cannot quantise a tensor of shape {tuple(x.shape)} and dtype {x.dtype}")
    try:
        height, width = (whole("block", size) for size in block)
    except (TypeError, ValueError):
        raise ValueError(f"block must be two positive integers, not {block!r}") from None
    flat = x.detach().reshape(-1, x.shape[-1]).to(torch.float32).contiguous()
    rows, columns = flat.shape
    height, width = min(height, rows), min(width, columns)
    shape = {"tensor": (rows, columns), "row": (1, columns), "tile": (1, width), "block": (height, width)}[granularity]
    largest = _block_largest(flat, shape)
    if bound is not None:
        largest = largest.clamp(max=positive("bound", bound))
    scales = largest / LARGEST[format]
    scales = torch.where(scales == 0, 1.0, scales)  # 0 ÷ 0 would be NaN; and NaN must stay one
    codes = (flat / _spread(scales, shape, flat)).clamp_(-LARGEST[format], LARGEST[format])
    if format == "int8":
        codes.round_()  # half to even, as the casts to FP8 do
    return QuantizedTensor(codes.to(DTYPES[format]).view(x.shape), scales, shape)


def _block_largest(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of x (rows, columns) → (row blocks, column blocks)."""
    rows, columns = x.shape
    if rows % block[0] or columns % block[1]:
        x = F.pad(x, (0, -columns % block[1], 0, -rows % block[0]))  # zeros make no block larger
    tiled = x.view(x.shape[0] // block[0], block[0], -1, block[1])
    return torch.maximum(tiled.amax((1, 3)), -tiled.amin((1, 3)))  # no copy of x for its magnitudes


def _spread(scales: Tensor, block: tuple[int, int], x: Tensor) -> Tensor:
    """Scales in a shape that multiplies x (rows, columns): an axis with one scale, or one each, stays as it is."""
    for axis in (0, 1):
        if scales.shape[axis] not in (1, x.shape[axis]):
            scales = scales.repeat_interleave(block[axis], axis).narrow(axis, 0, x.shape[axis])
    return scales


def _known(what: str, value: object, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}: one of {', '.join(map(str, choices))}")


# --- linear layers --------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def probe(device: str | torch.device = "cpu", format: str = "e4m3") -> frozenset[str]:
    """The granularities, among "tensor" and "row", in which this device multiplies scaled FP8 as it should.

    Finds out by one tiny product each, compared with the same product of dequantised numbers: what raises, or
    comes out otherwise, does not count. Which devices have it (compute capability 8.9 and later; a CPU slowly,
    without any instruction for it) depends on PyTorch's version too.
    """
    found = set()
    if format in _ROUNDS_UP:
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(rows, 64, generator=generator).to(device) for rows in (16, 32))
        for granularity in ("tensor", "row"):
            a, b = (quantize(t, format, granularity) for t in (x, w))
            try:
                got = _scaled_product(a, b, torch.float32)
            except (RuntimeError, ValueError, NotImplementedError, AttributeError):
                continue
            want = a.dequantize() @ b.dequantize().T
            if bool(((got - want).abs() <= 2**-7 * want.abs().max()).all()):  # it may round to bfloat16
                found.add(granularity)
    return frozenset(found)


def _scaled_product(x: QuantizedTensor, w: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """x (T, K) · wᵀ (K, N) by the device's own FP8 product; scales one for each tensor, or one for each row."""
    out = dtype if x.values.device.type == "cpu" else torch.bfloat16  # row-wise scales on a GPU give bfloat16 only
    y = torch._scaled_mm(x.values, w.values.t(), scale_a=x.scales, scale_b=w.scales.t(), out_dtype=out)
    return y.to(dtype)


class QuantizedLinear(nn.Module):
    """x (…, in) → (…, out) with a weight stored in one byte a number.

    ``values`` and ``scales`` are buffers; casting the module leaves both as they are. ``activations`` is how the
    input is quantised first, with scales found anew for each call: None leaves it (weight-only), ``"tensor"``,
    ``"row"`` one scale for each token, ``"tile"`` one for each token and 128 channels. ``matmul`` is how the
    product is done: ``"dequantised"`` expands the weight for each use; ``"scaled"`` multiplies the codes, where
    :func:`probe` found that the device can; ``"auto"`` does so on every device that can, but not on a CPU, which has
    no instruction for it and is slower that way. Both give the same numbers up to rounding.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: QuantizedTensor,
        bias: Tensor | None = None,
        *,
        format: str,
        activations: Granularity | None = None,
        activation_bound: float | None = None,
        matmul: Literal["auto", "scaled", "dequantised"] = "auto",
    ) -> None:
        super().__init__()
        _known("activations", activations, (None, "tensor", "row", "tile"))
        _known("matmul", matmul, ("auto", "scaled", "dequantised"))
        if activation_bound is not None:
            positive("activation_bound", activation_bound)
            if activations is None:
                raise ValueError("activation_bound bounds the scales of activations: say how to quantise these")
        self.out_features, self.in_features = weight.shape
        self.format, self.block, self.matmul = format, weight.block, matmul
        self.activations, self.activation_bound = activations, activation_bound
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("bias", None if bias is None else bias.detach())
        if matmul == "scaled" and self.scaled_granularity is None:
            raise ValueError(f"no scaled product here for {self!r}")

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: str = "e4m3",
        granularity: Granularity = "row",
        block: tuple[int, int] = BLOCK,
        **options: Any,
    ) -> QuantizedLinear:
        """The quantised form of a linear layer. Raises ValueError for a weight that holds NaN or infinity."""
        if not linear.weight.is_meta and not bool(linear.weight.isfinite().all()):
            raise ValueError("the weight holds NaN or infinity: it has no scale")
        return cls(quantize(linear.weight, format, granularity, block), linear.bias, format=format, **options)

    @property
    def weight(self) -> QuantizedTensor:
        return QuantizedTensor(self.values, self.scales, self.block)

    @property
    def scaled_granularity(self) -> str | None:
        """How the scaled product would take this layer's scales, or None if this device cannot."""
        if self.activations not in ("tensor", "row") or self.scales.shape[1] != 1 or self.values.is_meta:
            return None
        if self.in_features % 16 or self.out_features % 16:  # the hardware's own condition
            return None
        whole = self.activations == "tensor" and self.scales.shape[0] == 1
        granularity = "tensor" if whole else "row"
        return granularity if granularity in probe(str(self.values.device), self.format) else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.activations is None or not x.numel():  # no tokens, no scale
            return F.linear(x, weight.dequantize(x.dtype), self.bias)
        codes = quantize(x.reshape(-1, self.in_features), self.format, self.activations, bound=self.activation_bound)
        wanted = self.matmul == "scaled" or (self.matmul == "auto" and x.device.type != "cpu")
        granularity = self.scaled_granularity if wanted else None
        if granularity is None:
            return F.linear(codes.dequantize(x.dtype).view(x.shape), weight.dequantize(x.dtype), self.bias)
        if granularity == "row":  # one scale for a whole tensor is the same scale for each of its rows
            codes, weight = (QuantizedTensor(t.values, t.scales.expand(len(t.values), 1).contiguous(), t.block)
                             for t in (codes, weight))  # fmt: skip
        y = _scaled_product(codes, weight, x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        kept = {name: getattr(self, name) for name in ("values", "scales")}
        super()._apply(fn, recurse)
        for name, before in kept.items():  # model.to(dtype) would widen the codes and round the scales
            if getattr(self, name).dtype != before.dtype:
                setattr(self, name, before.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}values")
        if given is not None and given.dtype != self.values.dtype:  # copying would round one code to another
            raise ValueError(f"{prefix}values are {given.dtype}, but this layer stores {self.format}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        scales, inputs = " × ".join(map(str, self.scales.shape)), self.activations or "not quantised"
        return f"{self.in_features} → {self.out_features}, {self.format}, {scales} scales, inputs {inputs}"


def quantize_model(
    model: Decoder,
    format: str = "e4m3",
    granularity: Granularity = "row",
    *,
    include: Literal["all", "ffn"] = "all",
    block: tuple[int, int] = BLOCK,
    **options: Any,
) -> Decoder:
    """A decoder whose linear layers are stored in one byte a weight; ``model`` is left as it is.

    ``include="all"``: the linear layers of all mixers and feed-forwards; ``"ffn"``: Llama 3.1's choice, the
    feed-forwards of all layers but the first and the last (its activations: ``"row"``, with
    ``activation_bound=1200``). Embedding, head and norms stay, and share their memory with ``model``. ``options``
    (``activations``, ``activation_bound``, ``matmul``) as in :class:`QuantizedLinear`. Raises ValueError for what it
    does not know, for weights that hold NaN or infinity, and for a model with quantised layers or with experts.
    """
    _known("format", format, DTYPES)
    _known("granularity", granularity, GRANULARITIES)
    _known("include", include, ("all", "ffn"))
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError("the model holds quantised layers already")
    for i, layer in enumerate(model.layers):
        if isinstance(layer.feed_forward, MoE):
            raise ValueError(f"layer {i} is a mixture of experts, whose stacked weights cannot be quantised here")
    # What deepcopy finds in its memo it does not copy: new parameters, in the memory of the old ones.
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    new = copy.deepcopy(model, {**shared, **{id(b): b for b in model.buffers()}})
    last = len(new.layers) - 1
    for i, layer in enumerate(new.layers):
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            if include == "ffn" and (i in (0, last) or not name.startswith("feed_forward.")):
                continue
            owner, _, leaf = name.rpartition(".")
            try:
                quantised = QuantizedLinear.from_linear(linear, format, granularity, block, **options)
            except ValueError as error:
                raise ValueError(f"layer {i}, {name}: {error}") from None
            setattr(layer.get_submodule(owner), leaf, quantised)
    return new


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers of a model; what is tied counts once."""
    return sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


# --- the cache ------------------------------------------------------------------------------------


class QuantizedKVCache(KVCache):
    """Keys and values of one layer in one byte a number, with one float32 scale for each token and head.

    ``k`` and ``v`` hold the codes (B, K, max_length, D), ``k_scale`` and ``v_scale`` the scales
    (B, K, max_length, 1). A token is quantised once, by itself, when it arrives: chunks equal the whole. Reading
    expands all that is held; a kernel that expands on the way would save the bytes of the transfer too.
    """

    format: ClassVar[str]

    def __init__(self, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor) -> None:
        super().__init__(k, v)
        self.k_scale, self.v_scale = k_scale, v_scale

    @classmethod
    def empty(
        cls, config: AttentionConfig, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> QuantizedKVCache:
        shape = (batch_size, config.num_kv_heads, max_length, config.head_dim)
        k, v = (torch.zeros(shape, dtype=DTYPES[cls.format], device=device) for _ in range(2))
        return cls(k, v, *(torch.ones(*shape[:-1], 1, device=device) for _ in range(2)))

    def append(self, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write (B, K, T, D) at ``start`` and return everything held, expanded: (B, K, start + T, D)."""
        end = start + k.shape[2]
        for new, codes, scales in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            rows = quantize(new, self.format, "row")
            codes[:, :, start:end] = rows.values
            scales[:, :, start:end] = rows.scales.view(*new.shape[:-1], 1)
        return tuple(  # type: ignore[return-value]
            codes[:, :, :end].to(torch.float32).mul_(scales[:, :, :end]).to(k.dtype)
            for codes, scales in ((self.k, self.k_scale), (self.v, self.v_scale))
        )

    def nbytes(self, length: int | None = None) -> int:
        """Bytes allocated, or those of the first ``length`` tokens; scales included."""
        tokens = self.k.shape[2] if length is None else length
        return 2 * self.k[:, :, 0, 0].numel() * tokens * (self.k.shape[3] + self.k_scale.element_size())

    def gather(self, rows: Sequence[int], start: int, end: int, max_length: int, shift: int = 0) -> QuantizedKVCache:
        """A new cache: tokens ``start`` … ``end`` of the chosen rows, placed at ``shift``."""
        parts = []
        for old in (self.k, self.v, self.k_scale, self.v_scale):
            fresh = old.new_zeros((len(rows), old.shape[1], max_length, old.shape[3]))
            fresh[:, :, shift : shift + end - start] = old[list(rows), :, start:end]
            parts.append(fresh)
        return type(self)(*parts)

    @classmethod
    def concat(cls, caches: Sequence[KVCache]) -> QuantizedKVCache:
        """Caches of equal max_length, one under the other in the batch axis."""
        return cls(*(torch.cat([getattr(c, name) for c in caches]) for name in ("k", "v", "k_scale", "v_scale")))


class E4M3KVCache(QuantizedKVCache):
    """A cache in E4M3."""

    format = "e4m3"


class E5M2KVCache(QuantizedKVCache):
    """A cache in E5M2."""

    format = "e5m2"


class INT8KVCache(QuantizedKVCache):
    """A cache in INT8."""

    format = "int8"


#: The cache of each format.
caches: dict[str, type[QuantizedKVCache]] = {c.format: c for c in (E4M3KVCache, E5M2KVCache, INT8KVCache)}


def quantize_cache(model: Decoder, format: str | None = "e4m3") -> Decoder:
    """From now on the states of ``model`` keep keys and values in ``format``; None puts the model's own dtype back.

    Changes ``model`` and returns it. States made before are refused by it. Raises ValueError for an unknown format
    and for a model without attention layers.
    """
    _known("format", format, (*DTYPES, None))
    mixers = [module for module in model.modules() if isinstance(module, Attention)]
    if not mixers:
        raise ValueError("the model has no attention layers: there is no cache to quantise")
    for mixer in mixers:
        mixer.cache_class = KVCache if format is None else caches[format]
    return model
