"""Quantized bases over HTTP, in float32: drafts change nothing of what they write."""

from __future__ import annotations

import pytest

from tests.integration.api import AUTO, OFF, Api
from tests.integration.applications import application
from tests.integration.cluster import model_path
from tests.integration.stage import Stage

pytestmark = pytest.mark.timeout(900)

BASES = {
    "/fp8": ("demo-base", "fp8_per_block"),
    "/int8": ("demo-draft", "int8_per_channel_weight_only"),
}
"""The model, with and without experts, and its quantization, by route."""
PROMPT = "def add(a, b):\n    return a + b\n\n" * 4


def test_a_quantized_base_answers_the_same_with_drafts(stage: Stage) -> None:
    applications = {
        route: application(
            model={"path": str(model_path(name))}, engine={"vllm": {"quantization": quantization}}
        )
        for route, (name, quantization) in BASES.items()
    }
    app = stage.serve(applications)
    app.await_ready()
    for route in BASES:
        api = Api(app.base_url(route))
        with api.http:
            body = {"prompt": PROMPT, "max_tokens": 64, "return_token_ids": True}
            plain = api.complete(**body, vllm_xargs=OFF)
            before = api.counts()
            drafted = api.complete(**body, vllm_xargs=AUTO)
            assert api.counts().since(before).accepted_tokens > 0
            assert drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
