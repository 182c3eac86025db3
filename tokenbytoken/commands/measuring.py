"""``python -m tokenbytoken measure --out record.json``: all chapters' measurements on this machine, in one record."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "measure"
HELP = "measure what the chapters measure, on the GPU if there is one, and write one record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="where the record goes, as JSON")
    parser.add_argument("--weights", metavar="SOURCE", help="real weights for SmolLM2 (smollm2-135m); else random ones")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.epilog = "Nothing is downloaded. `make records RECORD=FILE` shows the record in the book."


def run(arguments: argparse.Namespace) -> int:
    """Measure and write; 1 where a measurement failed. Raises ValueError for bad input, before anything is measured."""
    out: Path = arguments.out
    _check(out)
    from ..measure import device  # here, so that the commands that need no torch start without
    from ..measure.kit import Bench, take
    from ..measure.records import write_json

    if arguments.weights is not None:
        from ..checkpoints import find

        find(arguments.weights)
    record = take(Bench(device(), arguments.quick, arguments.weights))
    words = ["python -m tokenbytoken measure", f"--out {out.name}"]
    words += [f"--weights {arguments.weights}"] * (arguments.weights is not None) + ["--quick"] * arguments.quick
    write_json(out, record | {"command": " ".join(words)})
    failed = [name for name, entry in record["measurements"].items() if "failed" in entry]
    print(f"wrote {out.name} after {record['seconds']:.0f} s" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def _check(out: Path) -> None:
    if out.is_dir() or out.suffix != ".json":
        raise ValueError(f"--out must name a .json file, not {str(out)!r}")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {str(out.parent)!r} to write {out.name} into")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"the folder {str(out.parent)!r} cannot be written to")
    if out.exists():
        try:
            kept = json.loads(out.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = None
        if not isinstance(kept, dict) or not str(kept.get("format", "")).startswith("tokenbytoken measure"):
            raise ValueError(f"{out.name} exists and is no record of this command: it is not overwritten")
