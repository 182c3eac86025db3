"""The decoder: embedding, layers of (mixer, feed-forward), norm, head. And the state it carries between passes.

This file knows no architecture. A config names the module class that realises it (``config.mixer.module``), which is
called with (config, hidden_size); every mixer keeps the promises of :class:`Mixer`, its state those of
:class:`LayerState`, every feed-forward those of :class:`FeedForward`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ._numbers import whole
from .config import DecoderConfig, FeedForwardConfig, LayerConfig, MixerConfig, RopeConfig
from .layers import devices
from .layers.norm import RMSNorm
from .layers.rope import rotate, rotation

__all__ = ["Decoder", "DecoderState", "FeedForward", "LayerState", "Mark", "Mixer", "Pass"]


class Pass:
    """What all layers of one pass share: where it starts, who is padded, the rotation of its positions.

    ``tokens`` (B, T) gives shape and device only; ``start`` tokens are held already, pads included; ``padding`` (B,)
    counts each row's pads; ``dtype`` is that of the hidden states.
    """

    def __init__(
        self, tokens: Tensor, start: int = 0, padding: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.start = start
        self.padding = padding
        self.dtype = dtype
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        # (T,), or (B, T) when rows are padded: a row's first real token has position 0, its pads are clamped.
        self.positions = positions if padding is None else (positions - padding[:, None]).clamp(min=0)
        self._tables: dict[RopeConfig, tuple[Tensor, Tensor]] = {}

    def without_pads(self, x: Tensor) -> Tensor:
        """x (B, T, …) with zeros in place of pads. As pads come first, zeros keep a recurrent state empty."""
        if self.padding is None:
            return x
        columns = torch.arange(self.start, self.start + x.shape[1], device=x.device)
        is_pad = columns < self.padding[:, None]  # (B, T)
        return x.masked_fill(is_pad.view(*is_pad.shape, *[1] * (x.dim() - 2)), 0)

    def rotate(self, x: Tensor, rope: RopeConfig) -> Tensor:
        """Apply RoPE to x (B, heads, T, D); numbers past ``rope.dim`` are left alone."""
        if rope not in self._tables:
            cos, sin = rotation(rope, self.positions, self.dtype)
            if self.padding is not None:
                cos, sin = cos[:, None], sin[:, None]  # (B, 1, T, dim/2)
            self._tables[rope] = cos, sin
        cos, sin = self._tables[rope]
        if rope.dim == x.shape[-1]:
            return rotate(x, cos, sin, rope.interleaved)
        turned, rest = x.split([rope.dim, x.shape[-1] - rope.dim], dim=-1)
        return torch.cat((rotate(turned, cos, sin, rope.interleaved), rest), dim=-1)


class LayerState(Protocol):
    """What one mixer remembers of a batch of sequences between passes: a cache, a recurrent state, or both."""

    def nbytes(self, length: int | None = None) -> int:
        """Bytes allocated, or those that ``length`` tokens use."""

    def mark(self) -> Any:
        """What :meth:`rewind` needs to come back here: None if a shorter length is enough, else copies."""

    def rewind(self, mark: Any) -> None:
        """Come back to ``mark``."""

    def gather(self, rows: Sequence[int], start: int, end: int, max_length: int, shift: int = 0) -> LayerState:
        """A new state of the chosen rows: their tokens ``start`` … ``end``, placed at ``shift``."""

    @classmethod
    def concat(cls, states: Sequence[Any]) -> LayerState:
        """States of equal max_length, one under the other in the batch axis."""


class Mixer(Protocol):
    """What mixes the tokens of a layer: called with x (B, T, M), the :class:`Pass` and its state, or None → (B, T, M).

    Pads stand on the left; no real row may depend on them, and what is returned for them must be finite.
    """

    @property
    def config(self) -> MixerConfig:
        """What it was built from."""

    def __call__(self, x: Tensor, step: Pass, state: Any = None) -> Tensor: ...

    def new_state(self, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """An empty state for ``batch_size`` sequences of at most ``max_length`` tokens."""


class FeedForward(Protocol):
    """What transforms each token by itself: x (…, M) → (…, M)."""

    def __call__(self, x: Tensor) -> Tensor: ...


def _build(config: MixerConfig | FeedForwardConfig, hidden_size: int) -> Any:
    try:
        module = pkgutil.resolve_name(config.module)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no module class for {type(config).__name__}: {config.module} does not exist") from error
    return module(config, hidden_size)


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)) where there is one."""

    def __init__(self, config: LayerConfig, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(hidden_size, eps=norm_eps)
        self.mixer: Mixer = _build(config.mixer, hidden_size)
        if config.feed_forward is not None:
            self.feed_forward_norm = RMSNorm(hidden_size, eps=norm_eps)
            self.feed_forward: FeedForward | None = _build(config.feed_forward, hidden_size)
        else:
            self.feed_forward = None

    def forward(self, x: Tensor, step: Pass, layer_state: LayerState | None = None) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), step, layer_state)
        if self.feed_forward is not None:
            x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


