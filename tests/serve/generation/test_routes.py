from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from specserve.core.errors import GenerationError
from specserve.engine.text_request import Continuation, Output, PromptToken, Token
from specserve.serve.middleware import DisconnectMiddleware
from tests.serve.generation.scripted_engine import ScriptedEngine, step, token

OVERLOADED = GenerationError("overloaded", "Model is overloaded")
BROKEN = GenerationError("generation", "Request failed during generation: it broke")


def post(engine: ScriptedEngine, path: str = "/generate", root_path: str = "", **body: Any) -> Any:
    client = TestClient(engine.app(), root_path=root_path, follow_redirects=False)
    return client.post(root_path + path, json={"inputs": "a b", **body})


def events(answer: Any) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    *sent, rest = answer.text.split("\n\n")
    assert rest == ""
    return [json.loads(each.removeprefix("data: ")) for each in sent]


def as_json(number: int) -> dict[str, Any]:
    return {"id": number, "text": f" t{number}", "logprob": -number / 8, "special": False}


def test_an_answer_is_the_text_alone_unless_details_are_asked_for() -> None:
    answer = post(ScriptedEngine(step(1, 2, finish="length")))
    assert answer.status_code == 200
    assert answer.json() == {"generated_text": " t1 t2"}
    assert answer.headers["x-prompt-tokens"] == "7"
    assert answer.headers["x-generated-tokens"] == "2"
    assert int(answer.headers["x-total-time"]) >= 0


def test_the_details_have_finish_reason_counts_and_tokens() -> None:
    engine = ScriptedEngine(step(1, 2, finish="eos_token"))
    answer = post(engine, parameters={"details": True}).json()
    assert answer == {
        "generated_text": " t1 t2",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 2,
            "prompt_tokens": 7,
            "seed": None,
            "prefill": [],
            "tokens": [as_json(1), as_json(2)],
        },
    }


def test_prompt_tokens_and_top_tokens_are_returned_on_request() -> None:
    (continuation,) = step(1, finish="length", top=[[1, 2]]).continuations
    prompt = (PromptToken(0, "<s>", None), PromptToken(5, "a", -0.5))
    output = Output(num_prompt_tokens=2, prompt_tokens=prompt, continuations=(continuation,))
    details = post(ScriptedEngine(output), parameters={"decoder_input_details": True})
    reported = details.json()["details"]
    assert reported["prefill"] == [
        {"id": 0, "text": "<s>", "logprob": None},
        {"id": 5, "text": "a", "logprob": -0.5},
    ]
    assert reported["top_tokens"] == [[as_json(1), as_json(2)]]


def test_best_of_returns_the_best_text_and_the_others_in_the_details() -> None:
    output = Output(
        num_prompt_tokens=7,
        continuations=(
            Continuation(text="worse", num_tokens=1, mean_logprob=-2, finish_reason="length"),
            Continuation(text="better", num_tokens=3, mean_logprob=-1, finish_reason="eos_token"),
        ),
    )
    engine = ScriptedEngine(output)
    options = {"best_of": 2, "do_sample": True, "details": True}
    answer = post(engine, parameters=options).json()
    assert answer["generated_text"] == "better"
    (other,) = answer["details"]["best_of_sequences"]
    assert (other["generated_text"], other["finish_reason"]) == ("worse", "length")
    seed = engine.asked[0].seed
    assert (answer["details"]["seed"], other["seed"]) == (seed + 1 if seed else None, seed)


def test_the_root_answers_a_list_with_prompt_plus_text() -> None:
    answer = post(ScriptedEngine(step(1, finish="length")), "/")
    assert answer.json() == [{"generated_text": "a b t1"}]


def test_the_root_of_an_application_below_a_prefix_answers_too() -> None:
    answer = post(ScriptedEngine(step(1, finish="length")), "", root_path="/llm")
    assert answer.json() == [{"generated_text": "a b t1"}]


STEPS = (step(1), step(2, 3, 4), step(5, 6, finish="stop_sequence"))


