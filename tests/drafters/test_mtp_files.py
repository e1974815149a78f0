"""Fetching an MTP module from a hub: the real huggingface_hub and a local server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from specserve.drafters.mtp_files import find_mtp
from tests.drafters.checkpoints import write_copy

COMMIT = "0" * 40


class Hub(SimpleHTTPRequestHandler):
    """Answers ``/org/name/resolve/REVISION/FILE`` with the files of a folder."""

    protocol_version = "HTTP/1.1"

    def translate_path(self, path: str) -> str:
        known = {f"/org/model/resolve/{revision}" for revision in ("main", "v2", COMMIT)}
        parent, _, file = path.rpartition("/")
        return str(Path(self.directory) / (file if parent in known else "missing"))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.send_response(code)
        # The hub uses this header to mark a missing file or a missing model.
        is_file = self.path.startswith("/org/model/")
        self.send_header("X-Error-Code", "EntryNotFound" if is_file else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def end_headers(self) -> None:
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{Path(self.path).name}"')
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@dataclass(frozen=True, slots=True)
class Served:
    """A local hub: the folder of its model, and the environment of its users."""

    folder: Path
    environment: dict[str, str]

    def fetch(self, model: str, revision: str = "") -> str:
        """Fetches the MTP files of a model and returns their folder."""
        call = f"print(fetch_mtp({model!r}, {revision!r}))"
        code = f"from specserve.drafters.mtp_files import fetch_mtp; {call}"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.splitlines()[-1])
        return done.stdout.strip()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "hub"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        yield Served(folder, environment)
        server.shutdown()


@pytest.mark.parametrize("revision", ["", "v2"])
def test_only_the_modules_files_are_fetched(hub: Served, revision: str) -> None:
    written = find_mtp(str(write_copy(hub.folder, num_shards=6)), "model")
    folder = hub.fetch("org/model", revision)
    assert find_mtp(folder, "model").tensors.keys() == written.tensors.keys()
    shards = {file.name for file in Path(folder).glob("*.safetensors")}
    assert shards == {file.name for file in written.tensors.values()}
    assert len(shards) < 6


def test_a_checkpoint_of_one_file_is_fetched(hub: Served) -> None:
    written = find_mtp(str(write_copy(hub.folder)), "model")
    fetched = find_mtp(hub.fetch("org/model"), "model")
    assert fetched.tensors.keys() == written.tensors.keys()


def test_a_model_that_the_hub_does_not_have_is_refused(hub: Served) -> None:
    write_copy(hub.folder)
    with pytest.raises(RuntimeError, match=r"model: 'org/other' .* a model that the hub has"):
        hub.fetch("org/other")


def test_a_model_without_a_module_is_refused_with_the_reason(hub: Served) -> None:
    write_copy(hub.folder, num_shards=2, architectures=["LlamaForCausalLM"])
    with pytest.raises(RuntimeError, match=r"model: 'org/model' .*; allowed: a checkpoint of Deep"):
        hub.fetch("org/model")


def test_finding_imports_no_torch(tmp_path: Path) -> None:
    """`specserve check` finds the module, and torch takes seconds to import."""
    folder = str(write_copy(tmp_path / "model", num_shards=2))
    code = (
        "import sys; from specserve.drafters.mtp_files import find_mtp;"
        "find_mtp(sys.argv[1], 'model'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True)
