"""``make bench``: this project beside others, in one run on one machine.

    python -m tests.peers [NAME ...] [--config configs/demo.yaml]

Without names all are run. Each prints its tables and ends with one line of JSON that holds
versions, machine, configuration and seed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module

from specserve.core.errors import SpecServeError

BENCHMARKS = {
    "drafting": "what drafting adds to a step, beside vLLM's ngram and suffix proposers",
    "trie": "the draft memory alone, beside Arctic's suffix trees: learning, bytes, acceptance",
    "mtp-context": "the MTP layer beside transformers': time of a token by length of the context",
    "cluster": "a simulation: one memory for 1 to 256 replicas, what it gains and what it costs",
    "engine": "one engine: no speculation, ours with a memory, vLLM's ngram and suffix decoding",
    "switched": "one engine: all sources together beside each alone, switched from turn to turn",
    "decisions": "recorded answers, drafted for again: suffix decoding, ours, a perfect choice",
    "drafters": "a model that drafts: in a process of its own, and in vLLM's engine",
    "agreement": "the same drafters beside vLLM's own: what both draft at the same places",
    "sharing": "two replicas: one drafter for both, beside a drafter each",
    "wire": "asking a drafter but for its model, beside a call of a Ray actor",
    "replication": "how soon replicas learn from each other, and where their store saturates",
    "grammar": "over HTTP: answers that keep to ten JSON schemas, beside prompt lookup and none",
    "prediction": "over HTTP: edits of a predicted text, beside prompt lookup and no speculation",
    "generation": "over HTTP: streaming by the generation API, beside /v1/completions",
    "tokens": "over HTTP: what `bench tokens` measures, beside `vllm bench serve`",
    "server": "over HTTP: ours beside `vllm serve` with its methods, by kind of traffic",
    "step-trace": "a step's timeline over all processes of the server, for Perfetto",
}

WITHOUT_ENGINE = ("drafting", "trie", "mtp-context", "cluster", "wire")
"""These need no Serve file."""


def main() -> int:
    """Runs the benchmarks asked for; 0, or 2 for a mistake of the user's."""
    listing = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(prog="python -m tests.peers", epilog=listing)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--config", help="Serve file to measure (default: the benchmark's own)")
    args, rest = parser.parse_known_args()
    for name in args.names:
        if name not in BENCHMARKS:
            parser.error(f"{name}: unknown; known are {', '.join(BENCHMARKS)}")
    if rest and len(args.names) != 1:
        parser.error(f"{' '.join(rest)}: options of a benchmark need its name, and one name only")
    # What a benchmark has started ends with it, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    status = 0
    for name in args.names or BENCHMARKS:
        options = list(rest)
        if args.config and name not in WITHOUT_ENGINE:
            options += ["--config", args.config]
        print(f"\n=== {name}: {BENCHMARKS[name]}", flush=True)
        try:
            import_module(f"tests.peers.bench_{name.replace('-', '_')}").main(options)
        except SpecServeError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2  # a missing peer is no reason to go without the others
    return status


if __name__ == "__main__":
    sys.exit(main())
