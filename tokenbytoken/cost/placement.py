"""A model on several GPUs: who holds what, and what they send each other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .._numbers import positive, whole
from ..config import Model, Number, is_symbolic, minimum, where
from .hardware import Accelerator, find_accelerator
from .memory import Footprint, WorkingMemory, footprint, working_memory
from .messages import all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from .parameters import whole_decoder
from .passes import bytes_in_parts
from .recipes import recipe_named

__all__ = [
    "CacheLayout", "ExpertLayout", "Placement", "communication_seconds", "footprint_on", "footprint_per_gpu",
    "state_share", "working_memory_per_gpu",
]  # fmt: skip

CacheLayout = Literal["heads", "readers", "sequence"]
ExpertLayout = Literal["split", "whole"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model lies: ``gpus`` in all, ``tensor_parallel`` of them (all, unless said) share each layer.

    The rest form pipeline stages, which hold layers. ``recipe``: how weights are stored. ``state_bytes_per_element``:
    how a cached number is. ``cache``: who keeps what of the state.

    ``heads``
        KV heads are dealt to the GPUs, each reader's to all of them. What has no heads (a latent) or fewer heads than
        there are GPUs is copied.
    ``readers``
        Each reader's state lies whole on one GPU, with a copy of every mixer there (data-parallel attention).
    ``sequence``
        Each GPU keeps a stretch of every reader's tokens, and queries travel.

    ``experts="whole"`` deals whole experts to the GPUs, tokens travel to them, and all other weights are copied: expert
    parallelism, for ``cache="readers"``. The busiest GPU has ``busiest`` times the mean load. Otherwise each expert is
    split. Raises ValueError for what does not divide or does not go together.
    """

    gpus: Number = 1
    tensor_parallel: Number | None = None
    recipe: str = "bf16"
    state_bytes_per_element: float = 2
    cache: CacheLayout = "heads"
    experts: ExpertLayout = "split"
    busiest: float = 1.0

    def __post_init__(self) -> None:
        gpus = whole("gpus", self.gpus)
        t = gpus if self.tensor_parallel is None else whole("tensor_parallel", self.tensor_parallel)
        object.__setattr__(self, "gpus", gpus)
        object.__setattr__(self, "tensor_parallel", t)
        if not is_symbolic(gpus, t) and gpus % t:
            raise ValueError(f"tensor_parallel ({t}) must divide gpus ({gpus})")
        if self.cache not in ("heads", "readers", "sequence"):
            raise ValueError(f"cache must be 'heads', 'readers' or 'sequence', not {self.cache!r}")
        if self.experts not in ("split", "whole"):
            raise ValueError(f"experts must be 'split' or 'whole', not {self.experts!r}")
        if self.experts == "whole" and self.cache != "readers":
            raise ValueError("experts='whole' sends tokens to experts: it goes with cache='readers'")
        positive("state_bytes_per_element", self.state_bytes_per_element)
        if not is_symbolic(self.busiest) and positive("busiest", self.busiest) < 1:
            raise ValueError(f"busiest is a multiple of the mean load, at least 1, not {self.busiest}")

    @property
    def shared_by(self) -> Number:
        """GPUs that share each layer."""
        return self.tensor_parallel

    @property
    def stages(self) -> Number:
        """Pipeline stages."""
        return self.gpus // self.shared_by

    def on(self, config: Model) -> Placement:
        """The same, once it is sure that each stage holds at least one layer of the model. ValueError otherwise."""
        layers = whole_decoder(config).num_layers
        if not is_symbolic(self.stages) and self.stages > layers:
            raise ValueError(
                f"gpus / tensor_parallel = {self.stages} pipeline stages, but the model has {layers} layers"
            )
        return self


# --- Who holds what ----------------------------------------------------------------------------------


