"""Random requests from the application's OpenAPI schema, and a report of their outcomes."""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation

from tests.integration.fuzz_bodies import EXAMPLES, ODD_BODIES, OPTIONS, bounded

logger = logging.getLogger(__name__)

Operation = APIOperation[Any, Any, Any, Any]
RandomCase = Case[Any]

CASE_S = 60.0
ALLOWED_5XX = (501, 503)

_FAILED = re.compile(
    r'"error_type":"(incomplete_)?generation"|"error":\{"type":"internal_error"'
    r'|"code":"InternalServerError"'
)
"""Signs of a server error in answers and streams of the generation API, of Anthropic's API and of
the responses API."""

_GRAMMARS = ("structured_outputs", "response_format", "tools", "text")
_TOKEN_LIMITS = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")

_HEAVY = (
    *("messages", "tools", "input", "system", "previous_input_messages", "mm_payload"),
    *("chat_request", "completion_request"),
)
"""Fields whose schemas take seconds to draw from. Only the examples have values for them."""


@dataclass
class Report:
    """Statuses by route, and the cases that failed."""

    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[str] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def note(self, label: str, request: object, status: int, text: str) -> None:
        """Records the outcome of one case."""
        in_stream = re.search(r'^data: \{"error".*"code": ?(\d+)', text, re.MULTILINE)
        outcome = int(in_stream[1]) if in_stream else status
        if _FAILED.search(text):
            outcome = 500
        with self._lock:
            self.statuses[label][outcome] += 1
        if outcome >= 500 and outcome not in ALLOWED_5XX and not is_vllms_own(label, request, text):
            self.failures.append(f"{label} {outcome}: {request!r:.1500}: {text[-600:]}")

    def table(self) -> str:
        """A table with a line for each route."""
        lines = []
        for label, counts in sorted(self.statuses.items()):
            good = sum(n for status, n in counts.items() if status < 300)
            lines.append(f"{label:45} {good:5}/{counts.total():<5} {dict(sorted(counts.items()))}")
        return "\n".join(lines)


def is_vllms_own(label: str, request: object, text: str) -> bool:
    """Whether vLLM itself answers this request with status 500, also without speculation."""
    if "/inference/v1/abort_requests" in label:
        # The route parses its body by hand and expects an object.
        return "object has no attribute 'get'" in text
    asked = request if isinstance(request, dict) else {}
    prompt = asked.get("prompt")
    if asked.get("echo") and isinstance(prompt, list) and "" in prompt:
        # The tokenizer puts a token before an empty text, and there is no text to echo.
        return '"message":""' in text
    sampling = asked.get("sampling_params") or {}
    if sampling.get("trace_decode_token_ids") is not None:
        # vLLM reports a wrong trace as an error without a message.
        return '"message":""' in text
    asked = asked | sampling
    # A grammar and another parameter together forbid every token.
    return (
        "Internal server error" in text
        and any(asked.get(key) for key in _GRAMMARS)
        and any(asked.get(key) for key in _TOKEN_LIMITS)
    )


def operations(http: httpx.Client) -> list[Operation]:
    """The application's operations, without the schemas that are slow to draw from."""
    spec = http.get("/openapi.json", timeout=CASE_S).json()
    for each in spec["components"]["schemas"].values():
        for name in _HEAVY:
            if name in each.get("properties", {}):
                each["properties"][name] = {}
    schema = schemathesis.openapi.from_dict(spec)
    found = []
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        found.append(result.ok())
    return found


def random_cases(found: Sequence[Operation], num_cases: int, number: int) -> list[RandomCase]:
    """Random cases of all operations in a random order.

    Args:
        found: the application's operations.
        num_cases: number of cases over all routes with a body.
        number: the seed. A seed always gives the same cases in the same order.
    """
    share = num_cases // sum(each.path in EXAMPLES for each in found)
    cases = [
        case
        for operation in found
        for case in _drawn(operation, share if operation.path in EXAMPLES else 5, number)
    ]
    random.Random(number).shuffle(cases)
    return cases


def send(
    http: httpx.Client,
    cases: Sequence[RandomCase],
    odd: Sequence[tuple[str, bytes]],
    num_clients: int,
) -> Report:
    """Sends the cases, and then the bodies that no schema describes.

    Args:
        http: a client of the application.
        cases: cases of its operations.
        odd: pairs of path and body.
        num_clients: clients that send at once. A case is mostly the wait for its answer.
    """
    report = Report()
    with ThreadPoolExecutor(num_clients) as pool:
        for number, _ in enumerate(pool.map(lambda case: _send(http, case, report), cases)):
            if number % 500 == 0:
                logger.info("%d of %d cases", number, len(cases))
        list(pool.map(lambda each: _post(http, each, report), odd))
    return report


def odd_bodies(found: Sequence[Operation]) -> list[tuple[str, bytes]]:
    """Each path that takes a body, paired with each body that no schema describes."""
    paths = sorted({each.path for each in found if each.method == "post"})
    return [(path.replace("{response_id}", "none"), body) for path in paths for body in ODD_BODIES]


def _drawn(operation: Operation, most: int, number: int) -> list[RandomCase]:
    """At most ``most`` cases of one operation; fewer if its schema has fewer."""
    by_schema = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    cases = []

    @seed(number)
    @settings(
        max_examples=most,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_cases(operation, by_schema))
    def draw(case: RandomCase) -> None:
        cases.append(case)

    draw()
    return cases


@st.composite
def _cases(
    draw: st.DrawFn, operation: Operation, by_schema: st.SearchStrategy[RandomCase]
) -> RandomCase:
    """A case from the schema alone, or an example with some fields of the schema and options."""
    example = EXAMPLES.get(operation.path)
    if example is None or draw(st.integers(0, 5)) == 0:
        case = draw(by_schema)
        case.body = bounded(case.body) if isinstance(case.body, dict) else case.body
        return case
    body = deepcopy(example)
    if draw(st.booleans()):  # drawing from a schema takes most of the time
        case = draw(by_schema)
        generated = case.body if isinstance(case.body, dict) else {}
        if others := sorted(generated.keys() - example.keys()):
            key = draw(st.sampled_from(others))
            body[key] = generated[key]
    else:
        case = operation.Case()
    for option in draw(st.lists(st.sampled_from(OPTIONS.get(operation.path, [{}])), max_size=3)):
        body |= option
    case.body = bounded(body)
    return case


def _send(http: httpx.Client, case: RandomCase, report: Report) -> None:
    body = case.body if isinstance(case.body, dict | list | str | int | float) else None
    content = b"" if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if content else {}
    query = {key: str(value) for key, value in (case.query or {}).items()}
    label = f"{case.method.upper()} {case.operation.path}"
    try:
        answer = http.request(
            case.method,
            case.formatted_path,
            params=query,
            content=content,
            headers=headers,
            timeout=CASE_S,
        )
    except httpx.TransportError as error:
        report.failures.append(f"{label}: {body!r:.1500}: {error!r}")
        return
    report.note(label, body, answer.status_code, answer.text)


def _post(http: httpx.Client, odd: tuple[str, bytes], report: Report) -> None:
    path, body = odd
    try:
        headers = {"Content-Type": "application/json"}
        answer = http.post(path, content=body, headers=headers, timeout=CASE_S)
    except httpx.TransportError as error:
        report.failures.append(f"odd body to {path}: {body[:100]!r}: {error!r}")
        return
    report.note(f"POST {path}, odd bodies", body[:100], answer.status_code, answer.text)
