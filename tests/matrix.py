"""The notebooks again, in every setting that may change a rounding: `make test-matrix`.

Threads change the order of sums; an older instruction set changes it too. ATEN_CPU_CAPABILITY steers PyTorch's
own kernels but not MKL and oneDNN, which have switches of their own. Each row is one nbval run over all of
book/, in another working directory and HOME, and must pass with the same stored outputs. The last row takes the place
of processors that this one is not: perturbed.py runs the chapters with the differences that their kernels may make.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stages import NBVAL, PYTEST, PYTHON, ROOT

OLD_LIBRARIES = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PERTURBED = [PYTHON, str(ROOT / "tests" / "perturbed.py")]


def flags() -> str:
    """The processor's feature flags, as Linux lists them; empty elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def settings() -> dict[str, dict[str, str]]:
    """Name and environment of each row, as far as this processor can run it."""
    capabilities = ["default", *(name for name, flag in (("avx2", "avx2"), ("avx512", "avx512f")) if flag in flags())]
    rows = {"1 thread": {"OMP_NUM_THREADS": "1"}, "2 threads": {"OMP_NUM_THREADS": "2"}}
    rows |= {f"ATen {name}": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": name} for name in capabilities}
    rows["MKL and oneDNN at AVX2"] = {"OMP_NUM_THREADS": "1", **OLD_LIBRARIES}
    return rows


def nbval(workers: str) -> list[str]:
    """The command that compares all of book/, from any working directory."""
    options = ("-n", workers, "--dist", "loadfile", "-p", "no:cacheprovider", "--rootdir", str(ROOT))
    sanitizer = [str(ROOT / word) if word.startswith("book/") else word for word in NBVAL]
    return [*PYTEST, *sanitizer, *options, "-c", str(ROOT / "pyproject.toml"), str(ROOT / "book")]


def run(command: list[str], environment: dict[str, str]) -> tuple[bool, str]:
    """Whether the command passed under this environment, and its closing line."""
    with tempfile.TemporaryDirectory(prefix="home ") as home:
        done = subprocess.run(
            command,
            cwd=home,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HOME": home, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0, lines[-1]


def main() -> int:
    results: list[bool] = []
    rows = {name: (nbval("1" if own["OMP_NUM_THREADS"] == "2" else "2"), own) for name, own in settings().items()}
    rows["perturbed"] = (PERTURBED, {})
    for name, (command, environment) in rows.items():
        started = time.perf_counter()
        passed, closing = run(command, environment)
        results.append(passed)
        verdict = "passed" if passed else "FAILED"
        print(f"{name:<24} {verdict}  {time.perf_counter() - started:5.0f} s   {closing}", flush=True)
    if "avx512f" not in flags():
        print("ATen avx512             not run: this processor has no AVX-512")
    print(f"\nmatrix: {sum(results)} passed, {len(results) - sum(results)} failed, 0 skipped")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
