"""The child's side of :mod:`specserve.compare.engine_process`: builds the engine, runs, reports.

Run as ``python -m specserve.compare.engine_child FD`` with the number of an inherited pipe.
"""

from __future__ import annotations

import sys
import time
import traceback
from multiprocessing.connection import Connection

from specserve.compare.engine_process import Failed, Progressed, Ready, Run, Start
from specserve.core.errors import SpecServeError, shorten

PROGRESS_INTERVAL_S = 0.25
"""Progress is told at most this often; it also is how a child notices that its parent is gone."""


def main(connection: Connection) -> None:
    """Serves one parent until it closes the pipe."""
    try:
        _serve(connection)
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return
    except SpecServeError as error:
        connection.send(Failed(str(error)))
    except Exception as error:
        traceback.print_exc()
        connection.send(Failed(f"{type(error).__name__}: {shorten(str(error), 300)}"))


def _serve(connection: Connection) -> None:
    start = connection.recv()
    assert isinstance(start, Start)
    began = time.perf_counter()
    # Importing vLLM takes seconds, and only here may it happen.
    from specserve.engine.offline import OfflineEngine

    engine = OfflineEngine(start.config, start.method)
    try:
        connection.send(Ready(time.perf_counter() - began))
        while True:
            run = connection.recv()
            assert isinstance(run, Run)
            progress = _Progress(connection)
            connection.send(engine.run(run.jobs, run.concurrency, progress))
    finally:
        engine.close()


class _Progress:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._told = time.perf_counter()

    def __call__(self, num_done: int, num_tokens: int) -> None:
        now = time.perf_counter()
        if now - self._told >= PROGRESS_INTERVAL_S:
            self._told = now
            self._connection.send(Progressed(num_done, num_tokens))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
