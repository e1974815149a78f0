"""Replicas' links to the draft memory, in separate processes that a test may kill.

`TrieHost` starts such a process and calls methods of `Links` there.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from specserve.trie.records import ExchangeRequest, Record, TextPiece
from specserve.trie.replica import ReplicaOptions, TrieReplica
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import RayStoreClient, RemoteStore, list_stores
from tests.integration.cluster import Cluster
from tests.integration.host_process import HostProcess, answer, connect

VOCAB_SIZE = 5000
STEP_TOKENS, STEP_S = 8, 0.01
STOP_S = 30.0
"""Time limit for a link's last call."""

LINK_ATTRIBUTES = (
    "up",
    "refused",
    "epoch",
    "dropped_tokens",
    "unsent_s",
    "received_tokens",
    "receive_lag_s",
    "apply_errors",
)
"""Attributes of a link that a test can read."""

SENDER = "sender"
"""Origin of records whose tokens come from no text."""


class TrieHost(HostProcess):
    """A process with links.

    Args:
        cluster: the cluster that it connects to.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, __name__)

    def __call__(self, command: str, *args: Any) -> Any:
        """Runs a method of :class:`Links` there. Returns its result, or its error as text."""
        return self.ask([command, *args])


def text(sequence: str, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The tokens of a sequence. They depend only on its name and the position."""
    seed = sum(map(ord, sequence))
    return ((np.arange(start, stop) * 2654435761 + seed) % VOCAB_SIZE).astype(np.int32)


class Link:
    """One replica: the text that it wrote, and the text that it received."""

    def __init__(self, store: Mapping[str, Any]) -> None:
        self.store = StoreOptions(**store, vocab_size=VOCAB_SIZE)
        self.client = RayStoreClient(self.store)
        self.link = TrieReplica(self.client, self.apply, ReplicaOptions())
        self.read: dict[str, set[int]] = defaultdict(set)
        self.wrote: dict[str, int] = {}
        self._traffic: threading.Thread | None = None
        self._quiet = threading.Event()
        self.link.start()

    def apply(self, record: Record) -> None:
        if record.kind == "text" and record.origin != SENDER:
            stop = record.start + record.num_tokens
            positions = set(range(record.start, stop))
            known = text(record.sequence, record.start, stop)
            assert np.array_equal(record.token_array(), known)
            assert not positions & self.read[record.sequence]
            self.read[record.sequence] |= positions

    def write(self, sequence: str, num_tokens: int) -> None:
        start = self.wrote.get(sequence, 0)
        tokens = text(sequence, start, start + num_tokens)
        self.link.publish(TextPiece("tenant", sequence, start, tokens))
        self.wrote[sequence] = start + num_tokens

    def begin(self, sequences: Sequence[str]) -> None:
        """Writes continuously, like requests that are being decoded."""

        def run() -> None:
            while not self._quiet.wait(STEP_S):
                for sequence in sequences:
                    self.write(sequence, STEP_TOKENS)

        self._quiet.clear()
        self._traffic = threading.Thread(target=run)
        self._traffic.start()

    def end(self) -> dict[str, int]:
        """Stops writing. Returns the number of tokens written, by sequence."""
        if self._traffic is not None:
            self._quiet.set()
            self._traffic.join()
        return self.wrote


class Links:
    """Commands of a host. Each names its link."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def start(self, name: str, store: Mapping[str, Any]) -> None:
        self._links[name] = Link(store)

    def write(self, name: str, sequence: str, num_tokens: int) -> None:
        self._links[name].write(sequence, num_tokens)

    def begin(self, name: str, *sequences: str) -> None:
        self._links[name].begin(sequences)

    def end(self, name: str) -> dict[str, int]:
        return self._links[name].end()

    def read(self, name: str) -> dict[str, int]:
        """Tokens received of each sequence, counted from its start to the first gap."""
        read = self._links[name].read
        return {
            sequence: next(n for n in range(len(positions) + 1) if n not in positions)
            for sequence, positions in list(read.items())
        }

    def link(self, name: str) -> dict[str, Any]:
        link = self._links[name].link
        return {name: getattr(link, name) for name in LINK_ATTRIBUTES}

    def stop(self, name: str) -> bool:
        self._links[name].end()
        return self._links.pop(name).link.stop(STOP_S)

    def send(self, name: str, records: list[dict[str, Any]]) -> None:
        """Sends records directly to the store, without the link's own checks."""

        link = self._links[name]
        base: dict[str, Any] = {"stamp": 1e9, "namespace": "tenant", "sequence": "raw"}
        made = [
            Record(
                **base,
                origin=SENDER,
                number=each["number"],
                tokens=np.array(each["tokens"], dtype="<i4").tobytes(),
            )
            for each in records
        ]
        request = ExchangeRequest(SENDER, "", 0, made, 1000)
        link.client.exchange(request, 10)

    def ask(self, store: str, question: str, *args: Any) -> Any:
        """Calls a store as an operator does."""

        return msgspec.to_builtins(getattr(RemoteStore(store), question)(*args))

    def stores(self) -> list[str]:

        return list_stores()

    def close(self) -> None:
        for name in list(self._links):
            self.stop(name)


def main() -> None:
    """Runs commands. Before it ends, the links send their unsent text."""
    answers = connect()
    links = Links()

    def run(call: list[Any]) -> Any:
        command, *args = call
        try:
            return getattr(links, command)(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    try:
        answer(answers, run)
    finally:
        links.close()


if __name__ == "__main__":
    main()
