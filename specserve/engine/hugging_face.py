"""Greedy generation by transformers, the reference of ``specserve evaluate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from vllm.platforms import current_platform

from specserve.core.config import AppConfig
from specserve.core.errors import EngineError, reason_of
from specserve.engine.args import engine_args
from specserve.engine.generation import Completion, Job, RunResult
from specserve.engine.methods import HF


class HuggingFaceEngine:
    """Runs the target model in transformers, in the dtype that vLLM would use.

    Raises:
        EngineError: transformers cannot load the model.
    """

    def __init__(self, config: AppConfig) -> None:
        model = config.model
        try:
            options = config.pretrained_options
            self._tokenizer = AutoTokenizer.from_pretrained(
                model.tokenizer or model.path, **options
            )
            dtype = engine_args(config, None).create_model_config().dtype
            self._model = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype, **options)
            self._model.to(current_platform.device_type).eval()
        except Exception as error:  # transformers passes on any exception of its libraries
            raise EngineError(f"method {HF}: {reason_of(error)}") from error
        self._end_token_ids = _end_token_ids(
            self._model.generation_config.eos_token_id, self._tokenizer.eos_token_id
        )
        # `generate` takes options that a call omits from here: beams, penalties, time limits.
        self._model.generation_config = GenerationConfig()

    def run(
        self, jobs: Sequence[Job], concurrency: int, progress: Callable[[int, int], None]
    ) -> RunResult:
        """Continues all jobs greedily, one after another; uses only their ``max_tokens``.

        ``progress`` is called after each token with the numbers of finished prompts and of
        generated tokens. Its exceptions end all jobs.
        """
        assert concurrency == 1
        started = time.perf_counter()
        completions: list[Completion] = []
        num_tokens = 0
        for job in jobs:
            clock = _Clock(partial(progress, len(completions)), num_tokens)
            completions.append(self._complete(job, clock))
            num_tokens += len(completions[-1].token_ids)
        seconds = time.perf_counter() - started
        return RunResult(completions=tuple(completions), seconds=seconds, drafts=())

    def close(self) -> None:
        """Does nothing: no other process was started."""

    @torch.inference_mode()
    def _complete(self, job: Job, clock: _Clock) -> Completion:
        prompt = torch.tensor([job.prompt_token_ids], device=self._model.device)
        greedy = GenerationConfig(
            max_new_tokens=job.sampling.max_tokens,
            do_sample=False,
            eos_token_id=self._end_token_ids or None,
            pad_token_id=self._end_token_ids[0] if self._end_token_ids else None,
        )
        (ids,) = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=greedy,
            streamer=clock,
        ).tolist()
        seconds = time.perf_counter() - clock.started
        generated = tuple(ids[len(job.prompt_token_ids) :])
        has_ended = generated[-1] in self._end_token_ids
        return Completion(
            text=self._tokenizer.decode(
                generated[:-1] if has_ended else generated, skip_special_tokens=True
            ),
            token_ids=generated,
            finish_reason="stop" if has_ended else "length",
            seconds=seconds,
            token_seconds=tuple(clock.token_seconds),
        )


class _Clock(BaseStreamer):
    """Records the time of each token in seconds; transformers first passes the prompt."""

    def __init__(self, progress: Callable[[int], None], num_tokens_before: int) -> None:
        self.started = time.perf_counter()
        self.token_seconds: list[float] = []
        self._has_prompt = False
        self._progress, self._num_tokens_before = progress, num_tokens_before

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.token_seconds.append(time.perf_counter() - self.started)
            self._progress(self._num_tokens_before + len(self.token_seconds))
        self._has_prompt = True

    def end(self) -> None:
        return


def _end_token_ids(*found: int | list[int] | None) -> list[int]:
    """End tokens of the generation config and the tokenizer together, as in vLLM."""
    ids: set[int] = set()
    for each in found:
        if each is not None:
            ids.update([each] if isinstance(each, int) else each)
    return sorted(ids)
