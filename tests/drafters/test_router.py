"""Which connections a drafter's port accepts, with real sockets."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest
import zmq

from specserve.drafters.server import DrafterServer
from specserve.wire.endpoint import Endpoint
from specserve.wire.frames import decode_reply, encode
from specserve.wire.messages import DraftRequest, Greeting, Hello, TextRow
from tests.drafters.fakes import WAIT_S, FakeDrafter
from tests.integration.cluster import eventually

FEED = DraftRequest(
    number=1,
    budget_s=60.0,
    rows=(TextRow(text=1, salt=0, start=0, tokens=np.arange(9, dtype=np.int32)),),
)


@pytest.fixture
def drafter() -> FakeDrafter:
    return FakeDrafter()


@pytest.fixture
def server(drafter: FakeDrafter) -> Iterator[DrafterServer]:
    with closing(DrafterServer(drafter)) as server:
        yield server


@contextmanager
def connected(endpoint: Endpoint) -> Iterator[zmq.Socket[bytes]]:
    """A client's socket in its own ZeroMQ context."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    try:
        endpoint.connect(client)
        yield client
    finally:
        client.close()
        context.term()


def greet(server: DrafterServer) -> None:
    """Sends a hello with the right secret and checks that it is answered."""
    with connected(Endpoint.parse(server.address)) as client:
        client.send_multipart(encode(Hello(7)))
        assert client.poll(int(WAIT_S * 1000)), "no answer"
        assert isinstance(decode_reply(client.recv_multipart()), Greeting)


def await_refused(server: DrafterServer, number: int) -> None:
    """Waits until ``number`` connections have been refused."""
    counters = server.counters
    eventually(lambda: counters.num_refused["unauthorized"] == number, "refusals", WAIT_S, 0.001)


def test_a_client_with_the_secret_is_answered(server: DrafterServer) -> None:
    greet(server)
    assert server.counters.num_refused["unauthorized"] == 0


@pytest.mark.parametrize("bind", ["tcp://[::1]:0", "tcp://::1:0"])
def test_a_drafter_listens_on_an_ipv6_address(bind: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on the loopback interface")
    with closing(DrafterServer(FakeDrafter(), bind)) as server:
        assert Endpoint.parse(server.address).place.startswith("tcp://[::1]:")
        greet(server)


def test_every_drafter_has_a_secret_of_its_own(server: DrafterServer) -> None:
    with closing(DrafterServer(FakeDrafter())) as other:
        mine, theirs = (Endpoint.parse(each.address).secret for each in (server, other))
    assert mine != theirs
    assert len(mine) == len(theirs) >= 32


def test_a_connection_is_accepted_while_the_model_computes(
    server: DrafterServer, drafter: FakeDrafter
) -> None:
    endpoint = Endpoint.parse(server.address)
    drafter.may_go.clear()
    with connected(endpoint) as client:
        client.send_multipart(encode(FEED))
        assert drafter.entered.wait(WAIT_S)
        late: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        late.setsockopt(zmq.LINGER, 0)
        accepted = late.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        endpoint.connect(late)
        is_accepted = accepted.poll(int(WAIT_S * 1000))
        drafter.may_go.set()
        late.close()
    assert is_accepted


@pytest.mark.parametrize("secret", ["", "wrong", "another drafter's"])
def test_a_client_without_the_secret_is_refused(
    server: DrafterServer, drafter: FakeDrafter, secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Endpoint.parse(server.address).place
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            with connected(Endpoint(place, secret)) as client:
                for question in (Hello(1), FEED):
                    with suppress(zmq.Again):  # it may have been refused already
                        client.send_multipart(encode(question), zmq.NOBLOCK)
                await_refused(server, number)
                greet(server)
                assert not client.poll(0)
    assert (server.counters.num_rows, server.counters.num_refused["malformed"]) == (0, 0)
    assert drafter.calls == []
    (record,) = caplog.records
    assert 'refused connection: "it came without this drafter\'s secret"' in record.getMessage()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: drafter\r\n\r\n",
        b"\x01\x00\x05hello",  # ZeroMQ's first protocol, which has no secrets
        b"\xff" + bytes(8) + b"\x7f\x03\x00PLAIN" + bytes(47) + b"\xff" * 64,
        b"\x00" * 4096,
    ],
)
def test_a_connection_that_is_not_zeromq_is_closed(
    server: DrafterServer, drafter: FakeDrafter, garbage: bytes
) -> None:
    host, port = Endpoint.parse(server.address).place.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as stranger:
        stranger.sendall(garbage)
        heard = b""
        while part := receive(stranger):
            heard += part
    assert len(heard) <= 64, "more than ZeroMQ's greeting"
    greet(server)
    assert server.counters.num_refused["malformed"] == 0
    assert drafter.calls == []


def receive(stranger: socket.socket) -> bytes:
    """The next bytes; empty if the server has closed the connection."""
    try:
        return stranger.recv(4096)
    except ConnectionResetError:
        return b""
