"""``python -m tokenbytoken calibrate [DTYPE …]``: what this machine can do, measured and printed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..measure import Calibration

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "calibrate"
HELP = "measure this machine: bandwidth, FLOP/s by rows, the cost of a small operation"
_DTYPES = ("float32", "bfloat16", "float16")  # those that an accelerator knows by name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "dtypes",
        nargs="*",
        metavar="DTYPE",
        help=f"what to measure in, of {', '.join(_DTYPES)} (default float32 bfloat16)",
    )
    parser.epilog = "With TBT_RECORD=1 the calibration is kept under book/measurements/, unless others disturbed it."


def run(arguments: argparse.Namespace) -> int:
    """Calibrate on the GPU, if there is one, else on the CPU; print, and keep the record where one is asked for.

    Raises ValueError for a dtype that is not known, before anything is measured.
    """
    dtypes = arguments.dtypes or _DTYPES[:2]
    for name in dtypes:
        if name not in _DTYPES:
            raise ValueError(f"unknown dtype {name!r}: one of {', '.join(_DTYPES)}")
    import torch  # here, so that the commands that need no torch start without

    from ..measure import calibrate, device, machine

    where = device()
    print(machine())
    for name in dtypes:
        calibration = calibrate(where, getattr(torch, name), quick=False)
        print(calibration)
        if calibration.busy:
            print("not recorded: other processes disturbed it")
        else:
            _record(calibration)
    return 0


def _record(calibration: Calibration) -> None:
    from ..measure import record

    where = f"cpu-{calibration.threads}-threads" if calibration.device == "cpu" else "gpu"  # record() adds which
    record(
        f"calibration-{where}-{calibration.dtype}",
        calibration.as_dict(),
        command=f"TBT_RECORD=1 python -m tokenbytoken {NAME} {calibration.dtype}",
    )
