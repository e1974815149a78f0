"""A real Prometheus that scrapes a serving cluster: every panel, every rule, and the counts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.panels import rows
from tests.integration.api import Api
from tests.integration.applications import MAX_NUM_SEQS, MAX_QUEUED, application
from tests.integration.cluster import BIN, Cluster, Deployment, model_path, serving
from tests.integration.prometheus import (
    FOLDER,
    Labels,
    Prometheus,
    labels,
    running_prometheus,
)
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(900)

PANELS = [
    pytest.param(query, id=f"{panel.title}: {legend}")
    for panels in rows().values()
    for panel in panels
    for legend, query in panel.queries.items()
]
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "specserve.rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES if "alert" in rule}
RECORDED = [rule["record"] for rule in RULES if "record" in rule]

CODE = [
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "for number in numbers:\n    total += number\n" * 4,
]
CHATS = [f"Complete this function:\n\ndef {name}(value):" for name in ("is_even", "load")]
COUNTED = {
    "specserve_drafts_total": "drafts",
    "specserve_draft_tokens_total": "draft_tokens",
    "specserve_accepted_tokens_total": "accepted_tokens",
    "specserve_accepted_length_count": "drafts",
}
AT_POSITION = ("drafted_at_position", "accepted_at_position")
EXPORTED_S = 60
FOUND_S = 60
DRAFTER_S = 120

Counts = dict[Labels, float]
"""Values by a series' labels and ``name``, the name of the metric."""


def ngram() -> dict[str, Any]:
    """``args`` of an application whose drafts depend only on the text, not on timing."""
    return application(model={"served_name": "ngram"})


def watched() -> dict[str, Any]:
    """``args`` of configs/demo.yaml with an MTP module that always drafts."""
    file = yaml.safe_load((Path(__file__).parents[2] / "configs/demo.yaml").read_text())
    args: dict[str, Any] = file["applications"][0]["args"]
    args["model"]["path"] = str(model_path("demo-base"))
    args["engine"]["kv_cache_memory_bytes"] = 256 << 20
    (mtp,) = (each for each in args["speculation"] if each["kind"] == "mtp")
    mtp |= {"dynamic": False, "timeout_s": 10.0}
    return args


def is_up(api: Api, kind: str) -> bool:
    """Whether a source of drafts is up."""
    return any(each["up"] for each in api.speculation()["sources"] if each["kind"] == kind)


@contextmanager
def api_of(app: Deployment, prefix: str) -> Iterator[Api]:
    api = Api(app.base_url(prefix))
    with api.http:
        yield api


@dataclass(frozen=True)
class Monitored:
    """A deployment and its Prometheus.

    Attributes:
        began: a time when the counts of demo and Prometheus agreed, in seconds since the epoch.
        ended: a time after some traffic when they agreed again.
        before: counts of the demo at ``began``.
        after: counts of the demo at ``ended``.
    """

    app: Deployment
    prometheus: Prometheus
    began: float
    ended: float
    before: Counts
    after: Counts

    @property
    def window(self) -> str:
        """Duration of the traffic as a PromQL range."""
        return f"{round(1000 * (self.ended - self.began))}ms"

    def as_grafana(self, query: str) -> str:
        """A panel's query for all models, with rates over the traffic."""
        return query.replace("$__rate_interval", self.window).replace("$model", ".*")


def counted_by(acceptance: dict[str, Any], model: str) -> Counts:
    """Counts of an application or a comparison, without zeros like Ray's series."""
    found: Counts = {}
    for source, entry in acceptance.items():
        tags = {"model": model, "source": source}
        for name, field in COUNTED.items():
            found[labels(name=name, **tags)] = entry[field]
        for which in AT_POSITION:
            for position, count in enumerate(entry[which], start=1):
                name = f"specserve_{which}_total"
                found[labels(name=name, position=str(position), **tags)] = count
    return {key: count for key, count in found.items() if count}


def counted_in(prometheus: Prometheus, model: str) -> Counts:
    """Counts of a model from Prometheus."""
    found: Counts = {}
    for name in (*COUNTED, *(f"specserve_{which}_total" for which in AT_POSITION)):
        query = f'sum by (model, source, position) (ray_{name}{{model="{model}"}})'
        for key, count in prometheus.query(query).items():
            found[key | labels(name=name)] = count
    return found


