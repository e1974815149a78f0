"""``specserve compare`` with real engines, run as by a user."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[3]
COMPARE = ROOT / "configs/compare.yaml"
PROMPT = (
    "def area(width, height):\n    return width * height\n\ndef area(width, height):\n    return"
)
MARK = "SPECSERVE_TEST_COMPARE"
"""Environment variable that all processes of a run inherit. It finds leftover processes."""


class Run:
    """One finished command.

    Args:
        folder: folder of its files.
        config: ``args`` of the application.
        options: further options of the command.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *options: str) -> None:
        file = folder / "serve.yaml"
        application = {"import_path": "specserve.app:build", "args": config}
        file.write_text(yaml.safe_dump({"applications": [application]}))
        prompts = folder / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"prompt": "x = 1"}))
        self.output = folder / "out.json"
        command = [sys.executable, "-m", "specserve.cli.main", "compare", "--config", str(file)]
        command += ["--prompts", str(prompts), "--save-output", str(self.output), *options]
        done = subprocess.run(
            command,
            env={**os.environ, MARK: str(folder)},
            capture_output=True,
            text=True,
            timeout=560,
            check=False,
        )
        self.code, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr
        self.strays = [p.info["cmdline"] for p in _inherited(str(folder))]


def _inherited(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get(MARK) == folder:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_compare_runs_two_methods_and_writes_the_result(
    tmp_path: Path, application: dict[str, Any]
) -> None:
    run = Run(tmp_path, application, "--methods", "none,ngram", "--max-tokens", "40")
    assert run.code == 0, run.stderr
    assert run.strays == []
    assert "Lossless: yes" in run.stdout
    content = json.loads(run.output.read_text())
    none, ngram = (content[name]["passes"][0]["prompts"] for name in ("none", "ngram"))
    assert [p["token_ids"] for p in ngram] == [p["token_ids"] for p in none]
    assert len(none) == 2
    assert all(p["tokens_per_second"] > 0 for p in none)
    counts = content["ngram"]["passes"][0]["sources"]["ngram"]
    assert 0 < counts["accepted_tokens"] == sum(counts["accepted_at_position"])
    assert content["lossless"] is True
    assert content["settings"]["tolerance"] == 0  # float32


def test_the_compare_config_gives_results_for_each_of_its_methods(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.json"
    match = re.search(r"^# `specserve (compare .+)`$", COMPARE.read_text(), re.M)
    assert match is not None
    options = ["--num-prompts", "1", "--max-tokens", "8", "--save-output", str(output)]
    command = [sys.executable, "-m", "specserve.cli.main", *match[1].split(), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text())
    for name in ("none", "draft_model", "ngram"):
        (prompt,) = content[name]["passes"][0]["prompts"]
        assert len(prompt["token_ids"]) == 8
        assert prompt["seconds"] > 0


def test_a_failed_engine_start_gives_one_line_and_leaves_nothing(
    tmp_path: Path, application: dict[str, Any]
) -> None:
    # With `hf_overrides` only vLLM itself checks the context length.
    application["engine"]["vllm"] = {"block_size": 7, "hf_overrides": {}}
    application["engine"]["max_model_len"] = 10**9
    run = Run(tmp_path, application, "--methods", "ngram")
    assert run.code == 2
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith("specserve: error: method ngram: ")
    assert run.strays == []
    assert not run.output.exists()
