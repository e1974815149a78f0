from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from specserve.core.errors import PortError
from specserve.serve.ports import Port, require_free, serve_ports


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def port_of(server: socket.socket, host: str = "127.0.0.1") -> Port:
    return Port(host, server.getsockname()[1], "the API")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_in_use_is_reported_with_its_purpose_and_process(
    listener: socket.socket, host: str
) -> None:
    port = port_of(listener, host)
    with pytest.raises(PortError) as error:
        require_free([port])
    assert str(error.value).startswith(f"port {port.number} (the API) is in use by ")
    assert str(error.value).endswith(f" (pid {os.getpid()})")


def test_all_ports_in_use_are_reported_in_one_line(listener: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortError) as error:
        require_free([port_of(listener), port_of(other)])
    assert str(error.value).count("is in use by") == 2
    assert "\n" not in str(error.value)


def test_a_port_with_reuse_port_is_in_use() -> None:
    server = socket.create_server(("127.0.0.1", 0), reuse_port=True)
    with server, pytest.raises(PortError):
        require_free([port_of(server)])


def test_the_same_port_of_another_interface_is_free(listener: socket.socket) -> None:
    require_free([port_of(listener, "127.0.0.9")])


def test_a_port_that_becomes_free_in_time_is_waited_for(listener: socket.socket) -> None:
    timer = threading.Timer(0.3, listener.close)
    timer.start()
    require_free([port_of(listener)], wait_s=30)
    assert listener.fileno() == -1  # closed by now
    timer.join()


def test_a_port_in_use_is_refused_when_joining_a_cluster_too(listener: socket.socket) -> None:
    with pytest.raises(PortError):
        require_free([port_of(listener)], joins_cluster=True)


def test_with_haproxy_its_ports_are_needed_too() -> None:
    program = (
        "from specserve.serve.ports import serve_ports\n"
        "for port in serve_ports('0.0.0.0', 80): print(port.host, port.number)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAY_SERVE_ENABLE_HA_PROXY": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ["0.0.0.0 80", "0.0.0.0 8500", "127.0.0.1 8404", "127.0.0.1 9101"]
    assert done.stdout.splitlines() == lines


def test_serves_own_proxy_needs_only_the_api_port() -> None:
    assert [port.number for port in serve_ports("127.0.0.1", 80)] == [80]
