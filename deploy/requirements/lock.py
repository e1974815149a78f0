"""Resolves a requirements file into a full lock: ``lock.py cpu.in cpu.txt``.

The lock contains ``name==version`` lines only. pip's configuration on the installing machine
decides where packages come from. Install the lock with ``--no-deps``, so that the packages of
``LEFT_OUT`` stay out. vLLM's CPU package requires them, but their builds on the package index need
CUDA. On a CPU they break the import of transformers' image code. specserve does not need them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton", "nvidia-*", "cuda-*")


def resolve(requirements: Path) -> dict[str, Any]:
    """Returns pip's installation report for ``requirements`` in an empty environment."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", str(report), "-r", str(requirements)]
        subprocess.run(command, check=True)
        answer: dict[str, Any] = json.loads(report.read_text())
        return answer


def lines(report: dict[str, Any]) -> list[str]:
    """Returns the lock's lines, sorted, with package names normalized by PEP 503."""
    pins = []
    for item in report["install"]:
        metadata = item["metadata"]
        name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
        if not any(fnmatch(name, pattern) for pattern in LEFT_OUT):
            pins.append(f"{name}=={metadata['version']}")
    return sorted(pins)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    pins = lines(resolve(source))
    target.write_text("\n".join(pins) + "\n")
    print(f"{target}: {len(pins)} packages")
