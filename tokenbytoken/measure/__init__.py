"""Measure this machine."""

from __future__ import annotations

from .counting import (
    Calibrated,
    Calibration,
    Count,
    Curve,
    PassPrediction,
    Timing,
    book_file,
    busy,
    calibrate,
    count,
    device,
    interleaved,
    machine,
    measured,
    record,
    reference,
    rule,
    show,
    timed,
)

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
