"""The record of a sweep: filled case by case, so that one that was stopped repeats only the case it was in."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import tokenbytoken as tbt

__all__ = ["Record", "asked_again", "provenance"]


def asked_again(description: str | None) -> bool:
    """Whether the command line of a sweep has ``--again``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="forget what was recorded")
    return bool(parser.parse_args().again)


def provenance(path: Path) -> dict[str, str]:
    """What made a record, and where and when."""
    return {
        "command": f"python book/experiments/{path.stem}.py",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": tbt.measure.machine().strip("⟨⟩").split(";")[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


class Record:
    """``values`` of a JSON file: its cases by name, the minutes of all runs together, and what else is known.

    ``again`` forgets what the file holds. Facts about the run are renewed each time it is opened.
    """

    def __init__(self, path: Path, *, again: bool = False, indent: int | None = 1, **facts: Any) -> None:
        self.path, self.indent = path, indent
        self.values: dict[str, Any] = {"minutes": 0.0, "cases": {}}
        if path.exists() and not again:
            self.values = json.loads(path.read_text(encoding="utf-8"))
        self.values |= provenance(path) | facts
        self.started = time.perf_counter()

    def __contains__(self, name: str) -> bool:
        return name in self.values["cases"]

    def keep(self, cases: Mapping[str, Any]) -> None:
        """Add what was found, and write the file, all or nothing."""
        self.values["cases"] |= cases
        now = time.perf_counter()
        self.values["minutes"] = round(self.values["minutes"] + (now - self.started) / 60, 2)
        self.started = now
        separators = (",", ":") if self.indent is None else None
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=self.indent, separators=separators) + "\n", encoding="utf-8")
        partial.replace(self.path)
