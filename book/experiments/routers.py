"""What the routers of transformers choose: the reference that chapter 11 compares its own with.

    python book/experiments/routers.py

Each router is given the same kind of random logits: its weight is the identity, so that its input is what it scores.
The chapter draws the logits again from their seed and needs no transformers, which not every reader has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, JambaConfig, MixtralConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.jamba.modeling_jamba import JambaTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

HERE = Path(__file__).resolve().parent
TOKENS = 64


def drawn(seed: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of 64 tokens, and a bias for each expert that turns most sigmoid scores negative."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((TOKENS, experts)).astype(np.float32)
    bias = (0.2 * rng.standard_normal(experts) - 0.9).astype(np.float32)
    return torch.from_numpy(logits), torch.from_numpy(bias)


def routers() -> dict[str, nn.Module]:
    """In the published shapes, but for the hidden size, which is the number of experts."""
    v2: dict[str, Any] = {"n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}
    v3: dict[str, Any] = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    limited: dict[str, Any] = {
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 16.0,
    }
    biased: dict[str, Any] = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
    return {
        "mixtral": MixtralTopKRouter(MixtralConfig(hidden_size=8, num_local_experts=8, num_experts_per_tok=2)),
        "jamba": JambaTopKRouter(JambaConfig(hidden_size=16, num_experts=16, num_experts_per_tok=2)),
        "deepseek-v2": DeepseekV2TopkRouter(DeepseekV2Config(hidden_size=160, **v2, **limited)),
        "deepseek-v3": DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=256, **v3, **biased)),
    }


@torch.no_grad()
def record() -> dict[str, Any]:
    found: dict[str, Any] = {"transformers": transformers.__version__, "tokens": TOKENS, "routers": {}}
    for seed, (name, router) in enumerate(routers().items()):
        weight = router.get_parameter("weight")
        experts = len(weight)
        logits, bias = drawn(seed, experts)
        weight.copy_(torch.eye(experts))
        if name == "deepseek-v3":
            router.get_buffer("e_score_correction_bias").copy_(bias)
        _, weights, chosen = router(logits)
        order = chosen.argsort(dim=-1)  # transformers promises none
        found["routers"][name] = {
            "seed": seed,
            "experts": experts,
            "chosen": chosen.gather(1, order).tolist(),
            "weights": [[float(f"{weight:.7g}") for weight in row] for row in weights.gather(1, order).tolist()],
        }
    return found


def main() -> None:
    (HERE / "routers.json").write_text(json.dumps(record()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
