"""Each rendered overlay, against the schemas of KubeRay, Kubernetes and Serve."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from specserve.core.source_config import DrafterConfig
from specserve.serve.config_file import Application, read
from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    groups,
    kuberay_validator,
    of_kind,
    pods,
    ray_service,
    rendered,
)

R1_OVERLAYS = ["r1-two-nodes", "rdma"]
SERVE_FILES = {
    "kind-cpu": "demo.yaml",
    "r1-two-nodes": "r1_mtp_hybrid.yaml",
    "rdma": "r1_mtp_hybrid.yaml",
}
SECRETS = {"specserve-ray-auth", "specserve-redis", "specserve-api-keys", "specserve-hub"}
"""Secrets are in no file: the user creates them."""
CUSTOM_KINDS = {"RayService", "PodMonitor", "PrometheusRule"}

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def serve_config(overlay: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])
    return content


def application(overlay: str, folder: Path) -> Application:
    path = folder / "serve.yaml"
    path.write_text(ray_service(overlay)["spec"]["serveConfigV2"])
    (found,) = read(path).applications
    return found


def ray_resources(group: dict[str, Any]) -> dict[str, float]:
    """What one host of a group offers to Ray."""
    marks: dict[str, float] = json.loads(json.loads(group["rayStartParams"]["resources"]))
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0)), **marks}


def environment(overlay: str) -> dict[str, str]:
    """Variables of all pods."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(overlay, "ConfigMap")}
    variables: dict[str, str] = maps["specserve-two-nodes"]
    return variables


@every_overlay
def test_running_requests_may_finish_before_a_pod_ends(overlay: str, tmp_path: Path) -> None:
    (variables,) = (
        found["data"]
        for found in of_kind(overlay, "ConfigMap")
        if found["metadata"]["name"] == "specserve-two-nodes"
    )
    ray_waits_s = float(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert application(overlay, tmp_path).config.http.drain_timeout_s + 10 <= ray_waits_s
    assert all(ray_waits_s < pod["spec"]["terminationGracePeriodSeconds"] for pod in pods(overlay))


@every_overlay
def test_a_silent_host_is_removed_as_soon_as_without_kubernetes(overlay: str) -> None:
    settings = (ROOT / "deploy/node.env").read_text()
    expected = dict(re.findall(r"^(RAY_health_check_\w+)=(\d+)$", settings, re.MULTILINE))
    assert len(expected) == 3
    assert environment(overlay).items() >= expected.items()
    (source,) = (
        each["configMapRef"]["name"]
        for each in groups(overlay)["head"]["template"]["spec"]["containers"][0]["envFrom"]
        if "configMapRef" in each
    )
    assert source == "specserve-two-nodes"


@every_overlay
def test_the_ray_service_is_valid_for_kuberay(overlay: str) -> None:
    kuberay_validator().validate(ray_service(overlay))


def test_a_misspelt_key_in_the_ray_service_is_refused() -> None:
    document = copy.deepcopy(ray_service("kind-cpu"))
    container = document["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    container["containers"][0]["readinesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="readinesProbe"):
        kuberay_validator().validate(document)


@every_overlay
def test_other_documents_are_valid_for_kubernetes(overlay: str) -> None:
    own = [document for document in rendered(overlay) if document["kind"] not in CUSTOM_KINDS]
    assert own
    for document in own:
        kubernetes_validate.validate(document, "1.32", strict=True)


@every_overlay
def test_the_serve_configuration_is_the_one_in_configs(overlay: str) -> None:
    expected = yaml.safe_load((ROOT / "configs" / SERVE_FILES[overlay]).read_text())
    expected["http_options"]["host"] = "0.0.0.0"  # a pod's proxy is reached from outside
    served = serve_config(overlay)
    if overlay == "kind-cpu":  # the demo itself runs on clusters without such a resource
        assert "deployments" not in expected["applications"][0]
        del served["applications"][0]["deployments"]
    assert served == expected


@every_overlay
def test_serve_and_we_accept_the_serve_configuration(overlay: str, tmp_path: Path) -> None:
    ServeDeploySchema.model_validate(serve_config(overlay))
    assert application(overlay, tmp_path).name == "specserve"


@every_overlay
def test_the_hosts_have_what_the_application_reserves(overlay: str, tmp_path: Path) -> None:
    config = application(overlay, tmp_path).config
    engine = groups(overlay)["engine"]
    num_gpus = float(overlay in R1_OVERLAYS)
    shard = {"GPU": num_gpus, "CPU": float(config.placement.num_cpus_per_shard)}
    shard |= config.placement.shard_resources
    num_hosts = engine["replicas"] // config.placement.num_replicas
    num_shards = config.engine.tensor_parallel_size / num_hosts
    offered = ray_resources(engine)
    assert {name: num_shards * amount <= offered[name] for name, amount in shard.items()} == (
        dict.fromkeys(shard, True)
    )
    assert offered["GPU"] == num_shards * num_gpus  # no GPU is left over


@pytest.mark.parametrize("overlay", R1_OVERLAYS)
def test_the_group_of_the_drafter_offers_what_it_needs(overlay: str, tmp_path: Path) -> None:
    (drafter,) = (
        source
        for source in application(overlay, tmp_path).config.speculation
        if isinstance(source, DrafterConfig)
    )
    offered = ray_resources(groups(overlay)["drafter"])
    asked = {"GPU": drafter.num_gpus, "CPU": drafter.num_cpus, **drafter.resources}
    assert all(amount <= offered[name] for name, amount in asked.items())


@every_overlay
def test_a_lost_host_is_replaced_alone(overlay: str) -> None:
    for name, group in groups(overlay).items():
        assert group.get("numOfHosts", 1) == 1, name


@every_overlay
def test_the_replica_runs_on_a_host_of_the_engine(overlay: str, tmp_path: Path) -> None:
    (deployment,) = serve_config(overlay)["applications"][0]["deployments"]
    assert deployment["name"] == "ModelServer"
    asked = deployment["ray_actor_options"]["resources"]
    shards = application(overlay, tmp_path).config.placement.shard_resources
    offered = ray_resources(groups(overlay)["engine"])
    for name, amount in asked.items():
        assert amount + 8 * shards.get(name, 0) <= offered[name]
        assert name not in groups(overlay)["head"]["rayStartParams"].get("resources", "")


@every_overlay
def test_the_head_offers_no_cpu_and_no_gpu(overlay: str) -> None:
    head = groups(overlay)["head"]
    assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]


