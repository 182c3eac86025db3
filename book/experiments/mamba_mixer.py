"""One Mamba mixer as transformers computes it: random weights, an input, and the output to be reproduced.

    python book/experiments/mamba_mixer.py              writes mamba_mixer.json beside it, in seconds

Chapter 14 builds the block from tensors and compares it with this file, so that it need not import transformers. The
weights have a standard deviation of 0.25: with the usual 0.02 real mistakes nearly vanish. The whole sequence goes
through in one pass, because transformers' own cache loses state when a prompt is fed in pieces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

RECORD = Path(__file__).resolve().parent / "mamba_mixer.json"
TOKENS, HIDDEN, INNER, STATE, TAPS, RANK = 12, 8, 16, 4, 4, 2
SHAPES = {
    "in_proj.weight": (2 * INNER, HIDDEN),
    "conv1d.weight": (INNER, 1, TAPS),
    "conv1d.bias": (INNER,),
    "x_proj.weight": (RANK + 2 * STATE, INNER),
    "dt_proj.weight": (INNER, RANK),
    "dt_proj.bias": (INNER,),
    "A_log": (INNER, STATE),
    "D": (INNER,),
    "out_proj.weight": (HIDDEN, INNER),
}


def drawn(seed: int = 14) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Weights by transformers' names, and an input (T, M); four decimals, so that they are the same everywhere."""
    rng = np.random.default_rng(seed)
    weights = {name: 0.25 * rng.standard_normal(shape) for name, shape in SHAPES.items()}
    weights["A_log"] += np.log(np.arange(1, STATE + 1))
    return {name: w.round(4) for name, w in weights.items()}, rng.standard_normal((TOKENS, HIDDEN)).round(4)


def reference(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """One pass of transformers' mixer over the whole sequence: (T, M)."""
    import transformers
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    transformers.logging.set_verbosity_error()
    config = MambaConfig(
        hidden_size=HIDDEN, state_size=STATE, conv_kernel=TAPS, time_step_rank=RANK, num_hidden_layers=1
    )
    mixer = MambaMixer(config, layer_idx=0).eval()
    mixer.load_state_dict({name: torch.tensor(w, dtype=torch.float32) for name, w in weights.items()})
    with torch.no_grad():
        y: np.ndarray = mixer(torch.tensor(x, dtype=torch.float32)[None])[0].numpy()
    return y


def main() -> None:
    import transformers

    weights, x = drawn()
    record: dict[str, Any] = {
        "command": "python book/experiments/mamba_mixer.py",
        "transformers": transformers.__version__,
        "weights": {name: w.tolist() for name, w in weights.items()},
        "x": x.tolist(),
        "y": [[float(f"{value:.7g}") for value in row] for row in reference(weights, x)],
    }
    RECORD.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"transformers {transformers.__version__}: {TOKENS} × {HIDDEN} numbers")


if __name__ == "__main__":
    main()
