"""Latent attention, experts, Mamba and the hybrid beside transformers: random weights at widths of real models.

Only a few layers each, so that the weights of all fit in a gigabyte; a step is one token of one sequence. Both sides
hold their own state and advance by a token each time they are timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

import tokenbytoken as tbt
from benchmarks.lines import OURS, Ways

__all__ = ["SHAPES", "decode", "equal", "pair", "prefill"]

COMMON = {"vocab_size": 4096, "tie_word_embeddings": True, "pad_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    # The attention of DeepSeek-V2-Lite, and experts of the same number for each token.
    "latent attention + experts": {
        **COMMON, "model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 4096, "moe_intermediate_size": 704,
        "n_routed_experts": 16, "num_experts_per_tok": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "max_position_embeddings": 4096,
    },
    "Mamba": {
        **COMMON, "model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 12, "state_size": 16,
        "conv_kernel": 4, "expand": 2, "time_step_rank": 48,
    },
    "hybrid, one attention layer in eight": {
        **COMMON, "model_type": "jamba", "hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 12, "num_key_value_heads": 2, "attn_layer_period": 8, "attn_layer_offset": 4,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 8, "num_experts_per_tok": 2,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 48, "use_mamba_kernels": False,
    },
}  # fmt: skip


def pair(fields: dict[str, Any], where: torch.device) -> tuple[tbt.Decoder, Any]:
    """The same random weights in this package and in transformers, by way of a checkpoint that transformers wrote."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it says at length which kernels of a GPU are not installed
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    for parameter in theirs.parameters():
        parameter.requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return tbt.load(folder, device=where), theirs.eval().to(where)


def equal(ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor], tolerance: float = 1e-4) -> Ways:
    """Both, once their logits have been found equal. Raises SystemExit when they differ."""
    a, b = ours(), theirs()
    error = (a - b).abs().max() / a.abs().max()
    if not error <= tolerance:
        raise SystemExit(f"the logits differ by {error:.1e} of their scale: nothing is timed")
    return {OURS: ours, "transformers": theirs}


def prefill(model: tbt.Decoder, theirs: Any, length: int) -> Ways:
    """A prompt into an empty state, the last row of logits out."""
    tokens = prompt(model, length)

    def ours() -> torch.Tensor:
        return model(tokens, model.new_state(1, length), logits="last")

    def other() -> torch.Tensor:
        return theirs(input_ids=tokens, use_cache=True, logits_to_keep=1).logits

    return equal(ours, other)


def decode(model: tbt.Decoder, theirs: Any, context: int, steps: int) -> Ways:
    """One more token after ``context``; at most ``steps`` times."""
    tokens = prompt(model, context + steps)
    state = model.new_state(1, context + steps)
    model(tokens[:, :context], state, logits="none")
    out = theirs(input_ids=tokens[:, :context], use_cache=True, logits_to_keep=1)
    cache = out.cache_params if "cache_params" in out else out.past_key_values
    place = iter(range(context, context + steps))

    def ours() -> torch.Tensor:
        return model(tokens[:, state.length : state.length + 1], state, logits="last")

    def other() -> torch.Tensor:
        at = next(place)
        return theirs(input_ids=tokens[:, at : at + 1], cache=cache, use_cache=True, logits_to_keep=1).logits

    return equal(ours, other)


def prompt(model: tbt.Decoder, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator).to(model.embed.weight.device)