@every_overlay
def test_a_worker_is_ready_without_a_serve_proxy(overlay: str) -> None:
    assert serve_config(overlay)["proxy_location"] == "HeadOnly"
    (service,) = of_kind(overlay, "Service")
    assert service["spec"]["selector"]["ray.io/node-type"] == "head"
    for name, group in groups(overlay).items():
        probe = group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
        expected = "/api/gcs_healthz" if name == "head" else "/api/local_raylet_healthz"
        assert probe["path"] == expected


@every_overlay
def test_no_pod_runs_as_root_or_can_become_root(overlay: str) -> None:
    for pod in pods(overlay):
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


@every_overlay
def test_each_pod_mounts_shared_memory_models_and_snapshots(overlay: str) -> None:
    for pod in pods(overlay):
        (container,) = pod["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert set(mounts) == {"/dev/shm", "/models", "/snapshots"}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert set(mounts.values()) == set(volumes)


@every_overlay
def test_objects_that_the_pods_name_exist(overlay: str) -> None:
    there = {(each["kind"], each["metadata"]["name"]) for each in rendered(overlay)}
    named = set()
    for pod in pods(overlay):
        for source in pod["spec"]["containers"][0]["envFrom"]:
            if "configMapRef" in source:
                named.add(("ConfigMap", source["configMapRef"]["name"]))
            else:
                assert source["secretRef"]["name"] in SECRETS
        for volume in pod["spec"]["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                named.add(("PersistentVolumeClaim", claim["claimName"]))
    assert named <= there


@pytest.mark.parametrize("overlay", R1_OVERLAYS)
def test_the_cluster_needs_a_token_and_keeps_its_state_in_redis(overlay: str) -> None:
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "specserve-ray-auth"}
    password = cluster["gcsFaultToleranceOptions"]["redisPassword"]
    assert password["valueFrom"]["secretKeyRef"]["name"] in SECRETS


def test_the_demo_needs_no_secret_and_no_volume() -> None:
    cluster = ray_service("kind-cpu")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert "gcsFaultToleranceOptions" not in cluster
    assert of_kind("kind-cpu", "PersistentVolumeClaim") == []


@every_overlay
def test_each_pod_runs_the_overlays_image(overlay: str) -> None:
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(overlay)}
    assert images == {"specserve:gpu" if overlay in R1_OVERLAYS else "specserve:cpu"}


@every_overlay
def test_the_network_policy_opens_the_ports_of_the_pods(overlay: str) -> None:
    (policy,) = of_kind(overlay, "NetworkPolicy")
    selectors = [policy["spec"]["podSelector"]["matchLabels"]]
    selectors += [
        each["spec"]["selector"]["matchLabels"] for each in of_kind(overlay, "PodMonitor")
    ]
    open_ports = {
        port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])
    }
    for pod in pods(overlay):
        assert all(pod["metadata"]["labels"].items() >= selector.items() for selector in selectors)
        ports = {
            each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]
        }
        assert ports["metrics"] in open_ports
    assert 8000 in open_ports


@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_the_nodes_communicate_over_the_pods_interface(variable: str) -> None:
    for overlay in OVERLAYS:
        assert environment(overlay)[variable] == "eth0"


