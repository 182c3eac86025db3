"""Feed-forward networks: Llama's gated one (Shazeer 2020, arXiv 2002.05202), and mixtures of it.

A mixture (MoE) sends each token through a few of its experts. What differs between Mixtral, DeepSeek-V2, DeepSeek-V3
and Jamba is the router alone, and that is in :class:`~tokenbytoken.config.MoEConfig`:

- Mixtral: softmax, the best k, their scores divided by their sum (arXiv 2401.04088);
- Jamba: the same without the division (arXiv 2403.19887);
- DeepSeek-V2: softmax, experts in groups, a group ranked by its best expert, no division, a factor
  (arXiv 2405.04434, 2.2);
- DeepSeek-V3: sigmoid, a bias that chooses but does not weigh, a group ranked by the sum of its best two, division,
  a factor (arXiv 2412.19437, equations 12 to 16).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import MoEConfig, SwiGLUConfig
from . import devices

__all__ = ["Experts", "MoE", "Router", "SwiGLU", "route"]


class SwiGLU(nn.Module):
    """down(silu(gate x) * (up x)): x (…, M) → (…, M)."""

    def __init__(self, config: SwiGLUConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = nn.Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def best(scores: Tensor, k: int) -> Tensor:
    """Places of the k largest numbers of the last axis, best first; of equal ones the lowest place is first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]  # topk promises no order of ties


