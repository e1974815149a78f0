"""Cost of sharing a memory: CPU of the store and of a replica, and bytes, by number of replicas.

Each part is measured with the real code, and the parts are added up. No cluster of that size runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.outbox import Outbox
from specserve.trie.records import ExchangeReply, ExchangeRequest, Record
from specserve.trie.replica import BATCH_BYTES, ReplicaOptions
from specserve.trie.store import StoreOptions, TrieStore
from specserve.trie.store_actor import get_or_start
from specserve.trie.unsent import FULL_TOKENS
from tests.integration.cluster import running_cluster
from tests.peers.replay import NAMESPACE
from tests.peers.texts import Text

VOCAB_SIZE = 1 << 20
MEMORY_BYTES = 64 << 20
STORE = StoreOptions(fingerprint="benchmark", vocab_size=VOCAB_SIZE, max_bytes=64 << 20)
LINK = ReplicaOptions()

_encode = msgspec.msgpack.encode
_decode_reply = msgspec.msgpack.Decoder(ExchangeReply).decode
_decode_request = msgspec.msgpack.Decoder(ExchangeRequest).decode


@dataclass(frozen=True, kw_only=True)
class Costs:
    """CPU seconds on this machine, and bytes. A record holds ``FULL_TOKENS`` tokens.

    Attributes:
        call_s: time of the store for an empty call.
        ray_call_s: time of the store's process for Ray's part of a call.
        taken_s: time of the store for a record from a replica.
        given_s: time of the store for a record to a replica.
        kept_s: time of a replica to decode a received record, and to keep it for a store that may
            lose its memory.
        learned_s: time of a replica to learn a record.
        record_bytes: size of a record in a call.
    """

    call_s: float
    ray_call_s: float
    taken_s: float
    given_s: float
    kept_s: float
    learned_s: float
    record_bytes: float

    def at(self, num_replicas: int, tokens_per_s: float) -> dict[str, float]:
        """Costs of a cluster in which each replica reads and writes ``tokens_per_s`` tokens."""
        calls_per_s = num_replicas / LINK.interval_s
        taken_per_s = num_replicas * tokens_per_s / FULL_TOKENS
        come_per_s = taken_per_s * (num_replicas - 1) / num_replicas
        given_per_s = num_replicas * come_per_s
        store = calls_per_s * (self.call_s + self.ray_call_s)
        store += taken_per_s * self.taken_s + given_per_s * self.given_s
        return {
            "store_cpus": store,
            "store_bytes_per_s": given_per_s * self.record_bytes,
            "replica_cpus": come_per_s * (self.kept_s + self.learned_s),
            "replica_bytes_per_s": come_per_s * self.record_bytes,
        }

    def most_replicas(self, tokens_per_s: float) -> int:
        """Largest number of replicas with which the store needs less than one CPU."""
        number = 1
        while self.at(number + 1, tokens_per_s)["store_cpus"] < 1:
            number += 1
        return number


def records_of(text: Text, origin: str, first_number: int) -> Iterator[Record]:
    """A request's text as the link publishes it: prompt and output separately, in full records."""
    end_of_text = len(text.tokens)
    cuts = {0, *range(text.num_prompt_tokens, end_of_text, FULL_TOKENS), end_of_text}
    for number, (begin, end) in enumerate(pairwise(sorted(cuts)), first_number):
        yield Record(
            origin=origin,
            number=number,
            stamp=time.time(),
            namespace=NAMESPACE,
            sequence=f"{origin}-{text.name}",
            start=begin,
            tokens=text.tokens[begin:end].astype("<i4").tobytes(),
            final=end == end_of_text,
        )


def measure_costs(texts: Sequence[Text], *, with_ray: bool) -> Costs:
    """Measures each cost separately in one thread."""
    full = [_as_output(text) for text in texts]
    records = [
        record
        for number, text in enumerate(full)
        for record in records_of(text, "writer", 1 + number * len(text.tokens))
    ]
    store = TrieStore(STORE)
    epoch = store.epoch
    calls = [_ask(epoch, 0, [], "idle")] * 2000
    call_s = _cpu_seconds(lambda: [_exchange(store, call) for call in calls]) / len(calls)
    batches = [records[begin : begin + 100] for begin in range(0, len(records), 100)]
    requests = [_ask(epoch, 0, batch, "writer") for batch in batches]
    taken = _cpu_seconds(lambda: [_exchange(store, request) for request in requests])
    replies: list[bytes] = []
    given = _cpu_seconds(lambda: replies.extend(_read_all(store, epoch)))
    kept = _cpu_seconds(lambda: _keep(replies))
    memory = TrieMemory(MEMORY_BYTES, [NAMESPACE])
    learner = ClusterLearner(memory)
    learned = _cpu_seconds(lambda: _learn(learner, records))
    size = len(records)
    return Costs(
        call_s=call_s,
        ray_call_s=max(_ray_call_seconds() - call_s, 0) if with_ray else 0.0,
        taken_s=max(taken - len(requests) * call_s, 0) / size,
        given_s=max(given - len(replies) * call_s, 0) / size,
        kept_s=kept / size,
        learned_s=learned / size,
        record_bytes=sum(map(len, replies)) / size,
    )


def _as_output(text: Text) -> Text:
    """The text as output only, in whole records."""
    length = len(text.tokens) // FULL_TOKENS * FULL_TOKENS
    return Text(text.name, text.tokens[:length], 0)


def _ask(epoch: str, position: int, records: list[Record], origin: str = "reader") -> bytes:
    return _encode(ExchangeRequest(origin, epoch, position, records, BATCH_BYTES))


def _exchange(store: TrieStore, request: bytes) -> bytes:
    """Answers a call like the store's actor."""
    return _encode(store.exchange(_decode_request(request)))


def _read_all(store: TrieStore, epoch: str) -> Iterator[bytes]:
    position, behind = 0, 1
    while behind:
        content = _exchange(store, _ask(epoch, position, []))
        yield content
        reply = _decode_reply(content)
        position, behind = reply.position, reply.behind


def _keep(replies: Sequence[bytes]) -> None:
    outbox = Outbox("reader", MEMORY_BYTES)
    for content in replies:
        for record in _decode_reply(content).records:
            outbox.receive(record)


def _learn(learner: ClusterLearner, records: Sequence[Record]) -> None:
    for record in records:
        learner.apply(record)


def _cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU time of this thread, which other processes hardly affect."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def _ray_call_seconds(number: int = 2000) -> float:
    """CPU time of the store's process for an empty call, with many calls in flight."""
    import ray

    with running_cluster(1) as cluster:
        of_ray = {k: v for k, v in cluster.environment.items() if k.startswith("RAY_")}
        os.environ.update(of_ray)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            actor = get_or_start(STORE)
            epoch = _decode_reply(ray.get(actor.exchange_encoded.remote(_ask("", 0, [])))).epoch
            (process,) = cluster.processes("ray::TrieStoreActor")
            for count in (number // 4, number):  # the first one warms up
                before = process.cpu_times()
                call = _ask(epoch, 0, [])
                ray.get([actor.exchange_encoded.remote(call) for _ in range(count)])
                after = process.cpu_times()
        finally:
            ray.shutdown()
    seconds: float = after.user + after.system - before.user - before.system
    return seconds / number