@lru_cache(maxsize=256, typed=True)  # typed: True is no 1
def state_share(config: Model, tensor_parallel: Number, cache: CacheLayout = "heads") -> tuple[Number, Number]:
    """Shares of a reader's growing and constant state that the fullest of t tensor-parallel GPUs holds.

    ``cache="heads"``: KV heads are dealt whole, so that a GPU holds ceil(K / t) of K, and with more GPUs than heads
    each head is kept t / K times; the latent of latent attention has no heads, and every GPU keeps all of it. Mamba's
    channels divide evenly. ``"readers"``: all of it, of the readers that the GPU has. ``"sequence"``: a t-th of the
    tokens (rounding to whole tokens is left out) and of the channels. Raises ValueError where the heads do not divide.
    """
    Placement(cache=cache)
    even = 1 / whole("tensor_parallel", tensor_parallel)
    if cache != "heads":
        return (1.0, 1.0) if cache == "readers" else (even, even)
    held = total = 0  # numbers a token, over the layers
    for mixer in config.mixers:
        elements = mixer.state().per_token
        held += elements * mixer.cache_share(tensor_parallel)
        total += elements
    return (held / total if total else even), even


@lru_cache(maxsize=256, typed=True)
def footprint_per_gpu(
    config: Model,
    *,
    gpus: Number = 1,
    tensor_parallel: Number | None = None,
    recipe: str = "bf16",
    state_bytes_per_element: float = 2,
    cache: CacheLayout = "heads",
    experts: ExpertLayout = "split",
) -> Footprint:
    """The footprint on the fullest of ``gpus``, in the layout that :class:`Placement` describes.

    Weights are divided evenly but for those that the layout copies. With ``gpus / tensor_parallel`` pipeline stages
    each GPU holds only its stage's layers.
    """
    return footprint_on(
        config,
        Placement(
            gpus=gpus,
            tensor_parallel=tensor_parallel,
            recipe=recipe,
            state_bytes_per_element=state_bytes_per_element,
            cache=cache,
            experts=experts,
        ),
    )


def footprint_on(config: Model, placement: Placement) -> Footprint:
    """:func:`footprint_per_gpu` of a placement."""
    lies = placement.on(config)
    t, stages = lies.shared_by, lies.stages
    growing, constant = state_share(config, t, lies.cache)
    size = footprint(config, lies.recipe, lies.state_bytes_per_element)
    copied = copied_bytes(config, lies)
    return Footprint(
        weights=((size.weights - copied) / t + copied) / stages,
        per_token=size.per_token * growing / stages,
        per_sequence=size.per_sequence * constant / stages,
        dealt_to=t if lies.cache == "readers" else 1,
    )


def copied_bytes(config: Model, placement: Placement) -> int:
    """Bytes of weights that each of the GPUs that share a layer has all of."""
    if placement.cache != "readers":
        return 0
    parts = bytes_in_parts(whole_decoder(config), placement.recipe)
    return parts.mixers if placement.experts == "split" else parts.mixers + parts.rest


def working_memory_per_gpu(
    config: Model, gpu: Accelerator | str, placement: Placement, tokens: Number | None = None
) -> WorkingMemory:
    """:func:`~tokenbytoken.cost.working_memory` of the fullest GPU, ``tokens`` a pass (8,192 unless said)."""
    lies, many = placement.on(config), {} if tokens is None else {"tokens": tokens}
    memory = find_accelerator(gpu).memory_bytes
    return working_memory(
        config, memory, **many, tensor_parallel=lies.shared_by, copied=lies.cache == "readers"
    )


# --- What they send ----------------------------------------------------------------------------------


