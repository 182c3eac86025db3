"""Run chapters top to bottom in a clean kernel and store what they print.

    python book/_tools/execute.py book/*.ipynb                 run, clean, save
    python book/_tools/execute.py --record-times book/*.ipynb  and record seconds per chapter
    python book/_tools/execute.py --keep-measured book/*.ipynb run, and keep the recorded run where it is reproduced

With --keep-measured, a cell that prints the same as before, readings between ⟨ and ⟩ aside, keeps its stored
output. The readings then remain those of the recorded run, which the prose quotes; every other change is stored.
recorded.py says why that is honest, and where it is not enough. Without it, everything is measured anew.

A notebook is saved only if every cell ran without an error and without a line on stderr; otherwise the
file stays as it was and the exit status is 1. What is saved holds nothing of the machine or the moment:
no time stamps, no paths, execution counts 1…n, cell ids that depend on the source alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import recorded
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
RECORD = "run_times"  # book/measurements/run_times.json
COMMAND = "python book/_tools/execute.py --record-times book/*.ipynb"
BUDGET = 60  # seconds a chapter may take on 2 cores
KERNELSPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}
KEPT_METADATA = ("title", "authors", "mystnb")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Refused(Exception):
    """The notebook ran, or failed to, in a way that must not be published."""


def kernel_environment(name: str) -> dict[str, str]:
    """The kernel's environment: this checkout's package, no spinning threads, and for records the notebook's name."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path, "TBT_NOTEBOOK": f"book/{name}"}


def run(notebook: NotebookNode, path: Path, timeout: float) -> float:
    """Execute in place, in a new kernel started beside `path`; return the seconds, kernel start included."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    started = time.perf_counter()
    try:
        # The kernel's own start-up remarks; what a cell writes to stderr still arrives as an output.
        client.execute(env=kernel_environment(path.name), stderr=subprocess.DEVNULL)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise Refused(f"{where(notebook)}\n{COLOUR.sub('', str(error)).rstrip()}") from error
    return time.perf_counter() - started


def where(notebook: NotebookNode) -> str:
    """The cell that execution stopped at: the last one that holds an output or a count."""
    reached = [i for i, cell in enumerate(notebook.cells) if cell.get("execution_count") or cell.get("outputs")]
    return f"cell {reached[-1] + 1} of {len(notebook.cells)}" if reached else "before the first cell"


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighbouring pieces of one stream, which the kernel splits wherever its buffer was flushed."""
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def clean(notebook: NotebookNode) -> None:
    """Drop everything that depends on the machine or the moment, in place."""
    kept = {key: notebook.metadata[key] for key in KEPT_METADATA if key in notebook.metadata}
    notebook.metadata = nbformat.from_dict({**kept, "kernelspec": KERNELSPEC, "language_info": LANGUAGE})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    # An empty code cell never runs, so it would leave a gap in the counts.
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    count, ids = 0, set()
    for cell in notebook.cells:
        for key in ("execution", "collapsed", "scrolled", "jupyter"):
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = merge_streams(cell.outputs)
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = count
        # Ids from the source: an unchanged cell keeps its id through a jupytext round trip.
        cell.id = next(name for salt in itertools.count() if (name := recorded.cell_id(cell, salt)) not in ids)
        ids.add(cell.id)


def refuse_stderr(notebook: NotebookNode) -> None:
    for index, cell in enumerate(notebook.cells, start=1):
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise Refused(f"cell {index} writes to stderr:\n{output.text.rstrip()}\n--- the cell\n{cell.source}")


def refuse_paths(notebook: NotebookNode) -> None:
    """Outputs that name a folder of this machine cannot be compared on another one."""
    folders = {str(ROOT), str(Path.home()), sys.prefix} - {"/"}
    for index, cell in enumerate(notebook.cells, start=1):
        text = json.dumps(cell.get("outputs", []))
        if found := next((folder for folder in sorted(folders, key=len) if folder in text), None):
            raise Refused(f"cell {index} prints the path {found} of this machine:\n{cell.source}")


def execute(path: Path, timeout: float = 600, *, keep_measured: bool = False) -> float:
    """Run `path`, save it cleaned, return its seconds. Raises Refused and leaves the file alone on any fault."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    stored = recorded.stored_outputs(notebook, recorded.committed(path)) if keep_measured else None
    seconds = run(notebook, path, timeout)
    clean(notebook)
    refuse_stderr(notebook)
    refuse_paths(notebook)
    if stored is not None:
        print(f"{path.name}\n{recorded.keep(notebook, stored)}", flush=True)
    nbformat.validate(notebook)
    scratch = path.with_suffix(".ipynb.part")
    nbformat.write(notebook, scratch)
    scratch.replace(path)
    return seconds


def record(seconds: dict[str, float]) -> None:
    """Merge seconds per chapter into the committed record, unless that was made on another machine."""
    from tokenbytoken import measure

    try:
        old = measure.reference(RECORD)
    except ValueError:
        old = {"payload": {"seconds": {}}}
    rounded = {name: round(value, 1) for name, value in seconds.items()}
    os.environ["TBT_RECORD"] = "1"  # only now: a chapter that records something of its own is another command
    measure.record(RECORD, {"seconds": rounded}, command=COMMAND)
    new = measure.reference(RECORD)
    if all(old.get(key) == new[key] for key in ("device", "cpu", "threads")):
        merged = {**old["payload"]["seconds"], **rounded}
        measure.record(RECORD, {"seconds": dict(sorted(merged.items()))}, command=COMMAND)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a single cell may take")
    parser.add_argument("--record-times", action="store_true", help=f"write book/measurements/{RECORD}.json")
    parser.add_argument("--keep-measured", action="store_true", help="keep readings whose cells print the same")
    arguments = parser.parse_args()
    if arguments.keep_measured and os.environ.get("TBT_RECORD") == "1":
        parser.error("TBT_RECORD=1 writes the new readings down, --keep-measured keeps the old ones: choose one")

    seconds: dict[str, float] = {}
    failed = 0
    for path in arguments.notebooks:
        try:
            seconds[path.stem] = execute(path, arguments.timeout, keep_measured=arguments.keep_measured)
        except Refused as fault:
            failed += 1
            print(f"{path}: not saved: {fault}\n", file=sys.stderr, flush=True)
        else:
            over = f"   over the budget of {BUDGET} s" if seconds[path.stem] > BUDGET else ""
            size = f"{path.stat().st_size / 1e3:7,.0f} kB"
            print(f"{path.name:<32} {seconds[path.stem]:6.1f} s {size}{over}", flush=True)
    if len(seconds) > 1:
        print(f"{'together':<32} {sum(seconds.values()):6.1f} s")
    chapters = {name: value for name, value in seconds.items() if re.match(r"\d\d_", name)}
    if arguments.record_times and chapters:
        record(chapters)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
