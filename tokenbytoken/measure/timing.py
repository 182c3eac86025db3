"""Seconds of a call: medians and quartiles of interleaved runs, after warming up, on a CPU or between GPU events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .computer import device_or, watching

__all__ = ["Timing", "interleaved", "timed"]


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
    once = _clock(device_or(device))
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warmup):
        for fn in functions.values():
            once(fn)
    with watching() as load:
        for r in range(repeats):
            for i in range(len(names)):
                name = names[(r + i) % len(names)]
                samples[name].append(once(functions[name]))
    return {name: _summary(times, load.disturbing) for name, times in samples.items()}


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
