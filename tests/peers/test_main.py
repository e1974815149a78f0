from __future__ import annotations

import signal
import subprocess
import sys

BENCHMARK = """
import sys, time, types
from tests.peers import __main__ as peers

def main(options):
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        print("ended", flush=True)

sys.modules["tests.peers.bench_wire"] = types.SimpleNamespace(main=main)
sys.argv = ["peers", "wire"]
peers.main()
"""


def test_a_benchmark_that_is_terminated_ends_what_it_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "started\n" in process.stdout
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "ended\n"
        assert process.wait(10) == 128 + signal.SIGTERM
