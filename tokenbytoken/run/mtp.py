"""Multi-token prediction: DeepSeek-V3's module that looks one token further (arXiv 2412.19437, section 2.2).

From the tokens up to i the model makes h_i, and its head predicts token i + 1. The module joins h_i with the embedding
of token i + 1, sends the result through one more layer, and the same head predicts token i + 2:

    x_i = W [norm(embed(t_{i+1})); norm(h_i)]        equation 21
    logits of t_{i+2} = head(norm(layer(x_i)))       equations 22 and 23

It was trained beside the model, for a better model. Generation can do without it, or use it as a draft for
:func:`~tokenbytoken.run.speculate`.

Two things the paper leaves open are settled here by those who run the released weights. The columns of W that meet the
embedding come first, as vLLM and SGLang concatenate them, although equation 21 writes the hidden state first. And h_i
is what the model's head multiplies, after the final norm; so is the module's own output where it is fed back for a
further guess, on which published implementations differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._numbers import whole
from ..checkpoints.huggingface import open_directory
from ..checkpoints.sources import find
from ..checkpoints.tensors import Stored, fill, usable_device
from ..config import DecoderConfig
from ..decoder import Decoder, DecoderState, Layer, Pass, _SkipMetaInit
from ..layers.norm import RMSNorm
from .speculation import Choose, Guess, Propose

__all__ = ["MTP", "load_mtp"]


class MTP(nn.Module):
    """hidden (B, T, M), embedded (B, T, M) → (B, T, M), for the model's head: what it predicts is two tokens ahead.

    ``hidden`` is ``model.norm(model(tokens, logits="none"))``, ``embedded`` the embedding of the tokens one further.
    Only what is the module's own is held here; embedding and head are the model's. With a state, positions continue
    what it holds. Raises ValueError for a config without such a module; and in a pass, before the state is touched,
    for other shapes or another dtype, for the state of something else, and for more positions than fit.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.mtp_layers != 1:
            raise ValueError(f"one multi-token-prediction module can be built, the config asks for {config.mtp_layers}")
        self.config = config
        M, eps = config.hidden_size, config.norm_eps
        with _SkipMetaInit():
            self.enorm = RMSNorm(M, eps=eps)
            self.hnorm = RMSNorm(M, eps=eps)
            self.eh_proj = nn.Linear(2 * M, M, bias=False)
            self.layer = Layer(config.layers[-1], M, eps)
            self.norm = RMSNorm(M, eps=eps)

    def new_state(self, batch_size: int, max_length: int) -> DecoderState:
        """An empty state for the module's one layer."""
        batch_size, max_length = whole("batch_size", batch_size), whole("max_length", max_length)
        weight = self.eh_proj.weight
        mixer: Any = self.layer.mixer
        cache = mixer.new_state(batch_size, max_length, weight.dtype, weight.device)
        padding = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        return DecoderState(self.kind, [cache], max_length, padding)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a state must have in common with this module, as in :class:`~tokenbytoken.decoder.Decoder`."""
        mixer: Any = self.layer.mixer
        return MTP, mixer.config, self.eh_proj.weight.dtype, getattr(mixer, "cache_format", None)

    def _check(self, hidden: Tensor, embedded: Tensor, state: DecoderState | None) -> None:
        M, dtype = self.config.hidden_size, self.eh_proj.weight.dtype
        if hidden.dim() != 3 or hidden.shape != embedded.shape or hidden.shape[-1] != M or not hidden.numel():
            raise ValueError(f"both must be (B, T, {M}), not {tuple(hidden.shape)} and {tuple(embedded.shape)}")
        if not hidden.dtype == embedded.dtype == dtype:
            raise ValueError(f"both must be {dtype}, as the module is, not {hidden.dtype} and {embedded.dtype}")
        if state is None:
            return
        B, T, _ = hidden.shape
        if state.kind != self.kind or state.batch_size != B:
            raise ValueError(f"the state was made for another module, or for other than {B} rows")
        if state.length + T > state.max_length:
            raise ValueError(
                f"{T} more positions do not fit: the state holds {state.length} of at most {state.max_length}"
            )

    def forward(self, hidden: Tensor, embedded: Tensor, state: DecoderState | None = None) -> Tensor:
        self._check(hidden, embedded, state)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        step = Pass(x[..., 0], 0 if state is None else state.length, None, x.dtype)
        x = self.layer(x, step, None if state is None else state.layers[0])
        if state is not None:
            state.length += x.shape[1]
        return self.norm(x)

    def start(self, model: Decoder, max_length: int) -> Propose:
        """As a draft, see :class:`~tokenbytoken.run.Draft`: one guess from the model's last hidden state.

        Further guesses feed the module's output back, which it was not trained for.
        """
        own, target = self.config.hidden_size, model.config.hidden_size
        if own != target:
            raise ValueError(f"the module works on {own} hidden numbers, the model on {target}")
        if self.eh_proj.weight.dtype != model.embed.weight.dtype:
            raise ValueError(f"the module is {self.eh_proj.weight.dtype}, the model {model.embed.weight.dtype}")
        state = self.new_state(1, max_length)
        mark = state.mark()

        def push(hidden: Tensor, tokens: Sequence[int]) -> Tensor:
            embedded = model.embed(torch.tensor([tokens], device=hidden.device))
            return self(hidden, embedded, state)[:, -1:]  # (1, 1, M)

        def propose(tokens: Sequence[int], count: int, choose: Choose, hidden: Tensor) -> list[Guess]:
            nonlocal mark
            state.rewind(mark)  # behind what was pushed for further guesses
            new = tokens[state.length + 1 :]  # position i joins hidden state i and token i + 1
            hidden = push(hidden[:, -len(new) :], new)
            mark = state.mark()
            guesses = [choose(model.head(hidden[:, 0]))]
            while len(guesses) < count:
                hidden = push(hidden, [guesses[-1].token])
                guesses.append(choose(model.head(hidden[:, 0])))
            return guesses

        return propose


def load_mtp(source: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> MTP:
    """The module with the weights that a Hugging Face directory stores behind its last layer, ready to run.

    Its copies of embedding and head are left out: they are the model's. Raises ValueError as
    :func:`~tokenbytoken.checkpoints.sources.load` does, and for a model without such a module.
    """
    path = find(source)
    if not path.is_dir():
        raise ValueError(f"{path.name} is not a directory: only such checkpoints hold a multi-token-prediction module")
    config, tensors = open_directory(path, mtp=True)
    with torch.device("meta"):
        module = MTP(config)
    return fill(module, _own_names(tensors), dtype, usable_device(device)).eval()


def _own_names(tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    for name, stored in tensors:
        name = re.sub(r"^(model\.)?layers\.\d+\.", "", name)
        if name in ("embed_tokens.weight", "shared_head.head.weight"):
            continue
        if name.startswith("shared_head.norm."):
            yield name.removeprefix("shared_head."), stored
        elif name.startswith(("enorm.", "hnorm.", "eh_proj.")):
            yield name, stored
        else:
            yield "layer." + name, stored