@pytest.mark.parametrize(
    ("path", "body"), [("/generate_stream", {}), ("/generate", {"stream": True})]
)
def test_a_stream_has_one_event_for_each_token(path: str, body: dict[str, Any]) -> None:
    *others, last = events(post(ScriptedEngine(*STEPS), path, **body))
    assert others == [
        {"index": n, "token": as_json(n), "generated_text": None, "details": None}
        for n in range(1, 6)
    ]
    assert last == {
        "index": 6,
        "token": as_json(6),
        "generated_text": " t1 t2 t3 t4 t5 t6",
        "details": None,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_the_details_have_the_counts_of_speculation(stream: bool) -> None:
    output = step(1, finish="length")
    (continuation,) = output.continuations
    drafted = dataclasses.replace(continuation, speculation={"num_draft_tokens": 3})
    engine = ScriptedEngine(dataclasses.replace(output, continuations=(drafted,)))
    answer = post(engine, parameters={"details": True}, stream=stream)
    details = json.loads(answer.text.removeprefix("data: "))["details"]
    assert details["speculative_decoding"] == {"num_draft_tokens": 3}


def test_the_last_event_has_the_details_on_request() -> None:
    parameters = {"details": True, "do_sample": True, "seed": 3}
    received = events(post(ScriptedEngine(*STEPS), "/", stream=True, parameters=parameters))
    assert [each["details"] for each in received[:-1]] == [None] * 5
    assert received[-1]["details"] == {
        "finish_reason": "stop_sequence",
        "generated_tokens": 6,
        "seed": 3,
        "input_length": 7,
    }
    assert received[-1]["generated_text"] == "a b t1 t2 t3 t4 t5 t6"


def test_each_event_has_the_top_tokens_on_request() -> None:
    engine = ScriptedEngine(step(1, 2, finish="length", top=[[1, 3], [2, 4]]))
    received = events(post(engine, "/generate_stream", parameters={"top_n_tokens": 2}))
    tops = [[each["id"] for each in event["top_tokens"]] for event in received]
    assert tops == [[1, 3], [2, 4]]
    assert engine.asked[0].given.top_n_tokens == 2


def test_a_step_without_tokens_is_no_event() -> None:
    received = events(post(ScriptedEngine(step(), step(1, finish="length")), "/generate_stream"))
    assert [each["index"] for each in received] == [1]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GenerationError("validation", "Input validation error: no"), 422),
        (BROKEN, 424),
        (OVERLOADED, 429),
        (GenerationError("incomplete_generation", "Incomplete generation"), 500),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_an_error_before_the_first_token_has_its_status(
    error: GenerationError, status: int, path: str
) -> None:
    answer = post(ScriptedEngine(error), path)
    assert answer.status_code == status
    assert answer.json() == {"error": str(error), "error_type": error.kind}


def test_no_output_at_all_is_an_incomplete_generation() -> None:
    answer = post(ScriptedEngine())
    assert (answer.status_code, answer.json()["error_type"]) == (500, "incomplete_generation")


@pytest.mark.parametrize(
    ("script", "kind"),
    [((step(1), BROKEN), "generation"), ((step(1),), "incomplete_generation")],
)
def test_an_error_after_the_first_token_is_the_last_event(
    script: tuple[Output | GenerationError, ...], kind: str
) -> None:
    token_event, error = events(post(ScriptedEngine(*script), "/generate_stream"))
    assert token_event["token"] == as_json(1)
    assert error.keys() == {"error", "error_type"}
    assert error["error_type"] == kind


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize(
    ("content", "headers", "words"),
    [
        (b"", JSON, "must be a JSON object"),
        (b"{", JSON, "not valid JSON"),
        (b"[]", JSON, "must be a JSON object"),
        (b"null", JSON, "must be a JSON object"),
        (b'{"inputs": "a"}', {}, "must be a JSON object"),
        (b'{"inputs": "a", "parameters": {"top_p": NaN}}', JSON, "`top_p` must be"),
        (b"\xff", JSON, "parsing the body"),
        (b"[" * 100_000, JSON, "parsing the body"),
    ],
)
def test_an_invalid_body_is_refused_in_the_same_form(
    path: str, content: bytes, headers: dict[str, str], words: str
) -> None:
    client = TestClient(ScriptedEngine().app(), raise_server_exceptions=False)
    answer = client.post(path, content=content, headers=headers)
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "validation"
    assert words in answer.json()["error"]


def test_info_has_the_model_and_its_limits() -> None:
    info = TestClient(ScriptedEngine().app()).get("/info").json()
    assert info.pop("version")
    assert info == {
        "model_id": "demo",
        "model_sha": "r1",
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": 6,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_input_tokens": 99,
        "max_total_tokens": 100,
        "validation_workers": 2,
        "max_client_batch_size": 1,
        "router": "specserve",
        "sha": None,
        "docker_label": None,
    }


@pytest.mark.parametrize(
    ("path", "script"),
    [
        ("/generate", (None,)),
        ("/generate_stream", (None,)),
        ("/generate_stream", (step(1), None)),
    ],
)
def test_generation_ends_when_the_client_leaves(
    path: str, script: tuple[Output | None, ...]
) -> None:
    async def run() -> None:
        engine = ScriptedEngine(*script)
        gone, body = asyncio.Event(), json.dumps({"inputs": "a"}).encode()
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Message:
            if message := next(messages, None):
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                gone.set()

        scope = {
            **{"type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1"},
            **{"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
            **{"root_path": "", "headers": [(b"content-type", b"application/json")]},
        }
        call = asyncio.create_task(DisconnectMiddleware(engine.app())(scope, receive, send))
        if script[0] is None:
            while not engine.asked:
                await asyncio.sleep(0)
            gone.set()
        await asyncio.wait_for(call, 10)
        await asyncio.wait_for(engine.ended.wait(), 10)

    asyncio.run(run())


def test_a_special_token_is_marked_as_special() -> None:
    end = Token(1, "</s>", -0.5, True)
    whole = Continuation(
        text=" t2", num_tokens=2, tokens=(token(2), end), finish_reason="eos_token"
    )
    output = Output(num_prompt_tokens=7, continuations=(whole,))
    received = events(post(ScriptedEngine(output), "/generate_stream"))
    assert received[-1]["token"] == {"id": 1, "text": "</s>", "logprob": -0.5, "special": True}
    assert received[-1]["generated_text"] == " t2"
