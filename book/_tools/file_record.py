"""Put a record of ``python -m tokenbytoken measure`` into the book, under the name of its machine.

    python book/_tools/file_record.py record.json

A record of another machine is left alone; an older one of the same machine is replaced. Then the page is written anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import front_matter

from tokenbytoken.measure import kit, records


def filed(path: Path) -> Path:
    """Where the record is now. Raises ValueError for a file that holds none."""
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read as a record: {error}") from None
    if not isinstance(record, dict) or record.get("format") != kit.FORMAT:
        raise ValueError(f"{path.name} is no record of `python -m tokenbytoken measure`")
    if record["quick"]:
        raise ValueError(f"{path.name} was measured with --quick: the book shows whole records")
    machine = record["device"] if record["device"] != "cpu" else f"{record['cpu']} {record['threads']} threads"
    target = records.record_path("kit", machine)
    about = {key: value for key, value in record.items() if key != "measurements"}
    records.write_json(target, {"name": target.stem, **about, "payload": record["measurements"]})
    return target


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python book/_tools/file_record.py record.json (make records RECORD=record.json)", file=sys.stderr)
        return 2
    try:
        print(f"filed as book/measurements/{filed(Path(sys.argv[1])).name}")
    except ValueError as error:
        print(f"file_record: {error}", file=sys.stderr)
        return 2
    page = "_generated/measurements.md"
    (front_matter.BOOK / page).write_text(front_matter.measurements(), encoding="utf-8")
    print(f"wrote book/{page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