@pytest.mark.parametrize("overlay", R1_OVERLAYS)
@pytest.mark.parametrize("variable", ["VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE"])
def test_each_compile_cache_is_on_a_shared_volume(overlay: str, variable: str) -> None:
    cache = environment(overlay)[variable]
    for pod in pods(overlay):
        (container,) = pod["spec"]["containers"]
        (mount,) = (
            each for each in container["volumeMounts"] if cache.startswith(each["mountPath"] + "/")
        )
        assert not mount.get("readOnly")
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        claimed = volumes[mount["name"]]["persistentVolumeClaim"]["claimName"]
        claims = {
            each["metadata"]["name"]: each for each in of_kind(overlay, "PersistentVolumeClaim")
        }
        assert claims[claimed]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_only_the_rdma_overlay_uses_infiniband() -> None:
    disabled = {overlay: environment(overlay)["NCCL_IB_DISABLE"] for overlay in OVERLAYS}
    assert disabled == {"kind-cpu": "1", "r1-two-nodes": "1", "rdma": "0"}
    limits = groups("rdma")["engine"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["rdma/hca_shared_devices_a"] == "1"


def weights_job() -> dict[str, Any]:
    """The job that fills the volume of weights."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "k8s/load-weights.yaml").read_text())
    kubernetes_validate.validate(document, "1.32", strict=True)
    return document


def test_a_job_fills_the_volume_of_weights_as_the_pods_that_read_it(tmp_path: Path) -> None:
    job = weights_job()["spec"]["template"]["spec"]
    reading = pods("r1-two-nodes")[0]["spec"]
    assert job["securityContext"] == reading["securityContext"]
    (container,), (reader,) = job["containers"], reading["containers"]
    assert container["image"] == reader["image"]
    assert container["securityContext"] == reader["securityContext"]
    (token,) = container["envFrom"]  # for the hub
    assert token in reader["envFrom"]
    (volume,) = job["volumes"]
    claims = list(yaml.safe_load_all((ROOT / "k8s/base/volumes.yaml").read_text()))
    claimed = volume["persistentVolumeClaim"]["claimName"]
    assert claimed in {each["metadata"]["name"] for each in claims}
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/models"}]
    config = application("r1-two-nodes", tmp_path).config
    (drafter,) = (each for each in config.speculation if isinstance(each, DrafterConfig))
    for folder in (config.model.path, drafter.model):
        assert folder in container["command"][-1].split()


def test_the_job_that_fills_the_volume_may_run_again(tmp_path: Path) -> None:
    (container,) = weights_job()["spec"]["template"]["spec"]["containers"]
    shell, option, script = container["command"]
    # The second call fails, as that of `specserve split-mtp`.
    writes = '#!/bin/sh\nmkdir "$3" && touch "$3/config.json"\n'
    for name, program in {"hf": "#!/bin/sh\n", "specserve": writes}.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [shell, option, script.replace("/models", str(tmp_path))]
    for _ in range(2):
        subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "DeepSeek-R1-MTP/config.json").exists()


def test_the_comment_of_the_overlay_fills_the_volume_before_the_pods_start() -> None:
    lines = (ROOT / "k8s/overlays/r1-two-nodes/kustomization.yaml").read_text().splitlines()
    commands = [line.removeprefix("#   ") for line in lines if line.startswith("#   kubectl ")]
    loads, waits, applies = commands[-3:]
    for file in ("k8s/base/volumes.yaml", "k8s/load-weights.yaml"):
        assert f"-f {file}" in loads
        assert (ROOT / file).exists()
    assert waits.endswith(f"job/{weights_job()['metadata']['name']}")
    assert applies == "kubectl apply -k k8s/overlays/r1-two-nodes"


SHARD_WEIGHTS = "../shard-weights"


def test_the_cluster_that_divides_weights_is_valid_and_may_write_them() -> None:
    (cluster,) = of_kind(SHARD_WEIGHTS, "RayCluster")
    kuberay_validator("rayclusters").validate(cluster)
    (engine,) = cluster["spec"]["workerGroupSpecs"]
    for group in (cluster["spec"]["headGroupSpec"], engine):
        pod = group["template"]["spec"]
        (mount,) = (
            each for each in pod["containers"][0]["volumeMounts"] if each["mountPath"] == "/models"
        )
        (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
        assert "readOnly" not in mount
        assert volume["persistentVolumeClaim"] == {"claimName": "specserve-weights"}


def test_the_cluster_that_divides_weights_has_the_hosts_of_the_engine() -> None:
    (cluster,) = of_kind(SHARD_WEIGHTS, "RayCluster")
    (engine,) = cluster["spec"]["workerGroupSpecs"]
    serving = groups("r1-two-nodes")["engine"]
    assert engine["replicas"] == serving["replicas"]
    assert ray_resources(engine) == ray_resources(serving)
    assert cluster["spec"]["authOptions"]["secretName"] in SECRETS


def test_to_delete_the_cluster_that_divides_weights_deletes_no_volume() -> None:
    kinds = {each["kind"] for each in rendered(SHARD_WEIGHTS)}
    assert kinds == {"RayCluster", "ConfigMap", "NetworkPolicy"}
    serving = rendered("r1-two-nodes")
    assert all(each in serving for each in rendered(SHARD_WEIGHTS) if each["kind"] != "RayCluster")