def route(logits: Tensor, config: MoEConfig, selection_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The choice of each token, from router logits (n, E): weights and experts, both (n, k), best expert first.

    Scores are formed in the logits' dtype: pass float32.
    """
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    choice = scores if selection_bias is None else scores + selection_bias
    if config.groups_kept < config.num_groups:
        grouped = choice.unflatten(-1, (config.num_groups, -1))  # (n, groups, E / groups)
        strongest = min(2 if config.group_score == "top2_sum" else 1, grouped.shape[-1])
        kept = best(grouped.topk(strongest, dim=-1).values.sum(-1), config.groups_kept)  # (n, groups_kept)
        dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, kept, False)
        # Not 0: a biased score may be negative, and would lose to the experts that are masked.
        choice = grouped.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(-2)
    chosen = best(choice, config.experts_per_token)
    weights = scores.gather(-1, chosen)  # without the bias
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # scores can all underflow to 0
    return weights * config.scale, chosen


class Router(nn.Module):
    """Chooses experts: x (n, M) → weights (n, k) and experts (n, k), best first.

    It works in float32 whatever the model's dtype (in float64 for float64): in half precision scores that differ
    round to equal ones, and another expert is chosen.
    """

    selection_bias: nn.Parameter | None

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        nn.init.uniform_(self.weight, -(hidden_size**-0.5), hidden_size**-0.5)
        if config.selection_bias:
            self.selection_bias = nn.Parameter(torch.empty(config.num_experts))
            nn.init.zeros_(self.selection_bias)
        else:
            self.selection_bias = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.selection_bias is None else self.selection_bias.to(dtype)
        return route(F.linear(x.to(dtype), self.weight.to(dtype)), self.config, bias)


class Experts(nn.Module):
    """E gated feed-forwards, one tensor for each projection: ``gate_proj`` and ``up_proj`` (E, F, M), ``down_proj``
    (E, M, F). Three tensors instead of 3 E: DeepSeek-V3 has 14,848 experts."""

    def __init__(self, num_experts: int, intermediate_size: int, hidden_size: int) -> None:
        super().__init__()
        E, width, M = num_experts, intermediate_size, hidden_size
        self.gate_proj = nn.Parameter(torch.empty(E, width, M))
        self.up_proj = nn.Parameter(torch.empty(E, width, M))
        self.down_proj = nn.Parameter(torch.empty(E, M, width))
        for weight in (self.gate_proj, self.up_proj, self.down_proj):  # as nn.Linear draws each of them
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """What one expert makes of x (n, M)."""
        hidden = F.silu(F.linear(x, self.gate_proj[expert])) * F.linear(x, self.up_proj[expert])
        return F.linear(hidden, self.down_proj[expert])

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of each token's experts, and no number is read on the host: how a GPU wants it.

        x (n, M), ``weights`` and ``chosen`` (n, k) → (n, M) in the dtype of ``weights``.
        """
        E, (n, k) = len(self.gate_proj), chosen.shape
        if _has_grouped_product(self.gate_proj):
            each = self._grouped(x, chosen)
        elif n * k <= E:  # few tokens, as in a decode step: the matrices that they need are copied
            each = self._gathered(x, chosen)
        else:  # many: each expert works on all of them, and what nobody asked for is dropped
            return asked_in_turn(self, E, torch.arange(E, device=x.device), x, weights, chosen)
        return (each * weights.unsqueeze(-1)).sum(1)

    def _grouped(self, x: Tensor, chosen: Tensor) -> Tensor:
        """What each token's experts make of it, (n, k, M), by torch's product over groups of rows."""
        experts, order = chosen.flatten().sort(stable=True)  # (n k) places of (n, k), expert by expert
        numbers = torch.arange(len(self.gate_proj), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)  # where each expert's rows end
        rows = x[order // chosen.shape[1]]
        gate, up = (F.grouped_mm(rows, w.mT, offs=ends) for w in (self.gate_proj, self.up_proj))
        down = F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)
        return torch.empty_like(down).index_copy_(0, order, down).view(*chosen.shape, -1)

    def _gathered(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The same by a copy of each token's own matrices."""
        column = x[:, None, :, None]  # (n, 1, M, 1)
        hidden = F.silu(self.gate_proj[chosen] @ column) * (self.up_proj[chosen] @ column)  # (n, k, F, 1)
        return (self.down_proj[chosen] @ hidden).squeeze(-1)


def asked_in_turn(
    expert: Callable[[Tensor, int], Tensor], E: int, numbers: Tensor, x: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:
    """:meth:`Experts.mixed`, an expert at a time: ``expert(x, i)`` is what number i of ``numbers`` (m,) makes of x.

    ``numbers`` are in order and hold each expert that was chosen; of equal ones the first counts.
    """
    share = weights.new_zeros(len(x), E).scatter_(-1, chosen, weights)
    asked = torch.zeros_like(share, dtype=torch.bool).scatter_(-1, chosen, True)
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[1:] = numbers[1:] != numbers[:-1]
    share, asked = share[:, numbers], asked[:, numbers] & first  # (n, m)
    out = torch.zeros_like(x, dtype=weights.dtype)
    for i in range(len(numbers)):
        its = asked[:, i : i + 1]
        # Zeros in place of others' tokens: no scale that the expert finds for its input depends on these. And zeros
        # in place of what it makes of them, not times 0: that may be infinite.
        out += (expert(x.where(its, 0), i) * share[:, i : i + 1]).where(its, 0)
    return out


def _has_grouped_product(weight: Tensor) -> bool:
    """Whether torch multiplies groups of rows whose bounds lie on this device, by one kernel: bfloat16, from 8.0 on."""
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[1] % 8 == weight.shape[2] % 8 == 0  # rows of whole 16 bytes
        and hasattr(F, "grouped_mm")
        and (devices.kind(weight.device).capability or (0, 0)) >= devices.BF16
    )


class MoE(nn.Module):
    """A mixture of experts: x (…, M) → (…, M), the weighted sum of each token's experts, and a shared one for all.

    On a CPU tokens are sorted by expert, so that each expert that is chosen reads its weights once and multiplies
    all its tokens at a time. For that the host must know how many each has; on a GPU it would wait for them in every
    layer, so experts that can (``mixed``) do without.
    """

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, hidden_size)
        self.experts = Experts(config.num_experts, config.intermediate_size, hidden_size)
        shared = config.shared_intermediate_size
        self.shared = SwiGLU(SwiGLUConfig(intermediate_size=shared), hidden_size) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (n, M)
        weights, chosen = self.router(rows)
        on_host = devices.kind(x.device).on_host or not hasattr(self.experts, "mixed")
        out = (self._expert_by_expert if on_host else self.experts.mixed)(rows, weights, chosen)
        out = out.to(x.dtype).view(x.shape)  # summed in the router's dtype, rounded once
        return out if self.shared is None else out + self.shared(x)

    def _expert_by_expert(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)  # (n k) places of (n, k), expert by expert
        tokens, shares = order // chosen.shape[1], weights.flatten()[order].unsqueeze(-1)
        out = torch.zeros_like(rows, dtype=weights.dtype)
        first = 0
        for expert, count in enumerate(self._loads(chosen)):
            if count:
                its, share = (t[first : first + count] for t in (tokens, shares))
                out.index_add_(0, its, self.experts(rows[its], expert) * share)  # no token twice: a fixed order
                first += count
        return out

    def _loads(self, chosen: Tensor) -> list[int]:
        """How many tokens each expert has. On the meta device nobody knows: as even as can be."""
        E = self.config.num_experts
        if chosen.is_meta:
            each, more = divmod(chosen.numel(), E)
            return [each + (expert < more) for expert in range(E)]
        loads: list[int] = devices.read(chosen.flatten().bincount(minlength=E))
        return loads
