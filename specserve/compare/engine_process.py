"""An engine in a process of its own, so that methods share neither memory nor state.

The child is ``python -m specserve.compare.engine_process FD FOLDER``. FD is an inherited pipe;
FOLDER is for vLLM's files and is removed when the child ends. The parent sends the configuration
and the method; the child answers None when the engine is ready. For each run the parent sends the
jobs and the concurrency. The child sends progress, new texts if asked to, and a ``RunResult``. An
empty tuple from the parent stops the run; the answer is None. On a failure the child sends an
``EngineError`` and ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from specserve.core.config import AppConfig
from specserve.core.errors import EngineError, MissingExtraError, SpecServeError, shorten
from specserve.core.importing import without_collections
from specserve.core.openmp import openmp_environment
from specserve.core.sockets import RPC_BASE_PATH, takes_sockets
from specserve.engine.generation import Completion, Job, RunResult, Show
from specserve.engine.methods import HF, Method

STOP_TIMEOUT_S = 20.0
"""How long :meth:`EngineProcess.close` waits before it kills the child."""

PROGRESS_INTERVAL_S = 0.25
"""Shortest interval between progress messages. Sending one also shows whether the parent lives."""


class EngineProcess:
    """Handle on a child process with one engine, which uses no CPU while idle.

    It is a context manager, for one thread.

    Raises:
        MissingExtraError: vLLM is not installed.
    """

    def __init__(self, config: AppConfig, method: Method) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtraError(f"method {method}")
        self.method = method
        ours, theirs = Pipe()
        self._connection: Connection = ours
        # vLLM's output: only its last line is shown, when the child dies.
        self._log = tempfile.TemporaryFile(prefix="specserve-engine-")  # noqa: SIM115
        # vLLM's temporary files; a killed vLLM does not remove them itself.
        self._folder = tempfile.TemporaryDirectory(
            prefix="ss-", dir=os.environ.get(RPC_BASE_PATH), ignore_cleanup_errors=True
        )
        folder, environment = self._folder.name, engine_environment(config)
        if takes_sockets(Path(folder)):
            environment[RPC_BASE_PATH] = folder
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), folder],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        self._send(config, method)

    def wait_ready(self) -> None:
        """Blocks until the engine is ready.

        Raises:
            EngineError: the engine did not start; the message is one line.
        """
        received = self._receive()
        assert received is None, received

    def run(
        self,
        jobs: Sequence[Job],
        concurrency: int,
        progress: Callable[[int, int], None] = lambda num_done, num_tokens: None,
        show: Show | None = None,
    ) -> RunResult:
        """Continues all jobs, at most ``concurrency`` at a time.

        Raises:
            EngineError: the engine died, or refused a prompt.
            KeyboardInterrupt: after Ctrl-C; the jobs have ended and the engine can run others.
        """
        self._send(tuple(jobs), concurrency, show is not None)
        try:
            while not isinstance(message := self._receive(), RunResult):
                if len(message) == 3:
                    assert show is not None
                    show(*message)
                else:
                    progress(*message)
        except KeyboardInterrupt:
            self._send()
            while not isinstance(self._receive(), RunResult | None):
                pass
            raise
        return message

    def close(self) -> None:
        """Ends the child and removes its files; kills it after :data:`STOP_TIMEOUT_S`."""
        self._connection.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._kill()
            self._log.close()
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._kill()
        self.close()

    def _send(self, *message: object) -> None:
        # If the child has died, `_receive` raises the error.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def _receive(self) -> Any:
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._kill()
            raise EngineError(f"method {self.method}: {self._exit_reason()}") from None
        if isinstance(message, EngineError):
            raise message
        return message

    def _kill(self) -> None:
        """Kills the child's process group, which includes the child's own children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _exit_reason(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else "no output"
        return f"the engine's process ended with {self._process.returncode}: {last}"


class _Stopped(Exception):
    """The parent has asked to end the run."""


def engine_environment(config: AppConfig) -> dict[str, str]:
    """The complete environment variables of a process that runs an engine."""
    environment = dict(os.environ)
    # The engine core runs in the child itself: one process per method.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment["VLLM_NO_USAGE_STATS"] = "1"
    # By default vLLM binds each CPU shard to its own NUMA node and refuses more shards than nodes.
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.update(openmp_environment(config.placement.num_cpus_per_shard))
    return environment


def main(connection: Connection) -> None:
    """Runs the child: serves the parent until the parent closes the pipe."""
    try:
        _serve(connection)
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return
    except SpecServeError as error:
        connection.send(EngineError(str(error)))
    except Exception as error:
        traceback.print_exc()
        connection.send(EngineError(f"{type(error).__name__}: {shorten(str(error), 300)}"))


def _serve(connection: Connection) -> None:
    config, method = connection.recv()
    # vLLM takes seconds to import; the parent must not import it.
    with without_collections():
        from specserve.engine.hugging_face import HuggingFaceEngine
        from specserve.engine.offline import OfflineEngine

    last_sent = time.perf_counter()

    def progress(num_done: int, num_tokens: int) -> None:
        nonlocal last_sent
        now = time.perf_counter()
        if now - last_sent >= PROGRESS_INTERVAL_S:
            last_sent = now
            connection.send((num_done, num_tokens))
            if connection.poll():
                raise _Stopped

    def show(index: int, text: str, completion: Completion | None) -> None:
        connection.send((index, text, completion))

    engine: OfflineEngine | HuggingFaceEngine
    engine = HuggingFaceEngine(config) if method.name == HF else OfflineEngine(config, method)
    try:
        connection.send(None)
        while True:
            request = connection.recv()
            if not request:
                continue  # the run to stop has already ended
            jobs, concurrency, streams = request
            try:
                result = engine.run(jobs, concurrency, progress, *([show] if streams else []))
            except _Stopped:
                connection.recv()
                result = None
            connection.send(result)
    finally:
        engine.close()


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])))
    finally:
        shutil.rmtree(sys.argv[2], ignore_errors=True)  # the parent may have been killed
