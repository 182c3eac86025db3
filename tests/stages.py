"""The stages of `make test`, one after another, with the time of each.

    python tests/stages.py               all stages
    python tests/stages.py lint rules    these only

Later stages run after a failed one, so that one call shows everything that is wrong; the exit status is 0
only if every stage passed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest")
# One notebook's cells stay on one worker; a cell that hangs ends in minutes, not with CI's patience.
NBVAL = ("--nbval", "--nbval-sanitize-with", "book/_tools/nbval_sanitize.cfg", "--nbval-cell-timeout", "120")
APART = ("tests/test_notebooks.py", "tests/test_site.py", "tests/test_colab.py")
WORKFLOWS = (".github/workflows/pages.yml", ".github/workflows/test.yml")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed)")


@dataclass(frozen=True)
class Stage:
    name: str
    commands: tuple[tuple[str, ...], ...]
    parallel: bool = False  # runs on two workers with one thread each


def module(name: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *arguments)


STAGES = (
    Stage(
        "lint",
        (
            module("ruff", "check", "."),
            module("mypy"),
            module("yamllint", "--strict", "-c", ".yamllint.yml", ".github", "_config.yml", "_toc.yml", "CITATION.cff"),
            module("check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS),
            module("check_jsonschema", "--builtin-schema", "custom.github-workflows-require-timeout", *WORKFLOWS),
            module("check_jsonschema", "--builtin-schema", "vendor.citation-file-format", "CITATION.cff"),
        ),
    ),
    Stage("package", ((*PYTEST, "tests", "-n", "2", *(f"--ignore={path}" for path in APART)),), parallel=True),
    Stage("nbval", ((*PYTEST, *NBVAL, "-n", "2", "--dist", "loadfile", "book"),), parallel=True),
    Stage("rules", ((*PYTEST, "tests/test_notebooks.py"),)),
    Stage("book", ((PYTHON, "book/_tools/colab.py"), (PYTHON, "book/_tools/build.py"))),
    # A browser for each worker; the pages differ tenfold in size, and so the worker that is done takes from the other.
    Stage("browser", ((*PYTEST, "tests/test_site.py", "-n", "2", "--dist", "worksteal"),), parallel=True),
    Stage("colab", ((*PYTEST, "tests/test_colab.py"),)),
)


def run(command: tuple[str, ...], environment: dict[str, str], counts: dict[str, int]) -> bool:
    """Run, show the output as it comes, add pytest's closing counts; True if it succeeded."""
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if "pytest" in command and COUNT.search(line) and " in " in line:
                last = line
    for number, word in COUNT.findall(last):
        counts[word.rstrip("s") if word.startswith("error") else word] += int(number)
    return process.returncode == 0


def main() -> int:
    wanted = sys.argv[1:] or [stage.name for stage in STAGES]
    if unknown := set(wanted) - {stage.name for stage in STAGES}:
        print(f"no such stage: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    counts = dict.fromkeys(("passed", "failed", "error", "skipped", "xfailed"), 0)
    times: list[tuple[str, float, bool]] = []
    for stage in STAGES:
        if stage.name not in wanted:
            continue
        print(f"\n== {stage.name}", flush=True)
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        if stage.parallel:
            environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        started = time.perf_counter()
        results = [run(command, environment, counts) for command in stage.commands]  # all, after a failure too
        times.append((stage.name, time.perf_counter() - started, all(results)))

    print("\nstage          time")
    for name, seconds, passed in times:
        print(f"{name:<10} {seconds:6.0f} s   {'' if passed else 'FAILED'}".rstrip())
    print(f"{'together':<10} {sum(seconds for _, seconds, _ in times):6.0f} s\n")
    failed = counts["failed"] + counts["error"]
    print(f"tests: {counts['passed']} passed, {failed} failed, {counts['skipped']} skipped")
    return 0 if all(passed for _, _, passed in times) else 1


if __name__ == "__main__":
    sys.exit(main())