@dataclass(frozen=True, eq=False)
class Mark:
    """A place to come back to in one state: a length, and copies of the parts that cannot be cut back."""

    length: int
    layers: tuple[Any, ...]


class DecoderState:
    """What a batch of sequences must remember between passes, layer by layer.

    ``length`` counts the tokens held, pads included; it advances once a pass, after the last layer, so that a
    pass that breaks off leaves caches as they were. Recurrent layers that it reached have gone on by then: only
    :meth:`rewind` to a mark helps. Rows of unequal length are padded on the left; ``padding`` (B,) counts each
    row's pads and is fixed at creation.
    """

    def __init__(
        self, kind: Hashable, layers: list[LayerState], max_length: int, padding: Tensor, length: int = 0
    ) -> None:
        self.kind = kind  # which models it serves: those of the same `Decoder.kind`
        self.layers = layers
        self.max_length = max_length
        self.padding = padding
        self.length = length
        self.batch_size = len(padding)
        self.padded = padding.device.type != "meta" and bool(devices.read(padding.any()))  # read once, not in each pass
        self._marks: WeakSet[Mark] = WeakSet()  # those that still describe what the state holds

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.nbytes() for layer in self.layers)

    @property
    def nbytes_used(self) -> int:
        """Bytes that hold tokens (pads included)."""
        return sum(layer.nbytes(self.length) for layer in self.layers)

    def mark(self) -> Mark:
        """Remember this point; costs nothing for caches, a copy for recurrent parts."""
        mark = Mark(self.length, tuple(layer.mark() for layer in self.layers))
        self._marks.add(mark)
        return mark

    def rewind(self, mark: Mark, length: int | None = None) -> None:
        """Forget everything after ``mark``; marks made after it are void from then on.

        With a ``length`` from the mark's on, the state keeps so many tokens if all its layers are caches, which can be
        cut anywhere; a recurrent layer can only return to its copy, and the others with it. ``self.length`` then says
        which of the two it was. Raises ValueError for a mark that is void, lies ahead, or was made by another state.
        """
        if mark.length > self.length:
            raise ValueError(f"cannot rewind to length {mark.length}: the state holds only {self.length} tokens")
        if mark not in self._marks:
            raise ValueError("this mark is another state's, or lies behind a point that was rewound")
        if length is not None and not mark.length <= whole("length", length, 0) <= self.length:
            raise ValueError(f"length {length} must lie between the mark's {mark.length} and the state's {self.length}")
        recurrent = any(copy is not None for copy in mark.layers)
        for layer, layer_mark in zip(self.layers, mark.layers, strict=True):
            layer.rewind(layer_mark)
        self.length = mark.length if length is None or recurrent else length
        self._marks = WeakSet(kept for kept in self._marks if kept.length <= self.length)

    def copy(self, max_length: int | None = None) -> DecoderState:
        """An independent state with the same content (only used bytes are copied), optionally of another size."""
        return self._gather(list(range(self.batch_size)), 0, self._at_least(max_length, self.length))

    def select(self, rows: Sequence[int], max_length: int | None = None) -> DecoderState:
        """A new state holding the given rows of the batch, in that order.

        Columns that are padding in all of them are dropped, so ``length`` may shrink.
        """
        rows = [-1 if isinstance(row, bool) else index(row) for row in rows]
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise ValueError(f"rows {rows} must be a non-empty choice from 0 … {self.batch_size - 1}")
        spare = min(int(self.padding[rows].min()), self.length)
        return self._gather(rows, spare, self._at_least(max_length, self.length - spare))

    @staticmethod
    def concat(states: Sequence[DecoderState], max_length: int | None = None) -> DecoderState:
        """One batch from several states of the same model: rows keep their order, shorter ones gain padding."""
        if not states:
            raise ValueError("nothing to concatenate: the list of states is empty")
        if any(state.kind != states[0].kind for state in states):
            raise ValueError("the states belong to models of different layers or dtype, or to other caches")
        length = max(state.length for state in states)
        longest = max(states, key=lambda state: state.max_length)
        max_length = longest._at_least(max_length, length)
        aligned = [
            state._gather(list(range(state.batch_size)), 0, max_length, length - state.length) for state in states
        ]
        layers = [type(column[0]).concat(column) for column in zip(*(state.layers for state in aligned), strict=True)]
        padding = torch.cat([state.padding for state in aligned])
        return DecoderState(states[0].kind, layers, max_length, padding, length)

    def _at_least(self, max_length: int | None, length: int) -> int:
        if max_length is None:
            return self.max_length
        max_length = whole("max_length", max_length)
        if max_length < length:
            raise ValueError(f"max_length {max_length} is too short: the state holds {length} tokens")
        return max_length

    def _gather(self, rows: list[int], start: int, max_length: int, shift: int = 0) -> DecoderState:
        """Tokens start … length of the chosen rows, moved right by ``shift``."""
        layers = [layer.gather(rows, start, self.length, max_length, shift) for layer in self.layers]
        padding = self.padding[rows] - start + shift
        return DecoderState(self.kind, layers, max_length, padding, self.length - start + shift)


