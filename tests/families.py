"""Tiny random models of transformers, the reference that this project did not write.

Weights are drawn again with a standard deviation of 0.25 and norm weights in [0.5, 1.5]: with the library's own
initialisation (0.02) real bugs nearly vanish. Logits then have a scale of about 5 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

import tokenbytoken as tbt
from tokenbytoken.layers import Cache, LatentAttention, MambaState

if TYPE_CHECKING:
    from transformers import (
        DeepseekV2ForCausalLM,
        DeepseekV3ForCausalLM,
        JambaForCausalLM,
        LlamaForCausalLM,
        MambaForCausalLM,
        MixtralForCausalLM,
        PreTrainedModel,
    )

Network = TypeVar("Network", bound=nn.Module)

T_LLAMA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
T_DSV3: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 640,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
T_MIXTRAL: dict[str, Any] = {
    **T_LLAMA, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "sliding_window": None,
}  # fmt: skip
T_MAMBA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4, "expand": 2,
    "time_step_rank": 4,
}  # fmt: skip
T_JAMBA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_dt_rank": 4, "max_position_embeddings": 512,
}  # fmt: skip


def redraw(model: Network, seed: int = 0) -> Network:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # spread about −1 … −N, and another in each channel
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.25, generator=generator))
            elif name.endswith("dt_proj.bias"):  # Δ from 0.02 to 2: some channels remember, some forget
                parameter.normal_(-1.5, 1.0, generator=generator)
            elif parameter.dim() == 1 and "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.25, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # so wide that biased scores are negative, too
                buffer.normal_(0, 0.5, generator=generator)
    return model.eval().requires_grad_(False)


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random LlamaForCausalLM in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return redraw(LlamaForCausalLM(LlamaConfig(**{**T_LLAMA, **changes})), seed)


def deepseek_v3(seed: int = 0, **changes: Any) -> DeepseekV3ForCausalLM:
    """A random DeepseekV3ForCausalLM in float32, its router biases drawn as well."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return redraw(DeepseekV3ForCausalLM(DeepseekV3Config(**{**T_DSV3, **changes})), seed)


def deepseek_v2(seed: int = 0, **changes: Any) -> DeepseekV2ForCausalLM:
    """A random DeepseekV2ForCausalLM in float32: softmax scores, groups ranked by their best expert."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    own = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0, "norm_topk_prob": False}
    return redraw(DeepseekV2ForCausalLM(DeepseekV2Config(**{**T_DSV3, **own, **changes})), seed)


def mixtral(seed: int = 0, **changes: Any) -> MixtralForCausalLM:
    """A random MixtralForCausalLM in float32."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return redraw(MixtralForCausalLM(MixtralConfig(**{**T_MIXTRAL, **changes})), seed)


def mamba(seed: int = 0, **changes: Any) -> MambaForCausalLM:
    """A random MambaForCausalLM in float32."""
    from transformers import MambaConfig, MambaForCausalLM

    return redraw(MambaForCausalLM(MambaConfig(**{**T_MAMBA, **changes})), seed)


def jamba(seed: int = 0, **changes: Any) -> JambaForCausalLM:
    """A random JambaForCausalLM in float32."""
    from transformers import JambaConfig, JambaForCausalLM

    return redraw(JambaForCausalLM(JambaConfig(**{**T_JAMBA, **changes})), seed)


def ours(reference: PreTrainedModel, folder: Path, **save: Any) -> tbt.Decoder:
    """The same weights in this project's decoder, by way of a checkpoint that transformers wrote."""
    reference.save_pretrained(folder, **save)
    return tbt.load(folder)


def reference_logits(reference: nn.Module, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """One pass of the reference over the whole sequence, without any cache."""
    return reference(input_ids=tokens, use_cache=False, **options).logits


def random_tokens(batch: int, time: int, vocab: int = 97, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (batch, time), generator=torch.Generator().manual_seed(seed))


def feed(model: tbt.Decoder, tokens: torch.Tensor, chunks: list[int], spare: int = 0, **state: Any) -> torch.Tensor:
    """Logits of all tokens (B, T), pushed in chunks through one state with room for ``spare`` more."""
    held = model.new_state(tokens.shape[0], tokens.shape[1] + spare, **state)
    return torch.cat([model(chunk, held) for chunk in tokens.split(chunks, dim=1)], dim=1)


def uneven(length: int) -> list[int]:
    """Chunks of five tokens, of one, of seven, and of what is left: a prompt, a step, and what is neither."""
    return [5, 1, 7, length - 13]


def in_form(model: tbt.Decoder, form: Any) -> tbt.Decoder:
    """The model with its latent attention told in which form to compute."""
    for mixer in model.mixers:
        if isinstance(mixer, LatentAttention):
            mixer.form = form
    return model


def held_by(state: tbt.DecoderState) -> list[torch.Tensor]:
    """Every tensor of a state, of caches and of recurrent layers."""
    held = []
    for layer in state.layers:
        assert isinstance(layer, Cache | MambaState)
        held += layer.tensors
    return held


def caches_of(state: tbt.DecoderState) -> list[Cache]:
    """What each layer keeps, in a state of caches alone."""
    held = [layer for layer in state.layers if isinstance(layer, Cache)]
    assert len(held) == len(state.layers)
    return held


def assert_close(got: torch.Tensor, want: torch.Tensor, relative: float = 2e-5) -> None:
    """Equal up to ``relative`` times the largest logit: float32 sums in another order differ in their last bits."""
    assert got.shape == want.shape
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= relative * scale, f"largest difference {error:.2e} on logits of scale {scale:.2f}"


def assert_rows_close(
    got: torch.Tensor, want: Sequence[torch.Tensor], padding: Sequence[int], relative: float = 2e-5
) -> None:
    """Each row of a padded batch (B, T, V), behind its pads, against its solo run (1, T - pads, V)."""
    for i, (pads, alone) in enumerate(zip(padding, want, strict=True)):
        assert_close(got[i : i + 1, pads:], alone, relative)


def assert_differs(got: torch.Tensor, want: torch.Tensor, relative: float = 1e-2) -> None:
    """A wrong variant must be far outside every tolerance that the right one has to meet."""
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert error > relative * scale, f"the wrong variant differs by only {error:.2e} on logits of scale {scale:.2f}"