def communication_seconds(
    config: Model,
    gpu: Accelerator | str,
    rows: Number,
    *,
    gpus: Number = 1,
    tensor_parallel: Number | None = None,
    logit_rows: Number = 1,
    bytes_per_element: float = 2,
) -> Number:
    """Seconds of messages in one pass of ``rows`` tokens, with tensor parallelism and pipeline stages.

    Tensor parallelism over t GPUs sums partial results after each mixer and each feed-forward (two all-reduces a
    layer), once more inside a Mamba mixer (its small input to Δ, B and C), and once after the embedding, which is
    split by vocabulary; the head's shards of logits are gathered. The g / t pipeline stages hand on the hidden
    states, each GPU its share. What each costs: :mod:`tokenbytoken.cost.messages`.
    """
    placement = Placement(gpus=gpus, tensor_parallel=tensor_parallel).on(config)
    return message_seconds(
        config,
        find_accelerator(gpu),
        placement,
        rows=whole("rows", rows),
        logit_rows=whole("logit_rows", logit_rows, 0),
        bytes_per_element=positive("bytes_per_element", bytes_per_element),
    )


def message_seconds(
    config: Model,
    gpu: Accelerator,
    placement: Placement,
    *,
    rows: Number,
    logit_rows: Number,
    bytes_per_element: float,
    seen: Number = 0,
) -> Number:
    """:func:`communication_seconds` of a placement. ``seen``: tokens in all caches together, the new ones included."""
    decoder, t, stages = whole_decoder(config), placement.shared_by, placement.stages
    if not is_symbolic(t, stages) and t * stages == 1:
        return 0.0
    if gpu.link is None or gpu.network is None:
        raise ValueError(f"{gpu.name} has no link to other GPUs: only gpus=1 can be predicted")

    def summed(numbers: Number) -> Number:
        return all_reduce_seconds(rows * numbers * bytes_per_element, t, gpu)

    def gathered(numbers: Number, of: Number = rows) -> Number:
        return all_gather_seconds(of * numbers * bytes_per_element, t, gpu)

    hidden, whole_experts = decoder.hidden_size, placement.experts == "whole"
    # The rows of the embedding, looked up where they lie, and in the end the pieces of the logits.
    total = 0.0 if whole_experts else summed(hidden) + gathered(decoder.vocab_size, logit_rows)
    for layer, times in Counter(decoder.layers).items():
        seconds: Number = 0.0
        if placement.cache != "readers":
            seconds += sum(summed(numbers) for numbers in (*layer.mixer.summed(), hidden))
        if placement.cache == "sequence" and layer.mixer.state().per_token:
            # Either the queries travel and their results come back, or the cache comes to where they are.
            queries, outputs = layer.mixer.exchanged()
            cached = gathered(layer.mixer.state().per_token, seen)
            seconds += minimum(gathered(queries) + gathered(outputs), cached)
        if layer.feed_forward is None:
            pass
        elif placement.cache != "readers":
            seconds += summed(hidden)
        elif not whole_experts:  # all rows to every GPU, and each GPU's sums back to it
            seconds += 2 * gathered(hidden)
        elif used := max((w.used for w in layer.feed_forward.weights(hidden) if w.copies > 1), default=0):
            there = 1 if recipe_named(placement.recipe).fp8_products else bytes_per_element
            sent = rows / t * used * hidden
            seconds += sum(all_to_all_seconds(sent * width, t, gpu, used) for width in (there, bytes_per_element))
        total += times * seconds
    return total + _handing_on(gpu, placement, rows * hidden * bytes_per_element)


def _handing_on(gpu: Accelerator, placement: Placement, size: Number) -> Number:
    """Seconds until ``size`` bytes of hidden states went from the first stage to the last.

    Each GPU sends its share to the one that has the same place in the next stage, which gathers the whole.
    """
    t, stages = placement.shared_by, placement.stages
    inside, across = gpu.link, gpu.network
    assert inside is not None
    assert across is not None
    crossings = minimum(stages - 1, math.ceil(t * stages / gpu.gpus_per_node) - 1)  # from one node to another
    near = inside.latency + size / t / inside.bandwidth
    far = across.latency + size / t / across.bandwidth
    gathering = where(t > 1, all_gather_seconds(size, t, gpu), 0.0)
    return (stages - 1) * (near + gathering) + crossings * (far - near)
