"""The chapters' measurements in one run, on a CPU or a GPU, without a download: ``python -m tokenbytoken measure``."""

from __future__ import annotations

from .bench import Bench, Case, Unavailable
from .taking import FORMAT, MEASUREMENTS, Measurement, take

__all__ = ["FORMAT", "MEASUREMENTS", "Bench", "Case", "Measurement", "Unavailable", "take"]
