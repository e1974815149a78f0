"""The dashboard's rows and panels, with their queries."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.grafana.series import (
    ACTORS,
    BETWEEN_TOKENS,
    FIRST_TOKEN,
    GENERATION_TOKENS,
    PLACEMENT_GROUPS,
    PROMPT_TOKENS,
    REPLICAS,
    REQUESTS_REFUSED,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    Series,
    of_drafters,
    or_zero,
    ours,
    share,
)
from specserve.core import metric_specs as specs


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph of lines over time.

    Attributes:
        unit: Grafana's name of it.
        queries: PromQL of each line or group of lines, by legend.
    """

    title: str
    description: str
    unit: str
    queries: dict[str, str]


def rows() -> dict[str, list[Panel]]:
    """Returns the panels by the title of their row, from top to bottom."""
    return {
        "Serving": _serving(),
        "Acceptance": _acceptance(),
        "Sources": _sources(),
        "Draft memory": _draft_memory(),
        "Placement": _placement(),
    }


def _quantiles(legend: str, series: Series, *by: str) -> dict[str, str]:
    return {f"{legend} p{q * 100:.0f}": series.quantile(q, *by) for q in (0.5, 0.95, 0.99)}


def _serving() -> list[Panel]:
    by = "{{model_name}}"
    generated = GENERATION_TOKENS.rate("model_name")
    return [
        Panel(
            "Tokens per second",
            "Generated, and read of prompts.",
            "short",
            {
                f"{by} generated": generated,
                f"{by} prompt": PROMPT_TOKENS.rate("model_name"),
            },
        ),
        Panel(
            "Time to first token",
            "From a request's arrival in the engine.",
            "s",
            _quantiles(by, FIRST_TOKEN, "model_name"),
        ),
        Panel(
            "Time between tokens",
            "Between a request's outputs, of which one may bring several tokens.",
            "s",
            _quantiles(by, BETWEEN_TOKENS, "model_name"),
        ),
        Panel(
            "Requests",
            "In the engine's batch, and waiting for it.",
            "short",
            {
                f"{by} running": or_zero(REQUESTS_RUNNING.value("sum", "model_name"), generated),
                f"{by} waiting": or_zero(REQUESTS_WAITING.value("sum", "model_name"), generated),
            },
        ),
        Panel(
            "Requests refused per second",
            "Answered 503 because too many were open.",
            "short",
            {by: or_zero(REQUESTS_REFUSED.rate("model_name"), generated)},
        ),
    ]


def _acceptance() -> list[Panel]:
    by = "{{model}} {{source}}"
    each = ("model", "source")
    drafts = ours(specs.DRAFTS).rate(*each)
    draft_tokens = ours(specs.DRAFT_TOKENS).rate(*each)
    accepted_tokens = ours(specs.ACCEPTED_TOKENS).rate(*each)
    drafted = ours(specs.DRAFTED_AT_POSITION).rate(*each, "position")
    accepted = ours(specs.ACCEPTED_AT_POSITION).rate(*each, "position")
    return [
        Panel(
            "Acceptance rate by source",
            "Accepted tokens of those drafted.",
            "percentunit",
            {by: share(accepted_tokens, draft_tokens)},
        ),
        Panel(
            "Acceptance rate by position",
            "Of the drafts that had a token there; a draft's first token is at position 1.",
            "percentunit",
            {f"{by} {{{{position}}}}": share(accepted, drafted)},
        ),
        Panel(
            "Accepted length",
            specs.ACCEPTED_LENGTH.description,
            "short",
            {
                f"{by} mean": share(accepted_tokens, drafts),
                f"{by} p90": ours(specs.ACCEPTED_LENGTH).quantile(0.9, *each),
            },
        ),
        Panel(
            "Draft tokens per second",
            "Verified, and accepted.",
            "short",
            {
                f"{by} drafted": draft_tokens,
                f"{by} accepted": accepted_tokens,
            },
        ),
        Panel(
            "Drafts per second",
            "Drafts that the target verified, by source.",
            "short",
            {by: drafts},
        ),
        Panel(
            "Hit rate",
            "Steps of the target, of one request each, with a draft of the source.",
            "percentunit",
            {by: _hit_rate()},
        ),
    ]


def _hit_rate() -> str:
    """Query for the drafts of each source per verify step of a request.

    A step yields one token of the target plus the accepted ones, so the steps are the difference.
    """
    drafts, accepted = ours(specs.DRAFTS), ours(specs.ACCEPTED_TOKENS)
    by_name = GENERATION_TOKENS.rate("model_name")
    renamed = f'label_replace({by_name}, "model", "$1", "model_name", "(.*)")'
    tokens = f"sum by (namespace, model) ({renamed})"
    steps = f"({tokens} - {or_zero(accepted.rate('model'), drafts.rate('model'))})"
    return f"{drafts.rate('model', 'source')} / on (namespace, model) group_left () {steps}"


