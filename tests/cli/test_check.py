from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.cli.main import main
from specserve.serve.config_file import _Loader
from tests.model_cards import DEEPSEEK_R1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a model in models/tiny."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/tiny").mkdir(parents=True)
    config = json.dumps({"architectures": ["LlamaForCausalLM"]})
    (tmp_path / "models/tiny/config.json").write_text(config)
    return tmp_path


def serve_file(args: object, **application: Any) -> dict[str, Any]:
    app = {"name": "demo", "import_path": "specserve.app:build", "args": args} | application
    return {"http_options": {"host": "127.0.0.1", "port": 8123}, "applications": [app]}


def write(content: object) -> str:
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    Path("app.yaml").write_text(text)
    return "app.yaml"


GOOD = {
    "model": {"path": "models/tiny"},
    "engine": {"tensor_parallel_size": 2},
    "speculation": [{"kind": "ngram", "max_draft_len": 5}],
    "placement": {"num_replicas": 3, "num_cpus_per_shard": 4, "shard_resources": {"fast": 1}},
    "http": {"api_keys": [{"env": "A_KEY", "tenant": "team-a"}]},
}


@pytest.mark.usefixtures("folder")
def test_all_served_names_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"path": "models/tiny", "served_name": ["tiny", "default"]}
    assert main(["check", write(serve_file({**GOOD, "model": model}))]) == 0
    assert "tiny, default (" in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.usefixtures("folder")
def test_a_valid_file_prints_what_starts_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(serve_file(GOOD))]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    for part in (
        "application demo",
        "http://127.0.0.1:8123/v1",
        "LlamaForCausalLM",
        "3 x 2 (replicas x tensor parallel), placed PACK",
        "CPU: 4, fast: 1",
        "ngram (max_draft_len 5,",
        "requests decoded at once: 256",
        "API keys team-a (from A_KEY)",
        "app.yaml: valid",
    ):
        assert part in out


@pytest.mark.usefixtures("folder")
def test_empty_options_of_sources_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(serve_file(GOOD | {"speculation": [{"kind": "trie"}]}))]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "share_tenants False, learn_prompts True, snapshot_interval" in out


@pytest.mark.usefixtures("folder")
def test_a_hub_id_is_not_looked_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(serve_file({"model": {"path": "org/name"}}))]) == 0
    assert "org/name, from the hub" in capsys.readouterr().out


