"""``specserve evaluate`` with our engine and Hugging Face's, run as by a user."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


def evaluate(
    folder: Path, application: dict[str, Any], *options: str
) -> subprocess.CompletedProcess[str]:
    file = folder / "serve.yaml"
    content = {"import_path": "specserve.app:build", "args": application}
    file.write_text(yaml.safe_dump({"applications": [content]}))
    command = [sys.executable, "-m", "specserve.cli.main", "evaluate", "--config", str(file)]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=280, check=False
    )


def test_answers_are_those_of_hugging_face_with_and_without_speculation(
    tmp_path: Path, application: dict[str, Any]
) -> None:
    output = tmp_path / "out.json"
    options = ("--num", "3", "--max-tokens", "40", "--save-output", str(output))
    done = evaluate(tmp_path, application, "--methods", "ngram,hf", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Quality kept: yes" in done.stdout
    content = json.loads(output.read_text())
    texts = {
        name: [each["token_ids"] for each in content[name]["passes"][0]["prompts"]]
        for name in ("none", "ngram", "hf")
    }
    # In float32, with a model whose two most_likely tokens are never close.
    assert texts["none"] == texts["ngram"] == texts["hf"]
    assert content["ngram"]["passes"][0]["sources"]["ngram"]["accepted_tokens"] > 0
    assert content["hf"]["rouge"] == content["none"]["rouge"]
    assert 0 < content["none"]["rouge"]["rouge1"] <= 100
    assert len(content["references"]) == 3
    firsts = [each["first_token_seconds"] for each in content["hf"]["passes"][0]["prompts"]]
    totals = [each["seconds"] for each in content["hf"]["passes"][0]["prompts"]]
    assert all(0 < first < total for first, total in zip(firsts, totals, strict=True))


def test_a_rouge_below_the_threshold_gives_exit_code_1(
    tmp_path: Path, application: dict[str, Any]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "def add(a, b):", "reference": "none of these words"}))
    options = ("--data", str(data), "--max-tokens", "8", "--rouge1-threshold", "99")
    done = evaluate(tmp_path, application, "--methods", "none", *options)
    assert done.returncode == 1, done.stderr
    assert "is below --rouge1-threshold 99" in done.stdout
    assert "Quality kept: NO" in done.stdout
