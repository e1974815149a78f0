"""The counts of speculation reach a request's answer, with each draft under its source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from specserve.core.config import parse
from specserve.engine.args import served_engine_args
from specserve.engine.report import Outcome, Reports, reported
from specserve.engine.scheduler import DraftScheduler
from tests.integration.cluster import model_path

BLOCK = 16


def vllm_config(**options: Any) -> Any:
    config = parse(
        {
            "model": {"path": str(model_path("demo-draft"))},
            "engine": {"max_model_len": 64, "enforce_eager": True, "vllm": options},
            "speculation": [
                {"kind": "trie", "share": "replica", "max_draft_len": 8},
                {"kind": "ngram"},
            ],
        }
    )
    return served_engine_args(config).create_engine_config()


class Core:
    """The scheduler of an engine core with one request, whose steps the test gives."""

    def __init__(self, vllm_config: Any, **params: Any) -> None:
        vllm_config.cache_config.num_gpu_blocks = 100
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = DraftScheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=100,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK,
        )
        self.reports = Reports.of(vllm_config)
        sampling = SamplingParams(**params)
        self.scheduler.add_request(Request("a", [1, 2, 3], sampling, None))

    def step(
        self, *tokens: int, outcome: Outcome | None = None, draft: tuple[int, ...] = ()
    ) -> Any:
        """The request's output of a step, as the replica decodes it.

        Args:
            tokens: new tokens of the step.
            outcome: outcome of the draft that the step verified.
            draft: draft for the next step.
        """
        scheduled = self.scheduler.schedule()
        output = ModelRunnerOutput(["a"], {"a": 0}, sampled_token_ids=[list(tokens)])
        if outcome is not None:
            output.specserve_outcomes = {"a": outcome}
        outputs = self.scheduler.update_from_output(scheduled, output)
        self.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [list(draft)]))
        (sent,) = (
            MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[0])).outputs
        )
        return sent


def write(core: Core) -> Any:
    """Verifies two drafts of three tokens, accepts two and none, and returns the last output."""
    core.step(4, draft=(5, 6, 7))
    core.step(5, 6, 9, outcome=("trie_cluster", 3, 2), draft=(7, 8, 9))
    return core.step(1, outcome=("ngram", 3, 0))


COUNTS = {
    "trie_local": {"drafted_tokens": 0, "accepted_tokens": 0},
    "trie_cluster": {"drafted_tokens": 3, "accepted_tokens": 2},
    "ngram": {"drafted_tokens": 3, "accepted_tokens": 0},
}


@pytest.mark.parametrize(
    ("options", "extra_args"),
    [({}, {"report": 1}), ({"per_request_spec_decode_metrics": "detailed"}, None)],
)
def test_the_last_output_has_the_counts_of_each_source(
    options: dict[str, Any], extra_args: dict[str, Any] | None
) -> None:
    core = Core(vllm_config(**options), max_tokens=5, extra_args=extra_args)
    report = core.reports.read(write(core).spec_decode_metrics).to_dict()
    assert report["sources"] == COUNTS
    assert (report["num_draft_tokens"], report["num_accepted_draft_tokens"]) == (6, 2)
    assert report["acceptance_histogram"] == [1, 0, 1, *[0] * 6]
    assert ("per_step_accepted" in report) == bool(options)


@pytest.mark.parametrize("extra_args", [None, {"report": 0}])
def test_a_request_that_does_not_ask_gets_no_report(extra_args: dict[str, Any] | None) -> None:
    core = Core(vllm_config(), max_tokens=5, extra_args=extra_args)
    assert write(core).spec_decode_metrics is None


def test_each_output_of_a_request_with_stop_strings_has_the_counts() -> None:
    core = Core(vllm_config(), max_tokens=50, stop=["x"], extra_args={"report": 1})
    sent = write(core)
    assert not sent.finished
    assert core.reports.read(sent.spec_decode_metrics).sources == COUNTS


def test_a_request_without_drafts_has_zero_counts() -> None:
    reports = Reports(("ngram",), 4, of_all=False)
    report = reports.read(None).to_dict()
    assert report["sources"] == {"ngram": {"drafted_tokens": 0, "accepted_tokens": 0}}
    assert report["acceptance_histogram"] == [0] * 5


def test_each_answer_has_its_counts_with_its_last_output() -> None:
    reports = Reports(("ngram",), 4, of_all=False)
    counts = reports.begin()
    reports.make_room(counts)
    reports.add(counts, ("ngram", 3, 2))
    going = SimpleNamespace(finish_reason=None, spec_decode_metrics=None)
    ended = SimpleNamespace(finish_reason="stop", spec_decode_metrics=counts)

    async def outputs() -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(outputs=[going, ended])

    async def read() -> list[Any]:
        return [each async for each in reported(outputs(), reports)]

    assert len(asyncio.run(read())) == 1
    assert going.spec_decode_metrics is None
    expected = {"ngram": {"drafted_tokens": 3, "accepted_tokens": 2}}
    assert ended.spec_decode_metrics.to_dict()["sources"] == expected
