"""Numbers in one byte: FP8 and INT8 with their scales; linear layers, experts and caches that are stored that way.

A stored number is code × scale. The scale is shared by a block of numbers: all of a tensor, a row, or 128 × 128 of
them; it sets the range, and the format of the code sets how finely the range is divided. Scales are float32 and
*multiply* when a number is read (DeepSeek's checkpoints call the same thing ``weight_scale_inv``).

Sources: Micikevicius et al. 2022 (arXiv 2209.05433) for the FP8 formats; the Llama 3 paper (arXiv 2407.21783),
section 6.2, for row-wise scales; DeepSeek-V3 (arXiv 2412.19437), section 3.3, for blocks and 1 × 128 tiles;
Jamba 1.5 (arXiv 2408.12570), section 3.1, for ExpertsInt8.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._numbers import positive, whole
from ..config import AttentionConfig, LatentAttentionConfig
from ..decoder import Decoder
from ..layers.attention import Attention, KVCache
from ..layers.feed_forward import Experts, Router
from ..layers.latent_attention import LatentAttention, LatentCache

__all__ = [
    "QuantizedExperts",
    "QuantizedKVCache",
    "QuantizedLatentCache",
    "QuantizedLinear",
    "QuantizedTensor",
    "probe",
    "quantize",
    "quantize_as",
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

    Leading axes count as rows; ``scales`` is (row blocks, column blocks), the last blocks may be ragged. In a stack of
    matrices (E, rows, columns), with scales (E, row blocks, column blocks), no block reaches into the next matrix.
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

    def __getitem__(self, i: int) -> QuantizedTensor:
        """One matrix of a stack, a view."""
        return QuantizedTensor(self.values[i], self.scales[i], self.block)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code × scale, multiplied in float32 and then rounded to ``dtype``."""
        wide = self.values.reshape(*self.scales.shape[:-2], -1, self.shape[-1]).to(torch.float32)
        return wide.mul_(_spread(self.scales, self.block, wide)).to(dtype).view(self.shape)


