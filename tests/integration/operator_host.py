"""Runs commands of ``specserve`` in one process, so that each is spared the imports."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from specserve.cli.main import main as specserve
from tests.integration.cluster import Cluster
from tests.integration.host_process import HostProcess


class Said(NamedTuple):
    """A command's exit code, and what it printed."""

    code: int
    stdout: str
    stderr: str


class Operator(HostProcess):
    """Runs commands as an operator does.

    Args:
        cluster: the cluster that the commands address.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, __name__)

    def __call__(self, *arguments: object) -> Said:
        """Runs ``specserve ARGUMENTS``."""
        return Said(*self.ask([*map(str, arguments)]))


def main() -> None:
    """Runs the commands that it reads."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints to standard output too
    for line in sys.stdin:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = specserve(json.loads(line))
        answers.write(json.dumps(Said(code, out.getvalue(), err.getvalue())) + "\n")


if __name__ == "__main__":
    main()
