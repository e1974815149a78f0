"""specserve's ``serve run`` and ``vllm serve`` in separate processes, with the same engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, SpecServeError
from specserve.core.openmp import openmp_environment
from specserve.core.source_config import source_sections
from specserve.engine.methods import parse_method
from specserve.engine.model_shapes import NO_MLA, is_plain_on_cpu
from tests.integration.cluster import (
    HAPROXY,
    HOST,
    READY_S,
    Cluster,
    eventually,
    free_ports,
    is_healthy,
    serving,
)
from tests.peers.suffix_peer import arctic

OURS = ("specserve", "specserve-none")
"""All configured sources, and ``speculation: []``."""

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 3},
    "suffix": {"num_speculative_tokens": 16},
    "mtp": {"num_speculative_tokens": 1},
}
"""vLLM's methods, with the settings that its documentation shows."""

_KINDS = "|".join(source_sections())
NAMES = (
    "specserve, specserve-none, specserve-KIND[+KIND], vllm-METHOD[:K][@ours] with plain, ngram, "
    "suffix or mtp"
)
_OUR_NAME = re.compile(rf"specserve(?:-(none|(?:{_KINDS})(?:\+(?:{_KINDS}))*))?")
_THEIR_NAME = re.compile(rf"vllm-({'|'.join(METHODS)})(?::([1-9]\d*))?(@ours)?")

LAUNCHER = [sys.executable, "-m", "specserve.engine.vllm_command"]
OUR_WORKER = "specserve.engine.cpu.worker.CpuWorker"
STOP_TIMEOUT_S = 30.0


def check(name: str) -> str:
    """Checks the name of a server, and returns it.

    Raises:
        ConfigError: there is no server with this name.
        SpecServeError: its package is missing.
    """
    if not (_OUR_NAME.fullmatch(name) or _THEIR_NAME.fullmatch(name)):
        raise ConfigError("--servers", name, NAMES)
    if name.startswith("vllm-suffix"):
        arctic()
    return name


@contextmanager
def serve(name: str, config: AppConfig) -> Iterator[str]:
    """Runs a new server for the length of a block. Yields its address.

    Args:
        name: ``specserve-KIND+KIND`` has only these of the configured sources. ``vllm-METHOD:K``
            drafts K tokens, and ``@ours`` has our CPU kernels.
        config: the served application.

    Raises:
        ConfigError: the configuration has no source of a named kind.
    """
    if match := _THEIR_NAME.fullmatch(name):
        method, number, kernels = match.groups()
        speculation = METHODS[method] and {"method": method, **METHODS[method]}
        if number:
            speculation |= {"num_speculative_tokens": int(number)}
        with _vllm(config, speculation, on_our_kernels=bool(kernels)) as url:
            yield url
    else:
        ours = _OUR_NAME.fullmatch(name)
        assert ours is not None, name
        narrowed = parse_method(ours[1], config).narrowed(config) if ours[1] else config
        with _specserve(narrowed) as url:
            yield url


@contextmanager
def _specserve(config: AppConfig) -> Iterator[str]:
    """``serve run`` on a new cluster, as ``make serve`` starts it."""
    cluster = Cluster([os.cpu_count() or 1])
    cluster.use_compiler()
    if HAPROXY.exists():
        cluster.use_haproxy()
    try:
        cluster.start()
        with serving(cluster, {"/": config.model_dump(mode="json")}) as deployment:
            yield deployment.base_url()
    finally:
        cluster.stop()


@contextmanager
def _vllm(config: AppConfig, speculation: dict[str, Any], *, on_our_kernels: bool) -> Iterator[str]:
    """``vllm serve`` with the configuration's engine options."""
    (port,) = free_ports(1)
    command = [*LAUNCHER, "serve", config.model.path, "--host", HOST, "--port", str(port)]
    for option, value in _vllm_options(config, speculation).items():
        command += [f"--{option}", str(value)]
    command += ["--enforce-eager"] if config.engine.enforce_eager else []
    command += ["--worker-cls", OUR_WORKER] if on_our_kernels else []
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    environment |= openmp_environment(config.placement.num_cpus_per_shard)
    if not on_our_kernels:
        del environment["THP_MEM_ALLOC_ENABLE"]
    elif is_plain_on_cpu(_card(config.model.path), config.engine.tensor_parallel_size):
        environment[NO_MLA] = "1"
    # As in our shards. By default vLLM leaves one core of each NUMA node free.
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="ss") as folder:
        environment["TMPDIR"] = folder  # it leaves sockets and other files
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        url = f"http://{HOST}:{port}"

        def is_up() -> bool:
            if process.poll() is not None:
                log.seek(0)
                last = log.read().decode(errors="replace").splitlines()[-5:]
                raise SpecServeError(f"vllm serve ended: {' | '.join(last)}")
            return is_healthy(url)

        try:
            eventually(is_up, "vllm serve is healthy", READY_S)
            yield url
        finally:
            _stop(process)


def _vllm_options(config: AppConfig, speculation: dict[str, Any]) -> dict[str, Any]:
    engine = config.engine
    options: dict[str, Any] = {
        "served-model-name": config.model.name,
        "dtype": engine.dtype,
        "tensor-parallel-size": engine.tensor_parallel_size,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "gpu-memory-utilization": engine.gpu_memory_utilization,
        "kv-cache-memory-bytes": engine.kv_cache_memory_bytes or 1 << 30,
        "seed": engine.seed,
    }
    if engine.max_model_len:
        options["max-model-len"] = engine.max_model_len
    if backend := _latent_attention(config.model.path, engine.dtype):
        options["attention-backend"] = backend
        speculation = speculation and {**speculation, "attention_backend": backend}
    if speculation:
        options["speculative-config"] = json.dumps(speculation)
    return options


def _card(folder: str) -> dict[str, Any]:
    card: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    return card


@cache
def _latent_attention(model: str, dtype: Any) -> str:
    """The backend of latent attention that a model needs here; empty: vLLM's own choice."""
    # Imported here, because it takes seconds.
    from vllm.engine.arg_utils import EngineArgs

    from specserve.engine.cpu.backend import fits_amx, has_amx

    arguments = EngineArgs(model=model, dtype=dtype)
    return "CPU_MLA" if has_amx() and not fits_amx(arguments.create_model_config()) else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group, and the rest of the group."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    finally:
        process.wait()
