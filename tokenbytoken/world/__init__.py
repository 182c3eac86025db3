"""What other people's systems reached, held against the model of time. Nothing here needs torch.

:mod:`tokenbytoken.world.measurements` is data: published figures, each with its source.
:mod:`tokenbytoken.world.floors` recomputes what the package says of the same system, and how far above it was measured.

>>> low, high = reached("lone decode")
>>> low > 1  # nobody was faster than the floor
True
"""

from __future__ import annotations

from .floors import binds, floor, launched, ratio, reached, room, rows_of, stored
from .measurements import KINDS, Kind, Measurement, Message, Pass, Rate, Read, Room, Stored, measurements

__all__ = [
    "KINDS", "Kind", "Measurement", "Message", "Pass", "Rate", "Read", "Room", "Stored", "binds", "floor",
    "launched", "measurements", "ratio", "reached", "room", "rows_of", "stored",
]  # fmt: skip
