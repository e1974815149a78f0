import json
from pathlib import Path

import pytest
import yaml

from specserve.cli.main import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


def serve_file(folder: Path, model: Path, copies: int = 1) -> Path:
    application = {
        "import_path": "specserve.app:build",
        "args": {"model": {"path": str(model)}, "speculation": [{"kind": "ngram"}]},
    }
    path = folder / "serve.yaml"
    applications = [
        application | {"name": f"app{n}", "route_prefix": f"/app{n}"} for n in range(copies)
    ]
    path.write_text(yaml.safe_dump({"applications": applications}))
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "trie"], "--methods: 'trie' is not allowed; allowed: none, all, ngram"),
        (["--methods", "none,none"], "each method once"),
        (["--temperature", "-1"], "--temperature: -1.0"),
        (["--temperature", "nan"], "--temperature: nan"),
        (["--tolerance", "-0.1"], "--tolerance: -0.1"),
        (["--save-output", "/nowhere/at/all.json"], "--save-output"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    tmp_path: Path,
    model: Path,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    config = serve_file(tmp_path, model)
    assert main(["compare", "--config", str(config), *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


def test_a_missing_model_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = serve_file(tmp_path, tmp_path / "missing")
    assert main(["compare", "--config", str(config)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "applications.0.args.model.path" in line


def test_a_folder_without_a_tokenizer_is_named(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--config", str(serve_file(tmp_path, model))]) == 2
    assert "a checkpoint with a tokenizer" in capfd.readouterr().err


def test_a_file_with_two_applications_is_refused(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--config", str(serve_file(tmp_path, model, copies=2))]) == 2
    assert "a file with one application" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--max-tokens", "--concurrency", "--repeat", "--num-prompts"])
def test_counts_below_one_are_refused(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["compare", "--config", str(serve_file(tmp_path, model)), option, "0"])
    assert raised.value.code == 2
    assert option in capfd.readouterr().err
