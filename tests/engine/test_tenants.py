"""The tenant of a request, written into vLLM's request on its way to the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from specserve.core.types import RequestControls
from specserve.engine.tenants import (
    CURRENT_CONTROLS,
    CURRENT_TENANT,
    IN_BEAM_SEARCH,
    stamp,
    stamp_controls,
    stamp_reasoning,
    stamp_requests,
)
from specserve.sources.controls import (
    NO_TENANT,
    REASONING_KEY,
    SALT_KEY,
    TENANT_KEY,
    parse_controls,
    with_tenant,
)


def request(salt: str | None = None, **extra_args: Any) -> Any:
    params = SamplingParams(extra_args=extra_args or None)
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def stamped(tenant: str, salt: str | None = None, **extra_args: Any) -> Any:
    made = request(salt, **extra_args)
    stamp(made, tenant)
    return made


def test_the_tenant_overwrites_what_a_client_sent() -> None:
    made = stamped("a", learn=0, **{TENANT_KEY: "b"})
    assert made.sampling_params.extra_args == {"learn": 0, TENANT_KEY: "a", SALT_KEY: ""}


def test_a_clients_own_salt_reaches_the_engines_controls() -> None:
    made = stamped("a", "x", **{SALT_KEY: "y"})
    controls = with_tenant(RequestControls(), made.sampling_params.extra_args)
    assert (controls.tenant, controls.cache_salt) == ("a", "x")


def test_the_callers_arguments_are_not_changed_in_place() -> None:
    sent = {"learn": 0}
    made = request()
    made.sampling_params.extra_args = sent
    stamp(made, "a")
    assert sent == {"learn": 0}


def test_prefix_cache_blocks_are_shared_within_one_tenant_only() -> None:
    assert stamped("a").cache_salt == stamped("a").cache_salt
    assert stamped("a").cache_salt != stamped("b").cache_salt


def test_a_clients_salt_separates_its_own_requests_only() -> None:
    salts = [stamped("a").cache_salt, stamped("a", "x").cache_salt, stamped("b", "x").cache_salt]
    assert len(set(salts)) == 3
    assert stamped("b", stamped("a").cache_salt).cache_salt not in salts


def test_requests_without_a_tenant_share_no_blocks() -> None:
    assert stamped(NO_TENANT).cache_salt != stamped(NO_TENANT).cache_salt


@pytest.mark.parametrize("wanted", [None, StructuredOutputsParams(regex="a")])
def test_a_request_with_a_grammar_says_how_to_tell_its_reasoning(
    wanted: StructuredOutputsParams | None,
) -> None:
    made = request()
    made.sampling_params.structured_outputs = wanted
    stamp_reasoning(made)
    assert made.sampling_params.extra_args is None
    made.reasoning_ended, made.reasoning_parser_kwargs = False, {"thinking": True}
    stamp_reasoning(made)
    given = {REASONING_KEY: (False, {"thinking": True})}
    assert made.sampling_params.extra_args == (given if wanted else None)


class Client:
    """The part of the engine's client that is used."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(request)


def test_concurrent_calls_keep_their_tenants() -> None:
    client = Client()
    stamp_requests(client, with_tenants=True)

    async def answer(tenant: str, both: asyncio.Barrier) -> None:
        CURRENT_TENANT.set(tenant)
        await both.wait()
        await asyncio.create_task(client.add_request_async(request()))

    async def run() -> None:
        both = asyncio.Barrier(2)
        await asyncio.gather(answer("a", both), answer("b", both))
        await client.add_request_async(request())

    asyncio.run(run())
    tenants = [made.sampling_params.extra_args[TENANT_KEY] for made in client.sent]
    assert sorted(tenants[:2]) == ["a", "b"]
    assert tenants[2] == NO_TENANT


@pytest.mark.parametrize("asked", [{}, {"learn": 1, "speculation": "auto"}])
@pytest.mark.parametrize("with_tenants", [False, True])
def test_beams_are_not_learned_and_get_no_drafts(
    with_tenants: bool, asked: dict[str, object]
) -> None:
    client = Client()
    stamp_requests(client, with_tenants=with_tenants)

    async def run() -> None:
        CURRENT_CONTROLS.set(asked)
        IN_BEAM_SEARCH.set(True)
        await asyncio.create_task(client.add_request_async(request()))

    asyncio.run(run())
    (sent,) = client.sent
    controls = parse_controls(sent.sampling_params.extra_args, [])
    assert (controls.speculation, controls.learn) == ("off", False)


def test_the_engine_gets_the_tokens_of_a_prediction_and_not_its_text() -> None:
    made = request(prediction="a text", other=1)
    stamp_controls(made, {"prediction": b"1234"})
    assert made.sampling_params.extra_args == {"prediction": b"1234", "other": 1}
    sent = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(made))
    assert parse_controls(sent.sampling_params.extra_args, []).prediction == b"1234"


def test_controls_reach_the_engine_if_the_handler_drops_them() -> None:
    client = Client()
    stamp_requests(client, with_tenants=False)

    async def answer(controls: dict[str, object]) -> None:
        CURRENT_CONTROLS.set(controls)
        await asyncio.create_task(client.add_request_async(request()))

    async def run() -> None:
        await asyncio.gather(answer({"learn": 0}), answer({}))

    asyncio.run(run())
    assert [made.sampling_params.extra_args for made in client.sent] == [{"learn": 0}, None]
