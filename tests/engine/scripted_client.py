"""vLLM's client, renderer and output processor, with an engine that returns given tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from specserve.core.config import parse
from specserve.engine.args import engine_args
from tests.integration.cluster import model_path

MAX_MODEL_LEN = 64


class ScriptedClient:
    """The part of vLLM's ``AsyncLLM`` that its routes use, with the demo's draft model.

    Args:
        options: of vLLM.

    Attributes:
        steps: tokens of each step of every continuation.
        ends_with: finish reason of the last step, unless a stop string ended the text before.
        raises: the error of the next request, if it shall fail.
        params: sampling parameters of the last request.
        options: other options of the last request.
        was_closed: whether the stream was closed before its end.
    """

    def __init__(self, **options: Any) -> None:
        engine = {"max_model_len": MAX_MODEL_LEN, "dtype": "float32", "enforce_eager": True}
        model = {"path": str(model_path("demo-draft")), "served_name": "demo"}
        self.config = parse({"model": model, "engine": engine | {"vllm": options}})
        self.vllm_config = engine_args(self.config, None).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.tokenizer = self.renderer.tokenizer
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.processor = OutputProcessor(self.tokenizer, log_stats=False)
        self.errored = False
        self.steps: Sequence[Sequence[int]] = ()
        self.ends_with = FinishReason.LENGTH
        self.raises: Exception | None = None
        self.params = SamplingParams()
        self.options: Mapping[str, Any] = {}
        self.prompt: list[int] = []
        self.was_closed = False

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """vLLM's method."""
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        """vLLM's method."""
        return False

    def check_admission(self, n: int, request_id: str | None = None) -> None:
        """vLLM's method. There is no limit."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's method."""
        self.params, self.options = sampling_params, {"request_id": request_id, **options}
        if self.raises is not None:
            raise self.raises
        request = self.input_processor.process_inputs(
            request_id, prompt, sampling_params, supported_tasks=("generate",)
        )
        self.prompt = list(request.prompt_token_ids or ())
        self.input_processor.assign_request_id(request)
        queue = RequestOutputCollector(sampling_params.output_kind, request.request_id)
        ids = self._add(request, queue)
        self.was_closed = True
        for number, tokens in enumerate(self.steps, 1):
            for index, each in enumerate(ids):
                if self.processor.has_request(each):
                    last = number == len(self.steps)
                    self.processor.process_outputs([self._output(each, tokens, index, last)])
            if output := queue.get_nowait():
                assert isinstance(output, RequestOutput)
                self.was_closed = not output.finished
                yield output
                if output.finished:
                    return

    def _add(self, request: EngineCoreRequest, queue: RequestOutputCollector) -> list[str]:
        params = request.sampling_params
        assert params is not None
        if params.n == 1:
            self.processor.add_request(request, None, queue=queue)
            return [request.request_id]
        parent, ids = ParentRequest(request), []
        for index in range(params.n):
            name, sampling = parent.get_child_info(index)
            fields = {field: getattr(request, field) for field in request.__struct_fields__}
            child = EngineCoreRequest(**fields | {"request_id": name, "sampling_params": sampling})
            self.processor.add_request(child, None, parent, index, queue)
            ids.append(name)
        return ids

    def _output(
        self, request_id: str, tokens: Sequence[int], index: int, is_last: bool
    ) -> EngineCoreOutput:
        """A step's output. The most_likely tokens are 300, 301, ..."""
        width = self.params.logprobs
        prompt = None
        if self.params.prompt_logprobs is not None:
            others = torch.tensor([[token] for token in self.prompt[1:]])
            prompt = LogprobsTensors(others, -others / 64, torch.ones(len(others)))
        likely = [] if width is None else list(range(300, 300 + width))
        rows = [[token, *likely] for token in tokens]
        values = [[-1.5 - index, *(-1.0 - i for i in range(len(likely)))] for _ in tokens]
        logprobs = LogprobsLists(
            np.array(rows), np.array(values), np.full(len(tokens), len(likely) + 1)
        )
        return EngineCoreOutput(
            request_id=request_id,
            new_token_ids=list(tokens),
            new_logprobs=None if width is None else logprobs,
            new_prompt_logprobs_tensors=prompt,
            finish_reason=self.ends_with if is_last else None,
        )


MODELS = SimpleNamespace(
    is_base_model=lambda name: name == "demo",
    base_model_paths=[SimpleNamespace(name="demo")],
    lora_requests={},
)
