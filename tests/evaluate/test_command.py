import json
from pathlib import Path

import pytest
import yaml

from specserve.cli.main import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    application = {
        "import_path": "specserve.app:build",
        "args": {"model": {"path": str(model)}, "speculation": [{"kind": "ngram"}]},
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "none,trie"], "--methods: 'trie' is not allowed"),
        (["--methods", "hf,hf"], "each method once"),
        (["--rouge1-threshold", "nan"], "--rouge1-threshold: nan"),
        (["--rouge1-threshold", "101"], "--rouge1-threshold: 101.0 is not allowed; allowed: 0 to"),
        (["--save-output", "/nowhere/at/all.json"], "--save-output"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    config: Path, capfd: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["evaluate", "--config", str(config), *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


def test_tasks_and_a_file_exclude_each_other(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["evaluate", "--config", str(config), "--tasks", "quote", "--data", "a.jsonl"])
    assert raised.value.code == 2
    assert "--data: not allowed with argument --tasks" in capfd.readouterr().err
