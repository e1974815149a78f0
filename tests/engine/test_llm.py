"""A replica's engine, with fakes of vLLM's client."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from httpx import ASGITransport, AsyncClient, Response
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from specserve.core.config import parse
from specserve.engine import llm
from specserve.engine.client import ServedLLM
from specserve.engine.isolation import TenantLLM
from specserve.engine.llm import Engine
from specserve.engine.prediction import CURRENT_PREDICTION, Prediction
from tests.engine.scripted_client import ScriptedClient

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
NGRAM = {"kind": "ngram"}
IN_ENGINE = {"kind": "mtp", "placement": "in_engine"}


class Llm:
    """The part of vLLM's AsyncLLM that the engine uses.

    Args:
        answer: result of a call to the shards.
    """

    def __init__(self, answer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.asked: list[str] = []
        self._answer = answer

    async def collective_rpc(self, method: str, timeout: float) -> None:
        self.asked.append(method)
        await self._answer()

    def shutdown(self) -> None:
        self.asked.append("shutdown")

    async def check_health(self) -> None: ...

    async def is_sleeping(self) -> None:
        self.asked.append("sign")
        await self._answer()

    def kill(self) -> None:
        self.asked.append("kill")

    @property
    def engine_core(self) -> Any:
        """A handle of the core's process. This object is that process too."""
        return SimpleNamespace(
            resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[self]))
        )


async def at_once() -> None: ...


async def never() -> None:
    await asyncio.Event().wait()


async def dead() -> None:
    raise EngineDeadError


def calls_at_shutdown(source: dict[str, Any], answer: Any = at_once) -> list[str]:
    """The calls that vLLM gets when an engine with this source shuts down."""
    fake: Any = Llm(answer)
    engine = Engine(parse({"model": {"path": "m"}, "speculation": [source]}), fake)
    asyncio.run(engine.shutdown())
    asked: list[str] = fake.asked
    return asked


@pytest.mark.parametrize("answer", [at_once, never, dead])
def test_the_sources_are_closed_before_the_engine(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "CLOSE_S", 0.01)
    assert calls_at_shutdown(NGRAM, answer) == ["close_sources", "shutdown"]


def test_no_sources_are_closed_with_an_in_engine_drafter() -> None:
    assert calls_at_shutdown(IN_ENGINE) == ["shutdown"]


