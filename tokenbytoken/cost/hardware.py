"""Accelerators as data, and the roofline: how fast a pass can be at best.

The seconds of a pass are the larger of two, the time to move its bytes and the time to do its FLOPs, plus
what neither hides: the start of each operation, and the messages between GPUs.

>>> from tokenbytoken.models import published
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

from .._numbers import positive, share, whole
from ..config import AttentionConfig, DecoderConfig, LatentAttentionConfig, MambaConfig
from .arithmetic import Footprint, PassCost, _need_decoder, footprint, pass_cost
from .recipes import recipes

__all__ = [
    "Accelerator",
    "Link",
    "Prediction",
    "accelerators",
    "communication_seconds",
    "crossover_batch",
    "find_accelerator",
    "footprint_per_gpu",
    "links",
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
    return find_accelerator(gpu).ridge(dtype) * positive("bytes_per_weight", bytes_per_weight) / 2


# --- data --------------------------------------------------------------------------------------------

_GB, _TB, _TFLOPS, _MIB = 1e9, 1e12, 1e12, 2**20
_SHEET = "dense peaks: github.com/stas00/ml-engineering, compute/accelerator (744d01e), and lightning-fabric 2.6.6"
_NETWORKS = "github.com/stas00/ml-engineering, network (0030e63), one direction"
_NVLINK = f"{_NETWORKS}; latency assumed"
_PCIE = f"PCI Express x16: {_NETWORKS}; latency assumed"


def _nvlink(gigabytes_per_second: float) -> Link:
    # 10 µs for one small all-reduce over eight GPUs: an assumption, between a tuned one-shot kernel and NCCL's ring.
    return Link(latency=10e-6, bandwidth=gigabytes_per_second * _GB, source=_NVLINK)


def _pcie(gigabytes_per_second: float) -> Link:
    return Link(latency=20e-6, bandwidth=gigabytes_per_second * _GB, source=_PCIE)


#: 400 Gbit/s InfiniBand for each GPU between nodes. The latency is an assumption.
_INFINIBAND = Link(latency=30e-6, bandwidth=50 * _GB, source="400 Gbit/s for each GPU; latency assumed")


def _sheet(
    name: str,
    gigabytes: float,
    terabytes_per_second: float,
    capability: tuple[int, int],
    link: Link,
    visible_mib: float | None = None,
    **teraflops: float,
) -> Accelerator:
    """A data sheet in its own units: GB, TB/s, TFLOP/s by dtype; and the MiB that the driver reports."""
    return Accelerator(
        name=name,
        memory_bytes=gigabytes * _GB,
        bandwidth=terabytes_per_second * _TB,
        flops={dtype: rate * _TFLOPS for dtype, rate in teraflops.items()},
        capability=capability,
        visible_bytes=None if visible_mib is None else visible_mib * _MIB,
        link=link,
        network=_INFINIBAND,
        source=_SHEET,
    )


#: What can join the GPUs of one generation (H100, H200), to compare: NVLink 4, PCI Express 5 and InfiniBand.
links: dict[str, Link] = {"nvlink": _nvlink(450), "pcie": _pcie(63), "network": _INFINIBAND}

#: Published accelerators, dense rates (without 2:4 sparsity), by short name.
#:
#: :meta hide-value:
accelerators: dict[str, Accelerator] = {
    "t4": _sheet("T4", 16, 0.320, (7, 5), _pcie(16), 15_360, fp16=65),
    "l4": _sheet("L4", 24, 0.300, (8, 9), _pcie(32), 23_034, fp16=121, bf16=121, fp8=242),
    "a100-40": _sheet("A100 40 GB", 40, 1.555, (8, 0), _nvlink(300), 40_960, fp16=312, bf16=312),
    "a100-80": _sheet("A100 80 GB", 80, 2.039, (8, 0), _nvlink(300), 81_920, fp16=312, bf16=312),
    "h100": _sheet("H100", 80, 3.35, (9, 0), _nvlink(450), 81_559, fp16=989.5, bf16=989.5, fp8=1979),
    "h200": _sheet("H200", 141, 4.8, (9, 0), _nvlink(450), fp16=989.5, bf16=989.5, fp8=1979),
    # NVIDIA's documents give the B200 180 GB in some places and 192 in others.
    "b200": _sheet("B200", 180, 8.0, (10, 0), _nvlink(900), fp16=2250, bf16=2250, fp8=4500),
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
    if not isinstance(name, str):
        raise ValueError(f"an accelerator is a name or an Accelerator, not {name!r}")
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split()).removeprefix("nvidia-")
    key = _ALIASES.get(key, key)
    if key not in accelerators:
        raise ValueError(f"unknown accelerator {name!r}: one of {', '.join(accelerators)}")
    return accelerators[key]


# --- several GPUs ------------------------------------------------------------------------------------


@lru_cache(maxsize=256, typed=True)  # typed: True is no 1
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
    even = 1 / whole("tensor_parallel", tensor_parallel)
    if cache == "divided":
        return even, even
    held = total = 0.0  # numbers a token, over the layers
    for mixer in (layer.mixer for layer in config.layers):
        if isinstance(mixer, MambaConfig):
            continue
        if isinstance(mixer, LatentAttentionConfig):
            elements = mixer.kv_lora_rank + mixer.qk_rope_head_dim
            part = 1.0
        else:
            elements = 2 * mixer.num_kv_heads * mixer.head_dim
            part = _head_share(mixer, tensor_parallel)
        held += elements * part
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


@lru_cache(maxsize=256, typed=True)
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
    t, stages = _split(config, gpus, tensor_parallel)
    growing, constant = state_share(config, t, cache)
    size = footprint(config, recipe, positive("state_bytes_per_element", state_bytes_per_element))
    return Footprint(
        weights=size.weights / (t * stages),
        per_token=size.per_token * growing / stages,
        per_sequence=size.per_sequence * constant / stages,
    )


def _split(config: DecoderConfig, gpus: int, tensor_parallel: int | None) -> tuple[int, int]:
    """(GPUs that share each layer, pipeline stages); each stage holds at least one layer."""
    gpus = whole("gpus", gpus)
    t = gpus if tensor_parallel is None else whole("tensor_parallel", tensor_parallel)
    if gpus % t:
        raise ValueError(f"tensor_parallel ({t}) must divide gpus ({gpus})")
    layers = _need_decoder(config, "its passes on several GPUs").num_layers
    if gpus // t > layers:
        raise ValueError(f"gpus / tensor_parallel = {gpus // t} pipeline stages, but the model has {layers} layers")
    return t, gpus // t


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
    gpu: Accelerator | str,
    rows: int,
    *,
    gpus: int = 1,
    tensor_parallel: int | None = None,
    logit_rows: int = 1,
    bytes_per_element: float = 2,
) -> float:
    """Seconds of messages in one pass of ``rows`` tokens: latency + bytes, for each of them.

    Tensor parallelism over t GPUs sums partial results after each mixer and each feed-forward (two
    all-reduces a layer), once more inside a Mamba mixer (its small input to Δ, B and C), and once after
    the embedding, which is split by vocabulary; the head's shards of logits are gathered. An all-reduce of
    m bytes over a ring sends 2 (t - 1) / t * m over each link, a gather half of that. The g / t pipeline
    stages hand on the hidden states. Groups larger than a node run at the pace of the network.
    """
    gpu = find_accelerator(gpu)
    t, stages = _split(config, gpus, tensor_parallel)
    rows, logit_rows = whole("rows", rows), whole("logit_rows", logit_rows, 0)
    bytes_per_element = positive("bytes_per_element", bytes_per_element)
    if t * stages == 1:
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
    handing_on = across if t * stages > gpu.gpus_per_node else inside
    message = rows * config.hidden_size * bytes_per_element
    return seconds + (stages - 1) * (handing_on.latency + message / handing_on.bandwidth)


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
    FLOPs and bytes are those of :func:`~tokenbytoken.cost.arithmetic.pass_cost`, divided among ``tensor_parallel``
    GPUs (all, unless said otherwise). Left-over GPUs form pipeline stages: they hold layers, but a single
    pass visits them one after the other, and is no faster. ``efficiency`` is the share of peak bandwidth
    and peak compute that is reached, ``usable`` that of memory; ``operations`` small operations cost
    ``accelerator.operation_seconds`` each. ``cache`` as in :func:`state_share`; messages are counted as
    those of tensor parallelism in either layout.

    FP8 recipes multiply in FP8 what they store in FP8, where the accelerator can; scores, values and scan
    stay in two bytes ("fp32": all in fp32). Raises ValueError for a number out of range, for sizes that do
    not divide, and for more pipeline stages than layers.
    """
    gpu = find_accelerator(accelerator)
    t, stages = _split(config, gpus, tensor_parallel)
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
    tokens = batch_size * new_tokens
    size = footprint_per_gpu(
        config,
        gpus=gpus,
        tensor_parallel=t,
        recipe=recipe,
        state_bytes_per_element=state_bytes_per_element,
        cache=cache,
    )
    seen = context + new_tokens
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
        bytes_needed=round(t * stages * size.bytes(batch_size, seen)),
        bytes_available=round(gpu.memory_bytes * usable * t * stages),
        cost=cost,
        tokens=tokens,
        dtype=gpu.compute_dtype("fp8") if recipes[recipe].fp8_products else dtype,
    )
