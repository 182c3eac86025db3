"""Measure this machine: what a pass costs on paper (count), in seconds (timed), and what to expect (calibrate).

The order is always the same: *count* the products and bytes of a pass, *calibrate* the machine on shapes that
are not the model's, predict, and only then time. :func:`show` prints the three side by side. Seconds, bytes
and FLOP/s are plain numbers in base units everywhere; a unit such as ``"ms"`` only says how to print them.

A measured value is printed between ⟨ and ⟩, and nothing else is: the notebook tests blank exactly that.
"""

from __future__ import annotations

from .._paths import book_file
from ..layers.operations import rule
from .calibration import Calibration, Curve, PassPrediction, calibrate
from .computer import busy, device, machine
from .counting import Count, count
from .printing import Calibrated, measured, show
from .records import record, reference
from .timing import Timing, interleaved, timed

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
