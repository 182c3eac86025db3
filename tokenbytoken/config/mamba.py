"""A Mamba-1 mixer, as data, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from .._algebra import Number
from .closed_forms import Flops, StateSize, Weight, positive_fields

__all__ = ["MambaConfig"]

#: FLOPs of the scan for one element of its state and one token: the products Δ·A and (Δ x)·B, the multiply-add of
#: a·h + b, and that of the sum over C·h. The exponential is no product.
SCAN_FLOPS = 6


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """A Mamba-1 mixer (Gu and Dao 2023, arXiv 2312.00752); ``inner_norms`` are Jamba's, on dt, B and C."""

    module: ClassVar[str] = "tokenbytoken.layers.mamba:Mamba"

    inner_size: int
    state_size: int
    conv_size: int
    dt_rank: int
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norms: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        positive_fields(self, "inner_size", "state_size", "conv_size", "dt_rank")

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        inner, state, rank = self.inner_size, self.state_size, self.dt_rank
        yield Weight("in_proj", "mamba", 2 * inner, hidden_size)
        yield Weight("x_proj", "mamba", rank + 2 * state, inner)
        yield Weight("dt_proj", "mamba", inner, rank)
        yield Weight("out_proj", "mamba", hidden_size, inner)
        yield Weight("conv", "recurrence", inner, self.conv_size)
        yield Weight("A_log", "recurrence", inner, state)
        yield Weight("D", "recurrence", inner)
        yield Weight("dt_bias", "bias", inner)
        if self.conv_bias:
            yield Weight("conv_bias", "bias", inner)
        if self.proj_bias:
            yield Weight("proj_bias", "bias", 2 * inner + hidden_size)
        if self.inner_norms:
            yield Weight("inner_norms", "norm", rank + 2 * state)

    def state(self) -> StateSize:
        """I x N numbers of the scan, and the last ``conv_size - 1`` inputs of the convolution."""
        return StateSize(
            recurrent=self.inner_size * self.state_size, constant=self.inner_size * (self.conv_size - 1)
        )

    def flops(self, context: Number, new_tokens: Number, *, causal: bool = False, form: str = "auto") -> Flops:
        """Six for each element of the state and token in the scan, two a tap in the convolution."""
        per_channel = SCAN_FLOPS * self.state_size + 2 * self.conv_size
        return Flops(recurrence=new_tokens * self.inner_size * per_channel)

    def intensity(
        self, *, bytes_per_element: float, recurrent_bytes_per_element: float, new_tokens: int, form: str
    ) -> float:
        """That of the scan, whose state is read and written: 6 / 8 in float32."""
        return SCAN_FLOPS * new_tokens / (2 * recurrent_bytes_per_element)

    def cache_share(self, tensor_parallel: Number) -> Number:
        """Nothing grows; its channels divide evenly."""
        return 1 / tensor_parallel

    def summed(self) -> tuple[Number, ...]:
        """The small input to Δ, B and C, to which every channel contributes."""
        return (self.dt_rank + 2 * self.state_size,)

    def exchanged(self) -> tuple[Number, Number]:
        """Nothing: no cache lies along the sequence."""
        return 0, 0
