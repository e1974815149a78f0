"""An engine in a process of its own, so that neither memory nor state passes between methods.

The child is ``python -m specserve.compare.engine_process FD FOLDER`` with the number of an
inherited pipe, and a folder of its own, which is removed when it ends. It is sent the configuration
and the method, then jobs and how many of them to run at a time. It answers None when the engine
stands, then the numbers of finished prompts and tokens so far from time to time, texts as they come
where it is asked for them, and a ``RunResult``; or an ``EngineError``, which is its last word. Sent
an empty tuple meanwhile, it ends its jobs and answers None.
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
"""How long an engine may take to end by itself."""

PROGRESS_INTERVAL_S = 0.25
"""Progress is told at most this often; it also is how a child notices that its parent is gone."""


class EngineProcess:
    """Handle on a child process with one engine; idle, it uses no CPU.

    Usable as a context manager. Not for several threads.

    Raises:
        MissingExtraError: vLLM is not installed.
    """

    def __init__(self, config: AppConfig, method: Method) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtraError(f"method {method}")
        self.method = method
        ours, theirs = Pipe()
        self._connection: Connection = ours
        # vLLM writes much; it is shown only when it tells why the engine died.
        self._log = tempfile.TemporaryFile(prefix="specserve-engine-")  # noqa: SIM115
        # vLLM leaves its files there when it is killed.
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
        """Blocks until the engine stands.

        Raises:
            EngineError: it did not start; one line says why.
        """
        assert self._receive() is None

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
            KeyboardInterrupt: Ctrl-C; the jobs have ended, and the engine takes others.
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
        """Ends the child, by force after :data:`STOP_TIMEOUT_S`; nothing of it is left."""
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
        # A child that has died is told when its answer is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def _receive(self) -> Any:
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._kill()
            raise EngineError(f"method {self.method}: {self._last_words()}") from None
        if isinstance(message, EngineError):
            raise message
        return message

    def _kill(self) -> None:
        """The child leads a process group, so that its own children go with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else "no output"
        return f"the engine's process ended with {self._process.returncode}: {last}"


class _Stopped(Exception):
    """The parent wants no more of what runs."""


def engine_environment(config: AppConfig) -> dict[str, str]:
    """All variables of a process that an engine is to run in."""
    environment = dict(os.environ)
    # The engine core runs in the child itself: one process a method.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment["VLLM_NO_USAGE_STATS"] = "1"
    # On CPU vLLM would give each shard a NUMA node of its own, and refuse more shards than nodes.
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.update(openmp_environment(config.placement.num_cpus_per_shard))
    return environment


def main(connection: Connection) -> None:
    """The child: serves its parent until that closes the pipe."""
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
    # Importing vLLM takes seconds, and only here may it happen.
    with without_collections():
        from specserve.engine.hugging_face import HuggingFaceEngine
        from specserve.engine.offline import OfflineEngine

    told = time.perf_counter()

    def progress(num_done: int, num_tokens: int) -> None:
        nonlocal told
        now = time.perf_counter()
        if now - told >= PROGRESS_INTERVAL_S:
            told = now
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
            asked = connection.recv()
            if not asked:
                continue  # too late to stop anything
            jobs, concurrency, shows = asked
            try:
                result = engine.run(jobs, concurrency, progress, *([show] if shows else []))
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
