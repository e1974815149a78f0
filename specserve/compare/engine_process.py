"""An engine in a process of its own, so that neither memory nor state passes between methods."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from specserve.core.config import AppConfig
from specserve.core.errors import EngineError, MissingExtraError
from specserve.core.openmp import openmp_environment
from specserve.engine.generation import Job, RunResult
from specserve.engine.methods import Method

STOP_TIMEOUT_S = 20.0
"""How long an engine may take to end by itself."""


@dataclass(frozen=True, slots=True)
class Start:
    """First message to the child: what to build. Answered by :class:`Ready`."""

    config: AppConfig
    method: Method


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine stands.

    Attributes:
        seconds: what it took to build.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """Continue these prompts. Answered by any number of ``Progressed`` and a ``RunResult``."""

    jobs: tuple[Job, ...]
    concurrency: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """Finished prompts and generated tokens so far."""

    num_done: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The child's last message: one line for the user."""

    line: str


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
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specserve.compare.engine_child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=engine_environment(config),
                start_new_session=True,
            )
        self._send(Start(config, method))

    def wait_ready(self) -> float:
        """Blocks until the engine stands; answers the seconds it took.

        Raises:
            EngineError: it did not start; one line says why.
        """
        message = self._receive()
        assert isinstance(message, Ready)
        return message.seconds

    def run(
        self,
        jobs: Sequence[Job],
        concurrency: int,
        progress: Callable[[int, int], None] = lambda num_done, num_tokens: None,
    ) -> RunResult:
        """Continues all jobs, at most ``concurrency`` at a time.

        Raises:
            EngineError: the engine died, or refused a prompt.
        """
        self._send(Run(tuple(jobs), concurrency))
        while True:
            message = self._receive()
            if isinstance(message, RunResult):
                return message
            assert isinstance(message, Progressed)
            progress(message.num_done, message.num_tokens)

    def close(self) -> None:
        """Ends the child, by force after :data:`STOP_TIMEOUT_S`; nothing of it is left."""
        self._connection.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._kill()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._kill()
        self.close()

    def _send(self, message: Start | Run) -> None:
        # A child that has died is told when its answer is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def _receive(self) -> object:
        try:
            message: object = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._kill()
            raise EngineError(f"method {self.method}: {self._last_words()}") from None
        if isinstance(message, Failed):
            raise EngineError(message.line)
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


def engine_environment(config: AppConfig) -> dict[str, str]:
    """All variables of a process that an engine is to run in."""
    environment = dict(os.environ)
    # The engine core runs in the child itself: one process a method.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment["VLLM_NO_USAGE_STATS"] = "1"
    environment.update(openmp_environment(config.placement.num_cpus_per_shard))
    return environment
