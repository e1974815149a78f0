from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

from specserve.engine.worker import SpeculationMixin


class OneOfManyRanks:
    """As much of vLLM's worker as the mixin builds upon, in a rank that does not draft."""

    rank = 1

    def init_device(self) -> None:
        self.model_runner = SimpleNamespace(
            device=torch.device("cpu"),
            vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(max_num_seqs=8),
                model_config=SimpleNamespace(get_vocab_size=lambda: 100),
                speculative_config=None,
                reasoning_config=None,
            ),
            input_batch=SimpleNamespace(logitsprocs=None),
        )


class Worker(SpeculationMixin, OneOfManyRanks):
    pass


def test_a_rank_that_does_not_draft_samples_as_the_one_that_does() -> None:
    worker = Worker()
    worker.init_device()
    processors = worker.model_runner.input_batch.logitsprocs
    assert {type(each) for each in processors.all} == set(BUILTIN_LOGITS_PROCESSORS)


def test_a_rank_that_does_not_draft_has_nothing_to_tell() -> None:
    worker = Worker()
    worker.init_device()
    assert worker.model_runner.propose_draft_token_ids(None, [[1], [2]], None) == [[], []]
    assert worker.speculation_snapshot() == b""
