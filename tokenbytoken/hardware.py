"""Accelerators as data, and the roofline: how fast a pass can be at best.

The seconds of a pass are the larger of two, the time to move its bytes and the time to do its FLOPs, plus
what neither hides: the start of each operation, and the messages between GPUs.

>>> from tokenbytoken.published import published
>>> prediction = predict(published["llama-3.1-8b"], "h100", batch_size=1, context=0)
>>> f"{1e3 * prediction.seconds:.2f} ms, bound by {prediction.binds}"
'4.48 ms, bound by memory'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from .arithmetic import Footprint, PassCost, footprint, pass_cost, recipes
from .config import AttentionConfig, DecoderConfig, LatentAttentionConfig, MambaConfig

__all__ = [
    "Accelerator",
    "Link",
    "Prediction",
    "accelerators",
    "communication_seconds",
    "crossover_batch",
    "find_accelerator",
    "footprint_per_gpu",
    "predict",
    "state_share",
]

Rate = float | Callable[[int], float]
CacheLayout = Literal["heads", "divided"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the GPUs: seconds before a message starts, bytes per second in each direction."""

    latency: float
    bandwidth: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU, or this machine as calibrated.

    ``memory_bytes``: capacity on the data sheet (80 GB is 80 * 10^9), or of the machine.
    ``visible_bytes``: what the driver reports, where known.
    ``bandwidth``: bytes per second, or a function of the bytes in the working set.
    ``flops``: dense FLOPs per second by dtype ("fp32", "fp16", "bf16", "fp8"; data sheets often print
    twice that, for 2:4 sparse matrices), or a function of the rows that meet a weight.
    ``operation_seconds``: cost of one small operation; 0 on a data sheet.
    ``measured``: the rates come from a calibration, so that predictions from them differ by machine.
    """

    name: str
    memory_bytes: float
    bandwidth: Rate
    flops: Mapping[str, Rate]
    capability: tuple[int, int] | None = None
    visible_bytes: float | None = None
    link: Link | None = None
    network: Link | None = None
    gpus_per_node: int = 8
    operation_seconds: float = 0.0
    measured: bool = False
    source: str = ""

    def bandwidth_at(self, working_set: int) -> float:
        """Bytes per second when a pass moves ``working_set`` bytes."""
        return self.bandwidth(working_set) if callable(self.bandwidth) else self.bandwidth

    def compute_dtype(self, dtype: str) -> str:
        """The dtype in which products of ``dtype`` run here.

        FP8 needs FP8 tensor cores, else its numbers are widened to bf16; bf16 falls back to fp16 (T4),
        and whatever a calibration did not measure to the one dtype it did.
        """
        for candidate in {"fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16", "fp16")}.get(dtype, (dtype,)):
            if candidate in self.flops:
                return candidate
        if len(self.flops) == 1:
            return next(iter(self.flops))
        raise ValueError(f"{self.name} has no rate for {dtype}: one of {', '.join(self.flops)}")

    def flops_at(self, dtype: str, rows: int) -> float:
        """FLOPs per second of a product of ``dtype`` in which ``rows`` rows meet each weight."""
        rate = self.flops[self.compute_dtype(dtype)]
        return rate(rows) if callable(rate) else rate

    def ridge(self, dtype: str = "bf16") -> float:
        """FLOPs a byte from which on a pass is bound by compute; for constant rates only."""
        rate = self.flops[self.compute_dtype(dtype)]
        if callable(rate) or callable(self.bandwidth):
            raise ValueError(f"{self.name} has rates that depend on size: it has a curve, and no single ridge")
        return rate / self.bandwidth


def crossover_batch(gpu: Accelerator | str, bytes_per_weight: float = 2, dtype: str = "bf16") -> float:
    """Tokens a pass from which on a dense model's weights are bound by compute; the state is left out.

    n tokens do 2 n FLOPs on each weight of s bytes, an intensity of 2 n / s: the crossing is at ridge * s / 2.
    """
    return find_accelerator(gpu).ridge(dtype) * bytes_per_weight / 2


# --- data --------------------------------------------------------------------------------------------

_GB, _TB, _TFLOPS, _MIB = 1e9, 1e12, 1e12, 2**20
_SHEET = "dense peaks: github.com/stas00/ml-engineering, compute/accelerator (744d01e), and lightning-fabric 2.6.6"
_NVLINK = "NVIDIA data sheet, from memory, half of the sum of both directions; latency assumed"
_PCIE = "PCI Express x16, from memory, one direction; latency assumed"


def _nvlink(bandwidth: float) -> Link:
    # 10 µs for one small all-reduce over eight GPUs: an assumption, between a tuned one-shot kernel and NCCL's ring.
    return Link(latency=10e-6, bandwidth=bandwidth, source=_NVLINK)


def _pcie(bandwidth: float) -> Link:
    return Link(latency=20e-6, bandwidth=bandwidth, source=_PCIE)


#: 400 Gbit/s InfiniBand for each GPU between nodes. The latency is an assumption.
_INFINIBAND = Link(latency=30e-6, bandwidth=50 * _GB, source="400 Gbit/s for each GPU; latency assumed")

#: Published accelerators, dense rates (without 2:4 sparsity), by short name.
#:
#: :meta hide-value:
accelerators: dict[str, Accelerator] = {
    "t4": Accelerator(
        name="T4",
        memory_bytes=16 * _GB,
        visible_bytes=15_360 * _MIB,
        bandwidth=0.320 * _TB,
        flops={"fp16": 65 * _TFLOPS},
        capability=(7, 5),
        link=_pcie(16 * _GB),
        network=_INFINIBAND,
        source=_SHEET,
    ),
    "l4": Accelerator(
        name="L4",
        memory_bytes=24 * _GB,
        visible_bytes=23_034 * _MIB,
        bandwidth=0.300 * _TB,
        flops={"fp16": 121 * _TFLOPS, "bf16": 121 * _TFLOPS, "fp8": 242 * _TFLOPS},
        capability=(8, 9),
        link=_pcie(32 * _GB),
        network=_INFINIBAND,
        source=_SHEET,
    ),
    "a100-40": Accelerator(
        name="A100 40 GB",
        memory_bytes=40 * _GB,
        visible_bytes=40_960 * _MIB,
        bandwidth=1.555 * _TB,
        flops={"fp16": 312 * _TFLOPS, "bf16": 312 * _TFLOPS},
        capability=(8, 0),
        link=_nvlink(300 * _GB),
        network=_INFINIBAND,
        source=_SHEET,
    ),
    "a100-80": Accelerator(
        name="A100 80 GB",
        memory_bytes=80 * _GB,
        visible_bytes=81_920 * _MIB,
        bandwidth=2.039 * _TB,
        flops={"fp16": 312 * _TFLOPS, "bf16": 312 * _TFLOPS},
        capability=(8, 0),
        link=_nvlink(300 * _GB),
        network=_INFINIBAND,
        source=_SHEET,
    ),
    "h100": Accelerator(
        name="H100",
        memory_bytes=80 * _GB,
        visible_bytes=81_559 * _MIB,
        bandwidth=3.35 * _TB,
        flops={"fp16": 989.5 * _TFLOPS, "bf16": 989.5 * _TFLOPS, "fp8": 1979 * _TFLOPS},
        capability=(9, 0),
        link=_nvlink(450 * _GB),
        network=_INFINIBAND,
        source=_SHEET,
    ),
    "h200": Accelerator(
        name="H200",
        memory_bytes=141 * _GB,
        bandwidth=4.8 * _TB,
        flops={"fp16": 989.5 * _TFLOPS, "bf16": 989.5 * _TFLOPS, "fp8": 1979 * _TFLOPS},
        capability=(9, 0),
        link=_nvlink(450 * _GB),
        network=_INFINIBAND,
        source=_SHEET,
    ),
    "b200": Accelerator(
        name="B200",
        memory_bytes=180 * _GB,  # NVIDIA's documents say 180 in some places and 192 in others
        bandwidth=8.0 * _TB,
        flops={"fp16": 2250 * _TFLOPS, "bf16": 2250 * _TFLOPS, "fp8": 4500 * _TFLOPS},
        capability=(10, 0),
        link=_nvlink(900 * _GB),
        network=_INFINIBAND,
        source=_SHEET,
    ),
}

_ALIASES = {
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "h100-80": "h100",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
}


def find_accelerator(name: Accelerator | str) -> Accelerator:
    """Look up an accelerator by name, in any case: "h100", "H100-SXM", "NVIDIA A100 80GB", …

    Raises ValueError, listing the names, for one that is not known ("a100" alone leaves its memory open).
    """
    if isinstance(name, Accelerator):
        return name
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split()).removeprefix("nvidia-")
    key = _ALIASES.get(key, key)
    if key not in accelerators:
        raise ValueError(f"unknown accelerator {name!r}: one of {', '.join(accelerators)}")
    return accelerators[key]


# --- several GPUs ------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def state_share(config: DecoderConfig, tensor_parallel: int, cache: CacheLayout = "heads") -> tuple[float, float]:
    """Shares of the growing and of the constant state that the fullest of t tensor-parallel GPUs holds.

    ``cache="heads"``: KV heads are dealt whole, so that a GPU holds ceil(K / t) of K, and with more GPUs
    than heads each head is kept t / K times; the latent of latent attention has no heads, and every GPU
    keeps all of it. Mamba's channels divide evenly. ``cache="divided"``: nothing is kept twice, as when
    each GPU serves its own readers (data-parallel attention) or its own stretch of the tokens; the
    rounding to whole readers is left out. Raises ValueError where the heads do not divide.
    """
    if cache not in ("heads", "divided"):
        raise ValueError(f"cache must be 'heads' or 'divided', not {cache!r}")
    even = 1 / tensor_parallel
    if cache == "divided":
        return even, even
    held = total = 0.0  # numbers a token, over the layers
    for mixer in (layer.mixer for layer in config.layers):
        if isinstance(mixer, MambaConfig):
            continue
        if isinstance(mixer, LatentAttentionConfig):
            elements = mixer.kv_lora_rank + mixer.qk_rope_head_dim
            share = 1.0
        else:
            elements = 2 * mixer.num_kv_heads * mixer.head_dim
            share = _head_share(mixer, tensor_parallel)
        held += elements * share
        total += elements
    return (held / total if total else even), even


def _head_share(mixer: AttentionConfig, tensor_parallel: int) -> float:
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    if tensor_parallel > kv_heads and (tensor_parallel % kv_heads or heads % tensor_parallel):
        raise ValueError(
            f"tensor_parallel = {tensor_parallel} does not divide {heads} query heads and {kv_heads} KV heads: "
            f"beyond {kv_heads} it must be a multiple of {kv_heads} and divide {heads}"
        )
    return math.ceil(kv_heads / tensor_parallel) / kv_heads


@lru_cache(maxsize=256)
def footprint_per_gpu(
    config: DecoderConfig,
    *,
    gpus: int = 1,
    tensor_parallel: int | None = None,
    recipe: str = "bf16",
    state_bytes_per_element: float = 2,
    cache: CacheLayout = "heads",
) -> Footprint:
    """The footprint on the fullest of ``gpus``: weights divided evenly, the state as :func:`state_share` says.

    With ``gpus / tensor_parallel`` pipeline stages each GPU holds only its stage's layers.
    """
    t = _tensor_parallel(gpus, tensor_parallel)
    growing, constant = state_share(config, t, cache)
    whole = footprint(config, recipe=recipe, bytes_per_element=state_bytes_per_element)
    stages = gpus // t
    return Footprint(
        weights=whole.weights / gpus,
        per_token=whole.per_token * growing / stages,
        per_sequence=whole.per_sequence * constant / stages,
    )


def _tensor_parallel(gpus: int, tensor_parallel: int | None) -> int:
    t = gpus if tensor_parallel is None else tensor_parallel
    for name, count in (("gpus", gpus), ("tensor_parallel", t)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a positive integer, not {count!r}")
    if gpus % t:
        raise ValueError(f"tensor_parallel ({t}) must divide gpus ({gpus})")
    return t


@lru_cache(maxsize=256)
def _messages(config: DecoderConfig) -> tuple[int, int]:
    """(number, elements a token) of the all-reduces in one pass."""
    hidden = config.hidden_size
    sizes = [hidden]  # after the embedding
    for layer in config.layers:
        sizes.append(hidden)
        if isinstance(layer.mixer, MambaConfig):
            sizes.append(layer.mixer.dt_rank + 2 * layer.mixer.state_size)
        if layer.feed_forward is not None:
            sizes.append(hidden)
    return len(sizes), sum(sizes)


def communication_seconds(
    config: DecoderConfig,
    gpu: Accelerator,
    rows: int,
    *,
    gpus: int = 1,
    tensor_parallel: int | None = None,
    logit_rows: int = 1,
    bytes_per_element: int = 2,
) -> float:
    """Seconds of messages in one pass of ``rows`` tokens: latency + bytes, for each of them.

    Tensor parallelism over t GPUs sums partial results after each mixer and each feed-forward (two
    all-reduces a layer), once more inside a Mamba mixer (its small input to Δ, B and C), and once after
    the embedding, which is split by vocabulary; the head's shards of logits are gathered. An all-reduce of
    m bytes over a ring sends 2 (t - 1) / t * m over each link, a gather half of that. The g / t pipeline
    stages hand on the hidden states. Groups larger than a node run at the pace of the network.
    """
    t = _tensor_parallel(gpus, tensor_parallel)
    if gpus == 1:
        return 0.0
    inside, across = gpu.link, gpu.network
    if inside is None or across is None:
        raise ValueError(f"{gpu.name} has no link to other GPUs: only gpus=1 can be predicted")
    seconds = 0.0
    if t > 1:
        link = inside if t <= gpu.gpus_per_node else across
        ring = (t - 1) / t / link.bandwidth  # seconds a byte, once round
        reduces, elements = _messages(config)
        seconds += reduces * link.latency + 2 * rows * elements * bytes_per_element * ring
        seconds += link.latency + logit_rows * config.vocab_size * bytes_per_element * ring
    handing_on = across if gpus > gpu.gpus_per_node else inside
    message = rows * config.hidden_size * bytes_per_element
    return seconds + (gpus // t - 1) * (handing_on.latency + message / handing_on.bandwidth)


# --- the roofline ------------------------------------------------------------------------------------


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
        slower = max(self.memory_seconds, self.compute_seconds)
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
    config: DecoderConfig,
    accelerator: Accelerator | str,
    batch_size: int,
    context: int,
    *,
    new_tokens: int = 1,
    gpus: int = 1,
    tensor_parallel: int | None = None,
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
    FLOPs and bytes are those of :func:`~tokenbytoken.arithmetic.pass_cost`, divided among ``tensor_parallel``
    GPUs (all, unless said otherwise). Left-over GPUs form pipeline stages: they hold layers, but a single
    pass visits them one after the other, and is no faster. ``efficiency`` is the share of peak bandwidth
    and peak compute that is reached, ``usable`` that of memory; ``operations`` small operations cost
    ``accelerator.operation_seconds`` each. ``cache`` as in :func:`state_share`; messages are counted as
    those of tensor parallelism in either layout.

    FP8 recipes multiply in FP8 what they store in FP8, where the accelerator can; scores, values and scan
    stay in two bytes ("fp32": all in fp32). Raises ValueError for sizes that do not divide.
    """
    gpu = find_accelerator(accelerator)
    t = _tensor_parallel(gpus, tensor_parallel)
    for name, part in (("efficiency", efficiency), ("usable", usable)):
        if not 0 < part <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1, not {part!r}")
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
    tokens = batch_size * new_tokens
    size = footprint_per_gpu(
        config,
        gpus=gpus,
        tensor_parallel=t,
        recipe=recipe,
        state_bytes_per_element=state_bytes_per_element,
        cache=cache,
    )
    seen, stages = context + new_tokens, gpus // t
    # A pass visits the stages in turn. A recurrent state is read and written, a cached token moved once.
    state = stages * batch_size * (seen * size.per_token + 2 * size.per_sequence)
    moved = cost.weight_bytes / t + state
    memory = moved / (efficiency * gpu.bandwidth_at(round(moved)))

    dtype = gpu.compute_dtype("fp32" if recipe == "fp32" else "bf16")
    fast = cost.flops_fp8 / gpu.flops_at("fp8", tokens) if cost.flops_fp8 else 0.0
    compute = (fast + (cost.flops - cost.flops_fp8) / gpu.flops_at(dtype, tokens)) / (t * efficiency)

    return Prediction(
        memory_seconds=memory,
        compute_seconds=compute,
        overhead_seconds=operations * gpu.operation_seconds,
        communication_seconds=communication_seconds(
            config,
            gpu,
            tokens,
            gpus=gpus,
            tensor_parallel=t,
            logit_rows={"all": tokens, "last": batch_size, "none": 0}[logits],
        ),
        bytes_needed=round(gpus * size.bytes(batch_size, seen)),
        bytes_available=round(gpu.memory_bytes * usable * gpus),
        cost=cost,
        tokens=tokens,
        dtype=gpu.compute_dtype("fp8") if recipes[recipe].fp8_products else dtype,
    )
