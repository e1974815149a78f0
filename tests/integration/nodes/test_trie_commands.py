"""``specserve trie`` on a cluster with a store, run as by an operator."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from specserve.core.config import ModelConfig
from specserve.engine.checkpoint import model_identity
from specserve.trie.namespaces import namespace
from tests.integration.cluster import Cluster, eventually, model_path
from tests.integration.operator_host import Operator

pytestmark = pytest.mark.timeout(600)

MODEL = model_path("demo-draft")
IDENTITY = model_identity(ModelConfig(path=str(MODEL)))
TENANTS = ("team-a", "team-b")
A, B = (namespace(IDENTITY, tenant=tenant) for tenant in TENANTS)

START = """
import ray, sys
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import get_or_start
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
options = StoreOptions(fingerprint=sys.argv[2], vocab_size=4096, snapshot_url=sys.argv[3])
ray.get(get_or_start(options).stats.remote())
print(options.name)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The Serve file of an application with two tenants."""
    keys = [{"env": f"KEY_{number}", "tenant": name} for number, name in enumerate(TENANTS)]
    args = {
        "model": {"path": str(MODEL)},
        "speculation": [{"kind": "trie"}],
        "http": {"api_keys": keys},
    }
    application = {"name": "demo", "import_path": "specserve.app:build", "args": args}
    path = tmp_path / "app.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.fixture(scope="module")
def operator(faults: Cluster) -> Iterator[Operator]:
    operator = Operator(faults)
    yield operator
    operator.stop()


@pytest.fixture
def cluster(faults: Cluster, operator: Operator) -> Cluster:
    """A cluster without stores. Stores of earlier applications are stopped first."""
    operator("trie", "stop", "--address", faults.address)
    eventually(lambda: not faults.processes("ray::TrieStore"), "no stores", 60)
    return faults


@pytest.fixture
def trie(cluster: Cluster, operator: Operator) -> Iterator[Callable[..., str]]:
    """Runs ``specserve trie``. Returns its stdout, or stderr if it fails. Stops all stores."""

    def trie(*arguments: object, code: int = 0) -> str:
        said = operator("trie", *arguments, "--address", cluster.address)
        assert said.code == code, said.stderr
        return said.stderr if code else said.stdout

    yield trie
    operator("trie", "stop", "--address", cluster.address)


def start_store(cluster: Cluster, folder: Path) -> str:
    """Starts the demo model's store, and returns its name."""
    command = [sys.executable, "-c", START, cluster.address, IDENTITY, str(folder)]
    done = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, check=True, timeout=240
    )
    return done.stdout.strip()


def test_an_operator_warms_inspects_saves_and_purges_the_memory(
    cluster: Cluster, trie: Callable[..., str], config: Path, tmp_path: Path
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"token_ids": list(range(1234))}))
    warm = ("warm", file, "--config", config, "--tenant")

    none = "specserve: error: no draft memory runs in this cluster\n"
    assert trie("stats", code=2) == none
    missing = "specserve: error: no draft memory of this model runs in this cluster\n"
    assert trie(*warm, "team-a", code=2) == missing

    name = start_store(cluster, tmp_path / "snapshots")
    for tenant, own in zip(TENANTS, (A, B), strict=True):
        out = trie(*warm, tenant)
        assert out == f"1,234 tokens of 1 texts taught to {own}\n"
    shown = trie("stats").split()
    assert shown[0] == name
    assert {(own, "1,234") for own in (A, B)} <= set(pairwise(shown))

    assert "bytes written" in trie("snapshot")
    snapshot = tmp_path / "snapshots" / f"{name}.snapshot"
    assert len(gzip.decompress(snapshot.read_bytes())) > 2 * 4 * 1234

    out = trie("purge", "--tenant", "team-a")
    assert out == f"{name}: 1,234 tokens of tenant team-a forgotten\n"
    shown = trie("stats").split()
    assert (B, "1,234") in set(pairwise(shown))
    assert (A, "1,234") not in set(pairwise(shown))
    out = trie("purge", "--namespace", B)
    assert out == f"{name}: 1,234 tokens of {B} forgotten\n"


SHARE = """
import json, sys, time
import numpy as np, ray
from specserve.core.source_config import TrieConfig
from specserve.engine.cluster_memory import joined_replica
from specserve.trie.memory import TrieMemory
from specserve.trie.records import TextPiece
from specserve.trie.store_actor import RemoteStore, list_stores
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
config, namespaces = TrieConfig(kind="trie"), sys.argv[3:]
memories = [TrieMemory(1 << 24, namespaces), TrieMemory(1 << 24, namespaces)]
writer, reader = [joined_replica(config, memory, sys.argv[2], 4096) for memory in memories]
deadline = time.monotonic() + 120
while not writer.link().up and time.monotonic() < deadline:
    time.sleep(0.05)
for namespace in namespaces:
    tokens = np.arange(500, dtype=np.int32)
    writer.publish(TextPiece(namespace, f"text of {namespace}", 0, tokens, final=True))
while True:
    sent = [RemoteStore(name).stats().num_tokens for name in list_stores()]
    if sent == [1000] or time.monotonic() > deadline:
        break
    time.sleep(0.05)
writer.close()
while True:
    held = [memories[1].tries()[namespace].num_tokens for namespace in namespaces]
    if min(held) == 500 or time.monotonic() > deadline:
        break
    time.sleep(0.05)
print(json.dumps([sent, held, list_stores()]))
"""


def test_replicas_share_the_texts_of_all_namespaces_through_one_store(
    cluster: Cluster, trie: Callable[..., str]
) -> None:
    names = [namespace(IDENTITY, tenant=f"tenant-{number}") for number in range(2)]
    done = subprocess.run(
        [sys.executable, "-c", SHARE, cluster.address, IDENTITY, *names],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    sent, held, stores = json.loads(done.stdout)
    assert (sent, held) == ([1000], [500, 500])
    (store,) = stores
    assert set(names) <= set(trie("stats").split())

    assert trie("stop") == f"{store}: stopped\n"
    assert "no draft memory runs" in trie("stats", code=2)
