"""The list of what is measured, and the record that comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..calibration import calibrate
from ..computer import clocks, gpu_tenants, watching
from ..records import provenance
from . import cases
from .bench import Bench, Case, Unavailable

__all__ = ["FORMAT", "MEASUREMENTS", "Measurement", "take"]

FORMAT = "tokenbytoken measure 1"
_APART = 0.10  # by which two readings of the machine may differ before what lies between is called disturbed


@dataclass(frozen=True)
class Measurement:
    """``chapter`` shows it; ``title`` says what is timed; ``across`` what the labels of its cases count."""

    name: str
    chapter: int
    title: str
    across: str
    prepare: Callable[[Bench], Mapping[str, Case]]


MEASUREMENTS = (
    Measurement("rows", 1, "SmolLM2-135M, float32: a pass of n tokens", "n", cases.rows),
    Measurement("formats", 1, "16 matrices of 2048 × 1024: n rows through all", "format, n", cases.formats),
    Measurement("graphs", 1, "SmolLM2-135M: a step after 256 tokens", "how it is started", cases.graphs),
    Measurement("attention", 2, "Attention of 9 query and 3 KV heads over T tokens", "T", cases.attention),
    Measurement("prompt", 3, "SmolLM2-135M: a prompt of T tokens", "T", cases.prompt),
    Measurement("context", 4, "SmolLM2-135M: a step after S tokens", "S", cases.context),
    Measurement("batch", 5, "SmolLM2-135M: a step of B sequences of 256 tokens", "B", cases.batch),
    Measurement("heads", 6, "Attention's step, 32 query heads, 8,192 tokens", "KV heads", cases.heads),
    Measurement("layer", 7, "One layer of Llama 3.1 8B, float32: n tokens", "n", cases.layer),
    Measurement("fp8", 8, "A product of n rows with 8192 × 8192", "format, n", cases.fp8),
    Measurement("latent", 10, "One layer of DeepSeek-V2-Lite: a step after S tokens", "S", cases.latent),
    Measurement("verify", 12, "SmolLM2-135M: n tokens to verify after 256", "n", cases.verify),
    Measurement("mamba", 14, "Mamba-130M: a step after S tokens", "S", cases.mamba),
    Measurement("hybrid", 15, "Eight layers of Jamba's order, width 512: a step after S", "mixers, S", cases.hybrid),
)


def take(
    bench: Bench,
    measurements: tuple[Measurement, ...] = MEASUREMENTS,
    *,
    seconds: float = 240,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure one after another, and return the record; what would begin after ``seconds`` is left out, and says so.

    The machine is read before and after each. Where the two readings differ by more than a tenth, it is measured
    once more, and marked ``disturbed`` if they still do. A measurement that fails leaves its error in the record.
    """
    start = time.perf_counter()
    gpu = None if bench.kind.on_host else bench.kind.name
    record: dict[str, Any] = {"format": FORMAT, **provenance(gpu)}
    record |= {"capability": bench.kind.capability, "clocks": clocks(bench.where), "gpu_processes": gpu_tenants()}
    record |= {"weights": bench.source or "random", "quick": bench.quick}
    if not bench.calibrations:
        bench.calibrations[torch.float32] = calibrate(bench.where)
    record["calibration"] = {f"{c.dtype}": c.as_dict() for c in bench.calibrations.values()}
    taken: dict[str, Any] = {}
    for one in measurements:
        entry: dict[str, Any] = {"chapter": one.chapter, "title": one.title, "across": one.across}
        if time.perf_counter() - start > seconds:
            entry["unavailable"] = f"left out: {seconds:.0f} s were over"
        else:
            try:
                with torch.inference_mode():
                    entry |= _taken(bench, one.prepare(bench))
            except Unavailable as reason:
                entry["unavailable"] = str(reason)
            except Exception as error:  # a rented GPU is there once: the rest is measured all the same
                entry["failed"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        taken[one.name] = entry
        say(f"{one.chapter:2}  {one.title}: {_word(entry)}")
    record |= {"measurements": taken, "seconds": round(time.perf_counter() - start, 1)}
    return record


def _taken(bench: Bench, prepared: Mapping[str, Case]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for tries in (1, 2):
        before = bench.reading()
        with watching() as load:
            times = bench.time(prepared)
        after = bench.reading()
        apart = max(abs(after[name] / before[name] - 1) for name in before)
        entry = {
            "tries": tries,
            "readings": {name: [_digits(before[name]), _digits(after[name])] for name in before},
            "disturbed": apart > _APART or load.disturbing,
            "stolen": None if load.stolen is None else _digits(load.stolen),
            "seconds": {
                label: {
                    "median": _digits(t.median), "low": _digits(t.low), "high": _digits(t.high), "n": t.n,
                    "predicted": None if (p := prepared[label].predicted) is None else _digits(p),
                }
                for label, t in times.items()
            },
        }  # fmt: skip
        if apart <= _APART:
            break
    return entry


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _word(entry: Mapping[str, Any]) -> str:
    if "seconds" not in entry:
        return str(entry.get("unavailable") or entry["failed"])
    times = ", ".join(f"{label}: {1e3 * t['median']:.3g} ms" for label, t in entry["seconds"].items())
    return times + (" (disturbed)" if entry["disturbed"] else "")
