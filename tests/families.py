"""Tiny random models of transformers, the reference that this project did not write.

Weights are drawn again with a standard deviation of 0.25 and norm weights in [0.5, 1.5]: with the library's own
initialisation (0.02) real bugs nearly vanish. Logits then have a scale of about 5 to 7.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import tokenbytoken as tbt

T_LLAMA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def redraw(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                continue
            if parameter.dim() == 1 and "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.25, generator=generator)
    return model.eval().requires_grad_(False)


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    """A random LlamaForCausalLM in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return redraw(LlamaForCausalLM(LlamaConfig(**{**T_LLAMA, **changes})), seed)


def ours(reference: nn.Module, folder: Path, **save: Any) -> tbt.Decoder:
    """The same weights in this project's decoder, by way of a checkpoint that transformers wrote."""
    reference.save_pretrained(folder, **save)
    return tbt.load(folder)


def reference_logits(reference: nn.Module, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """One pass of the reference over the whole sequence, without any cache."""
    return reference(input_ids=tokens, use_cache=False, **options).logits


def random_tokens(batch: int, time: int, vocab: int = 97, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (batch, time), generator=torch.Generator().manual_seed(seed))


def assert_close(got: torch.Tensor, want: torch.Tensor, relative: float = 2e-5) -> None:
    """Equal up to ``relative`` times the largest logit: float32 sums in another order differ in their last bits."""
    assert got.shape == want.shape
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= relative * scale, f"largest difference {error:.2e} on logits of scale {scale:.2f}"


def assert_differs(got: torch.Tensor, want: torch.Tensor, relative: float = 1e-2) -> None:
    """A wrong variant must be far outside every tolerance that the right one has to meet."""
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert error > relative * scale, f"the wrong variant differs by only {error:.2e} on logits of scale {scale:.2f}"
