from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from specserve.cli.main import main


class Server(ThreadingHTTPServer):
    """Answers like vLLM's application and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.drafts_itself = False
        """Whether it refuses reports, as with an in-engine drafter."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def of(self, path: str) -> list[dict[str, Any]]:
        """The bodies of the requests to a path."""
        return [body for asked, body in self.asked if asked == path]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "demo", "max_model_len": 50}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.path == "/tokenize":
            self._answer({"tokens": [1, 2, 3]})
        elif body["prompt"] == [9]:
            self._answer({"error": {"message": "no such token"}}, 400)
        elif "report" in body["vllm_xargs"] and self.server.drafts_itself:
            self._answer({"error": {"message": "vllm_xargs.report: 1 is not allowed"}}, 400)
        else:
            texts = [(0, "best", [7, 8]), (1, "worse", [7])]
            choices = [
                {"index": index, "text": text, "finish_reason": "length", "token_ids": tokens}
                for index, text, tokens in texts
            ]
            found = {"id": "1", "object": "text_completion", "choices": choices}
            if body.get("stream"):
                self._send(f"data: {json.dumps(found)}\n\n".encode(), "text/event-stream")
            else:
                self._answer(found)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(content).encode(), "application/json", status)

    def _send(self, data: bytes, content_type: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("samples", [False, True])
def test_a_beam_search_asks_for_beams_and_shows_the_best(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], samples: bool
) -> None:
    output = tmp_path / "found.json"
    task = "beam_search_with_sampling" if samples else "beam_search"
    options = ["--num-beams", "2", "--length-penalty", "0.5", "--max-length", "10"]
    options += ["--top-k", "5"] if samples else []
    command = ["generate", "--url", server.url, "--task", task, "--save-output", str(output)]
    assert main([*command, *options, "--input-texts", "a"]) == 0
    (body,) = server.of("/v1/completions")
    assert (body["use_beam_search"], body["n"], body["length_penalty"]) == (True, 2, 0.5)
    assert body["vllm_xargs"] == ({"beam_sample": 1} if samples else {})
    assert (body["temperature"], body["top_k"]) == ((1.0, 5) if samples else (0.0, 0))
    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3], 7)
    (answer,) = json.loads(output.read_text())["passes"][0]["answers"]
    assert (answer["text"], answer["token_ids"]) == ("best", [7, 8])
    assert "answer: best\n2 tokens" in capsys.readouterr().out


def test_a_system_prompt_sends_a_text_through_the_chat_template(
    server: Server, tmp_path: Path
) -> None:
    (template := tmp_path / "template.jinja").write_text("{{ messages }}")
    options = ["--system", "be kind", "--chat-template", str(template), "--input-texts", "hello"]
    assert main(["generate", "--url", server.url, "--task", "beam_search", *options]) == 0
    (body,) = server.of("/tokenize")
    assert body["chat_template"] == "{{ messages }}"
    assert [each["content"] for each in body["messages"]] == ["be kind", "hello"]


def test_the_default_texts_are_sent_twice(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--url", server.url, "--task", "beam_search"]) == 0
    assert len(server.of("/v1/completions")) == 2 * len(server.of("/tokenize"))
    assert "pass 2, " in capsys.readouterr().out


@pytest.mark.parametrize("drafts_itself", [False, True])
def test_no_report_is_asked_for_if_the_server_refuses_it(
    server: Server, tmp_path: Path, drafts_itself: bool
) -> None:
    server.drafts_itself = drafts_itself
    output = tmp_path / "found.json"
    options = ["--task", "greedy_search", "--input-ids", "5", "5,6"]
    command = ["generate", "--url", server.url, "--save-output", str(output)]
    assert main([*command, *options]) == 0
    _, *asked = [body["vllm_xargs"] for body in server.of("/v1/completions")]
    assert asked == [{} if drafts_itself else {"report": 1}] * 2
    answers = json.loads(output.read_text())["passes"][0]["answers"]
    assert [each["text"] for each in answers] == ["best", "best"]


def test_a_refusal_names_the_prompt(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    one_at_a_time = ["--max-batch-size", "1"]  # no other request is cut off
    options = ["--task", "beam_search", "--input-ids", "1,2", "9", *one_at_a_time]
    assert main(["generate", "--url", server.url, *options]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "request 2 failed: " in error
    assert "no such token" in error


def test_the_finished_answers_of_a_failed_run_are_saved(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--url", server.url, "--max-batch-size", "1", "--save-output", str(out)]
    assert main(["generate", *options, "--input-ids", "1,2", "9", "3,4"]) == 2
    (only,) = json.loads(out.read_text())["passes"]
    assert only["seconds"] is None
    assert [each["prompt_token_ids"] for each in only["answers"]] == [[1, 2]]


def test_a_run_without_a_finished_answer_overwrites_no_file(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("earlier")
    options = ["--url", server.url, "--save-output", str(out)]
    assert main(["generate", *options, "--input-ids", "9"]) == 2
    assert out.read_text() == "earlier"