@pytest.mark.parametrize(
    ("answer", "asked"), [(at_once, ["sign"] * 2), (dead, ["sign"] * 2), (never, ["sign", "kill"])]
)
def test_a_core_that_does_not_answer_within_a_step_timeout_is_killed(
    answer: Any, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0")
    fake: Any = Llm(answer)

    async def check() -> None:
        engine = Engine(parse({"model": {"path": "m"}}), fake)
        for _ in range(2):
            await engine.check_health()
            await asyncio.sleep(0)

    asyncio.run(check())
    assert fake.asked == asked


class Started(ServedLLM):
    """A started client of vLLM, without an engine."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.read: list[dict[str, Any]] = []
        self.engine_core: Any = SimpleNamespace(add_request_async=self._send)
        self.input_processor: Any = SimpleNamespace(speculative_config="vLLM's")
        self.renderer: Any = SimpleNamespace(
            _process_multimodal=self._read, _process_multimodal_async=self._read
        )

    async def _send(self, request: Any) -> None:
        self.sent.append(request)

    def _read(self, **options: Any) -> None:
        self.read.append(options)

    def shutdown(self, timeout: float | None = None) -> None: ...


@pytest.mark.parametrize("has_keys", [False, True])
def test_with_api_keys_requests_ids_and_media_are_kept_by_tenant(
    has_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = []

    def start(cls: type[ServedLLM], *_: Any, **__: Any) -> Started:
        classes.append(cls)
        return Started()

    monkeypatch.setattr(ServedLLM, "from_vllm_config", classmethod(start))
    keys = [{"env": "KEY", "tenant": "team-a"}] if has_keys else []
    config = parse({"model": {"path": "m"}, "http": {"api_keys": keys}})
    vllm_config: Any = SimpleNamespace(use_v2_model_runner=False)
    client: Any = llm._start_client(config, vllm_config, AsyncEngineArgs())
    request = SimpleNamespace(
        sampling_params=SamplingParams(), cache_salt=None, external_req_id="1"
    )
    asyncio.run(client.engine_core.add_request_async(request))
    client.renderer._process_multimodal()
    client.renderer._process_multimodal_async()

    assert classes == [TenantLLM if has_keys else ServedLLM]
    assert client.sent == [request]
    assert bool(request.cache_salt) is has_keys
    assert [bool(each) for each in client.read] == [has_keys, has_keys]
    assert client.input_processor.speculative_config is None


@pytest.mark.parametrize("has_room", [False, True])
def test_requests_that_the_v2_runner_has_no_room_for_are_refused(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedLLM, "from_vllm_config", classmethod(lambda *_, **__: Started()))
    vllm_config: Any = SimpleNamespace(use_v2_model_runner=not has_room)
    client: Any = llm._start_client(parse({"model": {"path": "m"}}), vllm_config, AsyncEngineArgs())
    params = SamplingParams(allowed_token_ids=list(range(2000)))
    request = SimpleNamespace(sampling_params=params)
    if has_room:
        asyncio.run(client.engine_core.add_request_async(request))
        assert client.sent == [request]
    else:
        with pytest.raises(VLLMValidationError, match="must be at most 1024"):
            asyncio.run(client.engine_core.add_request_async(request))
        assert client.sent == []


BESIDE = {"kind": "draft_model", "model": "m", "placement": "beside_rank_0"}


@pytest.mark.parametrize(
    ("sections", "node", "is_in_process"),
    [
        ({}, "own", True),
        ({"speculation": [NGRAM]}, "own", True),
        ({}, "another", False),
        ({"engine": {"tensor_parallel_size": 2}}, "own", False),
        ({"speculation": [BESIDE]}, "own", False),
    ],
)
def test_the_engine_core_holds_a_single_shard_on_its_own_node(
    sections: dict[str, Any], node: str, is_in_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"bundles_to_node_id": {0: node}}
    monkeypatch.setattr(llm, "placement_group_table", lambda _: table)
    here = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
    group: Any = None
    found = llm._in_process(parse({"model": {"path": "m"}, **sections}), group)
    assert found is (is_in_process and current_platform.is_cpu())


@pytest.mark.parametrize(
    ("sources", "on_cpu", "expected"),
    [
        ([], True, True),
        ([], False, False),
        ([NGRAM], True, True),
        ([NGRAM], False, True),
        ([IN_ENGINE], True, False),
    ],
)
def test_workers_have_our_logits_processors_with_our_hook_or_on_cpu(
    sources: list[dict[str, Any]],
    on_cpu: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    config = parse({"model": {"path": "m"}, "speculation": sources})
    assert llm.has_processors(config) is expected


@pytest.mark.parametrize(("given", "method"), [({}, "spawn"), ({METHOD: "fork"}, "fork")])
def test_vllm_finds_the_process_start_that_a_ray_actor_needs(
    given: dict[str, str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(llm, "keep_sockets_in_session", lambda: None)
    monkeypatch.setattr(os, "environ", given)
    llm.prepare_environment(parse({"model": {"path": "m"}}))
    assert given[METHOD] == method


def answer_of(client: Any, route: str, **body: Any) -> Response:
    """What the HTTP application of an engine with this client answers."""
    root = logging.getLogger()
    level = root.level  # a library of vLLM's routes changes it

    async def ask() -> Response:
        app = await Engine(client.config, client).asgi_app()
        transport = ASGITransport(app, raise_app_exceptions=False)
        async with AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.post(route, json={"model": "demo"} | body)

    try:
        return asyncio.run(ask())
    finally:
        root.setLevel(level)


def test_the_http_application_has_the_engines_reasoning_parser() -> None:
    client = ScriptedClient(reasoning_parser="granite")
    text = "Here is my thought process: A. Here is my response: B"
    client.steps = [client.tokenizer.encode(text, add_special_tokens=False)]
    messages = [{"role": "user", "content": "?"}]
    answer = answer_of(client, "/v1/chat/completions", messages=messages)
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" A. ", " B")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("number", "n", "status"), [(385, 1, 400), (193, 2, 400), (384, 1, 200)])
def test_a_list_of_prompts_that_exceeds_the_limit_alone_is_a_client_error(
    number: int, n: int, status: int, stream: bool
) -> None:
    client = ScriptedClient()
    client.steps = [[5]]
    body = {"prompt": ["a"] * number, "n": n, "temperature": 1, "stream": stream}
    answer = answer_of(client, "/v1/completions", **body)
    assert answer.status_code == status, answer.text
    if status == 400:
        error = answer.json()["error"]
        assert error["param"] == "prompt"
        assert f"{number} prompts with n={n} take {number * n} sequences" in error["message"]


TEXT = list(range(10, 20))
CHAT = {"messages": [{"role": "user", "content": "?"}]}
ROUTES = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2}),
]


class Predicting(ScriptedClient):
    """Compares answers with the call's prediction, as :class:`ServedLLM` does."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        outputs = super().generate(prompt, sampling_params, request_id, **options)
        if (prediction := CURRENT_PREDICTION.get()) is None:
            return outputs
        is_cumulative = sampling_params.output_kind is RequestOutputKind.CUMULATIVE
        return prediction.counted(outputs, is_cumulative=is_cumulative)


@pytest.fixture
def predicting() -> Iterator[Predicting]:
    client = Predicting()
    client.steps = [TEXT[:4], TEXT[4:8]]
    token = CURRENT_PREDICTION.set(Prediction(np.array(TEXT, np.int32)))
    yield client
    CURRENT_PREDICTION.reset(token)


def usages(answer: Response) -> list[Any]:
    """The usage of an answer, or of each chunk of a stream."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json().get("usage")]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event).get("usage") for event in events]


@pytest.mark.parametrize("is_continuous", [None, False, True])  # None: no stream
@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_the_usage_of_a_call_with_a_prediction_has_its_counts(
    predicting: Predicting, route: str, body: dict[str, Any], is_continuous: bool | None
) -> None:
    if is_continuous is not None:
        options = {"include_usage": True, "continuous_usage_stats": is_continuous}
        body = body | {"stream": True, "stream_options": options}
    *others, last = usages(answer_of(predicting, route, **body))
    number = len(body.get("prompt", "a")) * body.get("n", 1)
    assert last["completion_tokens"] == 8 * number
    assert last["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 8 * number,
        "rejected_prediction_tokens": 2 * number,
    }
    if is_continuous is not None:
        assert len(others) >= 2
    assert [each is not None for each in others] == [bool(is_continuous)] * len(others)
    assert not any(each.get("completion_tokens_details") for each in others if each)


def test_reasoning_tokens_and_counts_stand_side_by_side() -> None:
    client = Predicting(reasoning_parser="granite")
    text = "Here is my thought process: A. Here is my response: B"
    client.steps = [client.tokenizer.encode(text, add_special_tokens=False)]
    (before,) = usages(answer_of(client, "/v1/chat/completions", **CHAT))
    token = CURRENT_PREDICTION.set(Prediction(np.array(client.steps[0], np.int32)))
    (usage,) = usages(answer_of(client, "/v1/chat/completions", **CHAT))
    CURRENT_PREDICTION.reset(token)
    assert usage["completion_tokens_details"] == {
        **before["completion_tokens_details"],
        "accepted_prediction_tokens": len(client.steps[0]),
        "rejected_prediction_tokens": 0,
    }


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_the_usage_of_a_call_without_a_prediction_has_no_counts(
    route: str, body: dict[str, Any]
) -> None:
    client = Predicting()
    client.steps = [TEXT]
    (usage,) = usages(answer_of(client, route, **body))
    assert usage["completion_tokens"] > 0
    assert not usage["completion_tokens_details"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [("/v1/responses", {"input": "?"}), ("/v1/messages", CHAT | {"max_tokens": 8})],
)
def test_answers_without_openais_usage_have_no_counts(
    predicting: Predicting, route: str, body: dict[str, Any], stream: bool
) -> None:
    answer = answer_of(predicting, route, **body, stream=stream)
    assert answer.status_code == 200, answer.text
    assert "output_tokens" in answer.text
    assert "prediction_tokens" not in answer.text
