"""How fast a pass can be: the roofline of its bytes and FLOPs, and what neither hides.

The seconds of a pass are the larger of two, the time to move its bytes and the time to do its FLOPs, plus
what neither hides: the start of each operation, and the messages between GPUs.

>>> from tokenbytoken.models import published
>>> prediction = predict(published["llama-3.1-8b"], "h100", batch_size=1, context=0)
>>> f"{1e3 * prediction.seconds:.2f} ms, bound by {prediction.binds}"
'4.48 ms, bound by memory'
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .._numbers import share, whole
from ..config import Model, Number, maximum
from .hardware import Accelerator, find_accelerator
from .passes import PassCost, pass_cost
from .placement import CacheLayout, Placement, footprint_on, message_seconds
from .recipes import recipe_named

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The time of one pass, term by term, and whether weights and state fit.

    ``bytes_needed`` and ``bytes_available`` are those of all GPUs together: weights and state of the
    fullest GPU, times their number. Activations are left out of both.
    """

    memory_seconds: float
    compute_seconds: float
    overhead_seconds: float
    communication_seconds: float
    bytes_needed: int
    bytes_available: int
    cost: PassCost = field(repr=False)
    tokens: int
    dtype: str

    @property
    def seconds(self) -> float:
        slower = maximum(self.memory_seconds, self.compute_seconds)
        return slower + self.overhead_seconds + self.communication_seconds

    @property
    def binds(self) -> str:
        """The largest term: "memory", "compute", "overhead" or "communication"."""
        names = ("memory", "compute", "overhead", "communication")
        return max(names, key=lambda name: getattr(self, f"{name}_seconds"))

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
    usable: float = 1.0,
) -> Prediction:
    """Seconds of a pass = max(memory, compute) + overhead + communication.

    ``context`` tokens were seen by each sequence before; ``new_tokens`` are pushed through each. The
    FLOPs and bytes are those of :func:`~tokenbytoken.cost.pass_cost`, divided among ``tensor_parallel``
    GPUs (all, unless said otherwise). Left-over GPUs form pipeline stages: they hold layers, but a single
    pass visits them one after the other, and is no faster. ``efficiency`` is the share of peak bandwidth
    and peak compute that is reached, ``usable`` that of memory; ``operations`` small operations cost
    ``accelerator.operation_seconds`` each. ``cache`` as in :func:`~tokenbytoken.cost.state_share`;
    messages are counted as those of tensor parallelism in either layout.

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
    )
    gpu = find_accelerator(accelerator)
    t, stages = placement.on(config).shared_by, placement.stages
    batch_size, context = whole("batch_size", batch_size), whole("context", context, 0)
    new_tokens = whole("new_tokens", new_tokens)
    efficiency, usable = share("efficiency", efficiency), share("usable", usable)
    operations = whole("operations", operations, 0)
    cost = pass_cost(
        config,
        batch_size,
        context,
        new_tokens,
        recipe=recipe,
        state_bytes_per_element=state_bytes_per_element,
        logits=logits,
        causal=causal,
    )
    tokens, seen = batch_size * new_tokens, context + new_tokens
    size = footprint_on(config, placement)
    # A pass visits the stages in turn. A recurrent state is read and written, a cached token moved once.
    state = stages * batch_size * (seen * size.per_token + 2 * size.per_sequence)
    moved = cost.weight_bytes / t + state
    memory = moved / (efficiency * gpu.bandwidth_at(round(moved)))

    dtype = gpu.compute_dtype("fp32" if recipe == "fp32" else "bf16")
    in_fp8 = recipe_named(recipe).fp8_products
    fast = cost.flops_fp8 / gpu.flops_at("fp8", tokens) if in_fp8 else 0.0
    compute = (fast + (cost.flops - cost.flops_fp8) / gpu.flops_at(dtype, tokens)) / (t * efficiency)

    return Prediction(
        memory_seconds=memory,
        compute_seconds=compute,
        overhead_seconds=operations * gpu.operation_seconds,
        communication_seconds=message_seconds(
            config,
            gpu,
            placement,
            rows=tokens,
            logit_rows={"all": tokens, "last": batch_size, "none": 0}[logits],
            bytes_per_element=2,
        ),
        bytes_needed=round(t * stages * size.bytes(batch_size, seen)),
        bytes_available=round(gpu.memory_bytes * usable * t * stages),
        cost=cost,
        tokens=tokens,
        dtype=gpu.compute_dtype("fp8") if in_fp8 else dtype,
    )
