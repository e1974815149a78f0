"""Commands that start an engine, run as by a user."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.stage import Stage

PROMPTS = [[*range(40, 60)] * 2, [*range(100, 140)]]
MAX_OUTPUT = 24


@pytest.fixture
def config_file(stage: Stage, nodes: Stage, application: dict[str, Any], tmp_path: Path) -> Path:
    """A Serve file. All deployments and clusters are stopped first."""
    stage.end()
    nodes.clear()
    file = tmp_path / "serve.yaml"
    content = {"import_path": "specserve.app:build", "args": application}
    file.write_text(yaml.safe_dump({"applications": [content]}))
    return file


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "specserve.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generate_and_bench_tokens_write_the_same_tokens(config_file: Path, tmp_path: Path) -> None:
    generated, outputs, figures = (tmp_path / name for name in ("a.json", "b.csv", "c.json"))
    ids = [",".join(map(str, each)) for each in PROMPTS]
    limits = ["--max-new-tokens", str(MAX_OUTPUT), "--save-output", str(generated)]
    shown = run("generate", "--config", str(config_file), "--input-ids", *ids, *limits)
    (found,) = json.loads(generated.read_text())["passes"]
    assert found["sources"]["ngram"]["accepted_tokens"] > 0
    assert f"{found['sources']['ngram']['accepted_tokens']} accepted" in shown

    requests = tmp_path / "in.csv"
    requests.write_text("\n".join(ids))
    limits = ["--max-output", str(MAX_OUTPUT), "--warm-up", "0"]
    files = ["--record-output", str(outputs), "--save-output", str(figures)]
    run("bench", "tokens", str(requests), "--config", str(config_file), *limits, *files)
    written = [[int(each) for each in line.split(",")] for line in outputs.read_text().split()]
    assert written == [each["token_ids"] for each in found["answers"]]
    totals = json.loads(figures.read_text())
    assert (totals["request_num"], totals["tp"], totals["pp"]) == (len(PROMPTS), 1, 1)
    assert totals["qps_per_device"] == totals["qps"]
