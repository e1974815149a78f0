"""`configs/demo.yaml` as `make serve` serves it, with a compiler. The other tests have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.integration.api import Api
from tests.integration.cluster import Cluster, serving
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
ARGS = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["applications"][0]["args"]
ARGS["model"]["path"] = str(ROOT / ARGS["model"]["path"])
KINDS = {source["kind"] for source in ARGS["speculation"]}
PROMPT = 'import json\n\n\ndef load(path):\n    """Read a JSON file."""\n'


@contextmanager
def demo(cluster: Cluster) -> Iterator[Api]:
    with serving(cluster, {"/": ARGS}) as app:
        api = Api(app.base_url())
        with api.http:
            yield api


@pytest.fixture(scope="module")
def cluster(stage: Stage) -> Iterator[Cluster]:
    stage.end()
    cluster = Cluster([2])
    cluster.use_haproxy()
    cluster.use_compiler()
    cluster.environment["VLLM_CACHE_ROOT"] = str(cluster.folder / "vllm")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def saved_models(cluster: Cluster) -> dict[Path, int]:
    """Files of compiled models, and when they were written."""
    folder = cluster.folder / "vllm/torch_compile_cache/torch_aot_compile"
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_model_is_compiled_once_and_its_text_is_drafted(cluster: Cluster) -> None:
    with demo(cluster) as api:
        assert {each["kind"] for each in api.speculation()["sources"]} == KINDS
        for _ in range(6):
            answer = api.complete(prompt=PROMPT, max_tokens=64, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 64
        acceptance = api.speculation()["acceptance"]
        assert sum(each["accepted_tokens"] for each in acceptance.values()) > 100, acceptance
    saved = saved_models(cluster)
    assert saved
    with demo(cluster) as api:
        api.complete(prompt=PROMPT, max_tokens=8)
    assert saved_models(cluster) == saved
