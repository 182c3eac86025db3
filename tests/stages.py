"""The stages of `make test`, with the time of each.

    python tests/stages.py               all stages
    python tests/stages.py lint rules    these only

Those that keep one core busy come first, two at a time, and what one of them says comes in one piece when it ends;
then those with two workers, one after another. All run, also after one that failed, so that one call shows everything
that is wrong; the exit status is 0 only if every stage passed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    Stage("book", ((PYTHON, "book/_tools/colab.py"), (PYTHON, "book/_tools/build.py"))),
    Stage("rules", ((*PYTEST, "tests/test_notebooks.py"),)),
    # Halves, so that what the tests of a file share is made on one worker; who is done takes from the other.
    Stage(
        "package",
        ((*PYTEST, "tests", "-n", "2", "--dist", "worksteal", *(f"--ignore={path}" for path in APART)),),
        parallel=True,
    ),
    Stage("nbval", ((*PYTEST, *NBVAL, "-n", "2", "--dist", "loadfile", "book"),), parallel=True),
    # A browser for each worker; the pages differ tenfold in size, and so the worker that is done takes from the other.
    Stage("browser", ((*PYTEST, "tests/test_site.py", "-n", "2", "--dist", "worksteal"),), parallel=True),
    Stage("colab", ((*PYTEST, "tests/test_colab.py", "-n", "2", "--dist", "worksteal"),), parallel=True),
)


@dataclass(frozen=True)
class Outcome:
    name: str
    seconds: float
    passed: bool
    counts: Counter[str]


def run(command: tuple[str, ...], environment: dict[str, str], say: Callable[[str], None]) -> tuple[bool, Counter[str]]:
    """Run and hand on the output as it comes; whether it succeeded, and pytest's closing counts."""
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line)
            if "pytest" in command and COUNT.search(line) and " in " in line:
                last = line
    counts: Counter[str] = Counter()
    for number, word in COUNT.findall(last):
        counts[word.rstrip("s") if word.startswith("error") else word] += int(number)
    return process.returncode == 0, counts


def perform(stage: Stage, alone: bool) -> Outcome:
    """All commands, after a failed one too; what they say is shown as it comes, or at the end if not alone."""
    held: list[str] = []

    def say(text: str) -> None:
        print(text, end="", flush=True) if alone else held.append(text)

    say(f"\n== {stage.name}\n")
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if stage.parallel or not alone:
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started = time.perf_counter()
    results = [run(command, environment, say) for command in stage.commands]
    seconds = time.perf_counter() - started
    print("".join(held), end="", flush=True)
    return Outcome(
        stage.name, seconds, all(passed for passed, _ in results), sum((found for _, found in results), Counter())
    )


def main() -> int:
    wanted = sys.argv[1:] or [stage.name for stage in STAGES]
    if unknown := set(wanted) - {stage.name for stage in STAGES}:
        print(f"no such stage: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [stage for stage in STAGES if stage.name in wanted]
    single = [stage for stage in chosen if not stage.parallel]
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda stage: perform(stage, alone=len(single) == 1), single))
    outcomes += [perform(stage, alone=True) for stage in chosen if stage.parallel]

    print("\nstage          time")
    for outcome in outcomes:
        print(f"{outcome.name:<10} {outcome.seconds:6.0f} s   {'' if outcome.passed else 'FAILED'}".rstrip())
    print(f"{'together':<10} {time.perf_counter() - started:6.0f} s\n")
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    print(f"tests: {counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
