"""Whose a request is, written into vLLM's own request on its way to the engine."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from specserve.core.types import RequestControls
from specserve.engine.tenants import CURRENT_TENANT, stamp, stamp_requests
from specserve.proposers.controls import NO_TENANT, SALT_KEY, TENANT_KEY, with_tenant


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


def test_a_tenant_is_written_over_what_a_client_sent() -> None:
    made = stamped("a", learn=0, **{TENANT_KEY: "b"})
    assert made.sampling_params.extra_args == {"learn": 0, TENANT_KEY: "a", SALT_KEY: ""}


def test_a_clients_own_salt_reaches_the_engines_controls() -> None:
    made = stamped("a", "x", **{SALT_KEY: "y"})
    controls = with_tenant(RequestControls(), made.sampling_params.extra_args)
    assert (controls.tenant, controls.cache_salt) == ("a", "x")


def test_what_the_client_handed_over_is_not_changed_in_place() -> None:
    sent = {"learn": 0}
    made = request()
    made.sampling_params.extra_args = sent
    stamp(made, "a")
    assert sent == {"learn": 0}


def test_tenants_share_no_blocks_of_the_prefix_cache_and_one_shares_with_itself() -> None:
    assert stamped("a").cache_salt == stamped("a").cache_salt
    assert stamped("a").cache_salt != stamped("b").cache_salt


def test_a_clients_salt_parts_its_own_requests_and_opens_no_one_elses() -> None:
    salts = [stamped("a").cache_salt, stamped("a", "x").cache_salt, stamped("b", "x").cache_salt]
    assert len(set(salts)) == 3
    assert stamped("b", stamped("a").cache_salt).cache_salt not in salts


def test_requests_without_a_tenant_share_with_no_one() -> None:
    assert stamped(NO_TENANT).cache_salt != stamped(NO_TENANT).cache_salt


def test_a_request_that_pools_is_kept_apart_too() -> None:
    made = request()
    made.sampling_params = None
    stamp(made, "a")
    assert made.cache_salt == stamped("a").cache_salt


class Client:
    """As much of the engine's client as is used."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(request)


def test_calls_answered_at_the_same_time_keep_their_tenants() -> None:
    client = Client()
    stamp_requests(client)

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
