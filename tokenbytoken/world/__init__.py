"""What other people's systems reached, held against the model of time. Nothing here needs torch.

:mod:`tokenbytoken.world.measurements` is data: published figures, each with its source.
:mod:`tokenbytoken.world.floors` recomputes what the package says of the same system, and how far above it was measured.

>>> low, high = reached("lone decode")
>>> low > 1  # nobody was faster than the floor
True
"""

from __future__ import annotations

from .floors import binds, floor, launched, middle, ratio, reached, room, rows_of, stored
from .measurements import (
    BEATEN,
    KINDS,
    MISSED,
    Kind,
    Measurement,
    Message,
    Rate,
    Read,
    Reason,
    Room,
    Stored,
    Timed,
    measurements,
)  # fmt: skip

__all__ = [
    "BEATEN",
    "KINDS",
    "MISSED",
    "Kind",
    "Measurement",
    "Message",
    "Rate",
    "Read",
    "Reason",
    "Room",
    "Stored",
    "Timed",
    "binds",
    "floor",
    "launched",
    "measurements",
    "middle",
    "ratio",
    "reached",
    "room",
    "rows_of",
    "stored",
]  # fmt: skip
