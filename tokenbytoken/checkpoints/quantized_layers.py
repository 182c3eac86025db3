"""Linear layers and experts that store one byte a weight, and models that are made of them.

Sources: the Llama 3 paper (arXiv 2407.21783), section 6.2; DeepSeek-V3 (arXiv 2412.19437), section 3.3; Jamba 1.5
(arXiv 2408.12570), section 3.1, for ExpertsInt8.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._numbers import positive
from ..cost.recipes import recipes
from ..decoder import Decoder
from ..layers import devices
from ..layers.feed_forward import Experts, Router
from .number_formats import (
    BLOCK,
    DTYPES,
    FP8_FORMATS,
    GRANULARITIES,
    Granularity,
    QuantizedTensor,
    known,
    quantize,
)
from .packed import is_packed

__all__ = [
    "QuantizedExperts",
    "QuantizedLinear",
    "probe",
    "quantize_as",
    "quantize_model",
    "shared_copy",
    "stored_bytes",
]


@lru_cache(maxsize=64)
def probe(device: str | torch.device = "cpu", format: str = "e4m3") -> frozenset[str]:
    """The granularities, among "tensor" and "row", in which this device multiplies scaled FP8 as it should.

    Finds out by one tiny product each, compared with the same product of dequantised numbers: what raises, or
    comes out otherwise, does not count. Which devices have it (compute capability 8.9 and later; a CPU slowly,
    without any instruction for it) depends on PyTorch's version too.
    """
    found = set()
    if format in FP8_FORMATS:
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(rows, 64, generator=generator).to(device) for rows in (16, 32))
        for granularity in ("tensor", "row"):
            a, b = (quantize(t, format, granularity) for t in (x, w))
            try:
                got = _scaled_product(a, b, torch.float32)
            except (RuntimeError, ValueError, NotImplementedError, AttributeError):
                continue
            want = a.dequantize() @ b.dequantize().T
            if devices.read(((got - want).abs() <= 2**-7 * want.abs().max()).all()):  # it may round to bfloat16
                found.add(granularity)
    return frozenset(found)


def _scaled_product(x: QuantizedTensor, w: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """x (T, K) · wᵀ (K, N) by the device's own FP8 product; scales one for each tensor, or one for each row."""
    out = dtype if devices.kind(x.values.device).on_host else torch.bfloat16  # row-wise scales on a GPU give that only
    y = torch._scaled_mm(x.values, w.values.t(), scale_a=x.scales, scale_b=w.scales.t(), out_dtype=out)
    return y.to(dtype)


class OneByteLayer(nn.Module):
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
        known("activations", activations, (None, "tensor", "row", "tile"))
        known("matmul", matmul, ("auto", "scaled", "dequantised"))
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
        wanted = self.matmul == "scaled" or (self.matmul == "auto" and not devices.kind(x.device).on_host)
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


class QuantizedLinear(OneByteLayer):
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

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight, expanded: (out, in)."""
        return self.weight.dequantize(dtype)

    @property
    def scaled_granularity(self) -> str | None:
        """How the scaled product would take this layer's scales, or None if this device cannot."""
        return self._scaled(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        scales, inputs = " × ".join(map(str, self.scales.shape)), self.activations or "not quantised"
        return f"{self.in_features} → {self.out_features}, {self.format}, {scales} scales, inputs {inputs}"


class QuantizedExperts(OneByteLayer):
    """:class:`~tokenbytoken.layers.feed_forward.Experts` in one byte a number: a call expands one expert.

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


def shared_copy(model: Decoder) -> Decoder:
    """A second decoder on the same memory: what is changed of its layers, or of its dtype, the first does not see."""
    # What deepcopy finds in its memo it does not copy: new parameters, in the memory of the old ones.
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, {**shared, **{id(b): b for b in model.buffers()}})


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
    known("format", format, DTYPES)
    known("granularity", granularity, GRANULARITIES)
    known("include", include, ("all", "ffn", "all-ffn"))
    if is_packed(model) or any(isinstance(module, OneByteLayer) for module in model.modules()):
        raise ValueError("the model holds quantised layers already")
    new = shared_copy(model).requires_grad_(False)
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
                quantised: OneByteLayer
                if isinstance(module, Experts):
                    quantised = QuantizedExperts.from_experts(module, format, granularity, block, **options)
                else:
                    quantised = QuantizedLinear.from_linear(module, format, granularity, block, **options)
            except ValueError as error:
                raise ValueError(f"layer {i}, {name}: {error}") from None
            setattr(layer.get_submodule(owner), leaf, quantised)
    return new


def _include(one_byte: frozenset[str], skip_first_and_last: bool) -> Literal["all", "ffn", "all-ffn"]:
    if one_byte - {"feed_forward", "expert"}:
        return "all"
    return "ffn" if skip_first_and_last else "all-ffn"


def quantize_as(model: Decoder, recipe: str, **options: Any) -> Decoder:
    """A decoder stored by a recipe of :func:`tokenbytoken.cost.weight_bytes`; ``model`` is left as it is.

    ``"fp8-ffn"`` is Llama 3.1's; ``"fp8-block"`` DeepSeek-V3's, with activations in tiles of 1 × 128 and router biases
    in float32; ``"int8"`` and Jamba's ``"int8-experts"`` have a scale for each row and leave activations as they are.
    What stays, stays in the dtype of ``model``: in a bfloat16 model :func:`stored_bytes` is what ``weight_bytes``
    says, plus, for ``"int8-experts"``, the scales that it does not count. ``options``: what the recipe leaves open.
    Raises ValueError for another recipe, and where :func:`quantize_model` does.
    """
    known("recipe", recipe, [name for name, kept in recipes.items() if kept.one_byte])
    kept = recipes[recipe]
    blocks = kept.scales == "block"
    new = quantize_model(
        model,
        "e4m3" if kept.fp8_products else "int8",
        "block" if blocks else "row",
        include=_include(kept.one_byte, kept.skip_first_and_last_layer),
        activations=("tile" if blocks else "row") if kept.fp8_products else None,
        activation_bound=kept.activation_bound,
        **options,
    )
    if kept.float32_router_bias:
        for module in new.modules():
            if isinstance(module, Router) and module.selection_bias is not None:
                module.selection_bias = nn.Parameter(module.selection_bias.to(torch.float32), requires_grad=False)
    return new


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers of a model; what is tied counts once."""
    return sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
