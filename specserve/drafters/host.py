"""A drafter in a child process, for an engine without a Ray cluster.

    python -m specserve.drafters.host '{"kind": "mtp", ...}'

prints one line on standard output: the address with its secret, or why the drafter did not start.
It ends when standard input is closed, as when its parent ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

from specserve.core.errors import EngineError, SpecServeError
from specserve.core.openmp import openmp_environment
from specserve.drafters.options import FAILED_BACKOFF_S, DrafterOptions, serve


class HostedDrafter:
    """Starts a drafter in a child process, and restarts it after it has ended.

    Args:
        options: the drafter's options.
        gpu: the only GPU that it sees, as in ``CUDA_VISIBLE_DEVICES``; empty: those of the parent,
            of which it uses the first.
    """

    def __init__(self, options: DrafterOptions, gpu: str = "") -> None:
        self._options = options
        self._gpu = gpu
        self._process: subprocess.Popen[str] | None = None
        self._address = ""
        self._failure, self._rest_until = "", 0.0
        self._is_closed = False

    def __call__(self) -> str:
        """The drafter's address; waits until its model is loaded.

        Raises:
            EngineError: it was closed, or it did not start. If it has never started, it is not
                tried again. Otherwise the next try is after ``FAILED_BACKOFF_S`` seconds.
        """
        if self._failure and (not self._address or time.monotonic() < self._rest_until):
            raise EngineError(self._failure)
        if self._is_closed:
            raise EngineError("the drafter was closed")
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._address

    def close(self) -> None:
        """Kills the drafter, even while it loads its model. It is not started again."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        environment = os.environ | openmp_environment(self._options.num_threads)
        if self._gpu:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpu
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(asdict(self._options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        if self._is_closed:  # meanwhile, in another thread
            self._kill()
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line.startswith("tcp://"):
            self._address, self._failure = line, ""
        else:
            reason = line or f"it ended with exit code {self._process.wait()}"
            self._kill()
            self._failure = f"the drafter did not start: {reason}"
            self._rest_until = time.monotonic() + FAILED_BACKOFF_S
            raise EngineError(self._failure)


def main() -> None:
    """Runs the child process."""
    options = DrafterOptions(**json.loads(sys.argv[1]))
    # Output of libraries goes to stderr: the parent reads the first line of stdout as the address.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        server = serve(options, "tcp://127.0.0.1:0")
    except SpecServeError as error:
        print(error, file=answers, flush=True)
        sys.exit(1)
    except Exception as error:
        print(f"{type(error).__name__}:", *str(error).split(), file=answers, flush=True)
        raise
    print(server.address, file=answers, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
