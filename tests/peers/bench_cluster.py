"""Gain and cost of one draft memory for all replicas: a simulation with the real parts.

    python -m tests.peers cluster [--seed 0] [--requests 1024] [--plot docs/images/cluster.svg]

Traffic: see traffic.py. 16 requests per second arrive at the whole cluster, each at a random
replica. They are replayed (replay.py) one after the other, with drafts of up to 16 tokens and
without a gate. Accepted tokens per step are means over the second half of the requests. All
memories are empty at the start.

``separate``: each replica has learned only from its own requests. Exact.
``cluster``: the real memory and learner of each replica, and the real store. Replicas call the
store so often that each text arrives within 1 s. Exact, up to 8 replicas.
``late``: one memory that gets every text 1 s late, also the replica's own. It is a lower bound for
clusters of any size. The upper bound is the single replica of ``separate``.
``vllm suffix``: the peer, separate. Omitted if it is not installed.
``cold``: a replica that starts after the traffic and has called the store once, compared with one
that ran all the time. Both get further requests of which nothing is learned.

Not simulated: overlapping requests and full memories.

Costs are measured one by one and added up (cluster_costs.py). A store is one Python process, so it
is saturated when it needs one CPU.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from specserve.compare.machine import circumstances
from specserve.core.errors import SpecServeError
from specserve.trie.layout import PAGE
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.records import ExchangeRequest, Record
from specserve.trie.store import TrieStore
from tests.peers.cluster_costs import STORE, Costs, measure_costs, records_of
from tests.peers.replay import (
    NAMESPACE,
    Drafter,
    SuffixDrafter,
    TrieDrafter,
    learn,
    replay,
    replay_one,
)
from tests.peers.sources import Sources
from tests.peers.suffix_peer import arctic
from tests.peers.svg import Chart, Line, page
from tests.peers.tables import print_rows
from tests.peers.texts import Tally, Text
from tests.peers.traffic import OUTPUT_TOKENS, PROMPT_TOKENS, traffic

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WITH_STORE = (2, 8)
OF_PEER = (1, 2, 8, 64)
REQUESTS_PER_S, LATE_S = 16, 1.0
LATE_REQUESTS = round(REQUESTS_PER_S * LATE_S)
DRAFT_LEN = 16
NUM_PROBES = 100
REQUEST_BYTES = 68 * PAGE * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // PAGE)
"""Bytes of a trie for one request, in whole pages."""
TOKENS_PER_S = (100, 1000, 5000)
"""Prompt and output tokens per second of each replica."""
PLOT = Path(__file__).parents[2] / "docs/images/cluster.svg"


def room_for(num_requests: int) -> int:
    """Bytes of a trie that holds this number of requests."""
    return max(1 << 20, REQUEST_BYTES * (num_requests + 1))


class Replica:
    """A replica's memory and its link to the store, in simulated time.

    Args:
        name: name of the replica.
        store: the cluster's store.
        max_bytes: size of its trie.
    """

    def __init__(self, name: str, store: TrieStore, max_bytes: int) -> None:
        self.name = name
        self._store = store
        memory = TrieMemory(max_bytes, [NAMESPACE])
        self._learner = ClusterLearner(memory)
        trie = memory.tries().get(NAMESPACE)
        assert trie is not None
        self.trie = trie
        self.memory = memory
        self.drafter = TrieDrafter(memory, DRAFT_LEN)
        self._unsent: list[Record] = []
        self._num_records = 0
        self._epoch, self._position = "", 0

    def publish(self, text: Text) -> None:
        records = list(records_of(text, self.name, self._num_records + 1))
        self._num_records += len(records)
        self._unsent += records

    def exchange(self) -> None:
        """Sends new text, and learns the text of the other replicas."""
        behind = 1
        while behind:
            request = ExchangeRequest(self.name, self._epoch, self._position, self._unsent, 4 << 20)
            reply = self._store.exchange(request)
            assert not reply.refused
            self._unsent = []
            self._epoch, self._position, behind = reply.epoch, reply.position, reply.behind
            for record in reply.records:
                self._learner.apply(record)


class Count:
    """Counts drafts of the second half of the requests."""

    def __init__(self, num_requests: int) -> None:
        self._half = num_requests // 2
        self._warm_up, self._counted = Tally(), Tally()

    def of(self, number: int) -> Tally:
        return self._warm_up if number < self._half else self._counted

    @property
    def accepted_per_step(self) -> float:
        return round(self._counted.accepted / self._counted.steps, 3)


def separate(texts: Sequence[Text], owners: Sequence[int], make: Callable[[int], Drafter]) -> float:
    """Accepted tokens per step with a memory for each replica. They run one after the other."""
    count = Count(len(texts))
    for replica in sorted(set(owners)):
        drafter = make(owners.count(replica))
        for number, text in enumerate(texts):
            if owners[number] == replica:
                replay_one(drafter, text, count.of(number))
    return count.accepted_per_step


def with_store(texts: Sequence[Text], owners: Sequence[int]) -> tuple[float, list[Replica]]:
    """Each replica learns its own text at once, and the others' text through the store.

    Returns:
        (accepted tokens per step, the replicas at the end with one that was started there).
    """
    count, store, room = Count(len(texts)), TrieStore(STORE), room_for(len(texts))
    replicas = [Replica(f"replica-{number}", store, room) for number in range(max(owners) + 1)]
    for number, text in enumerate(texts):
        if number % (LATE_REQUESTS // 2) == 0:  # a text waits for its sender and for its reader
            for replica in replicas:
                replica.exchange()
        replay_one(replicas[owners[number]].drafter, text, count.of(number))
        replicas[owners[number]].publish(text)
    cold = Replica("cold", store, room)
    for replica in [*replicas, *replicas, cold]:
        replica.exchange()
    assert not any(each.trie.num_evicted_tokens for each in replicas)
    return count.accepted_per_step, [*replicas, cold]


def first_requests(replica: Replica, texts: Sequence[Text]) -> float:
    """Accepted tokens per step of requests that are not learned."""
    tally = replay(TrieDrafter(replica.memory, DRAFT_LEN, private=True), texts)
    return round(tally.accepted / tally.steps, 3)


def late(texts: Sequence[Text]) -> float:
    """Accepted tokens per step with one memory that gets each text some requests late."""
    count, memory = Count(len(texts)), TrieMemory(room_for(len(texts)), [NAMESPACE])
    trie = memory.tries().get(NAMESPACE)
    assert trie is not None
    drafter, waiting = TrieDrafter(memory, DRAFT_LEN, private=True), deque[Text]()
    for number, text in enumerate(texts):
        if len(waiting) > LATE_REQUESTS:
            known = waiting.popleft()
            learn(trie, known.tokens)
        replay_one(drafter, text, count.of(number))
        waiting.append(text)
    return count.accepted_per_step


def simulate(
    console: Console, texts: Sequence[Text], probes: Sequence[Text], seed: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(a row for each number of replicas, empty where not simulated; a cold start)."""
    has_peer = _has_peer(console)
    rows, cold_start = [], {}
    with Progress(console=console) as bars:
        bar = bars.add_task("simulating", total=len(REPLICAS) + 1)
        lower = late(texts)
        bars.advance(bar)
        for num_replicas in REPLICAS:
            rng = random.Random(seed)
            owners = [rng.randrange(num_replicas) for _ in texts]
            row: dict[str, Any] = {
                "replicas": num_replicas,
                "separate": separate(texts, owners, _new_trie),
                "cluster": "",
                "late": lower,
                "vllm_suffix": "",
            }
            if num_replicas in WITH_STORE:
                row["cluster"], replicas = with_store(texts, owners)
                warm, cold = (first_requests(replicas[i], probes) for i in (0, -1))
                cold_start = {"warm": warm, "cold": cold, "ratio": round(cold / warm, 3)}
            if has_peer and num_replicas in OF_PEER:
                row["vllm_suffix"] = separate(texts, owners, lambda _: SuffixDrafter(DRAFT_LEN))
            known = row["cluster"] or (row["separate"] if num_replicas == 1 else lower)
            row["gain"] = round(known / row["separate"], 2)
            row["gain_over_vllm"] = row["vllm_suffix"] and round(known / row["vllm_suffix"], 2)
            rows.append(row)
            bars.advance(bar)
    return rows, cold_start