def bad(**sections: Any) -> dict[str, Any]:
    return serve_file(GOOD | sections)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "line 1, column 6: not valid YAML"),
        ("", "file: None is not allowed; allowed: a mapping with the key applications"),
        (
            {"applications": []},
            "applications: [] is not allowed; allowed: at least one application",
        ),
        (
            {"applications": [], "logging": {}},
            "logging: 'logging' is not allowed; allowed: proxy_location, ",
        ),
        (
            "{on: 3, applications: []}",
            "True: 'True' is not allowed; allowed: proxy_location, ",
        ),  # YAML reads `on` as True
        (
            "{http_options: {off: 3}, applications: []}",
            "http_options.False: 'False' is not allowed; allowed: host, ",
        ),
        (
            serve_file(GOOD, import_path="other:app"),
            "applications.0.import_path: 'other:app' is not allowed; allowed: specserve.app:build",
        ),
        (serve_file(GOOD, arg={}), "applications.0.arg: 'arg' is not allowed; allowed: name, "),
        (
            serve_file(GOOD, deployments=[{"name": "ModelServer", "num_replica": 2}]),
            "applications.0.deployments.0.num_replica: 'num_replica' is not allowed; allowed: ",
        ),
        (
            serve_file(
                GOOD,
                deployments=[{"name": "ModelServer", "autoscaling_config": {"max_replica": 2}}],
            ),
            "applications.0.deployments.0.autoscaling_config.max_replica: 'max_replica' is not "
            "allowed; allowed: min_replicas, ",
        ),
        (
            serve_file(GOOD, deployments=[None]),
            "applications.0.deployments.0: None is not allowed; allowed: a mapping with the name",
        ),
        (
            serve_file(GOOD, deployments=[{"name": "Modelserver"}]),
            "applications.0.deployments.0.name: 'Modelserver' is not allowed; allowed: ModelServer",
        ),
        (
            serve_file(GOOD, route_prefix="v2"),
            "applications.0.route_prefix: 'v2' is not allowed; allowed: a path that begins with /",
        ),
        *(
            (
                serve_file(GOOD, route_prefix=prefix),
                f"applications.0.route_prefix: {prefix!r} is not allowed; allowed: a path that",
            )
            for prefix in ("/v2/", "/{a}", "", None)
        ),
        *(
            (
                serve_file(GOOD, deployments=[{"name": "ModelServer"} | options]),
                f"applications.{said}",
            )
            for options, said in (
                (
                    {"autoscaling_config": {"min_replicas": 2}},
                    "0.deployments.0.autoscaling_config: max_replicas (1) must be greater",
                ),
                (
                    {"autoscaling_config": {"max_replicas": "foo"}},
                    "0.deployments.0.autoscaling_config.max_replicas: 'foo' is not allowed; ",
                ),
            )
        ),
        (
            serve_file(
                GOOD,
                deployments=[
                    {
                        "name": "ModelServer",
                        "request_router_config": {"request_router_class": "foo.Bar"},
                    }
                ],
            ),
            "applications: Serve refuses a section: No module named 'foo'",
        ),
        (
            bad(speculation=[{"kind": "trie", "snapshot_url": "foo://x"}]),
            "applications.0.args.speculation.0.snapshot_url: 'foo://x' is not allowed; ",
        ),
        (
            bad(
                speculation=[{"kind": "trie", "max_bytes": 1 << 20}],
                http={"api_keys": [{"env": f"KEY_{i}", "tenant": f"t{i}"} for i in range(20)]},
            ),
            "applications.0.args.speculation.0.max_bytes: 1048576 is not allowed; allowed: "
            "at least 1334080, 66704 for each of 20 tenants and adapters",
        ),
        (
            serve_file(GOOD) | {"http_options": {"port": 99999}},
            "http_options.port: 99999 is not allowed; allowed: 1 .. 65535",
        ),
        ("applications: []\nhttp_options: {port: 1, port: 2}", "line 2, column 25: not valid YAML"),
        ("{applications: [], true: 1, True: 2}", "line 1, column 29: not valid YAML"),
        ("applications: {{ apps }}", "line 1, column 16: not valid YAML"),
        ("applications: 2025-02-30", "not valid YAML: day is out of range for month"),
        (serve_file([]), "applications.0.args: [] is not allowed; allowed: "),
        (
            bad(model={"path": "models/tyni"}),
            "applications.0.args.model.path: 'models/tyni' is not ",
        ),
        (
            bad(model={"path": "models"}),
            "applications.0.args.model.path: 'models' is not allowed; ",
        ),
        (bad(engine={"foo": 1}), "applications.0.args.engine.foo: 'foo' is not allowed; allowed: "),
        (
            bad(engine={"seed": "x"}),
            "applications.0.args.engine.seed: 'x' is not allowed; allowed: an ",
        ),
        (
            bad(speculation=[{"kind": "ngram"}] * 2),
            "applications.0.args.speculation.0.kind: 'ngram' is not allowed; allowed: each kind ",
        ),
        (
            bad(speculation=[{"kind": "ngram", "max_draft_len": 999}]),
            "applications.0.args.speculation.0.max_draft_len: 999 is not allowed; allowed: an ",
        ),
    ],
)
def test_an_invalid_file_is_reported_in_one_line(
    content: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", write(content)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"specserve: error: app.yaml: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.usefixtures("folder")
def test_each_unknown_key_of_a_deployments_sections_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sections: dict[str, Any] = {"autoscaling_config": {"max_replica": 2, "min_replica": 1, 1: 2}}
    sections |= {"gang_scheduling_config": {"gang_size": 2, "gang": 2}}
    deployment = {"name": "ModelServer", **sections}
    assert main(["check", write(serve_file(GOOD, deployments=[deployment]))]) == 2
    lines = capsys.readouterr().err.splitlines()
    keys = [f"autoscaling_config.{key}" for key in (1, "max_replica", "min_replica")]
    keys.append("gang_scheduling_config.gang")
    for line, key in zip(lines, keys, strict=True):
        assert f"app.yaml: applications.0.deployments.0.{key}: " in line


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "scaling",
    [
        {"num_replicas": 2},
        {"num_replicas": "auto"},
        {"num_replicas": "auto", "autoscaling_config": {"min_replicas": 2}},
        {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
    ],
)
def test_a_deployment_may_set_or_scale_its_replicas(scaling: dict[str, Any]) -> None:
    deployment = {"name": "ModelServer", **scaling}
    assert main(["check", write(serve_file(GOOD, deployments=[deployment]))]) == 0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("max_texts", "is_noted"), [(255, True), (256, False)])
