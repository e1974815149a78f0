"""Prompts without token ids, in vLLM's own input batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from specserve.core.config import parse
from specserve.core.recent import RecentRequest, Tokens
from specserve.engine.hook import ProposerHook
from specserve.sources.controls import TENANT_KEY

MAX_MODEL_LEN, VOCAB_SIZE, HIDDEN_SIZE = 64, 1000, 2
SECRET = list(range(100, 132))
EMBEDS = torch.zeros(len(SECRET), HIDDEN_SIZE)


class Runner:
    """The part of vLLM's model runner that the hook uses, with vLLM's own input batch."""

    def __init__(self) -> None:
        self.effective_drafter_max_model_len = MAX_MODEL_LEN
        self.model_config = SimpleNamespace(has_inner_state=False, is_hybrid=False)
        self.requests: dict[str, CachedRequestState] = {}
        self.input_batch = InputBatch(
            max_num_reqs=4,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_MODEL_LEN,
            device=torch.device("cpu"),
            vocab_size=VOCAB_SIZE,
            block_sizes=[16],
            max_num_blocks_per_req=[4],
        )

    def add(self, name: str, tenant: str, prompt: list[int] | None, **fields: Any) -> None:
        request = CachedRequestState(
            req_id=name,
            prompt_token_ids=prompt,
            mm_features=fields.pop("mm_features", []),
            sampling_params=SamplingParams(extra_args={TENANT_KEY: tenant}),
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
            **fields,
        )
        self.requests[name] = request
        self.input_batch.add_request(request)

    def remove(self, name: str) -> None:
        self.input_batch.remove_request(name)
        self.input_batch.condense()
        self.input_batch.refresh_metadata()
        del self.requests[name]


def step(hook: ProposerHook, runner: Runner, token: int) -> list[list[int]]:
    """A step in which each request of the batch gets the same token."""
    batch = runner.input_batch
    for row in range(len(batch.req_ids)):
        length = int(batch.num_tokens_no_spec[row])
        batch.token_ids_cpu[row, length] = token
        batch.is_token_ids[row, length] = True
        batch.num_tokens_no_spec[row] = length + 1
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens=dict.fromkeys(batch.req_ids, 1),
        total_num_scheduled_tokens=len(batch.req_ids),
    )
    sampled = [[token] for _ in batch.req_ids]
    hidden = torch.ones(len(batch.req_ids), HIDDEN_SIZE)
    return hook.propose_draft_token_ids(scheduled, sampled, None, hidden)


@pytest.fixture
def hook() -> ProposerHook:
    keys = [{"env": each.upper(), "tenant": each} for each in "ab"]
    sources = [{"kind": kind, "dynamic": False} for kind in ("ngram", "trie")]
    config = parse({"model": {"path": "m"}, "speculation": sources, "http": {"api_keys": keys}})
    vllm_config: Any = SimpleNamespace(
        additional_config={"specserve": config.model_dump(mode="json")},
        model_config=SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, get_vocab_size=lambda: VOCAB_SIZE
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        observability_config=SimpleNamespace(per_request_spec_decode_metrics="none"),
        lora_config=None,
    )
    return ProposerHook(vllm_config)


@pytest.fixture
def runner(hook: ProposerHook, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner whose first row held tenant a's prompt."""
    monkeypatch.setattr("specserve.engine.source_context.model_identity", lambda _: "model")
    runner = Runner()
    hook.attach(runner)
    runner.add("a-1", "a", SECRET)
    step(hook, runner, 200)
    hook.forget(["a-1"])
    runner.remove("a-1")
    return runner


UNKNOWN: dict[str, dict[str, Any]] = {
    "embeds alone": {"prompt": None, "prompt_embeds": EMBEDS},
    "ids and embeds": {
        "prompt": SECRET,
        "prompt_embeds": EMBEDS,
        "prompt_is_token_ids": [True] * 8 + [False] * (len(SECRET) - 8),
    },
    "embeds as media": {
        "prompt": SECRET,
        "mm_features": [
            MultiModalFeatureSpec(
                data=None,
                modality="prompt_embeds",
                identifier="i",
                mm_position=PlaceholderRange(offset=0, length=8),
            )
        ],
    },
}


@pytest.fixture(params=list(UNKNOWN))
def unknown(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A prompt with positions that have no token id."""
    return dict(UNKNOWN[request.param])


def test_a_prompt_without_ids_gets_no_draft_and_no_recent_steps(
    hook: ProposerHook, runner: Runner, unknown: dict[str, Any]
) -> None:
    runner.add("b-1", "b", **unknown)
    runner.input_batch.token_ids_cpu[0, len(SECRET) - 1] = SECRET[0]  # its continuation is known
    assert step(hook, runner, SECRET[1]) == [[]]
    recent = msgspec.json.decode(hook.recent_requests("b"), type=tuple[RecentRequest[Tokens], ...])
    assert recent == ()


def test_the_old_tokens_of_a_reused_row_are_not_learned(
    hook: ProposerHook, runner: Runner, unknown: dict[str, Any]
) -> None:
    runner.add("b-1", "b", **unknown)
    step(hook, runner, 200)
    hook.forget(["b-1"])
    runner.remove("b-1")

    runner.add("b-2", "b", SECRET[:20])
    assert step(hook, runner, SECRET[20]) == [[]]


def test_the_old_tokens_are_not_learned_when_the_request_ends(
    hook: ProposerHook,
    runner: Runner,
    unknown: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hook._chain, "step", lambda batch, *_: [[] for _ in batch.slots])
    runner.add("b-1", "b", **unknown)
    step(hook, runner, 200)
    hook.forget(["b-1"])
    runner.remove("b-1")
    monkeypatch.undo()

    runner.add("b-2", "b", SECRET[:20])
    assert step(hook, runner, SECRET[20]) == [[]]


def test_a_prompt_with_ids_is_learned_beside_one_without(
    hook: ProposerHook, runner: Runner
) -> None:
    runner.add("b-1", "b", None, prompt_embeds=EMBEDS)
    runner.add("a-2", "a", SECRET[:20])
    unknown, known = step(hook, runner, SECRET[20])
    assert unknown == []
    assert known[:3] == SECRET[21:24]
