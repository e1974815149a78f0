"""vLLM's engine client, as the routes use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from specserve.core.errors import reason_of
from specserve.engine.prediction import CURRENT_PREDICTION, counted
from specserve.engine.report import Reports, reported
from specserve.engine.tenants import CURRENT_CONTROLS
from specserve.sources.controls import wants_report

CLIENTS_MISTAKES = (ValueError, TypeError, OverflowError, RecursionError)
"""What a request can meet in vLLM that has no error of its own for it."""


class ServedLLM(AsyncLLM):
    """vLLM's engine client."""

    @cached_property
    def _reports(self) -> Reports:
        return Reports.of(self.vllm_config)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's; counts the answers of a call that predicts them, and tells what speculation
        did where that is asked for.
        """
        outputs: AsyncGenerator[RequestOutput, None] = super().generate(
            prompt, sampling_params, request_id, **options
        )
        if self._reports.of_all or wants_report(CURRENT_CONTROLS.get()):
            outputs = reported(outputs, self._reports)
        prediction = CURRENT_PREDICTION.get()
        if prediction is None:
            return outputs
        is_cumulative = sampling_params.output_kind is RequestOutputKind.CUMULATIVE
        return counted(outputs, prediction, is_cumulative=is_cumulative)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, **options: Any
    ) -> RequestOutputCollector:
        """As vLLM's; a request that cannot be taken is its client's mistake.

        vLLM's routes would answer 500 without a word: its ``generate`` hides what has no class
        of vLLM's own, as a number that the message to the engine core cannot hold.

        Raises:
            VLLMValidationError: the request cannot be taken.
        """
        try:
            return await super().add_request(request_id, prompt, params, **options)
        except CLIENTS_MISTAKES as error:
            message = f"The request cannot be taken: {reason_of(error)}"
            raise VLLMValidationError(message) from error

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        """As vLLM's; a request that does not reach the engine core is forgotten.

        vLLM would count it as waiting for as long as the process lives.
        """
        try:
            await super()._add_request(request, *args)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise
