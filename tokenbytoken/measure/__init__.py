"""Measure this machine: what a pass costs on paper (count), in seconds (timed), and what to expect (calibrate).

The order is always the same: *count* the products and bytes of a pass, *calibrate* the machine on shapes that
are not the model's, predict, and only then time. :func:`show` prints the three side by side. Seconds, bytes
and FLOP/s are plain numbers in base units everywhere; a unit such as ``"ms"`` only says how to print them.

A measured value is printed between ⟨ and ⟩, and nothing else is: the notebook tests blank exactly that.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .._paths import BOOK, book_file
from ..layers.mamba import product

if TYPE_CHECKING:
    from ..cost import Accelerator

__all__ = [
    "Calibrated",
    "Calibration",
    "Count",
    "Curve",
    "PassPrediction",
    "Timing",
    "book_file",
    "busy",
    "calibrate",
    "count",
    "device",
    "interleaved",
    "machine",
    "measured",
    "record",
    "reference",
    "rule",
    "show",
    "timed",
]


# --- The machine -------------------------------------------------------------------------------------


def device() -> torch.device:
    """The device that measurements run on: the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _device(chosen: torch.device | str | None) -> torch.device:
    return device() if chosen is None else torch.device(chosen)


def machine(where: torch.device | str | None = None) -> str:
    """One marked line for a notebook: the device, its threads or capability, and whether it is busy."""
    where = _device(where)
    if where.type == "cuda":
        major, minor = torch.cuda.get_device_capability(where)
        name = f"{torch.cuda.get_device_name(where)}, compute capability {major}.{minor}"
    else:
        threads = torch.get_num_threads()
        name = f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"
    return f"⟨{name}, torch {torch.__version__}; {busy() or 'otherwise idle'}⟩"


def busy() -> str | None:
    """A sentence when other processes load this machine, else None. Watches it for a fifth of a second."""
    with _watching() as load:
        time.sleep(0.2)
    others = load.cores
    if others is None and hasattr(os, "getloadavg"):  # no /proc/stat (macOS): the last minute, ourselves included
        others = max(0.0, os.getloadavg()[0] - 1.0)
    if others is None or others < _BUSY:
        return None
    return f"other processes use {others:.1f} of {os.cpu_count()} cores: times will be longer and more scattered"


_BUSY = 0.25  # cores that others may use before a measurement is called disturbed


@dataclass
class _Load:
    cores: float | None = None  # used by others while we watched; None where it cannot be known


@contextmanager
def _watching() -> Iterator[_Load]:
    """Processor time that *others* spend while the block runs, in cores."""
    load = _Load()
    begin, own, wall = _cpu_seconds(), time.process_time(), time.perf_counter()
    yield load
    end, elapsed = _cpu_seconds(), time.perf_counter() - wall
    # The kernel counts in ticks of 10 ms on each core: a shorter look sees nothing but rounding.
    if begin is not None and end is not None and elapsed > 0.1:
        load.cores = max(0.0, (end - begin - (time.process_time() - own)) / elapsed)


def _cpu_seconds() -> float | None:
    """Busy seconds of all cores since boot, stolen time included; None where the kernel does not say."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _ram() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _driver() -> str | None:
    """The version of NVIDIA's driver, if there is one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


# --- Time --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds of ``n`` runs: their median, and the quartiles ``low`` and ``high``; ``busy``: others disturbed it."""

    median: float
    low: float
    high: float
    n: int
    busy: bool = False


