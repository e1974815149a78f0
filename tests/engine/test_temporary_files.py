from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from specserve.engine.executor import InProcessExecutor, NodeRayWorkerProc
from specserve.engine.temporary_files import keep_rendezvous_with_sockets, socket_folder

SESSION = "session_2026-11-26_18-37-41_582222_28289"
VARIABLE = "VLLM_RPC_BASE_PATH"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder for sockets of Ray's session on this node; the variable is not set."""
    monkeypatch.delenv(VARIABLE, raising=False)
    context = SimpleNamespace(get_temp_dir=lambda: "/tmp/ray", get_session_name=lambda: SESSION)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    return f"/tmp/ray/{SESSION}/sockets"


def test_sockets_are_in_rays_folder_if_their_paths_are_short_enough() -> None:
    assert socket_folder(Path("/tmp/ray", SESSION)) == f"/tmp/ray/{SESSION}/sockets"
    assert socket_folder(Path("/home/somebody/scratch/ray", SESSION)) == tempfile.gettempdir()


def test_the_rendezvous_file_of_shards_is_in_the_socket_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for module in (uniproc_executor, multiproc_executor):
        method = module.get_file_store_init_method
        monkeypatch.setattr(module, "get_file_store_init_method", method)
    keep_rendezvous_with_sockets()
    executor = InProcessExecutor.__new__(InProcessExecutor)
    executor.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))
    method, *_ = executor._distributed_args()
    assert method.startswith(f"file://{tmp_path}/vllm_dist_")
    assert multiproc_executor.get_file_store_init_method().startswith(f"file://{tmp_path}/")


def test_a_shard_has_the_folder_of_its_own_node(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(_: object, driver_env_vars: dict[str, str]) -> None:
        for name, value in driver_env_vars.items():
            os.environ.setdefault(name, value)  # as vLLM does

    monkeypatch.setattr(RayWorkerProc, "initialize_worker", initialize)
    config = SimpleNamespace(parallel_config=SimpleNamespace())
    worker = NodeRayWorkerProc(config, 0, None, is_driver_worker=True)
    worker.initialize_worker(driver_env_vars={VARIABLE: "/of/the/head"})
    assert os.environ.pop(VARIABLE) == here
