"""Environment variables for fast CPU kernels of vLLM and torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def openmp_environment(num_threads: int) -> dict[str, str]:
    """Variables for a process that computes on CPU with ``num_threads`` threads.

    Intel's OpenMP is loaded before torch's if it is installed. vLLM expects it: its kernels are
    much slower without it.
    """
    variables = {
        "OMP_NUM_THREADS": str(num_threads),
        # As vLLM sets them for its own worker processes: threads sleep soon after a parallel
        # region, in milliseconds, without powering their core down.
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        # Large tensors of torch are in huge pages, so that weights and KV cache need fewer TLB
        # entries.
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),
    }
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    preload = os.environ.get("LD_PRELOAD", "")
    if "libiomp5" in preload:
        variables["LD_PRELOAD"] = preload
    elif openmp.exists():
        variables["LD_PRELOAD"] = f"{openmp}:{preload}".rstrip(":")
    return variables
