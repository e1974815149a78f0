"""A new local source needs only its own file to appear wherever sources are shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.api import Api, fresh
from tests.integration.applications import application, drafted_by
from tests.integration.cluster import Cluster, serving
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(600)

ARGS = drafted_by(application(), kind="toy", max_draft_len=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH for processes that register the source when they start."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "sitecustomize.py").write_text("import tests.integration.toy_source\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parents[2])])


@pytest.fixture(scope="module")
def api(stage: Stage, path: str) -> Iterator[Api]:
    stage.end()
    cluster = Cluster([2])
    cluster.environment["PYTHONPATH"] = path
    try:
        cluster.start()
        with serving(cluster, {"/": ARGS}) as app:
            api = Api(app.base_url())
            with api.http:
                yield api
    finally:
        cluster.stop()


def test_the_toy_source_is_reported_and_counted(api: Api) -> None:
    api.complete(prompt="a" * 40, max_tokens=32, ignore_eos=True)
    shown = api.speculation()
    assert [each["kind"] for each in shown["sources"]] == ["toy"]
    counts = shown["acceptance"]["echo"]
    assert counts["drafts"] > 0
    drafted = f'source="echo"}} {float(counts["draft_tokens"])}'
    metrics = fresh(api.http, "/metrics").text.splitlines()
    assert any(
        line.startswith("specserve_draft_tokens_total{") and line.endswith(drafted)
        for line in metrics
    )


def test_a_request_may_select_it_alone(api: Api) -> None:
    options = {"prompt": "a" * 40, "max_tokens": 32, "ignore_eos": True}
    plain = api.complete(**options, vllm_xargs={"speculation": "off"})
    drafted = api.complete(**options, vllm_xargs={"speculation": "toy", "report": 1})
    assert drafted["choices"] == plain["choices"]
    sources = drafted["metrics"]["speculative_decoding"]["sources"]
    assert sources.keys() == {"echo"}
    assert sources["echo"]["drafted_tokens"] > 0


def test_the_page_has_its_label_and_its_colour(api: Api) -> None:
    page = api.http.get("/speculation").text
    assert '"toy": ["echo"]' in page
    for colour in ("#123456", "#abcdef"):
        assert f"[data-source=toy] {{ --c: {colour} }}" in page
        assert f"[data-source=echo] {{ --c: {colour} }}" in page


def test_check_accepts_the_toy_source_and_lists_its_kind(path: str, tmp_path: Path) -> None:
    def check(kind: str) -> subprocess.CompletedProcess[str]:
        args = ARGS | {"speculation": [{"kind": kind}]}
        served = {"name": "toy", "import_path": "specserve.app:build", "args": args}
        file = tmp_path / "app.yaml"
        file.write_text(yaml.safe_dump({"applications": [served]}))
        return subprocess.run(
            [str(Path(sys.executable).with_name("specserve")), "check", str(file)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )

    assert check("toy").returncode == 0
    refused = check("tou")
    assert refused.returncode != 0
    assert "mtp, toy" in refused.stderr
