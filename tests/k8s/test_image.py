"""The image's Dockerfile, tested without a build."""

from __future__ import annotations

import re

from tests.k8s.manifests import RECIPE, ROOT, STAGES


def test_there_is_a_target_for_each_tag_that_the_manifests_name() -> None:
    manifests = [path.read_text() for path in (ROOT / "k8s").rglob("*.yaml")]
    tags = set(re.findall(r"(?:newTag: |image: specserve:)([\w.-]+)", "".join(manifests)))
    assert tags == {"cpu", "gpu"}
    assert tags <= set(STAGES)


def test_each_target_runs_as_the_user_of_the_manifests() -> None:
    for target in ("cpu", "gpu"):
        instructions = STAGES[target][1]
        assert re.findall(r"^USER (.*)$", instructions, re.M) == ["1000:1000"]
        # Compiled kernels are stored in that user's folder.
        compiles = "RUN python -m specserve.engine.compile_kernels"
        assert instructions.index("USER") < instructions.index(compiles)


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignore = (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert all((ROOT / path).exists() for path in kept)
    for sources in re.findall(r"^COPY (.*) \S+$", RECIPE, re.M):
        assert set(sources.split()) <= kept | {"."}
    served = re.search(r"HAPROXY_BINARY_PATH=/app/(\S+)", RECIPE)
    assert served is not None
    assert served[1] in kept
