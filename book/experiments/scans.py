"""Three forms of the selective scan against the clock: time by length, and by number of channels.

    python book/experiments/scans.py             runs what is missing; writes scans.json beside it
    python book/experiments/scans.py --again     forgets what was recorded

One sequence, state size 16, float32, on the CPU or, if there is one, the GPU. Each case times the package's loop,
chunked and associative scan in interleaved rounds, after they were shown equal, and keeps what was counted: calls, and
the bytes that these read and write. What the machine needs for a call, an exponential and a byte is measured apart,
with one operation on other sizes. The run can be interrupted at any case; "minutes" adds up the time of all runs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resumable import Record, asked_again
from torch import Tensor

import tokenbytoken as tbt
from tokenbytoken.layers.mamba import Scan, selective_scan

RECORD = Path(__file__).resolve().with_suffix(".json")
N = 16
FORMS: tuple[Scan, ...] = ("loop", "chunked", "associative")
LENGTHS, CHANNELS = (64, 256, 1024, 4096), (4, 16, 64, 256, 1024)
GRID = [(T, 64) for T in LENGTHS] + [(T, 16) for T in (*LENGTHS, 16_384)] + [(1024, I) for I in CHANNELS]
NUMBERS = (2**16, 2**19, 2**22, 2**24)  # in each operand, when bytes are timed


def inputs(T: int, I: int, device: torch.device) -> list[Tensor]:
    """x, Δ, A, B, C and the state before, as at the start of a training (Δ from 0.001 to 0.1, A from −1 to −16)."""
    rng = np.random.default_rng(13)
    x, B, C, h = (rng.standard_normal(shape) for shape in ((1, T, I), (1, T, N), (1, T, N), (1, I, N)))
    delta = 10 ** rng.uniform(-3, -1, (1, T, I))
    A = np.broadcast_to(-np.arange(1.0, N + 1), (I, N))
    return [torch.tensor(array, dtype=torch.float32, device=device) for array in (x, delta, A, B, C, h)]


def costs(device: torch.device) -> dict[str, Any]:
    """Seconds of a call on a small slice and of one exponential, and bytes a second by the bytes that are touched."""
    a, b, h = torch.ones(100, 48, device=device), torch.ones(100, 48, device=device), torch.ones(48, device=device)

    def calls() -> None:
        for a_t, b_t in zip(a, b, strict=True):
            b_t.addcmul_(a_t, h)

    rates = []
    for numbers in NUMBERS:
        x, y, z = torch.ones(3, numbers, device=device)
        seconds = tbt.measure.timed(partial(x.addcmul_, y, z), repeats=9, device=device).median
        rates.append([12 * numbers, float(f"{16 * numbers / seconds:.4g}")])  # three touched and read, one written
    call = tbt.measure.timed(calls, repeats=31, device=device).median / 100
    z = torch.full((2**16,), -0.5, device=device)
    exponential = tbt.measure.timed(z.exp, repeats=31, device=device).median / 2**16
    return {"call": float(f"{call:.4g}"), "exponential": float(f"{exponential:.4g}"), "rate": rates}


def case(T: int, I: int, device: torch.device) -> dict[str, Any]:
    """One cell of the grid: by form milliseconds (median and quartiles), calls, and bytes of traffic."""
    arguments = inputs(T, I, device)
    forms: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        form: partial(selective_scan, *arguments, scan=form) for form in FORMS
    }
    want = forms["loop"]()[0]
    for form in forms.values():
        assert torch.allclose(form()[0], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    counted = {form: tbt.measure.count(run) for form, run in forms.items()}
    repeats = 15 if T * I <= 2**16 else 5 if T * I <= 2**18 else 3
    times = tbt.measure.interleaved(forms, repeats=repeats, warmup=0, device=device)
    return {
        form: {
            "ms": [float(f"{1e3 * value:.4g}") for value in (t.median, t.low, t.high)],
            "calls": counted[form].operations,
            "traffic": counted[form].traffic,
            "flops": counted[form].flops,
            "busy": t.busy,
        }
        for form, t in times.items()
    }


def main() -> None:
    again, device = asked_again(__doc__), tbt.measure.device()
    machine = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "name": tbt.measure.machine(device).strip("⟨⟩").split(";")[0],
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    record = Record(RECORD, again=again, machine=machine)
    for T, I in GRID:
        if f"{T}/{I}" in record:
            continue
        with torch.inference_mode():
            if "costs" not in record.values:
                record.values["costs"] = costs(device)
            result = case(T, I, device)
        record.keep({f"{T}/{I}": result})
        times = ", ".join(f"{form} {entry['ms'][0]:.4g} ms" for form, entry in result.items())
        print(f"T = {T:6}, I = {I:5}: {times}", flush=True)


if __name__ == "__main__":
    main()
