"""API keys over HTTP, and isolation between tenants."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import httpx
import pytest

from specserve.trie.namespaces import half_of, tenant_half
from tests.integration.api import MODEL, TIMEOUT_S, fresh
from tests.integration.applications import KEYS, TENANTS
from tests.integration.cluster import Deployment

pytestmark = pytest.mark.timeout(900)

A, B, C, D = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())


@pytest.fixture
def http(shared: Deployment) -> Iterator[httpx.Client]:
    """A client without a key. Only the environment of the nodes has the keys."""
    with httpx.Client(base_url=shared.base_url("/team"), timeout=TIMEOUT_S) as client:
        yield client


def completion(text: str) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 2}


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


def responses(text: str) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": 2}


def generation(text: str) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": 2}}


ROUTES: list[tuple[str, Callable[[str], dict[str, Any]], dict[str, Any]]] = [
    ("/v1/completions", completion, {}),
    ("/v1/completions", completion, {"stream": True}),
    ("/v1/completions", completion, {"n": 2, "temperature": 1}),
    ("/v1/completions", completion, {"use_beam_search": True, "n": 2}),
    ("/v1/chat/completions", chat, {}),
    ("/v1/chat/completions", chat, {"stream": True}),
    ("/v1/responses", responses, {}),
    ("/v1/responses", responses, {"stream": True}),
    ("/v1/messages", chat, {}),
    ("/invocations", completion, {}),
    ("/generate", generation, {}),
    ("/", generation, {"stream": True}),
]


def metric(http: httpx.Client, name: str) -> float:
    """The sum of a metric's series. ``/metrics`` needs no key."""
    lines = fresh(http, "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def num_reused_tokens(http: httpx.Client) -> float:
    """Tokens found in the prefix cache so far."""
    return metric(http, "vllm:prefix_cache_hits_total")


def counts(http: httpx.Client, key: Mapping[str, str]) -> tuple[int, int]:
    """Numbers of verified and of accepted draft tokens so far."""
    answer = fresh(http, "/v1/speculation", key)
    sources: list[dict[str, int]] = list(answer.json()["acceptance"].values())
    drafted = sum(each["draft_tokens"] for each in sources)
    return drafted, sum(each["accepted_tokens"] for each in sources)


def some_text() -> str:
    """A new random text that fills several blocks of the KV cache."""
    return "".join(random.choices(string.ascii_lowercase + " ", k=1200))


def ask(http: httpx.Client, key: Mapping[str, str], path: str, body: Mapping[str, Any]) -> None:
    answer = http.post(path, headers=dict(key), json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text


def reused(
    http: httpx.Client, path: str, body: Mapping[str, Any], *keys: Mapping[str, str]
) -> list[float]:
    """Sends a request with each key. Returns the tokens found in the prefix cache each time."""
    counts = [num_reused_tokens(http)]
    for key in keys:
        ask(http, key, path, body)
        counts.append(num_reused_tokens(http))
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.parametrize(("path", "body", "options"), ROUTES)
def test_on_every_route_a_tenant_reuses_only_its_own_cached_text(
    http: httpx.Client,
    path: str,
    body: Callable[[str], dict[str, Any]],
    options: dict[str, Any],
) -> None:
    request = body(some_text()) | options
    first, again, others = reused(http, path, request, A, A, B)
    assert again > first  # `first` is not 0 if a request's n samples share the prompt
    assert others == first


def test_a_tenants_drafts_do_not_depend_on_other_tenants(http: httpx.Client) -> None:
    text = "".join(random.Random(1).choices(string.ascii_lowercase + " ", k=1200))
    body = completion(text) | {"model": MODEL, "temperature": 0, "max_tokens": 64}

    def counted(key: Mapping[str, str]) -> tuple[int, int]:
        before = counts(http, key)
        assert http.post("/v1/completions", headers=dict(key), json=body).status_code == 200
        after = counts(http, key)
        return after[0] - before[0], after[1] - before[1]

    first = counted(C)
    _, num_accepted = counted(C)
    assert num_accepted > first[1], first
    assert counted(D) == first


def test_a_clients_own_salt_does_not_open_another_tenants_cache(http: httpx.Client) -> None:
    request = completion(some_text()) | {"cache_salt": TENANTS[0]}
    first, again, others = reused(http, "/v1/completions", request, A, A, B)
    assert again > 0
    assert first == others == 0


@pytest.mark.parametrize("path", ["/v1/models", "/v1/speculation", "/version", "/info"])
def test_a_protected_route_needs_a_key(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 401
    assert http.get(path, headers={"Authorization": "Bearer sk-c"}).status_code == 401
    assert http.get(path, headers=A).status_code == 200


def test_the_open_metrics_have_a_series_per_tenant_that_hides_its_name(
    http: httpx.Client,
) -> None:
    for key in (A, B, C, D):
        ask(http, key, "/v1/completions", completion(some_text()))
    pattern = r'^specserve_trie_tokens{.*memory_namespace="(\w+)"'
    labels = set(re.findall(pattern, fresh(http, "/metrics").text, re.MULTILINE))
    assert len(labels) == len(TENANTS)
    assert not any(half_of(each) == tenant_half(name) for each in labels for name in TENANTS)


def test_health_needs_no_key(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200


def test_a_request_that_names_a_tenant_is_refused(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "vllm_xargs": {"specserve_tenant": TENANTS[1]}}
    answer = http.post("/v1/completions", headers=A, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vllm_xargs.specserve_tenant"
    answer = http.post("/generate", headers=A, json={"inputs": "a", **body})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")


def num_learned(http: httpx.Client, path: str, body: Mapping[str, Any]) -> float:
    """Number of tokens that the draft memory learned from a request."""
    name = "specserve_trie_ingested_tokens_total"
    before = metric(http, name)
    ask(http, A, path, body)
    return metric(http, name) - before


SILENT = {"learn": 0, "speculation": "off"}
"""With speculation the memory would hold and count the text for the request itself."""

SCORED = {"query": "a", "label_token_ids": [300, 301], "apply_softmax": False}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            completion("") | {"use_beam_search": True, "n": 2, "vllm_xargs": SILENT},
        ),
        ("/generative_scoring", SCORED | {"vllm_xargs": SILENT}),
        ("/v1/completions", completion("") | {"vllm_xargs": SILENT}),
        ("/generate", generation("") | {"vllm_xargs": SILENT}),
    ],
    ids=["beams", "scores", "completion", "generation"],
)
def test_no_handler_learns_a_request_that_forbids_it(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    text = some_text()
    assert num_learned(http, "/v1/completions", completion(some_text())) > 0
    assert num_learned(http, path, body | {"prompt": text, "inputs": text, "items": [text]}) == 0


def test_a_prediction_serves_only_its_own_request_and_is_not_learned(
    http: httpx.Client,
) -> None:
    code = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n"
    body = {"model": MODEL, "prompt": code * 3, "temperature": 0, "max_tokens": 48}
    answer = http.post("/v1/completions", headers=A, json=body | {"vllm_xargs": SILENT})
    written = answer.json()["choices"][0]["text"]
    alone = SILENT | {"speculation": "prediction"}
    predicted = alone | {"prediction": [some_text(), written]}

    def drafted(key: Mapping[str, str], xargs: Mapping[str, object]) -> tuple[int, int]:
        before = counts(http, key)
        asked = body | {"vllm_xargs": xargs}
        answer = http.post("/v1/completions", headers=dict(key), json=asked)
        assert answer.json()["choices"][0]["text"] == written
        after = counts(http, key)
        return after[0] - before[0], after[1] - before[1]

    assert drafted(B, predicted)[1] > 0
    assert drafted(B, alone) == drafted(A, alone) == (0, 0)
    short = completion("a") | {"vllm_xargs": {"prediction": some_text()}}
    assert 0 < num_learned(http, "/v1/completions", short) < 20


def test_only_its_own_tenant_can_use_a_stored_response(http: httpx.Client) -> None:
    body = responses("a") | {"model": MODEL, "request_id": "resp_chosen"}
    assert http.post("/v1/responses", headers=A, json=body).status_code == 200
    path = "/v1/responses/resp_chosen"
    more = responses("b") | {"model": MODEL, "previous_response_id": "resp_chosen"}
    for key, status in ((B, 404), (A, 200)):
        assert http.get(path, headers=key).status_code == status
        assert http.post("/v1/responses", headers=key, json=more).status_code == status
    assert http.post(f"{path}/cancel", headers=B).status_code == 404
    assert http.post("/v1/responses", headers=B, json=body).status_code == 200
    assert "resp_chosen" in http.get(path, headers=A).text


@pytest.mark.parametrize("path", ["/inference/v1/abort_requests", "/v1/load_lora_adapter"])
def test_a_route_that_affects_all_tenants_is_not_served(http: httpx.Client, path: str) -> None:
    assert http.post(path, headers=A, json={"request_ids": ["a"]}).status_code == 404
