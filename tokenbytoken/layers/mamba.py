"""The Mamba-1 mixer, its selective scan in three equal forms, and the state that it carries instead of a cache.

For each of I channels a state h of N numbers: h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t, and y_t = C_t · h_t. Δ, B and C
are computed from the input (that is what "selective" means), A is fixed and negative: a decay. Sources: Gu and Dao
2023 (arXiv 2312.00752), equations 2 to 4 and algorithm 2; B is multiplied by Δ alone, as in the authors' code; the
norms on Δ, B and C are Jamba's (Lieber et al. 2024, arXiv 2403.19887, section 6.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import MambaConfig
from . import devices
from .norm import RMSNorm
from .operations import product

if TYPE_CHECKING:
    from ..decoder import Pass

__all__ = ["SCANS", "Mamba", "MambaState", "Scan", "product", "selective_scan"]

Scan = Literal["auto", "loop", "chunked", "associative"]

# Numbers of all states (batch × tokens × I × N) that exist at one time. The loop wants to find a block in the
# processor's cache (2 MiB in float32); the parallel forms want as many tokens at once as memory allows (256 MiB).
LOOP_BLOCK, PARALLEL_BLOCK = 2**19, 2**26


# --- the scan -----------------------------------------------------------------------------------------
#
# Each form takes log_decay = Δ A and b = Δ B x, both (B, T, I, N), and the state before them (B, I, N), and returns
# all states (B, T, I, N), for which it may write over b. Decays are kept as logarithms, and only ever added: a sum of
# numbers ≤ 0 can neither overflow nor cancel, and its exponential lies in [0, 1]. (Quotients of cumulated decays
# would be 0 / 0.)


def _loop(log_decay: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Token after token: the least work, T steps that wait for each other."""
    keep = b.requires_grad or h.requires_grad or log_decay.requires_grad  # backward needs what was there
    states = []
    for decay_t, b_t in zip(log_decay.exp().unbind(1), b.unbind(1), strict=True):
        h = torch.addcmul(b_t, decay_t, h) if keep else b_t.addcmul_(decay_t, h)
        states.append(h)
    return torch.stack(states, dim=1) if keep else b