def quantize(
    x: Tensor,
    format: str = "e4m3",
    granularity: Granularity = "row",
    block: tuple[int, int] = BLOCK,
    *,
    bound: float | None = None,
    stacked: bool = False,
) -> QuantizedTensor:
    """Store x (…, columns) in one byte a number, with scale = largest magnitude of the block ÷ largest code.

    ``granularity``: one scale for the ``"tensor"``, for each ``"row"``, for each ``"tile"`` of 1 × ``block[1]``, or
    for each ``"block"``. A block of zeros has scale 1. ``bound`` caps the magnitude that a scale looks at; what
    exceeds it saturates, infinities included. Without a bound, a block with NaN or infinity comes back as NaN.
    ``stacked``: x is (E, rows, columns), each matrix of which is quantised by itself (and ``"tensor"`` is one of them).
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
    if stacked and x.dim() != 3:
        raise ValueError(f"a stack of matrices has three axes, not shape {tuple(x.shape)}")
    flat = x.detach().reshape(*x.shape[: int(stacked)], -1, x.shape[-1])
    rows, columns = flat.shape[-2:]
    height, width = min(height, rows), min(width, columns)
    shape = {"tensor": (rows, columns), "row": (1, columns), "tile": (1, width), "block": (height, width)}[granularity]
    if x.is_meta:  # nothing to compute, and operations on this device would import torch's compiler first (2 s)
        blocks = (-(-rows // shape[0]), -(-columns // shape[1]))
        scales = flat.new_empty(*flat.shape[:-2], *blocks, dtype=torch.float32)
        return QuantizedTensor(torch.empty_like(x, dtype=DTYPES[format]), scales, shape)
    flat = flat.to(torch.float32).contiguous()
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
    """Largest magnitude of each block of x (…, rows, columns) → (…, row blocks, column blocks)."""
    rows, columns = x.shape[-2:]
    if rows % block[0] or columns % block[1]:
        x = F.pad(x, (0, -columns % block[1], 0, -rows % block[0]))  # zeros make no block larger
    tiled = x.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    return torch.maximum(tiled.amax((-3, -1)), -tiled.amin((-3, -1)))  # no copy of x for its magnitudes


def _spread(scales: Tensor, block: tuple[int, int], x: Tensor) -> Tensor:
    """Scales in a shape that multiplies x (…, rows, columns): an axis with one scale, or one each, stays as it is."""
    for axis, size in ((-2, block[0]), (-1, block[1])):
        if scales.shape[axis] not in (1, x.shape[axis]):
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, x.shape[axis])
    return scales


def _known(what: str, value: object, choices: Any) -> None:
    if value not in tuple(choices):  # of which a mapping would ask for a hash
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


class _OneByte(nn.Module):
    """What layers with one-byte weights have in common: how inputs are quantised, how products are done.

    Buffers whose names end in ``values`` and ``scales`` stay as they are when the module is cast.
    """

    def __init__(
        self,
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
        self.format, self.matmul = format, matmul
        self.activations, self.activation_bound = activations, activation_bound

    def _scaled(self, weight: QuantizedTensor) -> str | None:
        """How the scaled product would take the scales of this weight, or None if this device cannot."""
        if self.activations not in ("tensor", "row") or weight.scales.shape[1] != 1 or weight.values.is_meta:
            return None
        if any(size % 16 for size in weight.shape):  # the hardware's own condition
            return None
        one_scale = self.activations == "tensor" and weight.scales.shape[0] == 1
        granularity = "tensor" if one_scale else "row"
        return granularity if granularity in probe(str(weight.values.device), self.format) else None

    def _product(self, x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
        """x (…, in) · weightᵀ (in, out) + bias."""
        if self.activations is None or not x.numel():  # no tokens, no scale
            return F.linear(x, weight.dequantize(x.dtype), bias)
        codes = quantize(x.reshape(-1, x.shape[-1]), self.format, self.activations, bound=self.activation_bound)
        wanted = self.matmul == "scaled" or (self.matmul == "auto" and x.device.type != "cpu")
        granularity = self._scaled(weight) if wanted else None
        if granularity is None:
            return F.linear(codes.dequantize(x.dtype).view(x.shape), weight.dequantize(x.dtype), bias)
        if granularity == "row":  # one scale for a whole tensor is the same scale for each of its rows
            codes, weight = (QuantizedTensor(t.values, t.scales.expand(len(t.values), 1).contiguous(), t.block)
                             for t in (codes, weight))  # fmt: skip
        y = _scaled_product(codes, weight, x.dtype).view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    def _stored(self) -> dict[str, Tensor]:
        return {name: b for name, b in self.named_buffers(recurse=False) if name.endswith(("values", "scales"))}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = self._stored()
        super()._apply(fn, recurse)
        for name, before in kept.items():  # model.to(dtype) would widen the codes and round the scales
            if getattr(self, name).dtype != before.dtype:
                setattr(self, name, before.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, held in self._stored().items():
            given = state_dict.get(f"{prefix}{name}")
            if name.endswith("values") and given is not None and given.dtype != held.dtype:
                # copying would round one code to another
                raise ValueError(f"{prefix}{name} are {given.dtype}, but this layer stores {self.format}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def _quantize_weight(weight: Tensor, format: str, granularity: Granularity, block: tuple[int, int]) -> QuantizedTensor:
    """A matrix, or a stack of them. Raises ValueError for a weight that holds NaN or infinity."""
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity: it has no scale")
    return quantize(weight, format, granularity, block, stacked=weight.dim() == 3)


class QuantizedLinear(_OneByte):
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

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None = None, *, format: str, **options: Any) -> None:
        super().__init__(format, **options)
        self.out_features, self.in_features = weight.shape
        self.block = weight.block
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("bias", None if bias is None else bias.detach())
        if self.matmul == "scaled" and self.scaled_granularity is None:
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
        weight = _quantize_weight(linear.weight, format, granularity, block)
        return cls(weight, linear.bias, format=format, **options)

    @property
    def weight(self) -> QuantizedTensor:
        return QuantizedTensor(self.values, self.scales, self.block)

    @property
    def scaled_granularity(self) -> str | None:
        """How the scaled product would take this layer's scales, or None if this device cannot."""
        return self._scaled(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        scales, inputs = " × ".join(map(str, self.scales.shape)), self.activations or "not quantised"
        return f"{self.in_features} → {self.out_features}, {self.format}, {scales} scales, inputs {inputs}"


class QuantizedExperts(_OneByte):
    """:class:`~tokenbytoken.layers.feed_forward.Experts` in one byte a number: a call expands the one expert that it asks for.

    ``gate_proj_values`` (E, F, M) and ``gate_proj_scales`` (E, row blocks, column blocks) are buffers, and so are those
    of ``up_proj`` and ``down_proj``; no two experts share a scale. Options as in :class:`QuantizedLinear`; the input
    of each of the three products is quantised.
    """

    def __init__(self, weights: Mapping[str, QuantizedTensor], *, format: str, **options: Any) -> None:
        super().__init__(format, **options)
        self.blocks = {name: weight.block for name, weight in weights.items()}
        for name, weight in weights.items():
            self.register_buffer(f"{name}_values", weight.values)
            self.register_buffer(f"{name}_scales", weight.scales)
        if self.matmul == "scaled" and None in [self._scaled(weight[0]) for weight in weights.values()]:
            raise ValueError(f"no scaled product here for {self!r}")

    @classmethod
    def from_experts(
        cls,
        experts: Experts,
        format: str = "e4m3",
        granularity: Granularity = "row",
        block: tuple[int, int] = BLOCK,
        **options: Any,
    ) -> QuantizedExperts:
        """The quantised form of experts. Raises ValueError for weights that hold NaN or infinity."""
        weights = {name: _quantize_weight(weight, format, granularity, block) for name, weight in
                   experts.named_parameters()}  # fmt: skip
        return cls(weights, format=format, **options)

    def weight(self, name: str) -> QuantizedTensor:
        """The stack of one projection, ``"gate_proj"``, ``"up_proj"`` or ``"down_proj"``; ``[expert]`` is a matrix."""
        return QuantizedTensor(getattr(self, f"{name}_values"), getattr(self, f"{name}_scales"), self.blocks[name])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """What one expert makes of x (n, M)."""
        gate, up, down = (self.weight(name)[expert] for name in ("gate_proj", "up_proj", "down_proj"))
        return self._product(F.silu(self._product(x, gate)) * self._product(x, up), down)

    def extra_repr(self) -> str:
        (E, width, M), inputs = self.weight("gate_proj").shape, self.activations or "not quantised"
        return f"{E} experts, {M} → {width} → {M}, {self.format}, inputs {inputs}"


def quantize_model(
    model: Decoder,
    format: str = "e4m3",
    granularity: Granularity = "row",
    *,
    include: Literal["all", "ffn", "all-ffn"] = "all",
    block: tuple[int, int] = BLOCK,
    **options: Any,
) -> Decoder:
    """A decoder whose linear layers and experts are stored in one byte a weight; ``model`` is left as it is.

    ``include="all"``: the linear layers of all mixers and feed-forwards, and all experts; ``"all-ffn"``: the
    feed-forwards and experts of all layers; ``"ffn"``: Llama 3.1's choice, those of all layers but the first and the
    last (its activations: ``"row"``, with ``activation_bound=1200``). Embedding, head, routers, norms and what Mamba
    does not multiply by stay, and share their memory with ``model``. ``options`` (``activations``,
    ``activation_bound``, ``matmul``) as in :class:`QuantizedLinear`. Raises ValueError for what it does not know, for
    weights that hold NaN or infinity, and for a model with quantised layers.
    """
    _known("format", format, DTYPES)
    _known("granularity", granularity, GRANULARITIES)
    _known("include", include, ("all", "ffn", "all-ffn"))
    if any(isinstance(module, _OneByte) for module in model.modules()):
        raise ValueError("the model holds quantised layers already")
    # What deepcopy finds in its memo it does not copy: new parameters, in the memory of the old ones.
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    new = copy.deepcopy(model, {**shared, **{id(b): b for b in model.buffers()}})
    last = len(new.layers) - 1
    for i, layer in enumerate(new.layers):
        if include == "ffn" and i in (0, last):
            continue
        for name, module in list(layer.named_modules()):
            if not isinstance(module, (nn.Linear, Experts)):
                continue
            if include != "all" and not name.startswith("feed_forward."):
                continue
            owner, _, leaf = name.rpartition(".")
            try:
                quantised: _OneByte
                if isinstance(module, Experts):
                    quantised = QuantizedExperts.from_experts(module, format, granularity, block, **options)
                else:
                    quantised = QuantizedLinear.from_linear(module, format, granularity, block, **options)
            except ValueError as error:
                raise ValueError(f"layer {i}, {name}: {error}") from None
            setattr(layer.get_submodule(owner), leaf, quantised)
    return new


#: What :func:`quantize_model` is asked for by a recipe that :func:`tokenbytoken.cost.weight_bytes` counts.
recipes: dict[str, dict[str, Any]] = {
    "fp8-ffn": {"include": "ffn", "activations": "row", "activation_bound": 1200.0},
    "fp8-block": {"granularity": "block", "activations": "tile"},
    "int8": {"format": "int8"},
    "int8-experts": {"format": "int8", "include": "all-ffn"},
}


def quantize_as(model: Decoder, recipe: str, **options: Any) -> Decoder:
    """A decoder stored by a recipe of :func:`tokenbytoken.cost.weight_bytes`; ``model`` is left as it is.

    ``"fp8-ffn"`` is Llama 3.1's; ``"fp8-block"`` DeepSeek-V3's, with activations in tiles of 1 × 128 and router biases
    in float32; ``"int8"`` and Jamba's ``"int8-experts"`` have a scale for each row and leave activations as they are.
    What stays, stays in the dtype of ``model``: in a bfloat16 model :func:`stored_bytes` is what ``weight_bytes``
    says, plus, for ``"int8-experts"``, the scales that it does not count. ``options``: what the recipe leaves open.
    Raises ValueError for another recipe, and where :func:`quantize_model` does.
    """
    _known("recipe", recipe, recipes)
    new = quantize_model(model, **recipes[recipe], **options)
    if recipe == "fp8-block":
        for module in new.modules():
            if isinstance(module, Router) and module.selection_bias is not None:
                module.selection_bias = nn.Parameter(module.selection_bias.to(torch.float32), requires_grad=False)
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


class QuantizedLatentCache(LatentCache):
    """Latents of one layer in one byte a number, with one float32 scale for each token and 128 of them.

    ``codes`` (B, max_length, R) and ``scales`` (B, max_length, ⌈R / 128⌉). The rotated key, ``rotary``
    (B, max_length, rope), stays in the model's dtype: it is short, and its error would meet every score. In
    DeepSeek-V3 that is 512 + 4 × 4 + 2 × 64 = 656 bytes for each token and layer, the layout of DeepSeek's FlashMLA.
    """

    format: ClassVar[str]

    def __init__(self, codes: Tensor, scales: Tensor, rotary: Tensor) -> None:
        self.codes, self.scales, self.rotary, self.rank = codes, scales, rotary, codes.shape[2]

    @classmethod
    def empty(
        cls, config: LatentAttentionConfig, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> QuantizedLatentCache:
        R, shape = config.kv_lora_rank, (batch_size, max_length)
        codes = torch.zeros(*shape, R, dtype=DTYPES[cls.format], device=device)
        scales = torch.ones(*shape, -(-R // BLOCK[1]), device=device)
        return cls(codes, scales, torch.zeros(*shape, config.qk_rope_head_dim, dtype=dtype, device=device))

    @property
    def latent(self) -> Tensor:
        """c_KV as it is read, expanded: (B, max_length, R)."""
        return self._expanded(self.codes.shape[1])

    @property
    def rotary_key(self) -> Tensor:
        """The rotated key that all heads share, (B, max_length, rope)."""
        return self.rotary

    def append(self, latent: Tensor, rotary_key: Tensor, start: int) -> Tensor:
        """Write (B, T, R) and (B, T, rope) at ``start``; returns all held, expanded: (B, start + T, R + rope)."""
        end = start + latent.shape[1]
        tiles = quantize(latent, self.format, "tile")
        self.codes[:, start:end] = tiles.values
        self.scales[:, start:end] = tiles.scales.view(*latent.shape[:2], -1)
        self.rotary[:, start:end] = rotary_key
        return torch.cat((self._expanded(end), self.rotary[:, :end]), dim=-1)

    def _expanded(self, end: int) -> Tensor:
        held = QuantizedTensor(self.codes[:, :end], self.scales[:, :end], (1, min(BLOCK[1], self.rank)))
        return held.dequantize(self.rotary.dtype)

    def nbytes(self, length: int | None = None) -> int:
        """Bytes allocated, or those of the first ``length`` tokens; scales included."""
        tokens = self.codes.shape[1] if length is None else length
        return tokens * sum(t[:, 0].numel() * t.element_size() for t in (self.codes, self.scales, self.rotary))

    def gather(
        self, rows: Sequence[int], start: int, end: int, max_length: int, shift: int = 0
    ) -> QuantizedLatentCache:
        """A new cache: tokens ``start`` … ``end`` of the chosen rows, placed at ``shift``."""
        parts = []
        for old in (self.codes, self.scales, self.rotary):
            fresh = old.new_zeros(len(rows), max_length, old.shape[2])
            fresh[:, shift : shift + end - start] = old[list(rows), start:end]
            parts.append(fresh)
        return type(self)(*parts)

    @classmethod
    def concat(cls, caches: Sequence[LatentCache]) -> QuantizedLatentCache:
        """Caches of equal max_length, one under the other in the batch axis."""
        return cls(*(torch.cat([getattr(c, name) for c in caches]) for name in ("codes", "scales", "rotary")))


class E4M3LatentCache(QuantizedLatentCache):
    """Latents in E4M3."""

    format = "e4m3"


class E5M2LatentCache(QuantizedLatentCache):
    """Latents in E5M2."""

    format = "e5m2"


class INT8LatentCache(QuantizedLatentCache):
    """Latents in INT8."""

    format = "int8"


#: The cache of each format, of keys and values and of latents.
caches: dict[str, type[QuantizedKVCache]] = {c.format: c for c in (E4M3KVCache, E5M2KVCache, INT8KVCache)}
latent_caches: dict[str, type[QuantizedLatentCache]] = {
    c.format: c for c in (E4M3LatentCache, E5M2LatentCache, INT8LatentCache)
}


def quantize_cache(model: Decoder, format: str | None = "e4m3") -> Decoder:
    """From now on the states of ``model`` keep keys and values, or latents, in ``format``; None undoes it.

    The rotated keys beside latents and the states of Mamba stay as they are. Changes ``model`` and returns it. States
    made before are refused by it. Raises ValueError for an unknown format and for a model without attention layers.
    """
    _known("format", format, (*DTYPES, None))
    mixers = [module for module in model.modules() if isinstance(module, (Attention, LatentAttention))]
    if not mixers:
        raise ValueError("the model has no attention layers: there is no cache to quantise")
    for mixer in mixers:
        if isinstance(mixer, LatentAttention):
            mixer.cache_class = LatentCache if format is None else latent_caches[format]
        else:
            mixer.cache_class = KVCache if format is None else caches[format]
    return model
