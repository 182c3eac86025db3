"""What a model costs on paper: parameters, bytes, FLOPs, seconds at best. Nothing here needs torch.

The configs hold the closed forms of each part; this folder only adds up.
"""

from __future__ import annotations

from .fits import Footprint, footprint, max_batch, max_context
from .hardware import Accelerator, Link, accelerators, crossover_batch, find_accelerator, links
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
from .placement import CacheLayout, Placement, communication_seconds, footprint_per_gpu, state_share
from .prediction import PassTime, Prediction, predict, roofline
from .recipes import Recipe, recipes
from .rows import Ledger, Row, book, ledger, row
from .state import RecurrentState, recurrent_state, state_bytes, state_bytes_per_token

__all__ = [
    "Accelerator",
    "CacheLayout",
    "Footprint",
    "Ledger",
    "Link",
    "ParameterCount",
    "PassCost",
    "PassTime",
    "Placement",
    "Prediction",
    "Recipe",
    "RecurrentState",
    "Row",
    "accelerators",
    "attention_intensity",
    "book",
    "cache_crossing",
    "communication_seconds",
    "count_parameters",
    "crossover_batch",
    "distinct_experts",
    "expected_tokens",
    "find_accelerator",
    "footprint",
    "footprint_per_gpu",
    "ledger",
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
    "row",
    "state_bytes",
    "state_bytes_per_token",
    "state_share",
    "weight_bytes",
    "weights",
]