def _new_trie(num_requests: int) -> TrieDrafter:
    return TrieDrafter(TrieMemory(room_for(num_requests), [NAMESPACE]), DRAFT_LEN)


def tabulate(costs: Costs) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(costs by number of replicas, replicas that saturate a store)."""
    loads = [
        {
            "replicas": number,
            "store_cpus": round(at["store_cpus"], 3),
            "store_mb_per_s": round(at["store_bytes_per_s"] / 1e6, 2),
            "replica_cpus": round(at["replica_cpus"], 4),
            "replica_kb_per_s": round(at["replica_bytes_per_s"] / 1e3, 1),
        }
        for number in REPLICAS
        for at in [costs.at(number, 1000)]
    ]
    limits = [
        {
            "tokens_per_s_of_a_replica": rate,
            "replicas": costs.most_replicas(rate),
        }
        for rate in TOKENS_PER_S
    ]
    return loads, limits


def charts(rows: Sequence[dict[str, Any]], costs: Costs) -> list[Chart]:
    def points(name: str) -> list[tuple[float, float]]:
        return [(row["replicas"], row[name]) for row in rows if row[name] != ""]

    gain = [
        Line("cluster's memory, every text 1 s late (lower bound)", points("late")),
        Line("each replica's memory for itself", points("separate")),
    ]
    if points("vllm_suffix"):
        gain.append(Line("vLLM suffix, each replica for itself", points("vllm_suffix")))
    loads = [
        Line(
            f"{part}, {rate:,} tokens/s a replica",
            [(number, costs.at(number, rate)[key]) for number in REPLICAS[1:]],
            dashed=rate == TOKENS_PER_S[0],
        )
        for part, key in (("store", "store_cpus"), ("each replica", "replica_cpus"))
        for rate in TOKENS_PER_S[:2]
    ]
    return [
        Chart("Accepted draft tokens a step", "replicas", gain, REPLICAS),
        Chart("CPUs busy with sharing", "replicas", loads, REPLICAS, log_y=True),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints four tables and, last, one line of JSON. Draws the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("configs/models/demo-base"))
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=PLOT)
    parser.add_argument("--without-ray", action="store_true", help="leave out what Ray costs")
    args = parser.parse_args(argv)
    console, made_with = Console(), circumstances()
    sources = Sources(Tokenizer.from_file(str(args.model / "tokenizer.json")), args.seed)
    texts = traffic(sources, args.requests + NUM_PROBES, args.seed)
    texts, probes = texts[:-NUM_PROBES], texts[-NUM_PROBES:]

    rows, cold_start = simulate(console, texts, probes, args.seed)
    print_rows(console, f"accepted tokens a step, {len(texts):,} requests", rows)
    print_rows(console, "a replica that has just started", [cold_start])
    measure_costs(texts[:50], with_ray=False)  # warms up
    costs = measure_costs(texts[:600], with_ray=not args.without_ray)
    in_us = {key: round(1e6 * value, 2) for key, value in asdict(costs).items() if key[-2:] == "_s"}
    console.print("us of CPU:", in_us, f"bytes a record: {costs.record_bytes:.0f}")
    loads, limits = tabulate(costs)
    print_rows(console, "cost of sharing, 1,000 tokens/s a replica", loads)
    print_rows(console, "one store is full with", limits)
    args.plot.write_text(page(charts(rows, costs)), encoding="utf-8")
    console.print(f"plot: {args.plot}")
    options = {"seed": args.seed, "requests": args.requests}
    result = {
        "rows": rows,
        "cold_start": cold_start,
        "costs": asdict(costs),
        "loads": loads,
        "limits": limits,
    }
    print(json.dumps({"benchmark": "cluster", **made_with, "options": options, **result}))
    return 0


def _has_peer(console: Console) -> bool:
    try:
        arctic()
    except SpecServeError as error:
        console.print(f"without vLLM suffix: {error}")
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
