"""Reference runs: measured numbers kept as JSON beside the book, with where, when and how they were made."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .._paths import BOOK
from .computer import busy, cpu_model, driver

__all__ = ["provenance", "record", "record_path", "reference", "write_json"]

_RECORDS = BOOK / "measurements"


def record(name: str, payload: Mapping[str, Any], *, command: str | None = None) -> Path | None:
    """Keep a reference run under ``book/measurements/``, with where, when and how it was made.

    A run on the CPU is ``<name>.json``, one on a GPU ``<name>.<gpu>.json``, so that neither replaces the other. Writes
    only when the environment has ``TBT_RECORD=1``, and returns the path; otherwise does nothing and
    returns None, so that a chapter may call it on every machine. ``payload`` is JSON of plain numbers.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    path = record_path(name, gpu)
    if os.environ.get("TBT_RECORD") != "1":
        return None
    write_json(path, {"name": name, **provenance(gpu), "command": command or _command(), "payload": payload})
    return path


def provenance(gpu: str | None) -> dict[str, Any]:
    """Where and when: device (a GPU's name, or none for the CPU), driver, processor, threads, versions, load, date."""
    return {
        "device": gpu or "cpu",
        "driver": driver() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "cpu": cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "busy": busy(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def write_json(path: Path, entry: Mapping[str, Any]) -> None:
    """Write a record whole or not at all; a folder that is missing is made. ValueError for what JSON cannot hold."""
    text = json.dumps(entry, indent=1, ensure_ascii=False, allow_nan=False)  # fails before the old file is gone
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)  # a run that is stopped leaves the old record whole


def reference(name: str, gpu: str | None = None) -> dict[str, Any]:
    """A committed reference run: ``payload``, and ``device``, ``cpu``, ``torch``, ``date``, ``command`` …

    That of the CPU, or of a ``gpu`` by the name that its driver gives it. Raises ValueError, naming those that exist,
    when there is none of this name.
    """
    path = record_path(name, gpu)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in _RECORDS.glob("*.json"))) or "none"
        raise ValueError(f"there is no reference run {name!r} (there are: {known})")
    entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return entry


def record_path(name: str, gpu: str | None = None) -> Path:
    """Where the record of this name is kept, of the CPU or of a GPU. ValueError for a name that is no file's."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(f"a record's name has small letters, digits, '.', '_' and '-', not {name!r}")
    where = "" if gpu is None else "." + re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return _RECORDS / f"{name}{where}.json"


def _command() -> str:
    """The command line, without the folders of the machine it ran on."""
    if os.path.basename(sys.argv[0]) == "ipykernel_launcher.py":
        return f"TBT_RECORD=1 make execute NB={os.environ.get('TBT_NOTEBOOK', 'book/…')}"
    return shlex.join(["python", *(os.path.basename(a) if os.path.isabs(a) else a for a in sys.argv)])
