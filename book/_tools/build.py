"""Build the site with warnings as errors and nitpicky references, and say where to open it.

python book/_tools/build.py [SOURCE]        SOURCE: the repository's root, this one if left out
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = "import sys; from jupyter_book.cli.main import main; sys.exit(main())"


def build(source: Path) -> int:
    """The exit status of Jupyter Book: 0 only if there was no error and no warning.

    Always from nothing: what an earlier build remembers hides warnings, and can even stop a sound build when
    the bibliography changed.
    """
    for leftover in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(source / "_build" / leftover, ignore_errors=True)
    command = [
        sys.executable,
        "-c",
        LAUNCH,
        "build",
        str(source),
        "--warningiserror",
        "--nitpick",
        "--keep-going",
        "-q",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, default=ROOT)
    source = parser.parse_args().source.resolve()
    started = time.perf_counter()
    if status := build(source):
        print("The book was not built: see the warnings above.", file=sys.stderr)
        return status
    page = source / "_build" / "html" / "index.html"
    print(f"The book is built ({time.perf_counter() - started:.0f} s). Open {page.as_uri()}, or run `make serve`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
