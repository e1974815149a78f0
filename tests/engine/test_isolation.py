"""Tenants cannot reach each other's requests, responses or media in vLLM's own classes."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest
import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import SamplingParams
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.inputs import _HF_MODALITY_PROCESSOR_KWARGS, ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from specserve.engine import isolation
from specserve.engine.client import ServedLLM
from specserve.engine.isolation import (
    TenantDict,
    TenantLLM,
    close_routes,
    part_media,
    part_responses,
)
from specserve.engine.tenants import CURRENT_TENANT
from specserve.serve.controls import ControlsMiddleware
from specserve.serve.middleware import (
    refuse_adapters,
    refuse_scaling,
    serve_fresh_metrics,
    wrap_routes,
)
from specserve.sources.controls import NO_TENANT

T = TypeVar("T")


def as_tenant(tenant: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    def run() -> T:
        CURRENT_TENANT.set(tenant)
        return call(*args, **kwargs)

    return copy_context().run(run)


# Request ids


class IdleLLM(ServedLLM):
    """vLLM's client and its output processor, with an engine that generates nothing."""

    def __init__(self) -> None:
        self.vllm_config: Any = SimpleNamespace(
            additional_config=None,
            speculative_config=None,
            observability_config=SimpleNamespace(per_request_spec_decode_metrics="none"),
        )
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.log_requests = False
        self.engine_core: Any = SimpleNamespace(abort_requests_async=self._aborted)
        self.aborted: list[str] = []

    async def _aborted(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def add_request(self, request_id: str, *_: Any, **__: Any) -> Any:
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        InputProcessor.assign_request_id(request)
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        self.output_processor.add_request(request, None, queue=queue)
        return queue

    def shutdown(self, timeout: float | None = None) -> None:
        pass


class Client(TenantLLM, IdleLLM):
    """An idle client with request ids by tenant."""

    async def run(self, tenant: str, request_id: str) -> str | None:
        """Generates as a tenant and returns the finish reason."""
        CURRENT_TENANT.set(tenant)
        (output,) = [each async for each in self.generate("", SamplingParams(), request_id)]
        reason: str | None = output.outputs[0].finish_reason
        return reason

    async def end(self, tenant: str, request_id: str | list[str]) -> None:
        CURRENT_TENANT.set(tenant)
        await self.abort(request_id)


@pytest.mark.parametrize("given", ["mine", ["mine", "other"]])
def test_an_id_aborts_only_requests_of_the_tenant_that_sends_it(
    given: str | list[str],
) -> None:
    async def run() -> tuple[bool, str | None]:
        client = Client()
        answer = asyncio.create_task(client.run("a", "mine"))
        await asyncio.sleep(0)  # runs until it waits
        await asyncio.create_task(client.end("b", given))
        was_ended = bool(client.aborted)
        await asyncio.create_task(client.end("a", given))
        return was_ended, await asyncio.wait_for(answer, 10)

    assert asyncio.run(run()) == (False, "abort")


# Stored responses


@pytest.fixture
def responses() -> Any:
    """The part of vLLM's responses handler that stores responses."""
    handler = OpenAIServingResponses.__new__(OpenAIServingResponses)
    handler.response_store_lock = asyncio.Lock()
    part_responses(handler)
    return handler


def stored(handler: Any, tenant: str, response_id: str, status: str) -> Any:
    response = SimpleNamespace(id=response_id, status=status)
    as_tenant(tenant, handler.response_store.__setitem__, response_id, response)
    return response


def test_only_its_tenant_finds_and_cancels_a_stored_response(responses: Any) -> None:
    response = stored(responses, "a", "resp_1", "queued")

    def ask(tenant: str, method: str, *args: Any) -> Any:
        return as_tenant(tenant, asyncio.run, getattr(responses, method)("resp_1", *args))

    for call in (("retrieve_responses", None, False), ("cancel_responses",)):
        answer = ask("b", *call)
        assert isinstance(answer, ErrorResponse)
        assert answer.error.code == 404
    assert response.status == "queued"
    assert ask("a", "retrieve_responses", None, False) is response
    assert ask("a", "cancel_responses") is response
    assert response.status == "cancelled"


def test_a_response_does_not_replace_another_tenants(responses: Any) -> None:
    first = stored(responses, "a", "resp_1", "completed")
    stored(responses, "b", "resp_1", "completed")
    assert as_tenant("a", responses.response_store.get, "resp_1") is first


def test_another_tenants_response_cannot_be_continued(
    responses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(responses, "a", "resp_1", "completed")

    async def no_error(*_: Any) -> None:
        return None

    monkeypatch.setattr(responses, "_check_model", no_error)
    monkeypatch.setattr(responses, "_preflight", lambda: None)
    responses.use_harmony = responses.enable_store = False
    responses.online_renderer = SimpleNamespace(
        validate_chat_template=lambda **_: None, trust_request_chat_template=False
    )
    request = ResponsesRequest(input="and then?", previous_response_id="resp_1")
    answer = as_tenant("b", asyncio.run, responses._create_responses(request))
    assert isinstance(answer, ErrorResponse)
    assert answer.error.code == 404


def test_each_tenant_has_its_own_entries() -> None:
    shared: TenantDict[int] = TenantDict()
    as_tenant("a", shared.update, {"x": 1, "y": 2})
    as_tenant("b", shared.update, {"x": 3})
    assert as_tenant("a", dict, shared) == {"x": 1, "y": 2}
    assert as_tenant("b", lambda: (len(shared), "y" in shared)) == (1, False)
    assert as_tenant("b", shared.pop, "y", None) is None
    assert as_tenant("a", shared.pop, "x") == 1
    assert as_tenant("b", dict, shared) == {"x": 3}


def test_vllm_stores_responses_in_these_dictionaries_and_no_others() -> None:
    body = inspect.getsource(OpenAIServingResponses.__init__)
    names = re.findall(r"self\.(\w+)(?:: dict\[[^=]+\])? = \{\}", body)
    assert set(names) == set(isolation._RESPONSE_STORES)


# Media


class Processor:
    """A fake of a model's media processor. It makes vLLM's keys and asks its cache."""

    def __init__(self, modality: str) -> None:
        self._modality = modality
        parser = MultiModalDataParser(expected_hidden_size=None)
        self.info = SimpleNamespace(parse_mm_data=parser.parse_mm_data)

    def apply(self, inputs: ProcessorInputs, _: Any) -> Any:
        ((key,),) = inputs.get_mm_hashes("model", "blake3").values()
        (item,) = inputs.mm_data_items.get_items(self._modality, object).get_all()
        assert inputs.cache is not None
        cached: Any = None if item is None else (MultiModalKwargsItem.dummy(), [])
        return key, inputs.cache.get_and_update_item(cached, key)[0]


class Renderer(BaseRenderer):  # type: ignore[misc]
    """vLLM's renderer around that processor."""

    def __init__(self, modality: str) -> None:
        settings = SimpleNamespace(mm_processor_cache_gb=1)
        self.model_config: Any = SimpleNamespace(
            multimodal_config=settings, get_multimodal_config=lambda: settings
        )
        self.mm_processor: Any = Processor(modality)
        self.api_process_rank = 0
        self._mm_req_counter: Any = SimpleNamespace(inc=lambda _: 1)
        self._mm_timing_registry: Any = SimpleNamespace(get=lambda _: None)
        self._mm_processor_cache = LruKeyReplicatedSenderCache(self.model_config)
        self._process_multimodal_async: Any = self._process_multimodal
        self._mm_cache_stats = None

    def render_messages(self, messages: Any, params: Any) -> Any:
        raise NotImplementedError


MEDIA = {"image": torch.zeros(3, 4, 4), "audio": torch.zeros(16).numpy()}


@pytest.fixture(params=["_process_multimodal", "_process_multimodal_async"])
def method(request: pytest.FixtureRequest) -> str:
    """Each method of the renderer that takes media."""
    return str(request.param)


@pytest.fixture(params=sorted(MEDIA))
def modality(request: pytest.FixtureRequest) -> str:
    """A kind of media."""
    return str(request.param)


@pytest.fixture
def send(modality: str, method: str) -> Callable[..., tuple[str, Any]]:
    """Sends media as a tenant. Returns their key, and the item unless it is cached."""
    renderer = Renderer(modality)
    part_media(renderer)

    def as_of(
        tenant: str,
        uuid: str | None = None,
        *,
        with_data: bool = True,
        media_io_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, Any]:
        process: Callable[..., tuple[str, Any]] = getattr(renderer, method)
        return as_tenant(
            tenant,
            process,
            [1],
            {modality: [MEDIA[modality] if with_data else None]},
            mm_uuids={modality: [uuid]} if uuid else None,
            mm_processor_kwargs=None,
            media_io_kwargs=media_io_kwargs,
        )

    return as_of


@pytest.mark.parametrize("uuid", ["picture", None])
def test_media_are_cached_only_for_the_tenant_that_sent_them(
    send: Callable[..., tuple[str, Any]], uuid: str | None
) -> None:
    first, sent = send("a", uuid)
    assert sent is not None
    assert send("a", uuid) == (first, None)
    other, sent = send("b", uuid)
    assert other != first
    assert sent is not None
    assert send(NO_TENANT, uuid)[0] != send(NO_TENANT, uuid)[0]


def test_no_uuid_or_option_opens_another_tenants_media(
    send: Callable[..., tuple[str, Any]], modality: str
) -> None:
    key, _ = send("a", "picture")
    claims = {modality: {"specserve_tenant": "a"}}
    for uuid in ("picture", key):
        for options in (None, claims):
            with pytest.raises(AssertionError, match="Expected a cached item"):
                send("b", uuid, with_data=False, media_io_kwargs=options)
    assert send("a", "picture", with_data=False) == (key, None)


def test_the_engine_finds_media_by_the_same_key(send: Callable[..., tuple[str, Any]]) -> None:
    settings: Any = SimpleNamespace(
        get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1)
    )
    receiver = LruKeyReplicatedReceiverCache(settings)
    key, sent = send("a", "picture")
    item = MultiModalKwargsItem.dummy()
    receiver.get_and_update_item(item, key)
    assert sent is not None
    assert receiver.get_and_update_item(None, send("a", "picture")[0]) is item
    assert send("b", "picture")[0] not in receiver._cache


def test_vllm_uses_the_options_of_media_only_for_keys() -> None:
    for method in (BaseRenderer._process_tokens, BaseRenderer._process_tokens_async):
        assert 'media_io_kwargs=prompt.get("media_io_kwargs")' in inspect.getsource(method)
    assert "media_io_kwargs" not in inspect.getsource(BaseMultiModalProcessor)


def test_vllm_has_no_other_modalities_with_options_of_their_own() -> None:
    assert set(isolation._MEDIA) == set(_HF_MODALITY_PROCESSOR_KWARGS)


# Routes

TASKS = ("generate", "transcription", "realtime", "embed", "classify", "token_embed", "score")


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], FastAPI]]:
    """Builds vLLM's application with every route that an option or a variable opens.

    The build imports a library that raises the level of the root logger and its handlers.
    """
    root = logging.getLogger()
    root_level, handlers = root.level, {each: each.level for each in root.handlers}
    for name in ("SERVER_DEV_MODE", "ALLOW_RUNTIME_LORA_UPDATING", "ENABLE_COHERE_API"):
        monkeypatch.setenv(f"VLLM_{name}", "1")
    namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    namespace.enable_scale_out = namespace.enable_fault_tolerance = True
    yield lambda: build_app(namespace, TASKS)
    root.setLevel(root_level)
    for handler, level in handlers.items():
        handler.setLevel(level)