def timed(
    fn: Callable[[], object], *, repeats: int = 7, warmup: int = 2, device: torch.device | str | None = None
) -> Timing:
    """Seconds of one call: ``warmup`` calls, then the median and quartiles of ``repeats`` timed ones.

    On a GPU each run lies between two events, and the device is synchronised before and after.
    """
    return interleaved({"": fn}, repeats=repeats, warmup=warmup, device=device)[""]


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 7,
    warmup: int = 2,
    device: torch.device | str | None = None,
) -> dict[str, Timing]:
    """Seconds of one call of each function, in ``repeats`` rounds that run each of them once.

    A change of clock or load during the measurement then falls on all of them alike; each round begins with
    another function. Each function is called exactly ``warmup + repeats`` times.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    once = _clock(_device(device))
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warmup):
        for fn in functions.values():
            once(fn)
    with _watching() as load:
        for r in range(repeats):
            for i in range(len(names)):
                name = names[(r + i) % len(names)]
                samples[name].append(once(functions[name]))
    disturbed = load.cores is not None and load.cores > _BUSY
    return {name: _summary(times, disturbed) for name, times in samples.items()}


def _clock(where: torch.device) -> Callable[[Callable[[], object]], float]:
    if where.type != "cuda":

        def on_cpu(fn: Callable[[], object]) -> float:
            start = time.perf_counter()
            fn()
            return time.perf_counter() - start

        return on_cpu

    def on_gpu(fn: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(where)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize(where)
        return start.elapsed_time(end) / 1e3  # events count in milliseconds

    return on_gpu


def _summary(times: list[float], busy: bool) -> Timing:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Timing(median, low, high, len(times), busy)


# --- Count: products and bytes -----------------------------------------------------------------------


@dataclass
class Count:
    """What a pass did: the FLOPs of its products, and the bytes that had to come from memory or go there.

    ``weight_bytes``  each byte of a weight once, however often it was read; of a table only the rows looked up
    ``state_bytes_read``  each byte of the state that was read before the pass itself had written it, once
    ``state_bytes_written``  each byte of the state that was written, once
    ``operations``  calls that do work (views are free)
    ``traffic``  bytes of all that these calls read and write, each time: what moves if nothing stays in a cache
    ``flops_by_operation``, ``calls_by_operation``  the same, by PyTorch's name of the operation
    """

    flops: int = 0
    weight_bytes: int = 0
    state_bytes_read: int = 0
    state_bytes_written: int = 0
    operations: int = 0
    traffic: int = 0
    flops_by_operation: Counter[str] = field(default_factory=Counter)
    calls_by_operation: Counter[str] = field(default_factory=Counter)

    @property
    def state_bytes(self) -> int:
        return self.state_bytes_read + self.state_bytes_written

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.state_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes if self.bytes else math.inf


Rule = Callable[..., int]
_RULES: dict[Any, Rule] = {}


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Register the FLOPs of operations: ``f(out, *args, **kwargs) -> int`` with the operation's own arguments.

    An operation is a packet such as ``torch.ops.aten.mm``; all its overloads share the rule. This is how a
    module that brings its own kernel (a convolution, a scan) makes :func:`count` know it.
    """

    def register(f: Rule) -> Rule:
        for operation in operations:
            _RULES[operation] = f
        return f

    return register


@overload
def count(fn: Callable[[], object], *, weights: object = None, state: object = None) -> Count: ...
@overload
def count(fn: None = None, *, weights: object = None, state: object = None) -> _Counter: ...
def count(fn: Callable[[], object] | None = None, *, weights: object = None, state: object = None) -> Count | _Counter:
    """Count the FLOPs and bytes of a pass, on real tensors or on the meta device.

    ``count(lambda: model(tokens, state), state=state)`` returns the :class:`Count`; without ``fn`` it is a
    context manager: ``with count(state=state) as cost: model(tokens, state)``.

    FLOPs are those of the products that run, a multiply-add as 2; a fused attention is counted full, masked
    scores included; sums, norms, activations and other element-wise work count 0. ``weights`` (modules or
    tensors) adds to what is taken for a weight; every ``nn.Parameter`` is one anyway. ``state`` is any object
    that holds tensors. Count one pass at a time: a weight that two passes read is still counted once.

    Raises NotImplementedError for an operation it has no rule for, rather than take it for free (:func:`rule`).
    """
    counter = _Counter(weights, state)
    if fn is None:
        return counter
    with counter as cost:
        fn()
    return cost


