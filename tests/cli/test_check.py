from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.cli.main import main


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
def test_a_valid_file_tells_what_would_start_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(serve_file(GOOD))]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    for part in (
        "application demo",
        "http://127.0.0.1:8123/v1",
        "LlamaForCausalLM",
        "3 x 2 (replicas x tensor parallel), placed PACK",
        "CPU: 4, fast: 1",
        "ngram (max_draft_len 5,",
        "requests decoded at once: 32",
        "API keys team-a (from A_KEY)",
        "app.yaml: valid",
    ):
        assert part in out


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
        ({"aplications": []}, "aplications: 'aplications' is not allowed; allowed: "),
        (
            serve_file(GOOD, import_path="other:app"),
            "applications.0.import_path: 'other:app' is not allowed; allowed: specserve.app:build",
        ),
        (serve_file(GOOD, arg={}), "applications.0.arg: 'arg' is not allowed; allowed: name, "),
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
def test_a_wrong_file_is_told_in_one_line(
    content: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", write(content)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"specserve: error: app.yaml: {message}")
    assert captured.err.count("\n") == 1


def test_a_config_json_that_is_no_models_is_refused(
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


def test_a_draft_model_with_another_vocabulary_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "models/tiny"
    tokenizer = json.loads((MODELS / "demo-draft/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["another token"] = vocabulary.pop(max(vocabulary, key=vocabulary.get))
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    source = {"kind": "draft_model", "model": str(other)}
    said = refusal(capsys, source, path=MODELS / "demo-base")
    assert "args.speculation.0.model" in said
    assert str(other) in said
    assert f"a model with the vocabulary of {MODELS / 'demo-base'}" in said


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["mtp", "draft_model", "demo"])
def test_the_projects_own_files_are_valid(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(MODELS.parents[1])
    assert main(["check", f"configs/{name}.yaml"]) == 0
    assert f"configs/{name}.yaml: valid" in capsys.readouterr().out
