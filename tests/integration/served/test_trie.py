"""Two replicas with one draft memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from tests.integration.api import MODEL, OFF, Api, page_data
from tests.integration.applications import MAX_NUM_SEQS
from tests.integration.cluster import Cluster, Deployment, kill

pytestmark = pytest.mark.timeout(900)

TEXT: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
NUM_ASKED = 12


@pytest.fixture
def api(shared: Deployment) -> Iterator[Api]:
    """A client of both replicas, when both are ready."""
    api = Api(shared.base_url("/two"))
    with api.http:
        shared.eventually(lambda: len(replicas(api)) == 2, "both replicas are ready", 240)
        yield api


@pytest.fixture
def app(shared: Deployment) -> Deployment:
    return shared


def replicas(api: Api) -> dict[str, dict[str, Any]]:
    """Page data of each replica by its id, at most one second old."""
    return {each["replica"]: each for each in page_data(api.http)["replicas"]}


def stores(cluster: Cluster) -> list[int]:
    """Process ids of the draft memory's store actors."""
    return [process.pid for process in cluster.processes("ray::TrieStore")]


def taught_by_others(api: Api) -> int:
    """Accepted draft tokens that came from the other replica, summed over both replicas."""
    return sum(
        sum(source["accepted"])
        for replica in replicas(api).values()
        for source in replica["speculation"]["acceptance"]
        if source["source"] == "trie_cluster"
    )


def await_drafts_from_the_other(api: Api, app: Deployment, prompt: str) -> None:
    """Repeats the same requests until a draft from another replica's text is accepted.

    Several run at once, since single requests may all go to one replica.
    """
    prompts = [prompt + more for more in ("", "try:", "import", "return", "@", '"""')]
    before = taught_by_others(api)
    with ThreadPoolExecutor(len(prompts)) as pool:

        def ask() -> bool:
            list(pool.map(lambda each: api.complete(prompt=each, **TEXT), prompts))
            return taught_by_others(api) > before

        app.eventually(ask, "an accepted draft from another replica's text", 120)


def test_each_replica_gives_the_page_data_of_both(api: Api, app: Deployment) -> None:
    number = count()  # a new query each time, so that HAProxy asks a replica

    def both() -> bool:
        data = page_data(api.http, number=next(number))
        shown = {each["replica"] for each in data["replicas"]}
        return len(shown) == 2 and bool(data["num_replicas"] == 2)

    # A replica learns of the other one a moment later than the client.
    app.eventually(lambda: all(both() for _ in range(4)), "both, four times in a row", 60)


def test_both_replicas_get_requests(api: Api, app: Deployment) -> None:
    await_text_from_both(api, app)


def test_both_replicas_get_requests_whichever_node_they_are_on(
    replicated_on_nodes: Deployment,
) -> None:
    api = Api(replicated_on_nodes.base_url("/two"))
    with api.http:
        await_text_from_both(api, replicated_on_nodes)


def await_text_from_both(api: Api, app: Deployment) -> None:
    def written() -> dict[str, float]:
        """Tokens by replica; empty until both replicas know of each other."""
        shown = replicas(api)
        return {k: v["generated_tokens"] for k, v in shown.items()} if len(shown) == 2 else {}

    before = app.eventually(written, "both replicas are ready", 240)
    asked = {"model": MODEL, "prompt": "class", **TEXT}

    def none_is_refused() -> bool:
        """Sends as many requests as both decode. HAProxy may learn of a replica late."""
        with ThreadPoolExecutor(2 * MAX_NUM_SEQS) as pool:
            posts = [
                pool.submit(api.http.post, "/v1/completions", json=asked)
                for _ in range(2 * MAX_NUM_SEQS)
            ]
        return {post.result().status_code for post in posts} == {200}

    app.eventually(none_is_refused, "both replicas decode", 60)

    def have_written() -> bool:
        after = written()
        return bool(after) and all(after[replica] > before[replica] for replica in before)

    app.eventually(have_written, "both replicas have written", 30)


def test_one_replica_drafts_what_the_other_wrote(api: Api, app: Deployment) -> None:
    await_drafts_from_the_other(api, app, "def read(path):\n")


def test_both_replicas_learn_a_text_taught_over_http(api: Api, app: Deployment) -> None:
    def learned() -> dict[str, int]:
        """Number of tokens that each replica has learned so far."""
        return {
            replica: sum(
                each["ingested_tokens"] for each in view["speculation"]["trie"]["namespaces"]
            )
            for replica, view in replicas(api).items()
        }

    before = learned()
    line = json.dumps({"token_ids": list(range(300, 1300))})
    answer = api.http.post("/v1/speculation/memory", content=line)
    assert answer.json()["tokens"] == 1000, answer.text

    def both() -> bool:
        after = learned()
        return len(after) == 2 and all(n >= before.get(name, 0) + 1000 for name, n in after.items())

    app.eventually(both, "both replicas have the text", 60)


def test_a_killed_store_changes_no_text_and_restarts(api: Api, app: Deployment) -> None:
    prompts = [f"def function_{i}(value):\n" for i in range(NUM_ASKED)]
    expected = [api.complete(prompt=p, vllm_xargs=OFF, **TEXT)["choices"] for p in prompts]
    before = stores(app.cluster)
    assert before
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda p: api.complete(prompt=p, **TEXT), 2 * prompts)
        kill([p for p in app.cluster.processes("ray::TrieStore") if p.pid in before])
        texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [choices[0]["text"] for choices in 2 * expected]

    app.eventually(
        lambda: len(set(stores(app.cluster)) - set(before)) == len(before), "new stores", 120
    )
    await_drafts_from_the_other(api, app, "class Shape:\n")