def paths(app: FastAPI) -> set[str]:
    return {getattr(route, "path", "") for route in app.routes}


DANGEROUS = {
    *("/v1/load_lora_adapter", "/adapters", "/sleep", "/collective_rpc", "/pause", "/resume"),
    *("/abort_requests", "/inference/v1/abort_requests", "/inference/v1/generate"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/scale_elastic_ep", "/update_weights"),
    *("/fault_tolerance/apply", "/server_info", "/kv_event_sources"),
}


def test_routes_that_reach_all_tenants_requests_are_closed(
    application: Callable[[], FastAPI],
) -> None:
    app = application()
    assert paths(app) >= DANGEROUS
    close_routes(app)
    assert not paths(app) & DANGEROUS
    assert paths(app) <= isolation.TENANT_ROUTES
    assert {"/v1/completions", "/v1/responses/{response_id}", "/v1/realtime"} <= paths(app)


def test_our_refusal_replaces_vllms_scaling_route(
    application: Callable[[], FastAPI],
) -> None:
    app = application()
    refuse_scaling(app)
    assert TestClient(app).post("/scale_elastic_ep", json={}).status_code == 501


def test_our_refusals_replace_vllms_routes_of_adapters(
    application: Callable[[], FastAPI],
) -> None:
    app = application()
    refuse_adapters(app)
    client = TestClient(app)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters"):
        assert client.post(path, json={}).status_code == 501, path
    assert client.delete("/adapters/a").status_code == 501


def test_our_metrics_route_replaces_vllms(
    application: Callable[[], FastAPI],
) -> None:
    async def refresh() -> float:
        return 0.0

    app = application()
    serve_fresh_metrics(app, refresh, CollectorRegistry())
    client = TestClient(app)
    assert (client.get("/metrics").status_code, client.get("/metrics").text) == (200, "")
    assert client.get("/metricsx").status_code == 404


def test_invocations_are_closed_if_they_have_sessions(
    application: Callable[[], FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGEMAKER_ENABLE_STATEFUL_SESSIONS", "true")
    app = application()
    close_routes(app)
    assert "/invocations" not in paths(app)


def test_a_middleware_runs_before_the_body_is_read(application: Callable[[], FastAPI]) -> None:
    class Refusing:
        def __init__(self, app: ASGIApp) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            is_known = "authorization" in Request(scope).headers
            await (self.app if is_known else Response(status_code=401))(scope, receive, send)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        raise AssertionError("the body was read")

    app = application()
    app.user_middleware.insert(0, Middleware(Refusing))
    app.middleware_stack = app.build_middleware_stack()
    wrap_routes(app, lambda routes: ControlsMiddleware(routes, []))

    async def run() -> list[int]:
        path, transport = "/v1/completions", httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            refused = await client.post(path, content=pieces())
            json, headers = {"vllm_xargs": {"learn": 2}}, {"authorization": "x"}
            read = await client.post(path, json=json, headers=headers)
            return [refused.status_code, read.status_code]

    assert asyncio.run(run()) == [401, 400]
