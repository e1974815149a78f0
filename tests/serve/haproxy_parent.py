"""Starts and reloads HAProxy as Serve's proxy actor does, in a process without Ray.

Reloads at each line of stdin. Prints HAProxy's process id at the start and after each reload.
The arguments are a folder, the address and the port to serve, and the port of a replica.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ray.serve._private.haproxy import (
    BackendConfig,
    HAProxyApi,
    HAProxyConfig,
    ServerConfig,
)
from ray.serve.config import HTTPOptions


async def main(folder: Path, host: str, port: int, replica_port: int) -> None:
    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
    )
    replica = ServerConfig(name="replica", host="127.0.0.1", port=replica_port)
    backend = BackendConfig(name="app", path_prefix="/", servers=[replica], app_name="app")
    api = HAProxyApi(config, {"app": backend}, config_file_path=str(folder / "haproxy.cfg"))
    await api.start()
    print_pid(api._proc.pid)
    while await asyncio.to_thread(sys.stdin.readline):
        await api.reload()
        print_pid(api._proc.pid)
    await api.stop()


def print_pid(pid: int) -> None:
    sys.stdout.write(f"{pid}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
