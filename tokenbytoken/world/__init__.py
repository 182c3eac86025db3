"""What other people's systems reached, held against the model of time. Nothing here needs torch.

:mod:`tokenbytoken.world.measurements` is data: published figures, each with its source.
:mod:`tokenbytoken.world.rows` is the book's ledger, which shows floors and how far above them others stayed.
:mod:`tokenbytoken.world.floors` recomputes what the package says of the same system, and how far above it was measured.

>>> low, high = reached("lone decode")
>>> low > 1  # nobody was faster than the floor
True
"""

from __future__ import annotations

from .floors import binds, floor, launched, middle, ratio, reached, room, rows_of, stored, typical
from .measurements import (
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
)
from .rows import Ledger, Row, book, ledger, row

__all__ = [
    "KINDS", "MISSED", "Kind", "Ledger", "Measurement", "Message", "Rate", "Read", "Reason", "Room",
    "Row", "Stored", "Timed", "binds", "book", "floor", "launched", "ledger", "measurements", "middle", "ratio",
    "reached", "room", "row", "rows_of", "stored", "typical",
]  # fmt: skip
