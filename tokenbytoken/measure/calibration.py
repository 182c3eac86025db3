"""What this machine can do, measured on shapes that no model has, and what a pass should take by that."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cost import Accelerator, PassTime, roofline
from ..layers import devices
from .computer import cpu_model, device_or, ram, watching
from .counting import count
from .printing import Calibrated, in_unit, measured
from .timing import interleaved, timed

__all__ = ["Calibration", "Curve", "PassPrediction", "calibrate"]


class PassPrediction(Calibrated):
    """The seconds of a :class:`~tokenbytoken.cost.PassTime` by a calibration: a number that is printed as measured.

    ``terms`` holds the pass term by term; sums and multiples are plain :class:`Calibrated` numbers without them.
    """

    terms: PassTime

    @classmethod
    def of(cls, terms: PassTime) -> PassPrediction:
        """The number that these terms come to."""
        new = cls(terms.seconds)
        new.terms = terms
        return new

    @property
    def memory(self) -> float:
        """Seconds to read the weights."""
        return self.terms.memory_seconds

    @property
    def compute(self) -> float:
        """Seconds of the products."""
        return self.terms.compute_seconds

    @property
    def state(self) -> float:
        """Seconds to read the state."""
        return self.terms.state_seconds

    @property
    def overhead(self) -> float:
        """Seconds to start the operations."""
        return self.terms.overhead_seconds

    @property
    def binds(self) -> str:
        """The largest term: "memory" (the state included), "compute" or "overhead"."""
        return self.terms.binds


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
        self,
        weight_bytes: float,
        flops: float,
        rows: float,
        operations: int,
        state_bytes: float = 0,
        *,
        working_set: float | None = None,
    ) -> PassPrediction:
        """Seconds of a pass that pushes ``rows`` rows through ``weight_bytes`` of weights.

        The larger of reading the weights and computing the products, plus reading the state, plus the small
        operations. On a GPU the launches run ahead of the work, so that they only count when they are the longer.
        ``working_set``: bytes that compete for the cache; those of the pass unless said otherwise.
        """
        touched = weight_bytes + state_bytes if working_set is None else working_set
        here = Accelerator(
            name=self.device,
            memory_bytes=0,
            bandwidth=self.bandwidth,
            flops={self.dtype: partial(self.rate, working_set=touched)},
            operation_seconds=self.operation,
        )
        terms = roofline(
            here,
            weight_bytes,
            {self.dtype: flops},
            rows,
            state=state_bytes,
            working_set=touched,
            operations=operations,
            overlapped=self.device != "cpu",
        )
        return PassPrediction.of(terms)

    def accelerator(self) -> Accelerator:
        """This machine as an :class:`~tokenbytoken.cost.Accelerator`, for ``tbt.predict``."""
        here = devices.kind(torch.device(self.device))
        name, memory = (cpu_model(), ram()) if here.on_host else (here.name, here.memory)
        dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self.dtype]
        return Accelerator(
            name=name,
            memory_bytes=memory,
            bandwidth=self.bandwidth,
            flops={dtype: self.rates[max(self.rates)]},
            capability=here.capability,
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
            f"reading {in_unit(size, 'MB', 3):>7}, one row   {measured(speed, 'GB/s')}"
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
# A GPU reads 16 MB in the 5 µs that it takes to start an operation: there the matrices are eight times as wide, and the
# working sets hold whole layers of them, so that starting them does not set the figure.
_WIDER, _GPU_SIZES = 8, (1024, 2048)
_MB = 1_000_000


def calibrate(
    device: torch.device | str | None = None, dtype: torch.dtype = torch.float32, quick: bool = True
) -> Calibration:
    """Measure this machine: bandwidth by working set, rate of linear layers by rows, cost of a small operation.

    ``quick`` takes under four seconds on two cores; otherwise more repeats and one larger working set.
    """
    where = device_or(device)
    gpu = not devices.kind(where).on_host
    wider = _WIDER if gpu else 1
    repeats = 5 if quick else 15
    sizes = list(_GPU_SIZES) if gpu else [2, 8, 32, 128, 256, *([] if quick else [1024])]  # MB; beyond any cache
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256] + ([512, 1024, 2048] if gpu else [])
    with torch.inference_mode(), watching() as load:
        pool = _filled(sizes[-1] * _MB // dtype.itemsize, where=where, dtype=dtype)
        matrices = _matrices(pool, wider)
        parts = [_first(matrices, size * _MB) for size in sizes]
        tall = (_LARGE[0], _LARGE[1] * wider)
        large = pool[: math.prod(tall)].view(tall)
        one = _filled(1, tall[1], where=where, dtype=dtype)

        reads: dict[str, Callable[[], object]] = {f"{i}": _cycle(part, 1) for i, part in enumerate(parts)}
        reads["large"] = lambda: nn.functional.linear(one, large)
        times = interleaved(reads, repeats=repeats, warmup=1, device=where)
        bandwidth = [_bytes(part) / times[f"{i}"].median for i, part in enumerate(parts)]
        rates = {
            float(_bytes(part)): _rates(part, rows, repeats=repeats // 2 + 1, where=where)
            for part in (parts[0], parts[-1 if gpu else sizes.index(128)])
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
        busy=load.disturbing,
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
    if not devices.kind(where).on_host:
        return torch.empty(shape, device=where, dtype=dtype).normal_()
    return torch.full(shape, 0.01, device=where, dtype=dtype)


def _matrices(pool: Tensor, wider: int = 1) -> list[Tensor]:
    """The pool cut into matrices, layer after layer, as far as it reaches; both sides ``wider`` times as long."""
    made = 0
    matrices: list[Tensor] = []
    for rows, columns in itertools.cycle(_LAYER):
        shape = (rows * wider, columns * wider)
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