def gain(after: Counts, before: Counts) -> Counts:
    gained = {key: count - before.get(key, 0) for key, count in after.items()}
    return {key: count for key, count in gained.items() if count}


def await_counted(app: Deployment, prometheus: Prometheus, api: Api, model: str) -> Counts:
    """Counts of an idle application so far. Waits until Prometheus has them."""
    own = counted_by(api.speculation()["acceptance"], model)
    now = time.time()
    scraped = f'min(timestamp(ray_specserve_drafter_up{{model="{model}"}})) > {now}'
    app.eventually(
        lambda: prometheus.query(scraped) and counted_in(prometheus, model) == own,
        lambda: f"Prometheus should have {own}; it has {counted_in(prometheus, model)}",
        EXPORTED_S,
    )
    return own


def traffic(api: Api) -> None:
    """Several code and chat requests at once, streamed or not, with one or all sources."""

    def stream(prompt: str, **options: Any) -> None:
        with api.streaming(prompt=prompt, max_tokens=48, **options) as events:
            assert list(events)

    def complete(prompt: str, **options: Any) -> None:
        api.complete(prompt=prompt, max_tokens=48, **options)

    def chat(content: str, **options: Any) -> None:
        api.chat(messages=[{"role": "user", "content": content}], max_tokens=48, **options)

    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(call, text, vllm_xargs={"speculation": source})
            for source in ("auto", "ngram", "trie", "mtp")
            for call, texts in ((complete, CODE), (stream, CODE), (chat, CHATS))
            for text in texts
        ]
        for each in waiting:
            each.result()


@pytest.fixture(scope="module")
def monitored(stage: Stage) -> Iterator[Monitored]:
    stage.end()  # two clusters at a time would be slow
    cluster = Cluster([4, 4])
    cluster.use_dashboard()
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        # Prometheus starts first, so it has to find the nodes when they start.
        prometheus = stack.enter_context(running_prometheus(cluster.folder))
        cluster.start()
        app = stack.enter_context(serving(cluster, {"/": watched(), "/ngram": ngram()}))
        api = stack.enter_context(api_of(app, ""))
        app.eventually(lambda: is_up(api, "mtp"), "the MTP module's actor", DRAFTER_S)
        for _ in range(2):  # creates the series, and makes them grow once before the window
            traffic(api)
        before, began = await_counted(app, prometheus, api, "demo"), time.time()
        # Now the window contains a sample from before the traffic.
        app.eventually(
            lambda: prometheus.query(f"min(timestamp(ray_specserve_drafter_up)) > {began}"),
            "one more scrape",
            EXPORTED_S,
        )
        traffic(api)
        after, ended = await_counted(app, prometheus, api, "demo"), time.time()
        yield Monitored(app, prometheus, began, ended, before, after)


@pytest.fixture(scope="module")
def refused(monitored: Monitored) -> float:
    """A time at which requests were refused because the queue was full."""
    prometheus, app = monitored.prometheus, monitored.app
    total = 'ray_vllm_admission_rejections_total{model_name="ngram"}'
    with api_of(app, "/ngram") as api, ThreadPoolExecutor(4 * (MAX_NUM_SEQS + MAX_QUEUED)) as pool:

        def ask(_: int) -> int:
            body = {"model": "ngram", "prompt": CODE[0], "max_tokens": 200, "ignore_eos": True}
            return api.http.post("/v1/completions", json=body).status_code

        def is_seen_to_grow() -> bool:
            """Sends a burst. The first refusal creates the series, the next one increases it."""
            assert 503 in pool.map(ask, range(4 * (MAX_NUM_SEQS + MAX_QUEUED)))
            return bool(prometheus.query(f"increase({total}[5m]) > 0"))

        app.eventually(is_seen_to_grow, f"{total} grows", 60)
    return time.time()


def test_prometheus_finds_nodes_that_start_later(monitored: Monitored) -> None:
    wanted = set(monitored.app.cluster.metrics_ports)
    assert len(wanted) == 2

    def ports() -> set[int]:
        return {int(address.rpartition(":")[2]) for address in monitored.prometheus.scraped()}

    monitored.app.eventually(
        lambda: ports() >= wanted, lambda: f"{wanted} scraped; {ports()} are", FOUND_S
    )


@pytest.mark.parametrize("query", PANELS)
def test_a_panel_has_data(monitored: Monitored, query: str) -> None:
    found = monitored.prometheus.query(monitored.as_grafana(query), monitored.ended)
    assert any(math.isfinite(value) for value in found.values()), found


