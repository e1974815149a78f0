"""``specserve bench tokens`` and vLLM's own commands against the served application."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.cli.main import main
from tests.integration.api import Api
from tests.integration.cluster import model_path

pytestmark = pytest.mark.timeout(600)

REQUESTS = [[*range(40, 60)] * 2, [*range(100, 140)], [*range(40, 60)] * 2]
MAX_OUTPUT = 24


def test_bench_tokens_runs_a_file_and_writes_figures_and_outputs(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, outputs, found = (tmp_path / name for name in ("in.csv", "out.csv", "found.json"))
    requests.write_text("\r\n".join(",".join(map(str, each)) for each in REQUESTS))
    command = ["bench", "tokens", str(requests), "--url", api.base_url, "--ignore-eos"]
    options = ["--max-output", str(MAX_OUTPUT), "--max-batch-size", "2", "--warm-up", "1"]
    files = ["--record-output", str(outputs), "--save-output", str(found)]
    assert main([*command, *options, *files]) == 0
    alone = api.complete(
        prompt=REQUESTS[1], max_tokens=MAX_OUTPUT, ignore_eos=True, return_token_ids=True
    )
    lines = outputs.read_text().splitlines()
    assert lines[1] == ",".join(map(str, alone["choices"][0]["token_ids"]))
    assert lines[0] == lines[2]
    figures = json.loads(found.read_text())
    assert figures["request_num"] == 3
    assert figures["average_output_length"] == MAX_OUTPUT
    ngram = figures["sources"]["ngram"]
    assert 0 < ngram["accepted_tokens"] <= ngram["drafted_tokens"]
    assert f"average_output_length   {MAX_OUTPUT}.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "text"), [("5,five", "in.csv: line 2: 'five'"), ("9999999", "in.csv: line 2: 9999999")]
)
def test_an_invalid_line_is_reported(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, text: str
) -> None:
    requests = tmp_path / "in.csv"
    requests.write_text(f"5\n{line}\n")
    options = ["--warm-up", "0", "--max-output", "1"]
    assert main(["bench", "tokens", str(requests), "--url", api.base_url, *options]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert text in error


def test_vllm_bench_serve_runs_against_it(api: Api, tmp_path: Path) -> None:
    options = {
        "--base-url": api.base_url,
        "--model": "demo",
        "--tokenizer": str(model_path("demo-draft")),
        "--dataset-name": "random",
        "--random-input-len": "64",
        "--random-output-len": "16",
        "--num-prompts": "2",
        "--request-rate": "4",
        "--result-dir": str(tmp_path),
        "--result-filename": "found.json",
    }
    arguments = [word for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "specserve.cli.main", "vllm", "--", "bench", "serve"]
    run = subprocess.run(
        [*command, "--save-result", *arguments], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads((tmp_path / "found.json").read_text())["completed"] == 2


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_vllms_own_client_gets_text(api: Api, command: str) -> None:
    words = ["-m", "specserve.cli.main", "vllm", "--", command, "--quick", "x = "]
    url = ["--url", f"{api.base_url}/v1", "--model-name", "demo"]
    run = subprocess.run(
        [sys.executable, *words, *url], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip()
