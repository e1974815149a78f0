"""The arguments and files of ``specserve trie``. tests/integration tests it with a cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from specserve.cli import trie, warm
from specserve.cli.main import main
from specserve.compare.prompts import load_tokenizer
from specserve.core.config import ModelConfig
from specserve.core.errors import SnapshotError
from specserve.core.source_config import TrieConfig
from specserve.engine.checkpoint import model_identity
from specserve.engine.cluster_memory import store_options
from specserve.trie.namespaces import namespace
from specserve.trie.records import Record
from specserve.trie.snapshot_keeper import SnapshotStats
from specserve.trie.store import StoreOptions, StoreStats, TrieStore
from tests.trie.texts import DirectClient, call

MODEL = str(Path(__file__).parents[2] / "configs/models/demo-draft")
VOCAB_SIZE = 4096
NOWHERE = ("--address", "127.0.0.1:1")  # nothing listens there
KEYS = [{"env": "A_KEY", "tenant": "team-a"}, {"env": "B_KEY", "tenant": "team-b"}]


def serve_file(folder: Path, *args: dict[str, Any]) -> Path:
    path = folder / "app.yaml"
    applications = [
        {
            "name": f"app{number}",
            "route_prefix": f"/{number}",
            "import_path": "specserve.app:build",
            "args": {"model": {"path": MODEL}, "speculation": [{"kind": "trie"}]} | each,
        }
        for number, each in enumerate(args)
    ]
    path.write_text(yaml.safe_dump({"applications": applications}))
    return path


def texts(folder: Path, *lines: object) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that ends with code 2."""
    assert main(["trie", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("specserve: error: ").rstrip()


class Store:
    """The part of a store that ``stats`` uses."""

    def __init__(self, stats: StoreStats) -> None:
        self._stats = stats

    def stats(self) -> StoreStats:
        return self._stats


class FailingStore:
    """A store whose file system is full, or the next one, which works."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def snapshot_now(self) -> int:
        if self._fails:
            raise SnapshotError("disk full")
        return 1000

    def purge(self, namespace: str) -> int:
        return self.snapshot_now()

    def stop(self) -> None:
        self.snapshot_now()


@pytest.mark.parametrize("command", [["snapshot"], ["purge", "--tenant", "team-a"], ["stop"]])
def test_an_error_of_one_store_does_not_stop_the_command_for_the_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    stores = {"first": FailingStore(fails=True), "second": FailingStore(fails=False)}
    monkeypatch.setattr(trie, "connected", lambda address: nullcontext())
    monkeypatch.setattr(trie, "_stores", lambda: stores)
    assert main(["trie", *command]) == 2
    printed = capsys.readouterr()
    assert "first: disk full" in printed.err
    assert printed.out.startswith("second: ")


def test_stats_print_a_snapshots_url_unchanged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = SnapshotStats(
        url="/kept/[red]/trie", num_saved=0, num_errors=0, last_error="", age_s=-1.0, num_bytes=0
    )
    stats = StoreStats(
        fingerprint="model",
        up_s=1.0,
        num_replicas=1,
        num_records=0,
        num_tokens=0,
        num_bytes=0,
        max_bytes=1,
        tokens_by_namespace={},
        dropped_tokens=0,
        snapshot=snapshot,
    )
    monkeypatch.setattr(trie, "connected", lambda address: nullcontext())
    monkeypatch.setattr(trie, "_stores", lambda: {"memory": Store(stats)})
    assert main(["trie", "stats"]) == 0
    assert "not yet; /kept/[red]/trie" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["stats"], ["snapshot"], ["purge", "--tenant", "team-a"]])
def test_a_missing_cluster_is_reported_in_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *command, *NOWHERE)
    assert said.startswith("no Ray cluster at 127.0.0.1:1: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--namespace", "../x"], "--namespace: '../x' is not allowed; allowed: 32 hexadecimal"),
        (["--namespace", "A" * 32], "--namespace: 'AAAA"),
        (["--tenant", ""], "--tenant: '' is not allowed; allowed: 1 .. 64 letters"),
    ],
)
def test_a_purges_arguments_are_checked_before_the_cluster(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "purge", *arguments, *NOWHERE).startswith(message)


@pytest.mark.parametrize("arguments", [[], ["--tenant", "a", "--namespace", "0" * 32]])
def test_a_purge_needs_either_a_namespace_or_a_tenant(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["trie", "purge", *arguments])


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ({"speculation": [{"kind": "ngram"}]}, [], "app.yaml: speculation: ['ngram'] is not"),
        (
            {"speculation": [{"kind": "trie", "share": "replica"}]},
            [],
            "app.yaml: speculation.0.share: 'replica' is not allowed; allowed: cluster",
        ),
        ({}, ["--tenant", "a"], "--tenant: 'a' is not allowed; allowed: nothing"),
        ({"http": {"api_keys": KEYS}}, [], "--tenant: '' is not allowed; allowed: team-a, team-b"),
        ({"http": {"api_keys": KEYS}}, ["--tenant", "c"], "--tenant: 'c' is not allowed"),
        (
            {
                "http": {"api_keys": KEYS},
                "speculation": [{"kind": "trie", "share_tenants": True}],
            },
            ["--tenant", "team-a"],
            "--tenant: 'team-a' is not allowed; allowed: nothing: all requests share one",
        ),
        ({}, ["--adapter", "a"], "--adapter: 'a' is not allowed; allowed: nothing: engine.vllm."),
        ({}, ["--application", "x"], "--application: 'x' is not allowed; allowed: app0"),
        ({"model": {"path": "no/such/model/at/all"}}, [], "app.yaml: model.path: "),
        ({"modell": {}}, [], "app.yaml: applications.0.args.modell: "),
    ],
)
def test_an_application_that_cannot_be_warmed_is_refused(
    args: dict[str, Any],
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    serve_file(tmp_path, args)
    path = texts(tmp_path, {"text": "a"})
    said = refusal(capsys, "warm", path, "--config", "app.yaml", *options, *NOWHERE)
    assert said.startswith(message)


def test_one_of_several_applications_must_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = serve_file(tmp_path, {}, {})
    said = refusal(capsys, "warm", texts(tmp_path, {"text": "a"}), "--config", path, *NOWHERE)
    assert said == "--application: '' is not allowed; allowed: app0, app1"


def test_a_file_with_an_invalid_line_is_refused_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = texts(tmp_path, {"text": "a"}, {"token_ids": [4096]})
    said = refusal(capsys, "warm", path, "--config", serve_file(tmp_path, {}), *NOWHERE)
    assert said.startswith(f"{path}: line 2: token_ids.0: 4096 is not allowed; allowed: an integer")


def test_a_pipe_is_refused_since_the_file_is_read_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    said = refusal(capsys, "warm", path, "--config", serve_file(tmp_path, {}), *NOWHERE)
    assert said.startswith(f"FILE: '{path}' is not allowed; allowed: a regular file")


@pytest.mark.parametrize("found", [0, 5])
def test_a_purge_that_finds_nothing_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    stores = {"only": SimpleNamespace(purge=lambda namespace: found)}
    monkeypatch.setattr(trie, "connected", lambda address: nullcontext())
    monkeypatch.setattr(trie, "_stores", lambda: stores)
    assert main(["trie", "purge", "--tenant", "team-a"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"only: {found} tokens of tenant team-a forgotten\n")
    assert ("no text of tenant team-a was found" in printed) == (not found)


def warmed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, config: Path, *options: str, lines: Sequence[Any]
) -> list[Record]:
    """Runs ``warm`` with the application's store in this process; returns the store's records."""
    identity = model_identity(ModelConfig(path=MODEL))
    store = TrieStore(StoreOptions(fingerprint=identity, vocab_size=VOCAB_SIZE))
    expected = store_options(TrieConfig(kind="trie"), identity, VOCAB_SIZE)

    def connect(used: StoreOptions) -> DirectClient:
        assert used == expected
        return DirectClient(store)

    monkeypatch.setattr(warm, "connected", lambda address: nullcontext())
    monkeypatch.setattr(warm, "list_stores", lambda: [expected.name])
    monkeypatch.setattr(warm, "RayStoreClient", connect)
    file = texts(folder, *lines)
    assert main(["trie", "warm", str(file), "--config", str(config), *options]) == 0
    return store.exchange(call()).records


def test_warm_texts_have_the_namespace_of_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = model_identity(ModelConfig(path=MODEL))
    lines = [{"token_ids": [1, 2, 3]}]
    (plain,) = warmed(tmp_path, monkeypatch, serve_file(tmp_path, {}), lines=lines)
    assert plain.namespace == namespace(identity)
    assert capsys.readouterr().out == f"3 tokens of 1 texts taught to {plain.namespace}\n"
    engine = {"vllm": {"enable_lora": True}, "max_num_seqs": 64}
    path = serve_file(tmp_path, {}, {"http": {"api_keys": KEYS}, "engine": engine})
    owner = ("--application", "app1", "--tenant", "team-b", "--adapter", "an-adapter")
    (taught,) = warmed(tmp_path, monkeypatch, path, *owner, lines=lines)
    assert taught.namespace == namespace(identity, "an-adapter", "team-b")


def test_warm_texts_have_the_tokens_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without dialogues, the chat template may be on another machine.
    elsewhere = serve_file(
        tmp_path, {"engine": {"vllm": {"chat_template": "elsewhere/chat.jinja"}}}
    )
    lines = [
        {"prompt": "def f(", "completion": "x):"},
        {"text": "return x"},
        {"token_ids": [7, 8]},
    ]
    both, completion, given = warmed(tmp_path, monkeypatch, elsewhere, lines=lines)
    encode: Any = load_tokenizer(MODEL).encode

    expected = [*encode("def f("), *encode("x):", add_special_tokens=False)]
    assert both.token_array().tolist() == expected
    assert completion.token_array().tolist() == encode("return x", add_special_tokens=False)
    assert given.token_array().tolist() == [7, 8]