def test_a_panels_acceptance_rate_agrees_with_the_application(monitored: Monitored) -> None:
    (panel,) = (each for each in rows()["Acceptance"] if each.title == "Acceptance rate by source")
    (query,) = panel.queries.values()
    shown = monitored.prometheus.query(monitored.as_grafana(query), monitored.ended)
    gained = gain(monitored.after, monitored.before)
    drafted, accepted = (
        {key - labels(name=name): count for key, count in gained.items() if ("name", name) in key}
        for name in ("specserve_draft_tokens_total", "specserve_accepted_tokens_total")
    )
    assert {dict(key)["source"] for key in drafted} >= {"ngram", "trie_local", "mtp"}
    for key, count in drafted.items():
        # Prometheus extrapolates each series to the ends of the window, but not below 0.
        assert shown[key] == pytest.approx(accepted.get(key, 0) / count, rel=0.03)


def test_the_counts_of_all_sources_add_up_to_vllms(monitored: Monitored) -> None:
    fields = ("drafts", "draft_tokens", "accepted_tokens")
    names = [labels(name=f"specserve_{field}_total") for field in fields]
    drafted = [sum(n for key, n in monitored.after.items() if name <= key) for name in names]

    def verified() -> list[float]:
        totals = [f'sum(ray_vllm_spec_decode_num_{f}_total{{model_name="demo"}})' for f in fields]
        return [sum(monitored.prometheus.query(total).values()) for total in totals]

    monitored.app.eventually(
        lambda: verified() == drafted,
        lambda: f"vLLM should count {drafted}; it counts {verified()}",
        EXPORTED_S,
    )


def test_prometheus_and_a_comparison_of_the_same_prompts_agree(
    monitored: Monitored, tmp_path: Path
) -> None:
    app, prometheus = monitored.app, monitored.prometheus
    with api_of(app, "/ngram") as api:
        before = await_counted(app, prometheus, api, "ngram")
        texts = [
            api.complete(model="ngram", prompt=prompt, max_tokens=64)["choices"][0]["text"]
            for prompt in CODE
        ]
        await_counted(app, prometheus, api, "ngram")
    (compared,) = comparison(tmp_path, CODE, 64)["ngram"]["passes"]
    assert [each["text"] for each in compared["prompts"]] == texts
    acceptance = {
        source: {**entry, "draft_tokens": entry["drafted_tokens"]}
        for source, entry in compared["sources"].items()
    }
    counted = gain(counted_in(prometheus, "ngram"), before)
    assert counted
    assert counted == counted_by(acceptance, "ngram")


def comparison(folder: Path, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Output file of `specserve compare` with the method ngram."""
    file, lines, output = (folder / name for name in ("serve.yaml", "prompts.jsonl", "out.json"))
    application = {"import_path": "specserve.app:build", "args": ngram()}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    lines.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    command = [str(BIN / "specserve"), "compare", "--config", str(file), "--methods", "ngram"]
    command += ["--prompts", str(lines), "--max-tokens", str(max_tokens)]
    command += ["--save-output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    written: dict[str, Any] = json.loads(output.read_text())
    return written


def test_each_rule_is_evaluated(monitored: Monitored) -> None:
    rules = {rule["name"]: rule for rule in monitored.prometheus.rules()}
    assert set(rules) == {*ALERTS, *RECORDED}
    assert {
        name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"
    } == {}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_series_has_data(monitored: Monitored, name: str) -> None:
    assert monitored.prometheus.query(name, monitored.ended)


@pytest.mark.parametrize("alert", ALERTS)
def test_no_alert_fires_while_all_is_well(monitored: Monitored, alert: str) -> None:
    assert monitored.prometheus.query(ALERTS[alert], monitored.ended) == {}


@pytest.mark.parametrize("alert", ALERTS)
def test_each_series_of_an_alert_has_data(monitored: Monitored, refused: float, alert: str) -> None:
    sides = re.split(r"\s+(?:[<>]|==|and|unless)\s+", ALERTS[alert])
    series = [side for side in sides if re.search("[a-z]", side)]
    assert series
    for side in series:
        assert monitored.prometheus.query(side, refused), side


def test_refused_requests_raise_an_alert(monitored: Monitored, refused: float) -> None:
    found = monitored.prometheus.query(ALERTS["SpecserveQueueFull"], refused)
    assert set(found) == {labels(model_name="ngram")}