class _Counter(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Counting never meets torch.compile; told so, torch does not import its compiler (2 s) at first use."""
        return False

    def __init__(self, weights: object, state: object) -> None:
        super().__init__()
        self.count = Count()
        # Views share a storage, so a storage is what a weight or a state is known by. The tensors are kept:
        # a freed storage could be allocated again at the same address, for something else.
        self.weights = {_storage(t): t for t in _tensors(weights)}
        self.state = {_storage(t): t for t in _tensors(state)}
        self.read: dict[int, _Cover] = defaultdict(_Cover)  # of weights
        self.looked_up: Counter[int] = Counter()  # bytes of rows, by table
        self.touched: dict[int, _Cover] = defaultdict(_Cover)  # of the state, read or written
        self.written: dict[int, _Cover] = defaultdict(_Cover)

    def __enter__(self) -> Count:
        super().__enter__()
        return self.count

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        listed = packet in _RULES
        if not listed and packet not in _LOOKUPS and not _is_free(func):
            if func._can_decompose():  # inference mode hands over composites such as matmul whole
                with self:
                    return func.decompose(*args, **kwargs)
            raise NotImplementedError(
                f"{packet} has no rule: register its FLOPs with tokenbytoken.measure.rule(torch.ops.{packet})"
            )
        out = func(*args, **kwargs)
        for tensor in _tensors([args, kwargs]):
            if isinstance(tensor, nn.Parameter):
                self.weights.setdefault(_storage(tensor), tensor)
        if func.is_view or packet in _VIEWS:
            return out
        name = packet.__name__
        self.count.operations += 1
        self.count.calls_by_operation[name] += 1
        if listed:
            flops = _RULES[packet](out, *args, **kwargs)
            self.count.flops += flops
            self.count.flops_by_operation[name] += flops
        self._move(func, packet, out, args, kwargs)
        return out

    def _move(self, func: Any, packet: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the bytes of weights and state that the operation reads and writes."""
        arguments = [
            (i, tensor, argument.alias_info is not None and argument.alias_info.is_write)
            for i, argument in enumerate(func._schema.arguments)
            for tensor in _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
        ]
        in_place = {_storage(tensor) for _, tensor, writes in arguments if writes}
        self.count.traffic += sum(_shown(tensor) for tensor in _tensors(out) if _storage(tensor) not in in_place)
        reads_first = sorted(arguments, key=lambda entry: entry[2])  # as the operation does
        for i, tensor, writes in reads_first:
            key = _storage(tensor)
            rows = out.numel() * out.element_size() if _LOOKUPS.get(packet) == i else None
            passes = writes + (not writes or packet not in _OVERWRITES)  # over these bytes
            self.count.traffic += _shown(tensor) * passes if rows is None else rows
            if key in self.weights:
                if rows is None:
                    self.read[key].add(tensor)
                else:
                    self.looked_up[key] += rows
            elif key in self.state:
                if not writes or packet not in _OVERWRITES:
                    self.count.state_bytes_read += self.touched[key].add(tensor) if rows is None else rows
                if writes and packet in _SCATTERS:  # where it writes is data: only how much is known
                    self.count.state_bytes_written += args[_SCATTERS[packet]].numel() * tensor.element_size()
                elif writes:
                    self.touched[key].add(tensor)
                    self.count.state_bytes_written += self.written[key].add(tensor)
        # A row that was looked up and read again with the whole table (tied weights) is one row.
        self.count.weight_bytes = sum(cover.bytes for cover in self.read.values()) + sum(
            min(rows, self.weights[key].untyped_storage().nbytes() - self.read[key].bytes)
            for key, rows in self.looked_up.items()
        )


class _Cover:
    """Which bytes of one storage were touched, as sorted intervals that do not overlap."""

    def __init__(self) -> None:
        self.start = self.end = np.empty(0, dtype=np.int64)
        self.bytes = 0
        self.known: set[tuple[Any, ...]] = set()

    def add(self, tensor: Tensor) -> int:
        """Touch what ``tensor`` shows of the storage; returns how many bytes are new."""
        size = tensor.element_size()
        # (stride, length) of the dimensions that are walked, innermost first; an expanded one has stride 0
        walk = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s > 0)
        region = (tensor.storage_offset(), *walk)
        if region in self.known or not tensor.numel():
            return 0
        self.known.add(region)
        run = 1
        while walk and walk[0][0] == run:
            run *= walk.pop(0)[1]
        begin = np.array([tensor.storage_offset() * size])
        for stride, n in walk:
            begin = np.add.outer(begin, np.arange(n) * (stride * size)).ravel()
        start = np.concatenate([self.start, begin])
        order = start.argsort(kind="stable")
        start = start[order]
        # Where each interval ends, or one before it that reaches further.
        end = np.maximum.accumulate(np.concatenate([self.end, begin + run * size])[order])
        gap = start[1:] > end[:-1]
        self.start, self.end = start[np.append(True, gap)], end[np.append(gap, True)]
        before, self.bytes = self.bytes, int((self.end - self.start).sum())
        return self.bytes - before


