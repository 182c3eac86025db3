"""The computer that measurements run on: its device, its name, and whether others use it at the same time."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..layers import devices

__all__ = ["busy", "device", "machine"]


def device() -> torch.device:
    """The device that measurements run on: the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_or(chosen: torch.device | str | None) -> torch.device:
    """``chosen`` as a device, or :func:`device` where nothing was chosen."""
    return device() if chosen is None else torch.device(chosen)


def machine(where: torch.device | str | None = None) -> str:
    """One marked line for a notebook: the device, its threads or capability, and whether it is busy."""
    where = device_or(where)
    kind = devices.kind(where)
    if kind.capability is not None:
        name = f"{kind.name}, compute capability {'.'.join(map(str, kind.capability))}"
    else:
        threads = torch.get_num_threads()
        name = f"{cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"
    return f"⟨{name}, torch {torch.__version__}; {busy() or 'otherwise idle'}⟩"


def busy() -> str | None:
    """A sentence when other processes load this machine, else None. Watches it for a fifth of a second."""
    with watching() as load:
        time.sleep(0.2)
    others = load.cores
    if others is None and hasattr(os, "getloadavg"):  # no /proc/stat (macOS): the last minute, ourselves included
        others = max(0.0, os.getloadavg()[0] - 1.0)
    if others is None or others < _BUSY:
        return None
    return f"other processes use {others:.1f} of {os.cpu_count()} cores: times will be longer and more scattered"


_BUSY = 0.25  # cores that others may use before a measurement is called disturbed


@dataclass
class Load:
    """What other processes used while :func:`watching`: so many cores, or None where that cannot be known.

    ``stolen`` of them went to other guests of the same host: a virtual machine sees their work only so.
    """

    cores: float | None = None
    stolen: float | None = None

    @property
    def disturbing(self) -> bool:
        """Whether a measurement is not to be trusted."""
        return self.cores is not None and self.cores > _BUSY


@contextmanager
def watching() -> Iterator[Load]:
    """Processor time that *others* spend while the block runs, in cores."""
    load = Load()
    begin, lost, own, wall = _cpu_seconds(), stolen_seconds(), time.process_time(), time.perf_counter()
    yield load
    end, taken, elapsed = _cpu_seconds(), stolen_seconds(), time.perf_counter() - wall
    # The kernel counts in ticks of 10 ms on each core: a shorter look sees nothing but rounding.
    if begin is not None and end is not None and elapsed > 0.1:
        load.cores = max(0.0, (end - begin - (time.process_time() - own)) / elapsed)
    if lost is not None and taken is not None and elapsed > 0.1:
        load.stolen = (taken - lost) / elapsed


def _cpu_seconds() -> float | None:
    """Busy seconds of all cores since boot, stolen time included; None where the kernel does not say."""
    ticks = _ticks()
    if ticks is None:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def stolen_seconds() -> float | None:
    """Seconds since boot that all cores were ready to run and the host served another guest; None if unknown."""
    ticks = _ticks()
    return None if ticks is None else ticks[7] / os.sysconf("SC_CLK_TCK")


def _ticks() -> list[int] | None:
    """The kernel's first eight counts of all cores together: user, nice, system, idle, iowait, irq, softirq, steal."""
    try:
        with open("/proc/stat") as stat:
            ticks = [int(count) for count in stat.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return ticks if len(ticks) == 8 else None


def cpu_model() -> str:
    """The name of the processor, as the system prints it."""
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def ram() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def driver() -> str | None:
    """The version of NVIDIA's driver, if there is one."""
    said = _nvidia("--query-gpu=driver_version")
    return said[0] if said else None


def clocks(where: torch.device) -> dict[str, float] | None:
    """Clocks now, in MHz, where the system shows them: a GPU's and its memory's, or the mean of a CPU's cores."""
    if where.type == "cuda":
        said = _nvidia("--query-gpu=clocks.sm,clocks.mem,clocks.max.sm", f"--id={where.index or 0}")
        try:
            now = [float(clock) for clock in said[0].split(",")] if said else []
        except ValueError:  # "[N/A]"
            return None
        return dict(zip(("gpu", "memory", "gpu at most"), now, strict=True)) if now else None
    try:
        with open("/proc/cpuinfo") as info:
            cores = [float(line.partition(":")[2]) for line in info if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    return {"cpu": round(sum(cores) / len(cores), 1)} if cores else None


def gpu_tenants() -> int | None:
    """How many processes compute on this machine's GPUs, ours included; None where the driver does not say."""
    said = _nvidia("--query-compute-apps=pid")
    return None if said is None else len(set(said))


def _nvidia(*query: str) -> list[str] | None:
    """Lines of NVIDIA's own tool, or None where it is missing or fails."""
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in said.splitlines() if line.strip()]
