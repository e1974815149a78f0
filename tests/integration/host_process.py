"""A process that is connected to a cluster and answers each line of JSON with another line.

`HostProcess` starts the process and asks it. The process uses `connect` and `answer`. `ask_once`
asks a program that takes one question and ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import ray

from tests.integration.cluster import Cluster, Failed

ROOT = Path(__file__).parents[2]


class HostProcess:
    """A handle on such a process.

    Args:
        cluster: the cluster that it connects to.
        module: the module that it runs.
    """

    def __init__(self, cluster: Cluster, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, cluster.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=cluster.environment,
            text=True,
        )

    def ask(self, question: object) -> Any:
        """Asks the process, and returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise Failed(f"the host ended with {self._process.wait()} at {question}")
        return json.loads(answer)

    def kill(self) -> None:
        """Kills the process, as if its node lost power."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Closes its input, and waits until the process has ended."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            finally:
                self._process.kill()


def connect() -> TextIO:
    """Connects this process to the cluster of its command line. Returns the output for answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints to standard output too
    ray.init(sys.argv[1], namespace="test", log_to_driver=False, logging_level="ERROR")
    return answers


def answer(answers: TextIO, ask: Callable[[Any], Any]) -> None:
    """Answers questions until the input ends."""
    for line in sys.stdin:
        answers.write(json.dumps(ask(json.loads(line))) + "\n")


def ask_once(cluster: Cluster, module: str, question: object) -> Any:
    """The answer of a program that takes one question as JSON and ends. Fails if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, cluster.address],
        cwd=ROOT,
        env=cluster.environment,
        input=json.dumps(question),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)
