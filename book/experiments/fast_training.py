"""Hand-written forms of three modules, for training on one CPU core: the same mathematics, fewer and faster steps.

``quicken(model)`` puts them in place of the forms of the package, which serve inference with a state. They know no
state and no padding. The tests compare outputs and gradients with the package's in float64.

Mamba's scan is in C (scan.c), with the adjoint recurrence written out: as PyTorch operations it spends its time on
launching them and on moving states through memory. It is compiled where it is first used; without a C compiler Mamba
keeps the form of the package, and takes five times as long.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tokenbytoken as tbt

__all__ = ["quicken", "scan"]

SOURCE = Path(__file__).with_name("scan.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


def quicken(model: tbt.Decoder) -> None:
    """Give each Mamba mixer, latent attention and mixture of experts of the model the form below."""
    for layer in model.layers:
        mixer: Any = layer.mixer  # of any kind; and its methods are replaced
        feed_forward: Any = layer.feed_forward
        if hasattr(mixer, "A_log") and COMPILER:
            mixer.forward = partial(mamba, mixer)
        if hasattr(mixer, "kv_b_proj"):
            mixer.form = "expanded"
            mixer._expanded = partial(expanded, mixer)
        if hasattr(feed_forward, "experts"):
            feed_forward.forward = partial(all_experts, feed_forward)


def expanded(mixer: Any, q_nope: Tensor, q_rope: Tensor, held: Tensor, padding: None) -> Tensor:
    """Latent attention over heads of one width: values are filled with zeros to the width of keys, and cut again.

    PyTorch's fused attention wants one width; without it the scores are written out.
    """
    if padding is not None:
        raise ValueError("this form is for training: it knows no padding")
    c, (B, S, _) = mixer.config, held.shape
    latent, k_rope = held.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    kv = mixer.kv_b_proj(latent).view(B, S, c.num_heads, -1).transpose(1, 2)  # (B, H, S, nope + v)
    k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    k = torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, c.num_heads, -1, -1)), dim=-1)
    q = torch.cat((q_nope, q_rope), dim=-1)
    v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=mixer.scale)
    return out[..., : c.v_head_dim]


def all_experts(moe: Any, x: Tensor) -> Tensor:
    """A mixture of experts that computes all of them, and multiplies by 0 what a token did not choose.

    All experts side by side are one feed-forward, three large products. With experts as small as the siblings' that
    is faster than sorting tokens for many small ones.
    """
    rows = x.reshape(-1, x.shape[-1])  # (n, M)
    weights, chosen = moe.router(rows)
    E, width, M = moe.experts.gate_proj.shape
    shares = weights.new_zeros(len(rows), E).scatter(1, chosen, weights)  # (n, E)
    gate, up = (F.linear(rows, w.view(E * width, M)) for w in (moe.experts.gate_proj, moe.experts.up_proj))
    hidden = (F.silu(gate) * up).view(-1, E, width) * shares.unsqueeze(-1)  # (n, E, F)
    down = moe.experts.down_proj.transpose(0, 1).reshape(M, E * width)
    out = F.linear(hidden.view(-1, E * width), down).view(x.shape)
    return out if moe.shared is None else out + moe.shared(x)


def mamba(mixer: Any, x: Tensor, step: Any, state: None = None) -> Tensor:
    """The Mamba mixer with the scan of scan.c: x (B, T, M) → (B, T, M)."""
    if state is not None or step.padding is not None:
        raise ValueError("this form is for training: it knows no state and no padding")
    c = mixer.config
    x, gate = mixer.in_proj(x).chunk(2, dim=-1)  # (B, T, I) each
    x = mixer._convolve(x, None)
    dt, B, C = mixer.x_proj(x).split([c.dt_rank, c.state_size, c.state_size], dim=-1)
    if c.inner_norms:
        dt, B, C = mixer.dt_norm(dt), mixer.b_norm(B), mixer.c_norm(C)
    delta = F.softplus(mixer.dt_proj(dt) + mixer.dt_bias)
    y = scan(x, delta, -mixer.A_log.exp(), B, C)
    return mixer.out_proj((y + x * mixer.D) * F.silu(gate))


def scan(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The selective scan from an empty state: x and delta (B, T, I), A (I, N), B and C (B, T, N) → y (B, T, I).

    float32 or float64, I a multiple of 32, N at most 64: ValueError otherwise.
    """
    width, _, most = (library(x.dtype).scan_limits(which) for which in range(3))
    if A.shape[0] % width or A.shape[1] > most:
        raise ValueError(f"A must be (a multiple of {width}, at most {most}), not {tuple(A.shape)}")
    return Scan.apply(x, delta, A.t(), B, C)


class Scan(torch.autograd.Function):
    """``scan`` with A given as (N, I)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        x, delta, A, B, C = (t.contiguous() for t in inputs)
        sizes = (*x.shape, A.shape[0])
        chunks = -(-x.shape[1] // library(x.dtype).scan_limits(1))
        y, starts = torch.empty_like(x), x.new_empty(x.shape[0], chunks, *A.shape)
        call(library(x.dtype).scan_forward, sizes, x, delta, A, B, C, y, starts)
        ctx.save_for_backward(x, delta, A, B, C, starts)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, delta, A, B, C, starts = ctx.saved_tensors
        sizes = (*x.shape, A.shape[0])
        grads = (torch.empty_like(x), torch.empty_like(x), *(torch.zeros_like(t) for t in (A, B, C)))
        call(library(x.dtype).scan_backward, sizes, x, delta, A, B, C, starts, grad.contiguous(), *grads)
        return grads


def call(function: Any, sizes: tuple[int, ...], *tensors: Tensor) -> None:
    function(*(ctypes.c_long(n) for n in sizes), *(ctypes.c_void_p(t.data_ptr()) for t in tensors))


@lru_cache(maxsize=2)
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """scan.c compiled for this processor and dtype."""
    kinds: dict[torch.dtype, list[str]] = {torch.float32: [], torch.float64: ["-DDOUBLE"]}
    if dtype not in kinds:
        raise ValueError(f"the scan is for float32 and float64, not {dtype}")
    with tempfile.TemporaryDirectory() as folder:
        part, built = Path(folder) / "scan.o", Path(folder) / "scan.so"
        # Two calls: linked with -ffast-math, the library would switch off subnormal numbers for the whole process.
        flags = ["-O3", "-march=native", "-ffast-math", "-fPIC", *kinds[dtype]]
        subprocess.run([str(COMPILER), *flags, "-c", "-o", str(part), str(SOURCE)], check=True)
        subprocess.run([str(COMPILER), "-shared", "-o", str(built), str(part), "-lm"], check=True)
        return ctypes.CDLL(str(built))
