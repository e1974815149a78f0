"""Over HTTP: specserve's ``serve run`` beside ``vllm serve``, driven by ``vllm bench serve``.

Both have the same engine options and make the same drafts: prompt lookup with the same settings,
ours without its gate, which vLLM's has not. The servers run one at a time, in turns, since an idle
Ray cluster uses some CPU too; a ratio is taken within a round, and the median of the rounds shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specserve.compare.machine import circumstances
from specserve.compare.prompts import load_prompts, load_tokenizer
from specserve.core.config import AppConfig
from specserve.core.errors import SpecServeError
from specserve.core.openmp import openmp_environment
from specserve.core.source_config import NgramConfig
from specserve.serve.config_file import read
from tests.integration.cluster import (
    HAPROXY,
    HOST,
    READY_S,
    Cluster,
    eventually,
    free_ports,
    is_healthy,
    serving,
)

LAUNCHER = [sys.executable, str(Path(__file__).with_name("vllm_launcher.py"))]
NUM_PROMPTS = {1: 16, 8: 64}
"""Requests a run, by concurrency."""
OUTPUT_TOKENS = 128
STOP_TIMEOUT_S = 30.0
DRAFTS = NgramConfig(
    kind="ngram",
    max_draft_len=5,
    min_matching_ngram_size=2,
    max_matching_ngram_size=3,
    use_oldest=True,
    dynamic=False,
)
COLUMNS = {"output_throughput": "tok/s", "median_ttft_ms": "median first token, ms"}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dataset", choices=("code", "random"), default="code")
    parser.add_argument("--num-prompts", type=int, default=0, help="default: 16 and 64")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console = Console()
    config = read(args.config).applications[0].config
    config = config.model_copy(update={"speculation": (DRAFTS,)})
    with tempfile.TemporaryDirectory(prefix="specserve-bench-") as folder:
        client = Client(config, args.dataset, args.num_prompts, args.seed, Path(folder))
        found = measure(console, client, args.rounds)
    rows = list(summarise(found, list(SERVERS)))
    print_table(console, rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "server", **circumstances(), **document}))
    return 0


Found = dict[tuple[str, int], list[dict[str, float]]]
"""By server and concurrency, a result a round."""


class Client:
    """``vllm bench serve`` with one dataset.

    Args:
        config: what is served.
        dataset: ``code`` or ``random``.
        num_prompts: requests a run; 0: :data:`NUM_PROMPTS`.
        seed: of the dataset.
        folder: for files of its own.
    """

    def __init__(
        self, config: AppConfig, dataset: str, num_prompts: int, seed: int, folder: Path
    ) -> None:
        self.config = config
        self._num_prompts = num_prompts
        self._seed = seed
        self._folder = folder
        self._data = _dataset(dataset, config, folder, seed)

    def drive(self, url: str, concurrency: int) -> dict[str, float]:
        """One run against the server at ``url``."""
        num_prompts = self._num_prompts or NUM_PROMPTS[concurrency]
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        model = self.config.model
        command = [
            *(*LAUNCHER, "bench", "serve", "--backend", "openai", "--base-url", url),
            *("--endpoint", "/v1/completions", "--model", model.path),
            *("--served-model-name", model.name, *self._data),
            *("--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency)),
            *("--num-warmups", str(concurrency * 2), "--temperature", "0"),
            *("--seed", str(self._seed), "--disable-tqdm", "--save-result"),
            *("--result-dir", str(self._folder), "--result-filename", result.name),
        ]
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode or not result.exists():
            last = " | ".join((done.stderr or done.stdout).splitlines()[-3:])
            raise SpecServeError(f"vllm bench serve ended with {done.returncode}: {last}")
        content = json.loads(result.read_text())
        if content["completed"] != num_prompts:
            raise SpecServeError(f"{content['completed']} of {num_prompts} requests succeeded")
        return {name: content[name] for name in (*COLUMNS, "total_output_tokens", "duration")}


def _latent_attention(config: AppConfig) -> str:
    """The backend that a model needs to be served here at all; empty: vLLM's own choice."""
    # Here, because it takes seconds.
    from vllm.engine.arg_utils import EngineArgs

    from specserve.engine.cpu.backend import choose_latent_attention

    arguments = EngineArgs(model=config.model.path, dtype=config.engine.dtype)
    choose_latent_attention(arguments)
    return "" if arguments.attention_backend is None else arguments.attention_backend.name


def measure(console: Console, client: Client, rounds: int) -> Found:
    """Every server in turn, started afresh, ``rounds`` times."""
    found: Found = defaultdict(list)
    with Progress(console=console) as bars:
        bar = bars.add_task("", total=rounds * len(SERVERS) * len(NUM_PROMPTS))
        for number in range(rounds):
            for name, server in SERVERS.items():
                bars.update(bar, description=f"round {number + 1}: starting {name}")
                with server(client.config) as url:
                    for concurrency in NUM_PROMPTS:
                        what = f"round {number + 1}: {name}, concurrency {concurrency}"
                        bars.update(bar, description=what)
                        found[name, concurrency].append(client.drive(url, concurrency))
                        bars.advance(bar)
    return found


