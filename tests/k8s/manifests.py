"""The overlays as kubectl renders them, KubeRay's schema to check them, and the image's recipe."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s/overlays").iterdir())
SCHEMAS = Path(os.environ.get("SPECSERVE_KUBERAY_SCHEMAS", ROOT / "../shared/kuberay"))
RECIPE = (ROOT / "deploy/Dockerfile").read_text()
STAGES = {
    match[2]: (match[1], match[3])
    for match in re.finditer(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", RECIPE, re.M | re.S)
}
"""Base and instructions of each stage, by name."""


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    """All documents of an overlay, or of another folder relative to ``k8s/overlays``."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(ROOT / "k8s/overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, kind: str) -> list[dict[str, Any]]:
    """The overlay's documents of one kind."""
    return [document for document in rendered(overlay) if document["kind"] == kind]


def ray_service(overlay: str) -> dict[str, Any]:
    """The overlay's only RayService."""
    (document,) = of_kind(overlay, "RayService")
    return document


def groups(overlay: str) -> dict[str, dict[str, Any]]:
    """The head's group and the workers', by name."""
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def pods(overlay: str) -> list[dict[str, Any]]:
    """The pod templates of all groups, each with one container."""
    return [group["template"] for group in groups(overlay).values()]


@cache
def kuberay_validator(kinds: str = "rayservices") -> Any:
    """A validator for one of KubeRay's kinds, v1, in which an unknown key is an error."""
    path = SCHEMAS / f"ray.io_{kinds}.yaml"
    if not path.exists():
        pytest.skip(
            f"no KubeRay schemas in {SCHEMAS}; SPECSERVE_KUBERAY_SCHEMAS names their folder"
        )
    definition = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    # jsonschema.validate() would check the schema, a megabyte, at each call.
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with ``additionalProperties: false`` wherever it lists properties."""
    made = dict(schema)
    if "properties" in made:
        made["properties"] = {key: closed(part) for key, part in made["properties"].items()}
        made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = closed(made[key])
    return made
