"""What a model costs on paper: parameters, bytes, FLOPs, seconds at best. Nothing here needs torch.

The configs hold the closed forms of each part; this folder only adds up.
"""

from __future__ import annotations

from .hardware import Accelerator, Launch, Link, accelerators, crossover_batch, find_accelerator, links
from .memory import (
    Footprint,
    RecurrentState,
    WorkingMemory,
    footprint,
    max_batch,
    max_context,
    recurrent_state,
    state_bytes,
    state_bytes_per_token,
    working_memory,
)  # fmt: skip
from .messages import ALL_REDUCES, Collective, all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from .parameters import ParameterCount, count_parameters, mtp_weights, weight_bytes, weights
from .passes import (
    PassCost,
    attention_intensity,
    cache_crossing,
    distinct_experts,
    expected_tokens,
    pass_cost,
    prefill_crossing,
)
from .placement import (
    CacheLayout,
    ExpertLayout,
    Placement,
    communication_seconds,
    footprint_on,
    footprint_per_gpu,
    state_share,
    working_memory_per_gpu,
)  # fmt: skip
from .prediction import PassTime, Prediction, launches, predict, roofline
from .recipes import Recipe, recipes

__all__ = [
    "ALL_REDUCES",
    "Accelerator",
    "CacheLayout",
    "Collective",
    "ExpertLayout",
    "Footprint",
    "Launch",
    "Link",
    "ParameterCount",
    "PassCost",
    "PassTime",
    "Placement",
    "Prediction",
    "Recipe",
    "RecurrentState",
    "WorkingMemory",
    "accelerators",
    "all_gather_seconds",
    "all_reduce_seconds",
    "all_to_all_seconds",
    "attention_intensity",
    "cache_crossing",
    "communication_seconds",
    "count_parameters",
    "crossover_batch",
    "distinct_experts",
    "expected_tokens",
    "find_accelerator",
    "footprint",
    "footprint_on",
    "footprint_per_gpu",
    "launches",
    "links",
    "max_batch",
    "max_context",
    "mtp_weights",
    "pass_cost",
    "predict",
    "prefill_crossing",
    "recipes",
    "recurrent_state",
    "roofline",
    "state_bytes",
    "state_bytes_per_token",
    "state_share",
    "weight_bytes",
    "weights",
    "working_memory",
    "working_memory_per_gpu",
]