def _shown(tensor: Tensor) -> int:
    """Bytes that a tensor shows of its storage; what an expanded dimension repeats is one."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(n if stride else min(n, 1) for n, stride in shape)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # distinct on the meta device too, where data_ptr is 0


_PLAIN = (int, float, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)  # hold no tensors


def _tensors(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors in a nest of containers, modules (parameters and buffers) and plain objects."""
    seen = set() if _seen is None else _seen
    if isinstance(value, Tensor):
        yield value
    elif value is None or isinstance(value, _PLAIN) or id(value) in seen:
        return
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()  # quantised weights are buffers
    else:
        seen.add(id(value))
        if isinstance(value, Mapping):
            parts: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple, set)):
            parts = value
        else:
            parts = getattr(value, "__dict__", {}).values()
        for part in parts:
            yield from _tensors(part, seen)


def _packets(*names: str) -> list[Any]:
    """The operations of this version of torch among ``names``."""
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


@rule(*_packets("mm", "bmm", "mv", "dot", "vdot", "linear", "_int_mm", "_scaled_mm"))
def _product(out: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * out.numel() * a.shape[-1]  # every number of the output is a sum of that many products


@rule(*_packets("addmm", "baddbmm", "addmv"))
def _product_with_sum(out: Tensor, start: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * out.numel() * a.shape[-1]  # the bias is added, not multiplied


@rule(product)
def _elementwise_product(out: Tensor, *_: Any) -> int:
    return out.numel()


@rule(*_packets("addcmul", "addcmul_"))
def _elementwise_multiply_add(out: Tensor, *_: Any, **__: Any) -> int:
    return 2 * out.numel()


@rule(*_packets("convolution"))
def _convolution(out: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    return 2 * out.numel() * math.prod(weight.shape[1:])  # weight: (out, in ÷ groups, *kernel)


@rule(
    *_packets(
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)
def _attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    # (…, H, T, D) · (…, S, D) → scores, then scores · (…, S, Dv): every pair, the masked ones too
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


# A table that is looked up, by the position of its argument: only the rows that come out were read.
_LOOKUPS: dict[Any, int] = dict.fromkeys(_packets("embedding", "index_select", "index", "gather", "take"), 0)

# Writes to places that are data, by the position of what is written.
_SCATTERS: dict[Any, int] = {
    **dict.fromkeys(_packets("index_copy_", "index_add_", "scatter_", "scatter_add_"), 3),
    **dict.fromkeys(_packets("index_put_", "_index_put_impl_"), 2),
}

# In-place operations that do not look at what they overwrite.
_OVERWRITES = set(_packets("copy_", "fill_", "zero_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_"))

_VIEWS = set(_packets("_unsafe_view", "lift_fresh", "_reshape_alias"))  # beside those that say so themselves

# No products here: moving, choosing, reducing, drawing, making. Element-wise operations and most reductions
# carry a tag in PyTorch and need no entry.
_FREE_NAMES = """
    _softmax _safe_softmax _log_softmax logsumexp cumsum cumprod logcumsumexp cummax cummin
    rms_norm _fused_rms_norm native_layer_norm mean sum prod amax amin aminmax max min argmax argmin any all var std
    linalg_vector_norm floor_divide equal topk sort kthvalue searchsorted bucketize _unique2 bincount histc nonzero
    cat stack repeat repeat_interleave roll flip constant_pad_nd tril triu tril_ triu_ tril_indices triu_indices
    index_copy index_copy_ index_put index_put_ _index_put_impl_ index_add index_add_ index_fill index_fill_
    scatter scatter_ scatter_add scatter_add_ slice_scatter select_scatter split_with_sizes_copy
    masked_select masked_fill masked_fill_ masked_scatter one_hot copy_ _to_copy clone fill_ zero_
    arange linspace full full_like zeros zeros_like ones ones_like empty empty_like empty_strided empty_permuted
    new_empty new_empty_strided new_zeros new_ones new_full eye scalar_tensor
    rand rand_like randn randn_like randint randperm multinomial normal normal_ uniform_ exponential_ bernoulli
    native_dropout _local_scalar_dense _assert_async _assert_scalar
"""
_FREE = set(_packets(*_FREE_NAMES.split()))


def _is_free(func: Any) -> bool:
    packet = func.overloadpacket
    return (
        func.is_view
        or packet in _FREE
        or packet in _VIEWS
        or torch.Tag.pointwise in func.tags
        or getattr(torch.Tag, "reduction", None) in func.tags
    )


# --- Calibrate: what this machine can do -------------------------------------------------------------


class Calibrated(float):
    """A number that rests on a measurement, so that :func:`show` marks it; sums and multiples are too."""

    def __add__(self, other: Any) -> Calibrated:
        return Calibrated(float(self) + other)

    def __sub__(self, other: Any) -> Calibrated:
        return Calibrated(float(self) - other)

    def __rsub__(self, other: Any) -> Calibrated:
        return Calibrated(other - float(self))

    def __mul__(self, other: Any) -> Calibrated:
        return Calibrated(float(self) * other)

    def __truediv__(self, other: Any) -> Calibrated:
        return Calibrated(float(self) / other)

    def __rtruediv__(self, other: Any) -> Calibrated:
        return Calibrated(other / float(self))

    __radd__ = __add__
    __rmul__ = __mul__


class PassPrediction(Calibrated):
    """Predicted seconds of a pass, with its terms: ``linear`` is the larger of ``memory`` and ``compute``."""

    memory: float
    compute: float
    state: float
    overhead: float
    binds: str

    @classmethod
    def of(cls, *, memory: float, compute: float, state: float, overhead: float, overlapped: bool) -> PassPrediction:
        linear = max(memory, compute) + state
        new = cls(max(linear, overhead) if overlapped else linear + overhead)
        new.memory, new.compute, new.state, new.overhead = memory, compute, state, overhead
        terms = {"memory": memory + state, "compute": compute, "overhead": overhead}
        new.binds = max(terms, key=lambda name: terms[name])
        return new


@dataclass(frozen=True)
class Curve:
    """A measured curve through points (x, y), x ascending: straight between them on log-log paper, flat beyond."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.x or len(self.x) != len(self.y) or any(a >= b for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError("a curve needs as many y as x, and x that ascend")
        if min(*self.x, *self.y) <= 0:
            raise ValueError("a curve on log-log paper needs positive numbers")

    def __call__(self, x: float) -> float:
        if x <= self.x[0] or len(self.x) == 1:
            return self.y[0]
        if x >= self.x[-1]:
            return self.y[-1]
        i = bisect.bisect_right(self.x, x)
        (x0, x1), (y0, y1) = self.x[i - 1 : i + 1], self.y[i - 1 : i + 1]
        return float(y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0)))


@dataclass(frozen=True)
class Calibration:
    """What this machine can do, in bytes, seconds and FLOP/s.

    ``bandwidth(working_set_bytes)``  bytes/s of products with one row, cycling through matrices of that total
    ``large_bandwidth``  bytes/s of one large product with one row
    ``rates``  by working set: FLOP/s of linear layers against rows; :meth:`rate` interpolates in both
    ``operation``  seconds of one small operation, as :func:`count` counts operations
    """

    device: str
    dtype: str
    threads: int
    bandwidth: Curve
    large_bandwidth: float
    rates: Mapping[float, Curve]
    operation: float
    busy: bool = False

    def rate(self, rows: float, working_set: float = math.inf) -> float:
        """FLOP/s of linear layers that push ``rows`` rows through weights of ``working_set`` bytes."""
        sizes = tuple(sorted(self.rates))
        return Curve(sizes, tuple(self.rates[size](rows) for size in sizes))(working_set)

    def predict_pass(
        self, weight_bytes: float, flops: float, rows: float, operations: int, state_bytes: float = 0
    ) -> PassPrediction:
        """Seconds of a pass that pushes ``rows`` rows through ``weight_bytes`` of weights.

        The larger of reading the weights and computing the products, plus reading the state, plus the small
        operations. On a GPU the launches run ahead of the work, so that they only count when they are the longer.
        """
        memory = weight_bytes / self.bandwidth(weight_bytes + state_bytes) if weight_bytes else 0.0
        return PassPrediction.of(
            memory=memory,
            compute=flops / self.rate(rows, weight_bytes + state_bytes) if flops else 0.0,
            state=state_bytes / self.bandwidth(weight_bytes + state_bytes) if state_bytes else 0.0,
            overhead=operations * self.operation,
            overlapped=self.device != "cpu",
        )

    def accelerator(self) -> Accelerator:
        """This machine as an :class:`~tokenbytoken.cost.Accelerator`, for ``tbt.predict``."""
        from ..cost import Accelerator

        if self.device == "cuda":
            name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        else:
            name, memory = _cpu_model(), _ram()
        dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self.dtype]
        return Accelerator(
            name=name,
            memory_bytes=memory,
            bandwidth=self.bandwidth,
            flops={dtype: self.rates[max(self.rates)]},
            capability=torch.cuda.get_device_capability() if self.device == "cuda" else None,
            operation_seconds=self.operation,
            measured=True,
            source="calibrated on this machine",
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for :func:`record`, to four digits."""

        def points(curve: Curve) -> list[list[float]]:
            return [[x, float(f"{y:.4g}")] for x, y in zip(curve.x, curve.y, strict=True)]

        return {
            "dtype": self.dtype,
            "bandwidth": points(self.bandwidth),
            "large_bandwidth": float(f"{self.large_bandwidth:.4g}"),
            "rates": {f"{size:.0f}": points(curve) for size, curve in self.rates.items()},
            "operation": float(f"{self.operation:.4g}"),
        }

    def __str__(self) -> str:
        lines = [f"calibrated in {self.dtype}" + (" ⟨on a busy machine⟩" if self.busy else " ⟨undisturbed⟩")]
        lines += [
            f"reading {_in(size, 'MB', 3):>7}, one row   {measured(speed, 'GB/s')}"
            for size, speed in zip(self.bandwidth.x, self.bandwidth.y, strict=True)
        ]
        lines.append(f"reading one large matrix   {measured(self.large_bandwidth, 'GB/s')}")
        streamed = self.rates[max(self.rates)]
        lines += [
            f"products, {rows:4.0f} row{'s' if rows > 1 else ' '}        {measured(rate, 'GFLOP/s')}"
            for rows, rate in zip(streamed.x, streamed.y, strict=True)
        ]
        return "\n".join([*lines, f"one small operation        {measured(self.operation, 'µs')}"])


# Matrices like those of one decoder layer, in shapes that no model of this book has: (out, in).
_LAYER = ((640, 640), (224, 640), (224, 640), (640, 640), (1792, 640), (1792, 640), (640, 1792))
_LARGE = (40_000, 640)
_MB = 1_000_000


def calibrate(
    device: torch.device | str | None = None, dtype: torch.dtype = torch.float32, quick: bool = True
) -> Calibration:
    """Measure this machine: bandwidth by working set, rate of linear layers by rows, cost of a small operation.

    ``quick`` takes under four seconds on two cores; otherwise more repeats and one larger working set.
    """
    where = _device(device)
    gpu = where.type == "cuda"
    repeats = 5 if quick else 15
    sizes = [2, 8, 32, 128, 256] + ([1024] if gpu or not quick else [])  # MB; the last ones exceed any cache
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256] + ([512, 1024, 2048] if gpu else [])
    with torch.inference_mode(), _watching() as load:
        pool = _filled(sizes[-1] * _MB // dtype.itemsize, where=where, dtype=dtype)
        matrices = _matrices(pool)
        parts = [_first(matrices, size * _MB) for size in sizes]
        large = pool[: math.prod(_LARGE)].view(_LARGE)
        one = _filled(1, _LARGE[1], where=where, dtype=dtype)

        reads: dict[str, Callable[[], object]] = {f"{i}": _cycle(part, 1) for i, part in enumerate(parts)}
        reads["large"] = lambda: nn.functional.linear(one, large)
        times = interleaved(reads, repeats=repeats, warmup=1, device=where)
        bandwidth = [_bytes(part) / times[f"{i}"].median for i, part in enumerate(parts)]
        rates = {
            float(_bytes(part)): _rates(part, rows, repeats=repeats // 2 + 1, where=where)
            for part in (parts[0], parts[sizes.index(128)])
        }
        operations, chain = _small_operations(where, dtype)
        small = timed(chain, repeats=3 * repeats, warmup=3, device=where)
    return Calibration(
        device=where.type,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        bandwidth=Curve(tuple(float(_bytes(part)) for part in parts), tuple(bandwidth)),
        large_bandwidth=_bytes([large]) / times["large"].median,
        rates=rates,
        operation=small.median / operations,
        busy=load.cores is not None and load.cores > _BUSY,
    )


def _rates(matrices: list[Tensor], rows: Sequence[int], *, repeats: int, where: torch.device) -> Curve:
    """FLOP/s of linear layers against rows.

    A processor overlaps reading and computing only in part, so that the matrices must come from memory at any
    number of rows. Only where a pass would take over 0.1 s, going by the rows before, is it cut to a quarter.
    """
    expected, before = 0.0, rows[0]
    passes: dict[str, Callable[[], None]] = {}
    parts: dict[int, list[Tensor]] = {}
    for n in rows:
        expected *= n / before
        while expected > 0.1 and len(matrices) > 4:
            matrices, expected = matrices[: len(matrices) // 4], expected / 4
        parts[n], passes[f"{n}"] = matrices, _cycle(matrices, n)
        expected, before = timed(passes[f"{n}"], repeats=1, warmup=0, device=where).median, n
    spent = interleaved(passes, repeats=repeats, warmup=0, device=where)
    rate = (2 * n * sum(w.numel() for w in parts[n]) / spent[f"{n}"].median for n in rows)
    return Curve(tuple(map(float, rows)), tuple(rate))


def _filled(*shape: int, where: torch.device, dtype: torch.dtype) -> Tensor:
    """Written once, so that its pages exist; on a GPU random, because a constant draws less power and runs faster."""
    if where.type == "cuda":
        return torch.randn(shape, device=where, dtype=dtype)
    return torch.full(shape, 0.01, device=where, dtype=dtype)


def _matrices(pool: Tensor) -> list[Tensor]:
    """The pool cut into matrices, layer after layer, as far as it reaches."""
    made = 0
    matrices: list[Tensor] = []
    for shape in itertools.cycle(_LAYER):
        end = made + math.prod(shape)
        if end > pool.numel():
            return matrices
        matrices.append(pool[made:end].view(shape))
        made = end
    return matrices


def _first(matrices: Sequence[Tensor], total: int) -> list[Tensor]:
    """As many of the first matrices as ``total`` bytes hold."""
    filled = itertools.accumulate(_bytes([matrix]) for matrix in matrices)
    return [matrix for matrix, end in zip(matrices, filled, strict=True) if end <= total]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _cycle(matrices: Sequence[Tensor], rows: int) -> Callable[[], None]:
    """A call that pushes ``rows`` rows through every matrix once."""
    inputs = {w.shape[1]: _filled(rows, w.shape[1], where=w.device, dtype=w.dtype) for w in matrices}

    def run() -> None:
        for w in matrices:
            nn.functional.linear(inputs[w.shape[1]], w)

    return run


def _small_operations(where: torch.device, dtype: torch.dtype) -> tuple[int, Callable[[], None]]:
    """The small operations that surround the products of a layer, and how many :func:`count` sees in them."""
    x = _filled(1, 1, 640, where=where, dtype=dtype)
    norm = nn.RMSNorm(640, device=where, dtype=dtype)

    def chain() -> None:
        h = x
        for _ in range(20):
            y = norm(h).view(1, 1, 10, 64).transpose(1, 2)
            a, b = y.chunk(2, dim=-1)
            y = torch.cat((a * 0.5 - b * 0.5, b * 0.5 + a * 0.5), dim=-1)
            y = y.transpose(1, 2).reshape(1, 1, 640)
            h = x + nn.functional.silu(y) * y

    return count(chain).operations, chain


# --- Show: predicted beside measured -----------------------------------------------------------------

# What one printed unit holds, in base units.
_UNITS = {
    "": 1.0, "×": 1.0, "%": 1e-2, "tokens/s": 1.0, "FLOP/byte": 1.0,
    "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9,
    "bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
    "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
    "GFLOP": 1e9, "TFLOP": 1e12, "GFLOP/s": 1e9, "TFLOP/s": 1e12,
}  # fmt: skip


def measured(value: float | Timing, unit: str = "") -> str:
    """A measured value, marked and to two digits: ``measured(0.0031, "ms")`` is ``⟨3.1 ms⟩``.

    ``value`` is in base units (seconds, bytes, FLOP/s); ``unit`` says how to print it. Raises ValueError for
    a unit that is not known.
    """
    return f"⟨{_in(value.median if isinstance(value, Timing) else value, unit)}⟩"


def show(
    label: str,
    measured: float | Timing,
    predicted: float | None = None,
    unit: str = "ms",
    timing: Timing | None = None,
) -> None:
    """Print one line: label, measured (and its spread), predicted, and measured ÷ predicted.

    Values are in base units, like those of :func:`measured`. A :class:`Timing` brings its spread, the middle
    half of its runs. A prediction from a :class:`Calibration` is marked like a measured value; any other is
    printed to three digits and compared by the tests.
    """
    if isinstance(measured, Timing):
        timing = timing or measured
        measured = measured.median
    line = f"{label}: ⟨{_in(measured, unit)}⟩"
    if timing is not None:
        disturbed = ", machine busy" if timing.busy else ""
        low, high = (_digits(value / _UNITS[unit], 2) for value in (timing.low, timing.high))
        line += f" (⟨{low} to {high}{disturbed}⟩)"
    if predicted is not None:
        if not predicted > 0:
            raise ValueError(f"{label}: predicted must be positive, not {predicted}")
        rests = isinstance(predicted, Calibrated)
        line += f", predicted ⟨{_in(predicted, unit)}⟩" if rests else f", predicted {_in(predicted, unit, 3)}"
        line += f", measured ÷ predicted ⟨{_digits(measured / predicted, 2)}⟩"
    print(line)


def _in(value: float, unit: str, digits: int = 2) -> str:
    if unit not in _UNITS:
        raise ValueError(f"unit {unit!r} is not one of {', '.join(filter(None, _UNITS))}")
    return f"{_digits(value / _UNITS[unit], digits)} {unit}".rstrip()


def _digits(value: float, digits: int) -> str:
    """``value`` rounded to so many significant digits, without an exponent: 0.69, 3.1, 12, 4,500."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    return f"{round(value, places):,.{max(places, 0)}f}"


# --- Records -----------------------------------------------------------------------------------------

_RECORDS = BOOK / "measurements"


def record(name: str, payload: Mapping[str, Any], *, command: str | None = None) -> Path | None:
    """Keep a reference run as ``book/measurements/<name>.json``, with where, when and how it was made.

    Writes only when the environment has ``TBT_RECORD=1``, and returns the path; otherwise does nothing and
    returns None, so that a chapter may call it on every machine. ``payload`` is JSON of plain numbers.
    """
    path = _record_path(name)
    if os.environ.get("TBT_RECORD") != "1":
        return None
    gpu = torch.cuda.is_available()
    entry = {
        "name": name,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "driver": _driver() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "busy": busy(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command or _command(),
        "payload": payload,
    }
    text = json.dumps(entry, indent=1, ensure_ascii=False, allow_nan=False)  # fails before the old file is gone
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def reference(name: str) -> dict[str, Any]:
    """A committed reference run: ``payload``, and ``device``, ``cpu``, ``torch``, ``date``, ``command`` …

    Raises ValueError, naming those that exist, when there is none of this name.
    """
    path = _record_path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in _RECORDS.glob("*.json"))) or "none"
        raise ValueError(f"there is no reference run {name!r} (there are: {known})")
    entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return entry


def _record_path(name: str) -> Path:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(f"a record's name has small letters, digits, '.', '_' and '-', not {name!r}")
    return _RECORDS / f"{name}.json"


def _command() -> str:
    """The command line, without the folders of the machine it ran on."""
    if os.path.basename(sys.argv[0]) == "ipykernel_launcher.py":
        return f"TBT_RECORD=1 make execute NB={os.environ.get('TBT_NOTEBOOK', 'book/…')}"
    return shlex.join(["python", *(os.path.basename(a) if os.path.isabs(a) else a for a in sys.argv)])


def main() -> None:
    """``python -m tokenbytoken.measure [dtype …]``: calibrate and print; with ``TBT_RECORD=1`` keep the record."""
    where = device()
    print(machine())
    for name in sys.argv[1:] or ["float32", "bfloat16"]:
        calibration = calibrate(where, getattr(torch, name), quick=False)
        print(calibration)
        if calibration.busy:
            print("not recorded: other processes disturbed it")
            continue
        kept = torch.cuda.get_device_name(where) if where.type == "cuda" else f"cpu-{torch.get_num_threads()}-threads"
        slug = re.sub(r"[^a-z0-9]+", "-", kept.lower()).strip("-")
        record(
            f"calibration-{slug}-{name}",
            calibration.as_dict(),
            command=f"TBT_RECORD=1 python -m tokenbytoken.measure {name}",
        )


if __name__ == "__main__":
    main()