def _sources() -> list[Panel]:
    by = "{{model}} {{source}}"
    each = ("model", "source")
    up = ours(specs.DRAFTER_UP).value("min", *each)
    rows = of_drafters(specs.DRAFTER_ROWS).rate("drafter")
    return [
        Panel(
            "Draft latency",
            specs.DRAFT_LATENCY.description,
            "s",
            _quantiles(by, ours(specs.DRAFT_LATENCY), *each),
        ),
        Panel(
            "Sources that are asked",
            specs.DRAFTER_UP.description + " Of several replicas the worst.",
            "bool_on_off",
            {by: up},
        ),
        Panel(
            "Requests drafted for without their beginning, per second",
            specs.DRAFTER_PARTIAL_TEXTS.description,
            "short",
            {by: or_zero(ours(specs.DRAFTER_PARTIAL_TEXTS).rate(*each), up)},
        ),
        Panel(
            "Failed calls per second",
            "Errors and malformed drafts, and calls that missed their deadline.",
            "short",
            {
                f"{by} errors": or_zero(ours(specs.DRAFTER_ERRORS).rate(*each), up),
                f"{by} timeouts": or_zero(ours(specs.DRAFTER_TIMEOUTS).rate(*each), up),
            },
        ),
        Panel(
            "Load of drafters",
            "Share of the time in which a drafter's model computes; near 1: raise num_actors.",
            "percentunit",
            {"{{drafter}}": of_drafters(specs.DRAFTER_COMPUTE).rate("drafter")},
        ),
        Panel(
            "Texts at drafters per second",
            specs.DRAFTER_ROWS.description + " And what was dropped, for any reason.",
            "short",
            {
                "{{drafter}}": rows,
                "{{drafter}} dropped": or_zero(
                    of_drafters(specs.DRAFTER_REFUSED).rate("drafter"), rows
                ),
            },
        ),
    ]


def _draft_memory() -> list[Panel]:
    by = "{{model}}"
    learned = ours(specs.TRIE_INGESTED).rate("model")
    store_up = ours(specs.TRIE_STORE_UP).value("min", "model")
    return [
        Panel(
            "Size by namespace",
            specs.TRIE_TOKENS.description + " Of several replicas the largest.",
            "short",
            {
                f"{by} {{{{memory_namespace}}}}": ours(specs.TRIE_TOKENS).value(
                    "max", "model", "memory_namespace"
                )
            },
        ),
        Panel(
            "Memory by node",
            specs.TRIE_BYTES.description,
            "bytes",
            {f"{by} {{{{instance}}}}": ours(specs.TRIE_BYTES).value("sum", "model", "instance")},
        ),
        Panel(
            "Learned and forgotten tokens per second",
            "Forgotten for want of memory.",
            "short",
            {
                f"{by} learned": learned,
                f"{by} forgotten": or_zero(ours(specs.TRIE_EVICTED).rate("model"), learned),
            },
        ),
        Panel(
            "Replication lag",
            specs.TRIE_LAG.description + " Of several replicas the worst.",
            "s",
            {by: ours(specs.TRIE_LAG).value("max", "model")},
        ),
        Panel(
            "Replicated tokens per second",
            "Received from other replicas, and lost to them while the store did not answer.",
            "short",
            {
                f"{by} received": or_zero(ours(specs.TRIE_RECEIVED).rate("model"), store_up),
                f"{by} dropped": or_zero(ours(specs.TRIE_DROPPED).rate("model"), store_up),
            },
        ),
        Panel(
            "Store that answers",
            specs.TRIE_STORE_UP.description + " Of several replicas the worst.",
            "bool_on_off",
            {by: store_up},
        ),
    ]


def _placement() -> list[Panel]:
    return [
        Panel(
            "Actors by node",
            "Replicas, shards, drafters and the draft memory's stores, on the nodes that run them.",
            "short",
            {"{{Name}} {{NodeAddress}}": ACTORS.value("sum", "Name", "NodeAddress")},
        ),
        Panel(
            "Healthy replicas",
            "Of each of Serve's deployments.",
            "short",
            {"{{application}} {{deployment}}": REPLICAS.latest("sum", "application", "deployment")},
        ),
        Panel(
            "Placement groups by state",
            "One that stays PENDING asks for a node or device that the cluster does not have.",
            "short",
            {"{{State}}": PLACEMENT_GROUPS.value("sum", "State")},
        ),
    ]