def _chunked(log_decay: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """√T chunks side by side, each from an empty state; then from chunk to chunk: twice the work, 2 √T steps."""
    B, T, I, N = b.shape
    size = math.isqrt(T - 1) + 1  # ⌈√T⌉
    count = -(-T // size)
    rest = (0, 0, 0, 0, 0, count * size - T)  # the last chunk is filled with tokens that change nothing
    log_decay, b = (F.pad(t, rest).view(B, count, size, I, N) for t in (log_decay, b))
    local = _loop(log_decay.flatten(0, 1), b.flatten(0, 1), b.new_zeros(B * count, I, N)).view(B, count, size, I, N)
    since = log_decay.cumsum(dim=2).exp()  # what the state before a chunk has decayed to, by token
    before = [h]
    for k in range(count - 1):
        before.append(torch.addcmul(local[:, k, -1], since[:, k, -1], before[-1]))
    states = torch.addcmul(local, since, torch.stack(before, dim=1)[:, :, None])
    return states.flatten(1, 2)[:, :T]


def _associative(log_decay: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Doubling: after round r each token holds the merged last 2^r steps: log₂ T rounds over all of T.

    Steps (decay, b) merge like the blocks of an online softmax: (a₁, b₁) then (a₂, b₂) is (a₁ a₂, a₂ b₁ + b₂).
    """
    first = torch.addcmul(b[:, :1], log_decay[:, :1].exp(), h[:, None])
    b = torch.cat((first, b[:, 1:]), dim=1)
    reach = 1
    while reach < b.shape[1]:
        merged = torch.addcmul(b[:, reach:], log_decay[:, reach:].exp(), b[:, :-reach])
        b = torch.cat((b[:, :reach], merged), dim=1)
        log_decay = torch.cat((log_decay[:, :reach], log_decay[:, reach:] + log_decay[:, :-reach]), dim=1)
        reach *= 2
    return b


SCANS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "loop": _loop,
    "chunked": _chunked,
    "associative": _associative,
}


def selective_scan(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, *, scan: Scan = "auto"
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over T tokens: x and delta (B, T, I), A (I, N), B and C (B, T, N), h (B, I, N).

    Returns y (B, T, I) and the last state (B, I, N); ``h`` is left as it was. ``scan`` is ``"loop"``, ``"chunked"``,
    ``"associative"``, or ``"auto"``: the loop on a CPU, where the other forms read and write more and save nothing;
    chunks on a GPU, where each step of the loop would be a launch of its own. Raises ValueError for another name.
    """
    if scan == "auto":
        scan = "loop" if devices.kind(x.device).on_host or x.shape[1] == 1 else "chunked"
    if scan not in SCANS:
        raise ValueError(f"scan must be 'auto', {', '.join(map(repr, SCANS))}, not {scan!r}")
    block = max(1, (LOOP_BLOCK if scan == "loop" else PARALLEL_BLOCK) // (x.shape[0] * A.numel()))
    outputs = []
    for first in range(0, x.shape[1], block):
        part = slice(first, first + block)
        log_decay = product(delta[:, part, :, None], A)  # (B, t, I, N)
        b = product((delta[:, part] * x[:, part])[..., None], B[:, part, None])  # (B, t, I, N)
        states = SCANS[scan](log_decay, b, h)
        outputs.append((C[:, part, None] @ states.transpose(-1, -2)).squeeze(2))  # (B, t, I)
        h = states[:, -1]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), h


# --- the mixer and its state --------------------------------------------------------------------------


class MambaMark(NamedTuple):
    """Copies of a state, for it cannot be cut back: what it forgot is gone."""

    conv: Tensor
    ssm: Tensor


class MambaState:
    """What one layer remembers, however long the context: ``conv`` (B, I, d_conv − 1) and ``ssm`` (B, I, N).

    ``conv`` holds the last inputs of the convolution in the model's dtype, the newest last. ``ssm`` is float32 at
    least: each step adds to a sum that thousands of steps may have built up, and in bfloat16, with a spacing of 1 in
    256, small additions would vanish.
    """

    def __init__(self, conv: Tensor, ssm: Tensor) -> None:
        self.conv, self.ssm = conv, ssm

    @classmethod
    def empty(cls, config: MambaConfig, batch_size: int, dtype: torch.dtype, device: torch.device) -> MambaState:
        I, N = config.inner_size, config.state_size
        conv = torch.zeros(batch_size, I, config.conv_size - 1, dtype=dtype, device=device)
        return cls(conv, torch.zeros(batch_size, I, N, dtype=_wide(dtype), device=device))

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [self.conv, self.ssm]

    def nbytes(self, length: int | None = None) -> int:
        """Bytes allocated, which is also what any number of tokens uses."""
        return sum(t.nbytes for t in self.tensors)

    def mark(self) -> MambaMark:
        return MambaMark(self.conv.clone(), self.ssm.clone())

    def rewind(self, mark: MambaMark) -> None:
        self.conv.copy_(mark.conv)
        self.ssm.copy_(mark.ssm)

    def gather(self, rows: Sequence[int], start: int, end: int, max_length: int, shift: int = 0) -> MambaState:
        """A new state of the chosen rows; it never saw a pad, so that pads that come or go change nothing."""
        return MambaState(self.conv[list(rows)], self.ssm[list(rows)])

    @classmethod
    def concat(cls, states: Sequence[MambaState]) -> MambaState:
        """States one under the other in the batch axis."""
        return cls(torch.cat([s.conv for s in states]), torch.cat([s.ssm for s in states]))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Mamba(nn.Module):
    """x (B, T, M) → (B, T, M): projection to x and a gate, causal convolution, selective scan, gate, projection.

    ``scan`` chooses the form of the scan, see :func:`selective_scan`. The bias of ``dt_proj`` stands apart as
    ``dt_bias``: it is added in float32, and once.
    """

    def __init__(self, config: MambaConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.scan: Scan = "auto"
        I, N, R = config.inner_size, config.state_size, config.dt_rank
        self.in_proj = nn.Linear(hidden_size, 2 * I, bias=config.proj_bias)
        self.conv1d = nn.Conv1d(I, I, config.conv_size, groups=I, bias=config.conv_bias)
        self.x_proj = nn.Linear(I, R + 2 * N, bias=False)
        self.dt_proj = nn.Linear(R, I, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(I))
        self.A_log = nn.Parameter(torch.empty(I, N))
        self.D = nn.Parameter(torch.empty(I))
        self.out_proj = nn.Linear(I, hidden_size, bias=config.proj_bias)
        if config.inner_norms:
            self.dt_norm = RMSNorm(R, eps=config.norm_eps)
            self.b_norm = RMSNorm(N, eps=config.norm_eps)
            self.c_norm = RMSNorm(N, eps=config.norm_eps)
        if self.A_log.device.type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The paper's start: A = −1 … −N, D = 1, and Δ between 0.001 and 0.1 (its section 3.6 and its code)."""
        nn.init.uniform_(self.dt_proj.weight, -(self.config.dt_rank**-0.5), self.config.dt_rank**-0.5)
        self.A_log.copy_(torch.arange(1, self.config.state_size + 1).log().expand_as(self.A_log))
        self.D.fill_(1)
        delta = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(delta + torch.log(-torch.expm1(-delta)))  # softplus⁻¹

    def new_state(self, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device) -> MambaState:
        return MambaState.empty(self.config, batch_size, dtype, device)

    def forward(self, x: Tensor, step: Pass, state: MambaState | None = None) -> Tensor:
        dtype, wide, config = x.dtype, _wide(x.dtype), self.config
        x, gate = self.in_proj(x).chunk(2, dim=-1)  # (B, T, I) each
        x = self._convolve(step.without_pads(x), state).to(dtype)
        x = step.without_pads(x)  # once more: the convolution's bias has made something of nothing

        dt, B, C = self.x_proj(x).split([config.dt_rank, config.state_size, config.state_size], dim=-1)
        if config.inner_norms:
            dt, B, C = self.dt_norm(dt), self.b_norm(B), self.c_norm(C)
        delta = F.softplus(self.dt_proj(dt).to(wide) + self.dt_bias.to(wide))  # (B, T, I)
        A = -self.A_log.to(wide).exp()  # (I, N)
        x = x.to(wide)
        h = x.new_zeros(x.shape[0], *A.shape) if state is None else state.ssm
        y, h = selective_scan(x, delta, A, B.to(wide), C.to(wide), h, scan=self.scan)
        if state is not None:
            state.ssm.copy_(h.detach())
        y = (y + x * self.D.to(wide)) * F.silu(gate)
        return self.out_proj(y.to(dtype))

    def _convolve(self, x: Tensor, state: MambaState | None) -> Tensor:
        """A causal convolution of each channel with its own d_conv taps, then SiLU: (B, T, I) → (B, T, I).

        The newest input meets the last tap. Taps are few and channels many, so that a multiply-add of the shifted
        input for each tap is faster on a CPU than the library's convolution, from one token to thousands. Returns
        float32 at least.
        """
        T, past = x.shape[1], self.config.conv_size - 1
        if state is None:
            x = F.pad(x, (0, 0, past, 0))
        else:
            x = torch.cat((state.conv.transpose(1, 2), x), dim=1)  # (B, d_conv − 1 + T, I)
            state.conv.copy_(x[:, T:].detach().transpose(1, 2))
        wide = _wide(x.dtype)
        x, weight, bias = x.to(wide), self.conv1d.weight[:, 0].to(wide), self.conv1d.bias
        y = x.new_zeros(x.shape[-1]) if bias is None else bias.to(wide)
        for tap in range(past + 1):
            y = torch.addcmul(y, x[:, tap : tap + T], weight[:, tap])
        return F.silu(y)