def test_a_drafter_with_fewer_texts_than_requests_is_noted(
    max_texts: int, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"kind": "draft_model", "model": "models/tiny", "max_texts": max_texts}
    one = GOOD | {"speculation": [source], "placement": {"num_replicas": 1}}
    assert main(["check", write(serve_file(one))]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    note = f"draft_model holds {max_texts} texts (max_texts) of the 256 requests decoded at once"
    assert (note in out) == is_noted


def test_an_invalid_config_json_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "models/tiny/config.json").write_text("{")
    assert main(["check", write(serve_file(GOOD))]) == 2
    assert "not valid JSON" in capsys.readouterr().err


def test_a_missing_file_ends_the_command_with_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specserve.cli.main", "check", "none.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    expected = "specserve: error: none.yaml: cannot be read: No such file or directory\n"
    assert done.stderr == expected


def test_the_demo_file_is_checked_by_default(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "configs").mkdir()
    Path(write(serve_file(GOOD))).rename("configs/demo.yaml")
    assert main(["check"]) == 0
    assert "configs/demo.yaml: valid" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "configs/ has none here"),
        (("b.yaml", "a.yaml"), "here are configs/a.yaml, configs/b.yaml"),
    ],
)
def test_the_existing_files_are_listed_if_none_is_named(
    files: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (folder / "configs").mkdir(exist_ok=True)
        (folder / "configs" / name).touch()
    assert main(["check"]) == 2
    assert capsys.readouterr().err == f"specserve: error: name the Serve file to check: {said}\n"


R1 = {
    "model": {"path": "models/r1"},
    "engine": {"tensor_parallel_size": 16, "max_model_len": 32768},
    "placement": {"num_cpus_per_shard": 2, "shard_resources": {"mark": 0.01}},
}


@pytest.fixture
def r1(folder: Path) -> Path:
    """The folder with R1's config.json, without its weights."""
    (folder / "models/r1").mkdir()
    (folder / "models/r1/config.json").write_text(json.dumps(DEEPSEEK_R1))
    return folder


@pytest.mark.usefixtures("r1")
def test_a_plan_for_two_nodes_has_ranks_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(serve_file(R1)), "--cluster", "2x8"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    for part in (
        "node 1 8 GPU replica 0: ranks 0-7",
        "node 2 8 GPU replica 0: ranks 8-15",
        "a shard: 40.2 GiB of weights, 70,272 bytes of KV cache a token",
        "on a GPU with 80.0 GiB: 486,402 tokens",
        "app.yaml: valid",
    ):
        assert part in out


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "vocab_size": 129280,
}


def test_a_plan_has_a_drafter_beside_rank_0_and_its_memory(
    r1: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (r1 / "models/tiny/config.json").write_text(json.dumps(LLAMA))
    drafter = {"kind": "draft_model", "model": "models/tiny", "max_texts": 4}
    beside = {**drafter, "placement": "beside_rank_0", "num_gpus": 0.1}
    file = write(serve_file({**R1, "speculation": [beside]}))
    assert main(["check", file, "--cluster", "2x8"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "node 1 8 GPU replica 0: ranks 0-7 draft_model beside rank 0 node 2 8 GPU" in out
    assert "for 4 texts, in the 8.0 GiB (0.1) that it has of rank 0's GPU" in out
    assert main(["check", file, "--cluster", "2x8", "--gpu-memory", "60GB"]) == 2
    assert "do not fit into 5.6 GiB of a GPU" in capsys.readouterr().err


def test_an_invalid_cluster_is_refused_before_the_file_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "no/such.yaml", "--cluster", "2by8"]) == 2
    assert "--cluster: '2by8' is not allowed" in capsys.readouterr().err


@pytest.mark.usefixtures("r1")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "1x8"], "app.yaml: applications.0.args: needs 16 GPU, the cluster has 8 "),
        (["--cluster", "2x8cpu"], "app.yaml: applications.0.args: needs 32 CPU, the cluster has 1"),
        (
            ["--cluster", "2x8", "--gpu-memory", "40GB"],
            "app.yaml: applications.0.args: a shard's weights of 40.2 GiB do not fit into 0.9 x 37",
        ),
        (["--cluster", ""], "--cluster: '' is not allowed; allowed: running, or groups "),
        (["--cluster", "2by8"], "--cluster: '2by8' is not allowed; allowed: running, or groups "),
        (["--cluster", "2x8", "--gpu-memory", "80"], "--gpu-memory: '80' is not allowed; allow"),
        (["--cluster", "2x8", "--gpu-memory", "0GB"], "--gpu-memory: '0GB' is not allowed; allow"),
        (["--gpu-memory", "much"], "--gpu-memory: 'much' is not allowed; allowed: a size such as"),
        (["--gpu-memory", "80GB"], "--gpu-memory: '80GB' is not allowed; allowed: only with --clu"),
    ],
)
def test_a_plan_that_fails_is_reported_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", write(serve_file(R1)), *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"specserve: error: {message}")
    assert captured.err.count("\n") == 1
    assert "valid" not in captured.out


