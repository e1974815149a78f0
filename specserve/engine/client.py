"""vLLM's engine client with specserve's counts and errors, for the HTTP routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from specserve.core.errors import reason_of
from specserve.engine.prediction import CURRENT_PREDICTION
from specserve.engine.report import Reports, reported
from specserve.engine.schema_references import check_references
from specserve.engine.tenants import CURRENT_CALL, CURRENT_CONTROLS, IN_BEAM_SEARCH, RESERVED
from specserve.sources.controls import wants_report

CLIENT_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)
"""Exceptions that a wrong request can raise where vLLM has no error class of its own."""

MIN_PENALTY, MAX_PENALTY = 1e-30, 1e30
"""Bounds of ``repetition_penalty``. vLLM divides or multiplies float32 logits by it. Beyond the
bounds they become infinite or NaN, and if a grammar forbids the other tokens, vLLM answers 500."""

MAX_STOPS = 1024
"""Most strings in ``stop``. vLLM searches for each of them after each token, in the loop that
answers all calls."""
MAX_BAD_WORDS_CHARS = 1 << 16
"""Most characters of all ``bad_words`` together. vLLM tokenizes them in the same loop."""


def refuse_long_lists(handler: Any, most: int) -> None:
    """Makes vLLM's completions refuse a list of prompts that exceeds the limit alone.

    vLLM admits each prompt on its own. It would answer 503 at each try, and every try would take
    the places of other requests for a while.

    Args:
        handler: vLLM's completions of one application.
        most: the limit of open sequences.
    """
    render = handler.render_completion_request

    async def render_checked(request: Any) -> Any:
        prompts = await render(request)
        if not isinstance(prompts, ErrorResponse):
            number = len(prompts) * (request.n or 1)
            if number > most:
                message = (
                    f"{len(prompts)} prompts with n={request.n or 1} take {number} sequences, "
                    f"and the server's limit of open ones is {most}."
                )
                raise VLLMValidationError(message, parameter="prompt", value=len(prompts))
            handler.engine_client.check_admission(number - (request.n or 1))  # vLLM checked one
        return prompts

    handler.render_completion_request = render_checked


class ServedLLM(AsyncLLM):
    """vLLM's engine client with draft counts in answers and errors for wrong requests."""

    @cached_property
    def _reports(self) -> Reports:
        return Reports.of(self.vllm_config)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's method. Adds requested draft counts, and compares answers with a prediction."""
        outputs: AsyncGenerator[RequestOutput, None] = super().generate(
            prompt, sampling_params, request_id, **options
        )
        if self._reports.of_all or wants_report(CURRENT_CONTROLS.get()):
            outputs = reported(outputs, self._reports)
        prediction = CURRENT_PREDICTION.get()
        if prediction is None:
            return outputs
        is_cumulative = sampling_params.output_kind is RequestOutputKind.CUMULATIVE
        return prediction.counted(outputs, is_cumulative=is_cumulative)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """vLLM's method. Also refuses a request that exceeds the limit alone.

        vLLM would answer 503, as if it could be accepted later.

        vLLM checks a call before it renders the prompt, and again when it adds the request. Then a
        stream has been answered with 200. So the first check reserves the call's places.

        Args:
            n: number of sequences.
            request_id: of the request being added; None: the call's first check.

        Raises:
            VLLMValidationError: ``n`` is above the limit.
            QueueOverflowError: the places are taken or reserved.
        """
        if IN_BEAM_SEARCH.get():
            return
        most = self.scheduler_config.max_num_queued_reqs
        if most is not None and n > most:  # some routes count other things than their field `n`
            message = (
                f"The request takes {n} sequences, and the server's limit of open ones is {most}."
            )
            raise VLLMValidationError(message)
        call = CURRENT_CALL.get()
        if request_id is not None and call in RESERVED:
            RESERVED[call] = max(RESERVED[call] - n, 0)
        super().check_admission(n, request_id)
        if request_id is None and call in RESERVED:
            RESERVED[call] += n

    def get_num_unfinished_requests(self) -> int:
        """vLLM's method, which :meth:`check_admission` calls. Counts reserved places, too."""
        return int(super().get_num_unfinished_requests()) + RESERVED.total()

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, **options: Any
    ) -> RequestOutputCollector:
        """vLLM's method. A request that cannot be processed gets a client error.

        vLLM's routes would answer 500 without a reason, because its ``generate`` hides exceptions
        of other classes. An example is a number too large for the message to the engine core.

        Raises:
            VLLMValidationError: the request cannot be processed.
        """
        _check_sampling(params)
        check_references(params.structured_outputs)
        try:
            return await super().add_request(request_id, prompt, params, **options)
        except CLIENT_ERRORS as error:
            message = f"The request cannot be processed: {reason_of(error)}"
            raise VLLMValidationError(message) from error

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        """vLLM's method. Aborts a request that does not reach the engine core.

        vLLM would count it as waiting until the process ends.
        """
        try:
            await super()._add_request(request, *args)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise


def _check_sampling(params: SamplingParams) -> None:
    """Refuses values that would delay or break all requests, or be answered 500.

    Raises:
        VLLMValidationError: a value is out of its bounds.
    """
    penalty = params.repetition_penalty
    if not MIN_PENALTY <= penalty <= MAX_PENALTY:
        message = f"repetition_penalty must be in [{MIN_PENALTY}, {MAX_PENALTY}], got {penalty}."
        raise VLLMValidationError(message, parameter="repetition_penalty", value=penalty)
    if len(params.stop or ()) > MAX_STOPS:
        message = f"stop must have at most {MAX_STOPS} strings, got {len(params.stop)}."
        raise VLLMValidationError(message, parameter="stop", value=len(params.stop))
    num_chars = sum(map(len, params.bad_words or ()))
    if num_chars > MAX_BAD_WORDS_CHARS:
        message = (
            f"bad_words must have at most {MAX_BAD_WORDS_CHARS} characters in all, got {num_chars}."
        )
        raise VLLMValidationError(message, parameter="bad_words", value=num_chars)
