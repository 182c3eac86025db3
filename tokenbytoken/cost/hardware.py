"""Accelerators as data: what one GPU holds, how fast it moves bytes and multiplies, and what joins several.

>>> f"{accelerators['h100'].ridge():.0f} FLOPs a byte"
'295 FLOPs a byte'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .._numbers import positive

__all__ = ["Accelerator", "Launch", "Link", "accelerators", "crossover_batch", "find_accelerator", "links"]

Rate = float | Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the GPUs, or the nodes.

    ``latency``: seconds of one step of a message, from its start to its arrival. ``bandwidth``: bytes per second that
    one GPU sends, and at the same time receives. ``adds``: the switch adds up what passes through it.
    """

    latency: float
    bandwidth: float
    adds: bool = False
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Seconds to start one operation on a GPU: one by one from the host, or all together, recorded as a graph."""

    eager: float
    graphed: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU, or this machine as calibrated.

    ``memory_bytes``: capacity on the data sheet (80 GB is 80 * 10^9), or of the machine.
    ``visible_bytes``: what the driver reports, where known.
    ``bandwidth``: bytes per second, or a function of the bytes in the working set.
    ``flops``: dense FLOPs per second by dtype ("fp32", "fp16", "bf16", "fp8"; data sheets often print
    twice that, for 2:4 sparse matrices), or a function of the rows that meet a weight.
    ``link``, ``network``: between the GPUs of a node, and between nodes, where each GPU has an adapter of its own.
    ``operation_seconds``: cost of one small operation, where it was calibrated. ``launch``: what others measured.
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
    launch: Launch | None = None
    measured: bool = False
    source: str = ""

    def bandwidth_at(self, working_set: float) -> float:
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

    def flops_at(self, dtype: str, rows: float) -> float:
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


# One step takes 3.6 µs: a one-shot all-reduce of 16 KiB over four H100 took 3.7, and its bytes alone 0.1
# (github.com/sgl-project/sglang, pull request 2904). It is the fastest published, and assumed for all of NVLink.
_STEP = "a step: sglang pull request 2904, 16 KiB over four H100"


def _nvlink(gigabytes_per_second: float, adds: bool) -> Link:
    return Link(
        latency=3.6e-6, bandwidth=gigabytes_per_second * _GB, adds=adds, source=f"bandwidth: {_NETWORKS}; {_STEP}"
    )


def _pcie(gigabytes_per_second: float) -> Link:
    source = f"PCI Express x16: {_NETWORKS}; the latency is an assumption"
    return Link(latency=10e-6, bandwidth=gigabytes_per_second * _GB, source=source)


#: 400 Gbit/s InfiniBand for each GPU. One step takes 16 µs: an exchange of 128 tokens a GPU took 163 µs, and all its
#: bytes, of which some need not travel, take 147. So it is no more than what that kernel needed.
_INFINIBAND = Link(latency=16e-6, bandwidth=50 * _GB, source="github.com/deepseek-ai/DeepEP (e0eaaf9), dispatch, EP8")

#: Kernels that do nothing, on an H100, recorded as a graph: 1.3 µs each (hazyresearch.stanford.edu, "Look Ma, No
#: Bubbles!", May 2025). The host takes 4 to 6 µs to submit one (susun-blog.com, "pegainfer (3)").
_LAUNCH = Launch(eager=5e-6, graphed=1.3e-6, source="Hazy Research, Look Ma, No Bubbles!; susun-blog, pegainfer (3)")


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
        launch=_LAUNCH,
        source=_SHEET,
    )


#: What can join the GPUs of one generation (H100, H200), to compare: NVLink 4, PCI Express 5 and InfiniBand.
links: dict[str, Link] = {"nvlink": _nvlink(450, adds=True), "pcie": _pcie(63), "network": _INFINIBAND}

#: Published accelerators, dense rates (without 2:4 sparsity), by short name.
#:
#: :meta hide-value:
accelerators: dict[str, Accelerator] = {
    "t4": _sheet("T4", 16, 0.320, (7, 5), _pcie(16), 15_360, fp16=65),
    "l4": _sheet("L4", 24, 0.300, (8, 9), _pcie(32), 23_034, fp16=121, bf16=121, fp8=242),
    "a100-40": _sheet("A100 40 GB", 40, 1.555, (8, 0), _nvlink(300, adds=False), 40_960, fp16=312, bf16=312),
    "a100-80": _sheet("A100 80 GB", 80, 2.039, (8, 0), _nvlink(300, adds=False), 81_920, fp16=312, bf16=312),
    "h100": _sheet("H100", 80, 3.35, (9, 0), _nvlink(450, adds=True), 81_559, fp16=989.5, bf16=989.5, fp8=1979),
    "h200": _sheet("H200", 141, 4.8, (9, 0), _nvlink(450, adds=True), fp16=989.5, bf16=989.5, fp8=1979),
    # NVIDIA's documents give the B200 180 GB in some places and 192 in others.
    "b200": _sheet("B200", 180, 8.0, (10, 0), _nvlink(900, adds=True), fp16=2250, bf16=2250, fp8=4500),
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
