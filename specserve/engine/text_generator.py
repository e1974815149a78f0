"""Continues texts for the generation API with vLLM's renderer, engine client and detokenizer."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from vllm import envs
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.renderers import TokenizeParams
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from specserve.core.errors import GenerationError, reason_of
from specserve.engine.logits_processors import extra_args
from specserve.engine.text_outputs import OutputReader
from specserve.engine.text_request import Asked, Output, Parameters

logger = logging.getLogger(__name__)


class TextGenerator(GenerateBaseServing):
    """The engine of the generation API, on vLLM's base class of HTTP handlers.

    Args:
        engine_client: vLLM's ``AsyncLLM``.
        models: its ``OpenAIServingModels``, with the adapters.
        request_logger: logs requests; None: requests are not logged.
        max_concurrent_requests: limit of running and waiting requests.
        has_processors: whether the workers have :mod:`specserve.engine.logits_processors`.
    """

    def __init__(
        self,
        engine_client: Any,
        models: Any,
        request_logger: Any,
        max_concurrent_requests: int,
        *,
        has_processors: bool,
    ) -> None:
        super().__init__(engine_client, models, request_logger=request_logger)
        self._max_concurrent_requests = max_concurrent_requests
        self._has_processors = has_processors

    @property
    def max_concurrent_requests(self) -> int:
        """Limit of running and waiting requests."""
        return self._max_concurrent_requests

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return int(self.engine_client.model_config.max_model_len)

    @property
    def num_tokenizers(self) -> int:
        """Threads of vLLM's renderer."""
        return int(self.engine_client.model_config.renderer_num_workers)

    async def generate(self, asked: Asked, call: Request) -> AsyncGenerator[Output, None]:
        """Continues a text. Closing the generator aborts the request.

        Args:
            asked: the text and its parameters.
            call: the HTTP request; its headers may contain a request id.

        Raises:
            GenerationError: the request is refused or fails.
        """
        with _as_our_errors(asked):
            self._check_processors(asked.given)
            adapter = await self._adapter(asked.given.adapter_id or "")
            prompt = await self._rendered(asked.body.inputs, asked.given.truncate)
            params = self._sampling_params(asked, self._extract_prompt_len(prompt))
            request_id = f"generate-{self._base_request_id(call)}"
            self._log_inputs(request_id, prompt, params, adapter)
            outputs = self.engine_client.generate(
                prompt,
                params,
                request_id,
                lora_request=adapter,
                trace_headers=await self._get_trace_headers(call.headers),
                priority=self._get_priority(SimpleNamespace(priority=0), call),
                session_id=self._get_session_id_from_headers(call),
            )
            reader = OutputReader(asked, self.renderer.tokenizer)
            async with aclosing(outputs):
                async for output in outputs:
                    yield reader.read(output)

    def _check_processors(self, given: Parameters) -> None:
        rule = "is not supported by this server: its engine does not run the processor for it"
        for name, value in (("typical_p", given.typical_p), ("watermark", given.watermark)):
            if value and not self._has_processors:
                raise GenerationError.of_field(name, rule, value)

    async def _adapter(self, name: str) -> LoRARequest | None:
        found = self.models.lora_requests.get(name)
        if found is None and self._is_model_supported(name):
            return None
        if found is None and envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            found = await self.models.resolve_lora(name)
        if isinstance(found, LoRARequest):
            return found
        names = [*(each.name for each in self.models.base_model_paths), *self.models.lora_requests]
        raise GenerationError.of_field("adapter_id", f"must be one of {', '.join(names)}", name)

    async def _rendered(self, text: str, truncate: int | None) -> EngineInput:
        most = self.max_total_tokens
        options = TokenizeParams(
            max_total_tokens=most,
            truncate_prompt_tokens=truncate,
            truncation_side=None if truncate is None else "left",
        )
        prompt = parse_model_prompt(self.model_config, text)
        try:
            (rendered,) = await self.renderer.render_cmpl_async([prompt], options)
        except VLLMValidationError as error:
            if error.parameter not in ("input_tokens", "input_text"):
                raise
            unit = "tokens" if error.parameter == "input_tokens" else "characters"
            raise _too_long(most, f"{error.value} {unit} or more") from None
        return rendered

    def _sampling_params(self, asked: Asked, num_prompt_tokens: int) -> SamplingParams:
        given, most = asked.given, self.max_total_tokens
        max_tokens = given.max_new_tokens
        if max_tokens is None:
            max_tokens = most - num_prompt_tokens
        elif num_prompt_tokens + max_tokens > most:
            rule = f"`inputs` tokens + `max_new_tokens` must be <= {most}"
            lengths = f"{num_prompt_tokens} `inputs` tokens and {max_tokens} `max_new_tokens`"
            raise GenerationError.invalid(f"{rule}. Given: {lengths}")
        if num_prompt_tokens >= most:
            raise _too_long(most, str(num_prompt_tokens))
        num_sequences = given.best_of or 1
        with_logprobs = asked.with_tokens or num_sequences > 1
        is_typical = given.typical_p is not None  # its processor applies top_k and top_p
        grammar = given.grammar and StructuredOutputsParams(**given.grammar.constraint())
        return SamplingParams(
            n=num_sequences,
            temperature=(given.temperature or 1.0) if given.samples else 0.0,
            top_k=0 if is_typical else given.top_k or 0,
            top_p=1.0 if is_typical else given.top_p or 1.0,
            repetition_penalty=given.repetition_penalty or 1.0,
            frequency_penalty=given.frequency_penalty or 0.0,
            # vLLM's GPU runner stores the seed as int64, with -1 for none.
            seed=None if asked.seed is None else asked.seed % 2**63,
            stop=given.stop,
            include_stop_str_in_output=True,
            max_tokens=max_tokens,
            logprobs=given.top_n_tokens or 0 if with_logprobs else None,
            prompt_logprobs=0 if given.decoder_input_details else None,
            output_kind=RequestOutputKind.DELTA if asked.streams else RequestOutputKind.FINAL_ONLY,
            structured_outputs=grammar,
            extra_args={**(asked.body.vllm_xargs or {}), **extra_args(given)} or None,
        )


def _too_long(most: int, given: str) -> GenerationError:
    return GenerationError.invalid(f"`inputs` must have less than {most} tokens. Given: {given}")


@contextmanager
def _as_our_errors(asked: Asked) -> Iterator[None]:
    """Translates vLLM's errors into those of Text Generation Inference."""
    try:
        yield
    except GenerationError:
        raise
    except GracefulHTTPError as error:
        if error.http_status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        raise GenerationError("overloaded", "Model is overloaded") from error
    except VLLMClientError as error:
        # All parameters but the grammar have been checked before.
        what = "grammar is not valid: " if asked.given.grammar else ""
        raise GenerationError.invalid(what + reason_of(error)) from error
    except Exception as error:
        logger.exception("A text was not generated")
        message = f"Request failed during generation: {reason_of(error)}"
        raise GenerationError("generation", message) from error