@contextmanager
def vllm_server(config: AppConfig) -> Iterator[str]:
    """``vllm serve`` with the configuration's engine options; its address."""
    (port,) = free_ports(1)
    engine = config.engine
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS.max_draft_len,
        "prompt_lookup_min": DRAFTS.min_matching_ngram_size,
        "prompt_lookup_max": DRAFTS.max_matching_ngram_size,
    }
    options = {
        "host": HOST,
        "port": port,
        "served-model-name": config.model.name,
        "dtype": engine.dtype,
        "tensor-parallel-size": engine.tensor_parallel_size,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "gpu-memory-utilization": engine.gpu_memory_utilization,
        "kv-cache-memory-bytes": engine.kv_cache_memory_bytes or 1 << 30,
        "seed": engine.seed,
        "speculative-config": json.dumps(speculation),
    } | ({"max-model-len": engine.max_model_len} if engine.max_model_len else {})
    if backend := _latent_attention(config):
        options["attention-backend"] = backend
    command = [*LAUNCHER, "serve", config.model.path]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command += ["--enforce-eager"] if engine.enforce_eager else []
    environment = _environment() | openmp_environment(config.placement.num_cpus_per_shard)
    # As our shards. Left to itself vLLM would keep one core of each NUMA node free.
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        url = f"http://{HOST}:{port}"

        def is_up() -> bool:
            if process.poll() is not None:
                log.seek(0)
                last = log.read().decode(errors="replace").splitlines()[-5:]
                raise SpecServeError(f"vllm serve ended: {' | '.join(last)}")
            return is_healthy(url)

        try:
            eventually(is_up, "vllm serve is healthy", READY_S)
            yield url
        finally:
            _stop(process)


@contextmanager
def specserve_server(config: AppConfig) -> Iterator[str]:
    """``serve run`` as ``make serve`` starts it, on a cluster of its own; its address."""
    cluster = Cluster([os.cpu_count() or 1])
    if HAPROXY.exists():
        cluster.use_haproxy()
    try:
        cluster.start()
        with serving(cluster, {"/": config.model_dump(mode="json")}) as deployment:
            yield deployment.base_url()
    finally:
        cluster.stop()


SERVERS: dict[str, Callable[[AppConfig], AbstractContextManager[str]]] = {
    "vllm serve": vllm_server,
    "specserve": specserve_server,
}
"""The first is what ratios are to."""


def summarise(found: Found, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each server and concurrency; ratios are to the first server's same round."""
    for concurrency in NUM_PROMPTS:
        for name in names:
            own, base = found[name, concurrency], found[names[0], concurrency]
            row: dict[str, Any] = {"server": name, "concurrency": concurrency}
            for column in COLUMNS:
                row[column] = round(median(one[column] for one in own), 2)
                row[f"{column}_ratio"] = round(
                    median(a[column] / b[column] for a, b in zip(own, base, strict=True)), 3
                )
            row["rounds"] = own
            yield row


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Over HTTP, the same drafts on both sides")
    table.add_column("concurrency", justify="right")
    table.add_column("server", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
        table.add_column("x vllm", justify="right")
    for row in rows:
        cells = [
            cell
            for column in COLUMNS
            for cell in (f"{row[column]:.1f}", f"{row[f'{column}_ratio']:.2f}")
        ]
        table.add_row(str(row["concurrency"]), row["server"], *cells)
    console.print(table)


def _dataset(name: str, config: AppConfig, folder: Path, seed: int) -> list[str]:
    """Options of ``vllm bench serve`` that say what to send."""
    if name == "random":
        lengths = ("--random-input-len", "200", "--random-output-len", str(OUTPUT_TOKENS))
        return ["--dataset-name", "random", *lengths, "--ignore-eos"]
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.revision)
    prompts = load_prompts("code", tokenizer, num_prompts=max(NUM_PROMPTS.values()), seed=seed)
    # The one format that it reads from a file without pandas.
    conversations = [
        {"conversations": [{"value": prompt.text}, {"value": "answer"}]} for prompt in prompts
    ]
    path = folder / "code.json"
    path.write_text(json.dumps(conversations))
    output = ("--sharegpt-output-len", str(OUTPUT_TOKENS))
    return ["--dataset-name", "sharegpt", "--dataset-path", str(path), *output]


def _environment() -> dict[str, str]:
    return {**os.environ, "VLLM_NO_USAGE_STATS": "1"}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group, and what is left of the group."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    finally:
        process.wait()
