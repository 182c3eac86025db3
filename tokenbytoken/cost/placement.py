"""A model on several GPUs: who holds what, and what they send each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .._numbers import positive, whole
from ..config import Model, Number, is_symbolic, where
from .fits import Footprint, footprint
from .hardware import Accelerator, find_accelerator
from .parameters import whole_decoder

__all__ = ["CacheLayout", "Placement", "communication_seconds", "footprint_per_gpu", "state_share"]

CacheLayout = Literal["heads", "divided"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model lies: ``gpus`` in all, ``tensor_parallel`` of them (all, unless said) share each layer.

    The rest form pipeline stages, which hold layers. ``recipe`` says how weights are stored,
    ``state_bytes_per_element`` how a cached number is, ``cache`` who keeps what of it, see :func:`state_share`.
    Raises ValueError for what does not divide.
    """

    gpus: Number = 1
    tensor_parallel: Number | None = None
    recipe: str = "bf16"
    state_bytes_per_element: float = 2
    cache: CacheLayout = "heads"

    def __post_init__(self) -> None:
        gpus = whole("gpus", self.gpus)
        t = gpus if self.tensor_parallel is None else whole("tensor_parallel", self.tensor_parallel)
        object.__setattr__(self, "gpus", gpus)
        object.__setattr__(self, "tensor_parallel", t)
        if not is_symbolic(gpus, t) and gpus % t:
            raise ValueError(f"tensor_parallel ({t}) must divide gpus ({gpus})")
        if self.cache not in ("heads", "divided"):
            raise ValueError(f"cache must be 'heads' or 'divided', not {self.cache!r}")
        positive("state_bytes_per_element", self.state_bytes_per_element)

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


@lru_cache(maxsize=256, typed=True)  # typed: True is no 1
def state_share(config: Model, tensor_parallel: Number, cache: CacheLayout = "heads") -> tuple[Number, Number]:
    """Shares of the growing and of the constant state that the fullest of t tensor-parallel GPUs holds.

    ``cache="heads"``: KV heads are dealt whole, so that a GPU holds ceil(K / t) of K, and with more GPUs
    than heads each head is kept t / K times; the latent of latent attention has no heads, and every GPU
    keeps all of it. Mamba's channels divide evenly. ``cache="divided"``: nothing is kept twice, as when
    each GPU serves its own readers (data-parallel attention) or its own stretch of the tokens; the
    rounding to whole readers is left out. Raises ValueError where the heads do not divide.
    """
    if cache not in ("heads", "divided"):
        raise ValueError(f"cache must be 'heads' or 'divided', not {cache!r}")
    even = 1 / whole("tensor_parallel", tensor_parallel)
    if cache == "divided":
        return even, even
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
) -> Footprint:
    """The footprint on the fullest of ``gpus``: weights divided evenly, the state as :func:`state_share` says.

    With ``gpus / tensor_parallel`` pipeline stages each GPU holds only its stage's layers.
    """
    return footprint_on(
        config,
        Placement(
            gpus=gpus,
            tensor_parallel=tensor_parallel,
            recipe=recipe,
            state_bytes_per_element=state_bytes_per_element,
            cache=cache,
        ),
    )


def footprint_on(config: Model, placement: Placement) -> Footprint:
    """:func:`footprint_per_gpu` of a placement."""
    where_it_lies = placement.on(config)
    growing, constant = state_share(config, where_it_lies.shared_by, placement.cache)
    size = footprint(config, placement.recipe, placement.state_bytes_per_element)
    return Footprint(
        weights=size.weights / (where_it_lies.shared_by * where_it_lies.stages),
        per_token=size.per_token * growing / where_it_lies.stages,
        per_sequence=size.per_sequence * constant / where_it_lies.stages,
    )


@lru_cache(maxsize=256)
def _messages(config: Model) -> tuple[int, Number]:
    """(number, elements a token) of the all-reduces in one pass."""
    decoder = whole_decoder(config)
    hidden = decoder.hidden_size
    sizes = [hidden]  # after the embedding
    for layer in decoder.layers:
        sizes += [*layer.mixer.summed(), hidden]
        if layer.feed_forward is not None:
            sizes.append(hidden)
    return len(sizes), sum(sizes)


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
    """Seconds of messages in one pass of ``rows`` tokens: latency + bytes, for each of them.

    Tensor parallelism over t GPUs sums partial results after each mixer and each feed-forward (two
    all-reduces a layer), once more inside a Mamba mixer (its small input to Δ, B and C), and once after
    the embedding, which is split by vocabulary; the head's shards of logits are gathered. An all-reduce of
    m bytes over a ring sends 2 (t - 1) / t * m over each link, a gather half of that. The g / t pipeline
    stages hand on the hidden states. Groups larger than a node run at the pace of the network.
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
    config: Model, gpu: Accelerator, placement: Placement, *, rows: Number, logit_rows: Number, bytes_per_element: float
) -> Number:
    """:func:`communication_seconds` of a placement."""
    decoder, t, stages = whole_decoder(config), placement.shared_by, placement.stages
    if not is_symbolic(t, stages) and t * stages == 1:
        return 0.0
    inside, across = gpu.link, gpu.network
    if inside is None or across is None:
        raise ValueError(f"{gpu.name} has no link to other GPUs: only gpus=1 can be predicted")
    fits_a_node = t <= gpu.gpus_per_node
    latency = where(fits_a_node, inside.latency, across.latency)
    ring = (t - 1) / t / where(fits_a_node, inside.bandwidth, across.bandwidth)  # seconds a byte, once round
    reduces, elements = _messages(decoder)
    sums = reduces * latency + 2 * rows * elements * bytes_per_element * ring
    gather = latency + logit_rows * decoder.vocab_size * bytes_per_element * ring
    together = where(t > 1, sums + gather, 0.0)
    beyond_a_node = t * stages > gpu.gpus_per_node
    message = rows * decoder.hidden_size * bytes_per_element
    handing_on = where(beyond_a_node, across.latency, inside.latency) + message / where(
        beyond_a_node, across.bandwidth, inside.bandwidth
    )
    return together + (stages - 1) * handing_on