class _SkipMetaInit(TorchFunctionMode):
    """Leaves out random initialisation on the meta device: it draws nothing, yet imports torch's compiler (2 s)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return func(*args, **kwargs)


class Decoder(nn.Module):
    """A causal language model: tokens (B, T) int64 → logits (B, T, V).

    Raises ValueError for a config whose mixer or feed-forward has no module class.
    """

    #: Under tensor parallelism: what makes every rank go on with the tokens that rank 0 chose.
    agree: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        with _SkipMetaInit():
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Layer(layer, config.hidden_size, config.norm_eps) for layer in config.layers)
            self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer."""
        return tuple(cast(Layer, layer).mixer for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """That of the hidden states, and of the numbers that a state keeps."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.norm.weight.device

    @property
    def kind(self) -> Hashable:
        """What a state must have in common with this model: its layers, dtype, and what its caches store."""
        # Under tensor parallelism the mixers are of fewer heads.
        caches = tuple((mixer.config, getattr(mixer, "cache_format", None)) for mixer in self.mixers)
        return self.config.layers, self.dtype, caches

    def new_state(
        self, batch_size: int, max_length: int, padding: Sequence[int] | Tensor | None = None
    ) -> DecoderState:
        """An empty state for ``batch_size`` sequences of at most ``max_length`` tokens, pads included.

        ``padding`` (B,) counts each row's pad tokens; every row must keep at least one real token.
        """
        batch_size, max_length = whole("batch_size", batch_size), whole("max_length", max_length)
        pads = _check_padding([0] * batch_size if padding is None else padding, batch_size, max_length)
        try:
            layers = [mixer.new_state(batch_size, max_length, self.dtype, self.device) for mixer in self.mixers]
        except RuntimeError as error:  # torch's word for memory that it does not get
            reason = str(error).partition("\n")[0]
            raise ValueError(f"no memory for a state of {batch_size} × {max_length} tokens: {reason}") from None
        return DecoderState(self.kind, layers, max_length, pads.to(self.device))

    def forward(
        self,
        tokens: Tensor,
        state: DecoderState | None = None,
        *,
        logits: Literal["all", "last", "none"] = "all",
        checked: bool = False,
    ) -> Tensor:
        """One pass: tokens (B, T) → logits (B, T, V), or (B, 1, V) for "last".

        "none" skips norm and head and returns the last layer's output (B, T, M).

        With a state, the tokens continue what it holds and are added to it. Raises ValueError, and leaves the
        state as it was, for tokens of a wrong shape or outside the vocabulary, a batch of another size, or
        more tokens than fit. ``checked`` promises that all ids lie within the vocabulary, as those that a model of
        the same vocabulary chose: they are not read again, for which the host would wait for the device.
        """
        self._check(tokens, state, logits, checked)
        start = 0 if state is None else state.length
        padding = state.padding if state is not None and state.padded else None
        x = self.embed(tokens)
        step = Pass(tokens, start, padding, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, step, None if state is None else state.layers[i])
        if state is not None:
            state.length += tokens.shape[1]
        if logits == "none":
            return x
        return self.head(self.norm(x[:, -1:] if logits == "last" else x))

    def _check(self, tokens: Tensor, state: DecoderState | None, logits: str, checked: bool) -> None:
        if logits not in ("all", "last", "none"):
            raise ValueError(f'logits must be "all", "last" or "none", not {logits!r}')
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be a tensor of ids, not {type(tokens).__name__}")
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, time), not {tuple(tokens.shape)}")
        B, T = tokens.shape
        if B == 0 or T == 0:
            raise ValueError(f"the prompt is empty: tokens have shape {(B, T)}")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be int64, not {tokens.dtype}")
        if not checked and not tokens.is_meta:
            low, high = (devices.read(t) for t in torch.aminmax(tokens))
            if low < 0 or high >= self.config.vocab_size:
                bad = low if low < 0 else high
                raise ValueError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")
        if state is not None:
            if state.kind != self.kind:
                raise ValueError("the state was made for a model of other layers or another dtype or cache")
            if state.batch_size != B:
                raise ValueError(f"the batch has {B} rows, the state was made for {state.batch_size}")
            if state.length + T > state.max_length:
                raise ValueError(
                    f"{T} more tokens do not fit: the state holds {state.length} of at most {state.max_length}"
                )


def _check_padding(padding: Sequence[int] | Tensor, batch_size: int, max_length: int) -> Tensor:
    pads = torch.as_tensor(padding, device="cpu")
    if pads.shape != (batch_size,):
        raise ValueError(f"padding must hold one count for each of {batch_size} rows, not shape {tuple(pads.shape)}")
    if pads.dtype.is_floating_point or pads.dtype == torch.bool:
        raise ValueError(f"padding must be integers, not {pads.dtype}")
    counts: list[int] = devices.read(pads)
    if min(counts) < 0:
        raise ValueError(f"padding must not be negative: {counts}")
    if max(counts) >= max_length:
        raise ValueError(f"padding {counts} leaves no room for a real token in max_length {max_length}")
    return pads.to(torch.int64, copy=True)  # fixed at creation, whatever the caller does to its own tensor
