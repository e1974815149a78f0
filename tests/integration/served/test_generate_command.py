"""``specserve generate`` with texts and a chat against the served application."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from specserve.cli.main import main
from tests.integration.api import Api

pytestmark = pytest.mark.timeout(600)

TEXTS = ["import os\nimport os\nimport os\n", "def f(x):\n    return x\n"]


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_generate_gives_the_answers_of_the_api_and_counts_drafts(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], stream: list[str]
) -> None:
    output = tmp_path / "found.json"
    options = ["--max-new-tokens", "24", "--max-batch-size", "2", "--save-output", str(output)]
    command = ["generate", "--url", api.base_url, "--input-texts", *TEXTS, *stream, *options]
    assert main(command) == 0
    (found,) = json.loads(output.read_text())["passes"]
    expected = [api.complete(prompt=each, max_tokens=24)["choices"][0]["text"] for each in TEXTS]
    assert [each["text"] for each in found["answers"]] == expected
    assert found["sources"]["ngram"]["accepted_tokens"] > 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in expected)
    assert f"{found['sources']['ngram']['accepted_tokens']} accepted" in shown


def test_an_extra_end_token_ends_an_answer(api: Api, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    plain = api.complete(prompt=TEXTS[0], max_tokens=8, return_token_ids=True)["choices"][0]
    end = plain["token_ids"][3]
    command = ["generate", "--url", api.base_url, "--input-texts", TEXTS[0]]
    options = ["--add-eos-token", str(end), "--max-length", "60", "--save-output", str(output)]
    assert main([*command, *options]) == 0
    (answer,) = json.loads(output.read_text())["passes"][0]["answers"]
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"].index(end) == len(answer["token_ids"]) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--add-eos-token", "two words and more"], "--add-eos-token: 'two words and more'"),
        (["--max-length", "1", "--input-texts", "import os"], "--max-length: 1 is not allowed"),
        (["--input-ids", "9999999"], "request 1 failed: "),
    ],
)
def test_a_failed_run_gives_a_one_line_error(
    api: Api, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["generate", "--url", api.base_url, *options]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert message in error


def test_a_chat_keeps_its_history_until_it_is_cleared(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "found.json"
    monkeypatch.setattr("sys.stdin", io.StringIO("What is x?\nAnd y?\nnew\nWhat is x?\nquit\n"))
    options = ["--temperature", "0", "--max-new-tokens", "12", "--save-output", str(output)]
    assert main(["generate", "--url", api.base_url, "--task", "chat", *options]) == 0
    first, second, third = json.loads(output.read_text())["turns"]
    assert first["text"] == third["text"]
    dialogue = [
        {"role": "user", "content": "What is x?"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And y?"},
    ]
    expected = api.chat(messages=dialogue, max_tokens=12)["choices"][0]["message"]["content"]
    assert second["text"] == expected
    assert expected in capsys.readouterr().out
