"""``make bench``: compares this project with others in one run on one machine.

    python -m tests.peers [NAME ...] [--config configs/demo.yaml]

Without names it runs all benchmarks. Each prints its tables, and last one line of JSON with
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
    "mtp-context": "time of a token in the MTP layer, by context length, beside transformers'",
    "cluster": "a simulation: gain and cost of one memory for 1 to 256 replicas",
    "engine": "one engine: no speculation, ours with a memory, vLLM's ngram and suffix decoding",
    "switched": "one engine: all sources together, and each alone, in turns",
    "decisions": "drafts for recorded answers: suffix decoding, ours, a perfect choice",
    "limits": "one engine: drafts of the known answer, beside ours and vLLM's",
    "drafters": "a drafting model: in a separate process, and in vLLM's engine",
    "agreement": "drafts of the same models at the same places: ours and vLLM's",
    "sharing": "two replicas: one shared drafter, or a drafter each",
    "wire": "cost of a drafter call without the model, beside a call of a Ray actor",
    "replication": "how soon replicas learn from each other, and where their store saturates",
    "grammar": "over HTTP: answers to ten JSON schemas, beside prompt lookup and no speculation",
    "prediction": "over HTTP: edits of a predicted text, beside prompt lookup and no speculation",
    "generation": "over HTTP: streaming by the generation API, beside /v1/completions",
    "tokens": "over HTTP: figures of `bench tokens`, beside `vllm bench serve`",
    "server": "over HTTP: ours beside `vllm serve` with its methods, by kind of traffic",
    "step-trace": "a step's timeline over all processes of the server, for Perfetto",
}

WITHOUT_ENGINE = ("drafting", "trie", "mtp-context", "cluster", "wire")
"""Benchmarks that need no Serve file."""


def main() -> int:
    """Runs the named benchmarks. Returns 0, or 2 after a user's mistake."""
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
    # On SIGTERM a benchmark stops the processes it started, as after Ctrl-C.
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
            status = 2  # go on with the other benchmarks
    return status


if __name__ == "__main__":
    sys.exit(main())
