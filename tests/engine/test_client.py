"""A request that cannot be sent to the engine core is refused and leaves no state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import Context, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackEncoder

from specserve.engine.client import ServedLLM, refuse_long_lists
from specserve.engine.tenants import CURRENT_CALL, IN_BEAM_SEARCH, RESERVED
from tests.engine.scripted_client import ScriptedClient

NESTED: Any = 1
for _ in range(2000):
    NESTED = [NESTED]


class Client(ServedLLM):
    """vLLM's client with an engine core that receives messages and does nothing."""

    def __init__(self) -> None:
        scripted = ScriptedClient()
        self.vllm_config = scripted.vllm_config
        self.model_config = scripted.model_config
        self.scheduler_config = scripted.vllm_config.scheduler_config
        self.observability_config = scripted.vllm_config.observability_config
        self.renderer = scripted.renderer
        self.input_processor = scripted.input_processor
        self.output_processor = OutputProcessor(scripted.tokenizer, log_stats=False)
        self.log_requests = False
        self.engine_core: Any = SimpleNamespace(
            add_request_async=self._receive,
            abort_requests_async=self._aborted,
            resources=SimpleNamespace(engine_dead=False),
        )
        self._supported_tasks = ("generate",)
        self.output_handler: Any = SimpleNamespace(done=lambda: False)
        self.received = asyncio.Event()
        self.is_busy = False
        self.admission_stats = None

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    async def _receive(self, request: Any) -> None:
        MsgpackEncoder().encode(request)
        self.received.set()
        while self.is_busy:
            await asyncio.sleep(1)

    async def _aborted(self, request_ids: list[str]) -> None:
        pass

    async def first_output(self, params: SamplingParams) -> Any:
        prompt = parse_model_prompt(self.model_config, "def f(a):")
        (rendered,) = await self.renderer.render_cmpl_async([prompt])
        return await anext(self.generate(rendered, params, "request"))


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs": StructuredOutputsParams(json={"any": -(2**63) - 1})},
        {"structured_outputs": StructuredOutputsParams(json={"any": 2**64})},
        {"extra_args": {"any": NESTED}},
        {"max_tokens": 2**64},
        {"extra_args": {"any": 2j}},
    ],
    ids=["small", "large", "nested", "field", "type"],
)
def test_a_request_that_cannot_be_encoded_is_a_client_error(
    client: Client, number: int, options: dict[str, Any]
) -> None:
    params = SamplingParams(n=number, output_kind=RequestOutputKind.FINAL_ONLY, **options)
    with pytest.raises(VLLMValidationError, match="The request cannot be processed: "):
        asyncio.run(client.first_output(params))
    assert client.output_processor.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("penalty", [5e-324, 1e-31, 1e31, 1.7976931348623157e308])
def test_a_penalty_that_makes_logits_infinite_is_a_client_error(
    client: Client, penalty: float
) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    with pytest.raises(VLLMValidationError, match=r"in \[1e-30, 1e\+30\], got ") as error:
        asyncio.run(asyncio.wait_for(client.first_output(params), 10))
    assert str(penalty) in str(error.value)
    assert client.output_processor.get_num_unfinished_requests() == 0


@pytest.mark.parametrize(
    ("given", "allowed", "got"),
    [
        ({"stop": ["a"] * 1025}, "stop must have at most 1024 strings", 1025),
        (
            {"bad_words": ["a" * (1 << 16), "b"]},
            "bad_words must have at most 65536 characters",
            65537,
        ),
    ],
    ids=["stop", "bad_words"],
)
def test_lists_that_would_delay_all_calls_are_client_errors(
    client: Client, given: dict[str, Any], allowed: str, got: int
) -> None:
    with pytest.raises(VLLMValidationError, match=f"{allowed}.*, got {got}") as error:
        asyncio.run(asyncio.wait_for(client.first_output(SamplingParams(**given)), 10))
    assert error.value.parameter == next(iter(given))
    assert client.output_processor.get_num_unfinished_requests() == 0


def test_a_schema_that_would_exhaust_the_stack_is_a_client_error(client: Client) -> None:
    links = {f"a{number}": {"$ref": f"#/a{number + 1}"} for number in range(5000)}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=links))
    with pytest.raises(VLLMValidationError, match="references may lead through at most"):
        asyncio.run(asyncio.wait_for(client.first_output(params), 10))
    assert client.output_processor.get_num_unfinished_requests() == 0


def test_a_request_that_exceeds_the_limit_alone_is_a_client_error(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.scheduler_config, "max_num_queued_reqs", 4)
    with pytest.raises(VLLMValidationError, match=r"takes 5 sequences, .* is 4\."):
        client.check_admission(5)
    client.check_admission(4)


def test_a_beam_searchs_steps_are_admitted_while_the_queue_is_full(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.scheduler_config, "max_num_queued_reqs", 1)
    monkeypatch.setattr(client, "get_num_unfinished_requests", lambda: 1)
    monkeypatch.setattr(client, "admission_stats", None)
    monkeypatch.setattr(client, "_record_admission_rejection", lambda limit: None)
    with pytest.raises(QueueOverflowError):
        client.check_admission(1)
    context = copy_context()
    context.run(IN_BEAM_SEARCH.set, True)
    context.run(client.check_admission, 1)


@pytest.fixture
def calls(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Context]]:
    """Contexts of three HTTP calls, at a client that admits two sequences."""
    monkeypatch.setattr(client.scheduler_config, "max_num_queued_reqs", 2)
    monkeypatch.setattr(client, "_record_admission_rejection", lambda limit: None)
    contexts = [copy_context() for _ in range(3)]
    for call, context in enumerate(contexts):
        RESERVED[call] = 0
        context.run(CURRENT_CALL.set, call)
    yield contexts
    RESERVED.clear()


def test_calls_whose_requests_are_not_added_yet_take_places(
    client: Client, calls: list[Context]
) -> None:
    calls[0].run(client.check_admission, 1)
    calls[1].run(client.check_admission, 1)
    with pytest.raises(QueueOverflowError):
        calls[2].run(client.check_admission, 1)
    calls[0].run(client.check_admission, 1, "request")  # takes its own place
    with pytest.raises(QueueOverflowError):
        calls[2].run(client.check_admission, 2)
    calls[2].run(client.check_admission, 1)


def test_a_list_of_prompts_takes_the_places_of_all_of_them(
    client: Client, calls: list[Context]
) -> None:
    async def render(request: Any) -> list[str]:
        client.check_admission(request.n)
        return ["a", "b"]

    handler = SimpleNamespace(engine_client=client, render_completion_request=render)
    refuse_long_lists(handler, 2)

    async def run() -> None:
        rendered = partial(handler.render_completion_request, SimpleNamespace(n=1))
        await asyncio.create_task(rendered(), context=calls[0])
        with pytest.raises(QueueOverflowError):
            await asyncio.create_task(rendered(), context=calls[1])

    asyncio.run(run())


def test_a_client_that_leaves_during_the_send_leaves_no_request(client: Client) -> None:
    async def leave() -> None:
        client.is_busy = True
        call = asyncio.ensure_future(client.first_output(SamplingParams()))
        await client.received.wait()
        assert client.output_processor.get_num_unfinished_requests() == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(leave())
    assert client.output_processor.get_num_unfinished_requests() == 0
