from __future__ import annotations

import pytest

from specserve.core.errors import RequestError
from specserve.core.types import RequestControls
from specserve.sources.controls import NO_TENANT, TENANT_KEY, parse_controls, with_tenant

KINDS = ("ngram", "mtp")


@pytest.mark.parametrize("extra_args", [None, {}, {"kv_transfer_params": {"a": 1}}])
def test_a_request_that_asks_for_nothing_gets_the_defaults(
    extra_args: dict[str, object] | None,
) -> None:
    assert parse_controls(extra_args, KINDS) == RequestControls()


def test_all_controls_are_read() -> None:
    asked = {"speculation": "mtp", "max_draft_tokens": 3, "learn": 0, "report": 1, "other": "x"}
    assert parse_controls(asked, KINDS) == RequestControls("mtp", 3, False, report=True)


@pytest.mark.parametrize("value", ["auto", "off", "ngram", "mtp"])
def test_speculation_takes_auto_off_and_the_configured_kinds(value: str) -> None:
    assert parse_controls({"speculation": value}, KINDS).speculation == value


@pytest.mark.parametrize("value", ["", "draft_model", "OFF", 0, None, ["ngram"]])
def test_another_speculation_is_refused_with_the_allowed_values(value: object) -> None:
    with pytest.raises(
        RequestError, match=r"vllm_xargs\.speculation.*auto, off, ngram, mtp"
    ) as info:
        parse_controls({"speculation": value}, KINDS)
    assert info.value.value == value


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (128, 128), (4.0, 4)])
def test_a_draft_limit_may_be_an_integral_number(value: object, expected: int) -> None:
    assert parse_controls({"max_draft_tokens": value}, KINDS).max_draft_tokens == expected


@pytest.mark.parametrize("value", [-1, 129, 2.5, "4", True, None, float("nan"), float("inf")])
def test_another_draft_limit_is_refused_with_its_range(value: object) -> None:
    with pytest.raises(RequestError, match=r"vllm_xargs\.max_draft_tokens.*0 \.\. 128"):
        parse_controls({"max_draft_tokens": value}, KINDS)


@pytest.mark.parametrize("key", ["learn", "report"])
@pytest.mark.parametrize("value", [2, -1, "no", "true", 0.5, None])
def test_another_switch_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"vllm_xargs\.{key}.*0 or 1"):
        parse_controls({key: value}, KINDS)


@pytest.mark.parametrize(("value", "expected"), [(1, True), (1.0, True), (True, True), (0, False)])
def test_a_switch_may_be_a_json_number_or_boolean(value: object, expected: bool) -> None:
    controls = parse_controls({"learn": value, "report": value}, KINDS)
    assert (controls.learn, controls.report) == (expected, expected)


def test_a_tenant_among_the_arguments_is_no_request_control() -> None:
    assert parse_controls({TENANT_KEY: "a"}, KINDS) == RequestControls()


def test_the_engine_reads_the_tenant_that_the_server_wrote() -> None:
    controls = RequestControls("ngram", 3, learn=False)
    expected = RequestControls("ngram", 3, learn=False, tenant="a")
    assert with_tenant(controls, {TENANT_KEY: "a"}) == expected


@pytest.mark.parametrize("value", ["a text", [1, 2], None])
def test_a_prediction_is_taken_only_as_the_servers_bytes(value: object) -> None:
    tokens = b"\1\0\0\0"
    assert parse_controls({"prediction": tokens}, KINDS).prediction == tokens
    assert parse_controls({"prediction": value}, KINDS).prediction == b""


@pytest.mark.parametrize("extra_args", [None, {}, {TENANT_KEY: 1}, {TENANT_KEY: NO_TENANT}])
def test_a_request_without_a_tenant_is_not_learned(
    extra_args: dict[str, object] | None,
) -> None:
    controls = with_tenant(RequestControls(), extra_args)
    assert (controls.tenant, controls.learn) == (NO_TENANT, False)


@pytest.mark.parametrize("key", ["speculation", "max_draft_tokens", "learn", "report"])
def test_controls_are_refused_if_vllm_drafts_itself(key: str) -> None:
    with pytest.raises(RequestError, match=f"vllm_xargs.{key}"):
        parse_controls({key: 0}, None)
    assert parse_controls({"another": 0}, None) == RequestControls()