@pytest.mark.usefixtures("r1")
def test_applications_of_one_file_share_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    file = serve_file(R1)
    file["applications"] += [file["applications"][0] | {"name": "more", "route_prefix": "/more"}]
    assert main(["check", write(file), "--cluster", "4x8"]) == 0
    capsys.readouterr()
    assert main(["check", write(file), "--cluster", "3x8"]) == 2
    assert "applications.1.args: needs 16 GPU, the cluster has 8 free" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_memory_that_cannot_be_estimated_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    args = GOOD | {"model": {"path": "org/name"}}
    assert main(["check", write(serve_file(args)), "--cluster", "2x8"]) == 0
    said = capsys.readouterr().out
    assert (
        "memory was not estimated: there is no org/name/config.json here: put the model's" in said
    )


def test_config_json_alone_plans_the_model_and_its_mtp_module(
    r1: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [path.name for path in (r1 / "models/r1").iterdir()] == ["config.json"]
    drafter = {"kind": "mtp", "model": "/models/none/R1-MTP", "num_gpus": 1, "max_texts": 64}
    file = write(serve_file({**R1, "speculation": [drafter]}))
    assert main(["check", file, "--cluster", "2x8+1x1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    note = "/models/none/R1-MTP: the MTP module was not checked: its weights are not here"
    assert lines.count(note) == 1
    out = re.sub(r"\s+", " ", " ".join(lines))
    assert "node 3 1 GPU mtp" in out
    sizes = "40.2 GiB of weights, 70,272 bytes of KV cache a token, 441.9 MiB to verify drafts"
    assert f"a shard: {sizes}" in out
    assert "the mtp drafter: 25.1 GiB of weights, 2.2 GiB of KV cache for 64 texts" in out


@pytest.mark.usefixtures("r1")
@pytest.mark.parametrize("options", [[], ["--cluster", "running"]])
def test_missing_weights_are_refused_where_they_are_to_be_served(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(serve_file({**R1, "speculation": [{"kind": "mtp"}]}))
    assert main(["check", file, *options]) == 2
    said = capsys.readouterr().err
    assert "args.model.path: '" in said
    assert "allowed: a checkpoint with all its files: model.safetensors is missing" in said


def test_config_json_alone_refuses_a_model_without_an_mtp_module(
    r1: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (r1 / "models/r1/config.json").write_text(json.dumps(LLAMA))
    file = write(serve_file({**R1, "speculation": [{"kind": "mtp", "model": "/models/none"}]}))
    assert main(["check", file, "--cluster", "2x8"]) == 2
    said = capsys.readouterr().err
    assert "args.model.path: 'models/r1' is not allowed; allowed: a checkpoint of Deepseek" in said


@pytest.mark.usefixtures("r1")
def test_a_missing_draft_model_is_planned_without_its_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = {"kind": "draft_model", "model": "/models/none/small", "num_gpus": 1}
    file = write(serve_file({**R1, "speculation": [drafter]}))
    assert main(["check", file, "--cluster", "2x8+1x1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "/models/none/small: the vocabulary was not checked: its folder is not here" in lines
    assert any(
        line.startswith(
            "the draft_model drafter's memory was not estimated: there is no /models/none/small/"
        )
        for line in lines
    )


def test_drafters_of_the_demo_are_placed_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(MODELS.parents[1])
    assert main(["check", "configs/mtp.yaml", "--cluster", "1x2cpu"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "node 1 2 CPU replica 0: rank 0 mtp" in out
    assert "the mtp drafter: 13.9 MiB of weights, 576.0 MiB of KV cache for 64 texts" in out


MODELS = Path(__file__).parents[2] / "configs/models"


def refusal(capsys: pytest.CaptureFixture[str], *sources: dict[str, Any], path: Path) -> str:
    args = {"model": {"path": str(path)}, "speculation": list(sources)}
    assert main(["check", write(serve_file(args))]) == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_model_without_an_mtp_module_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, {"kind": "mtp"}, path=MODELS / "demo-draft")
    assert "args.model.path" in said
    assert "DeepseekV3ForCausalLM" in said
    elsewhere = {"kind": "mtp", "model": str(MODELS / "demo-draft")}
    assert "args.speculation.0.model" in refusal(capsys, elsewhere, path=MODELS / "demo-base")


@pytest.mark.usefixtures("folder")
def test_an_mtp_module_of_another_architecture_is_left_to_vllm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = MODELS / "demo-draft"
    source = {"kind": "mtp", "placement": "in_engine"}
    file = write(serve_file({"model": {"path": str(path)}, "speculation": [source]}))
    assert main(["check", file]) == 0
    assert "the MTP module was not checked: vLLM knows its format" in capsys.readouterr().out


def test_a_draft_model_with_another_vocabulary_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "models/tiny"
    tokenizer = json.loads((MODELS / "demo-draft/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["another token"] = vocabulary.pop(max(vocabulary, key=vocabulary.get))
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    source = {"kind": "draft_model", "model": "models/tiny"}
    said = refusal(capsys, source, path=MODELS / "demo-base")
    assert "args.speculation.0.model: 'models/tiny' is not allowed" in said
    assert f"a model with the vocabulary of {MODELS / 'demo-base'}" in said


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["mtp", "draft_model", "demo"])
def test_the_projects_own_files_are_valid(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(MODELS.parents[1])
    assert main(["check", f"configs/{name}.yaml"]) == 0
    assert f"configs/{name}.yaml: valid" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_a_port_in_use_is_refused_only_with_the_ports_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray looks for a running cluster
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    content = serve_file(GOOD)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = content["http_options"]["port"] = server.getsockname()[1]
        assert main(["check", write(content)]) == 0
        assert main(["check", "--ports", write(content)]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"specserve: error: port {port} \(the API, http_options.port\) is in use by .*\n", said
    )
    assert main(["check", "--ports", write(content)]) == 0


@pytest.mark.usefixtures("folder")
def test_each_error_of_a_section_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = {"modell": {}, "speculation": [{"kind": "ngram", "max_len": 3}]}
    assert main(["check", write(serve_file(args))]) == 2
    lines = capsys.readouterr().err.splitlines()
    start = "specserve: error: app.yaml: applications.0.args."
    assert [line.removeprefix(start).split(":")[0] for line in lines] == [
        "speculation.0.max_len",
        "modell",
        "model",
    ]


@pytest.mark.usefixtures("folder")
def test_a_missing_adapter_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = [{"name": "fine", "path": "/no/such/adapter"}]
    engine = {"vllm": {"enable_lora": True, "lora_modules": adapters}}
    assert main(["check", write(serve_file({**GOOD, "engine": engine}))]) == 2
    words = "engine.vllm.lora_modules.0.path: '/no/such/adapter' is not allowed"
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_an_unset_key_variable_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "the API keys' variables A_KEY are not set here; `serve run` needs them"
    monkeypatch.setenv("A_KEY", "")
    assert main(["check", write(serve_file(GOOD))]) == 0
    assert note in capsys.readouterr().out
    monkeypatch.setenv("A_KEY", "secret")
    assert main(["check", write(serve_file(GOOD))]) == 0
    assert "are not set here" not in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_the_replicas_of_a_deployment_are_those_that_serve_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    deployments = [{"name": "ModelServer", "num_replicas": 5}]
    assert main(["check", write(serve_file(GOOD, deployments=deployments))]) == 0
    assert "5 x 2 (replicas x tensor parallel)" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_tls_is_refused_behind_haproxy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"ssl_keyfile": "key.pem", "ssl_certfile": "cert.pem"}
    file = write(serve_file(GOOD) | {"http_options": options})
    assert main(["check", file]) == 0
    capsys.readouterr()
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert main(["check", file]) == 2
    assert "http_options.ssl_keyfile: 'key.pem' is not allowed" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_merged_mappings_and_keys_of_other_types_are_no_repetitions() -> None:
    merged = "a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, <<: *b}\nd: {1: 1, '1': 2}"
    assert yaml.load(merged, _Loader)["c"] == {"x": 1, "y": 2}
    assert yaml.load(merged, _Loader)["d"] == {1: 1, "1": 2}
