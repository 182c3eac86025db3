"""How fast a pass can be: the roofline of its bytes and FLOPs, and what neither hides.

The seconds of a pass are the larger of two, the time to move its bytes and the time to do its FLOPs, plus
what neither hides: the start of each operation, and the messages between GPUs.

>>> from tokenbytoken.models import published
>>> prediction = predict(published["llama-3.1-8b"], "h100", batch_size=1, context=0)
>>> f"{1e3 * prediction.seconds:.2f} ms, bound by {prediction.binds}"
'4.48 ms, bound by memory'
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .._numbers import share, whole
from ..config import Model, Number, maximum
from .hardware import Accelerator, find_accelerator
from .parameters import whole_decoder
from .passes import PassCost, Share, busiest_share, pass_cost
from .placement import CacheLayout, ExpertLayout, Placement, footprint_on, message_seconds
from .recipes import recipe_named

__all__ = ["Launched", "PassTime", "Prediction", "launches", "predict", "roofline"]

Launched = Literal["eager", "graphed"]


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """The seconds of one pass, term by term.

    ``memory_seconds`` and ``compute_seconds``: to move bytes and to multiply, each of which hides the other.
    ``state_seconds``: to read a state that no product hides; 0 where the state counts with the bytes moved.
    ``overhead_seconds``: to start the operations; ``overlapped``: that runs ahead of all the work before, as on a
    GPU, and counts only where it is the longer. ``communication_seconds``: for messages.
    """

    memory_seconds: float
    compute_seconds: float
    state_seconds: float = 0.0
    overhead_seconds: float = 0.0
    communication_seconds: float = 0.0
    overlapped: bool = False

    @property
    def seconds(self) -> float:
        work = maximum(self.memory_seconds, self.compute_seconds) + self.state_seconds
        started = maximum(work, self.overhead_seconds) if self.overlapped else work + self.overhead_seconds
        return started + self.communication_seconds

    @property
    def binds(self) -> str:
        """The largest term: "memory" (a state included), "compute", "overhead" or "communication"."""
        terms = {
            "memory": self.memory_seconds + self.state_seconds,
            "compute": self.compute_seconds,
            "overhead": self.overhead_seconds,
            "communication": self.communication_seconds,
        }
        return max(terms, key=lambda name: terms[name])


def roofline(
    accelerator: Accelerator | str,
    moved: Number,
    flops: Mapping[str, Number],
    rows: Number,
    *,
    state: Number = 0,
    working_set: Number | None = None,
    operations: Number = 0,
    messages: Number = 0.0,
    efficiency: float = 1.0,
    overlapped: bool = False,
) -> PassTime:
    """Seconds of a pass by its bytes and FLOPs: each divided by the rate at which one accelerator takes them.

    ``moved``: bytes through its memory; ``state``: further bytes, read while nothing is multiplied.
    ``flops``: FLOPs by dtype ("fp8", "bf16", …), in products in which ``rows`` rows meet each weight.
    ``working_set``: bytes among which the pass finds its own, where these are not all of them.
    ``operations``: small operations to start, ``messages``: seconds of messages, ``efficiency``: the share of both
    rates that is reached, ``overlapped``: as in :class:`PassTime`.
    Raises ValueError for an accelerator that is not known or has no rate for a dtype.
    """
    gpu = find_accelerator(accelerator)
    bandwidth = efficiency * gpu.bandwidth_at(round(moved + state if working_set is None else working_set))
    multiplying = sum(number / gpu.flops_at(dtype, rows) for dtype, number in flops.items())
    return PassTime(
        memory_seconds=moved / bandwidth,
        compute_seconds=multiplying / efficiency,
        state_seconds=state / bandwidth,
        overhead_seconds=operations * gpu.operation_seconds,
        communication_seconds=messages,
        overlapped=overlapped,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction(PassTime):
    """The time of one pass, and whether weights and state fit.

    ``bytes_needed`` and ``bytes_available`` are those of all GPUs together: weights and state of the
    fullest GPU, times their number. What a server needs besides is left out of both:
    :func:`~tokenbytoken.cost.working_memory`. ``launches``: operations started, see :func:`launches`.
    """

    bytes_needed: int
    bytes_available: int
    launches: int = 0
    cost: PassCost = field(repr=False)
    tokens: int
    dtype: str

    @property
    def fits(self) -> bool:
        return self.bytes_needed <= self.bytes_available

    @property
    def tokens_per_second(self) -> float:
        """Tokens pushed through a second, over the whole batch."""
        return self.tokens / self.seconds


def predict(
    config: Model,
    accelerator: Accelerator | str,
    batch_size: Number,
    context: Number,
    *,
    new_tokens: Number = 1,
    gpus: Number = 1,
    tensor_parallel: Number | None = None,
    recipe: str = "bf16",
    state_bytes_per_element: float = 2,
    efficiency: float = 1.0,
    operations: int = 0,
    logits: Literal["all", "last", "none"] = "last",
    causal: bool = False,
    cache: CacheLayout = "heads",
    experts: ExpertLayout = "split",
    busiest: float = 1.0,
    usable: float = 1.0,
    launched: Launched | None = None,
) -> Prediction:
    """Seconds of a pass = max(memory, compute) + overhead + communication.

    ``context`` tokens were seen by each sequence before; ``new_tokens`` are pushed through each. The
    FLOPs and bytes are those of :func:`~tokenbytoken.cost.pass_cost`, divided among ``tensor_parallel``
    GPUs (all, unless said otherwise). Left-over GPUs form pipeline stages: they hold layers, but a single
    pass visits them one after the other, and is no faster. ``efficiency`` is the share of peak bandwidth
    and peak compute that is reached, ``usable`` that of memory; ``operations`` small operations cost
    ``accelerator.operation_seconds`` each. ``cache``, ``experts`` and ``busiest`` as in
    :class:`~tokenbytoken.cost.Placement`: the times are those of the busiest GPU. ``launched`` adds what others
    measured for the start of each of :func:`launches`: "graphed" to the work, "eager" while the work runs.

    FP8 recipes multiply in FP8 what they store in FP8, where the accelerator can; scores, values and scan
    stay in two bytes ("fp32": all in fp32). Raises ValueError for a number out of range, for sizes that do
    not divide, and for more pipeline stages than layers.
    """
    placement = Placement(
        gpus=gpus,
        tensor_parallel=tensor_parallel,
        recipe=recipe,
        state_bytes_per_element=state_bytes_per_element,
        cache=cache,
        experts=experts,
        busiest=busiest,
    )
    gpu = find_accelerator(accelerator)
    t, stages = placement.on(config).shared_by, placement.stages
    batch_size, context = whole("batch_size", batch_size), whole("context", context, 0)
    new_tokens = whole("new_tokens", new_tokens)
    efficiency, usable = share("efficiency", efficiency), share("usable", usable)
    operations = whole("operations", operations, 0)
    if launched not in (None, "eager", "graphed"):
        raise ValueError(f"launched must be 'eager', 'graphed' or None, not {launched!r}")
    if launched and gpu.launch is None:
        raise ValueError(f"{gpu.name} has no published time of a launch: its own are part of its calibration")

    def passed(readers: Number) -> PassCost:
        return pass_cost(
            config,
            readers,
            context,
            new_tokens,
            recipe=recipe,
            state_bytes_per_element=state_bytes_per_element,
            logits=logits,
            causal=causal,
        )

    cost = passed(batch_size)
    tokens, seen = batch_size * new_tokens, context + new_tokens
    size = footprint_on(config, placement)
    here = math.ceil(batch_size / size.dealt_to)  # readers whose state the fullest GPU has
    work = Share(cost.weight_bytes / t, cost.flops / t, cost.flops_fp8 / t)
    if cache == "readers":
        work = busiest_share(
            config,
            cost,
            passed(here),
            tokens,
            here * new_tokens,
            gpus=t,
            recipe=recipe,
            whole_experts=experts == "whole",
            busiest=busiest,
        )
    # A pass visits the stages in turn. A recurrent state is read and written, a cached token moved once.
    state = stages * here * (seen * size.per_token + 2 * size.per_sequence)
    dtype = gpu.compute_dtype("fp32" if recipe == "fp32" else "bf16")
    in_fp8 = recipe_named(recipe).fp8_products
    flops = {"fp8": work.flops_fp8} if in_fp8 else {}
    flops[dtype] = work.flops - work.flops_fp8
    messages = message_seconds(
        config,
        gpu,
        placement,
        rows=tokens,
        logit_rows={"all": tokens, "last": batch_size, "none": 0}[logits],
        bytes_per_element=2,
        seen=batch_size * seen,
    )
    time = roofline(
        gpu, work.weight_bytes + state, flops, tokens, operations=operations, messages=messages, efficiency=efficiency
    )
    started = launches(config) if launched else 0
    if launched and gpu.launch is not None:
        overhead = started * {"eager": gpu.launch.eager, "graphed": gpu.launch.graphed}[launched]
        time = replace(time, overhead_seconds=overhead, overlapped=launched == "eager")
    return Prediction(
        **vars(time),
        bytes_needed=round(t * stages * size.bytes(batch_size, seen)),
        bytes_available=round(gpu.memory_bytes * usable * t * stages),
        launches=started,
        cost=cost,
        tokens=tokens,
        dtype=gpu.compute_dtype("fp8") if in_fp8 else dtype,
    )


def launches(config: Model) -> int:
    """Operations that a pass starts: one for each product with a weight and each norm, and for each layer's mixer and
    feed-forward one more, for the scores and values, the scan, or the gate.

    Kernels that do several of these at once start fewer, the first attempt at a model several times as many. All
    experts together count as one.
    """
    decoder = whole_decoder(config)
    started = sum(1 for w in decoder.weights() if w.role in STARTED) + decoder.tie_embeddings
    return started + sum(1 + (layer.feed_forward is not None) for layer in decoder.layers)


#: Roles of weights that an operation is started for.
STARTED = frozenset(
    {"embedding", "head", "attention", "mamba", "mixer", "feed_forward", "expert", "router", "projection", "norm"}
)
