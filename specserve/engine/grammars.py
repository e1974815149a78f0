"""Grammars of requests with structured outputs, for drafting in rank 0.

vLLM's scheduler has a grammar matcher for each such request. It may be in another process, and it
does not yet know a step's tokens when the next drafts are made. Rank 0 therefore has its own
matchers. vLLM's manager compiles and advances them, so the same code decides what a request asks
for and when a reasoning model starts to be constrained.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from specserve.core.errors import GrammarError
from specserve.core.token_texts import TokenTexts
from specserve.core.types import Int32Array
from specserve.engine.shortest_match import LONGEST, longest_of_shortest
from specserve.sources.controls import REASONING_KEY

_CONTEXT_TOKENS = 4
"""Last answer tokens that are tokenized together with a forced text."""

Given = tuple[Request, TokenTexts]
"""Result of the compiling thread: a copy of the request, in which vLLM's manager keeps the grammar,
and the texts of the vocabulary."""


class Grammars:
    """Compiles grammars in a separate thread, so that no step waits.

    Supports only xgrammar; vLLM's other backends cannot return forced text.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._manager = StructuredOutputManager(vllm_config)
        # A copy, because other threads' encoding changes state in the tokenizer's Rust part.
        self._tokenizer: Any = copy.deepcopy(self._manager.tokenizer)
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._thread.submit(int).result()  # starts it now: a failure in a step ends the engine
        self._texts: TokenTexts | None = None  # set by the thread with the first grammar

    def open(self, request_id: str, state: Any) -> RequestGrammar | None:
        """Starts to compile a new request's grammar; None: it has no supported grammar.

        Args:
            request_id: vLLM's request id.
            state: the model runner's state of the request.
        """
        params, prompt = state.sampling_params, state.prompt_token_ids
        wanted = params.structured_outputs
        if wanted is None or wanted._backend != "xgrammar" or prompt is None:
            return None
        given = self._thread.submit(self._give, request_id, prompt, params)
        return RequestGrammar(self._manager, given, self._tokenizer, self._thread)

    def _give(self, request_id: str, prompt: list[int], params: SamplingParams) -> Given:
        ended, options = (params.extra_args or {}).get(REASONING_KEY, (None, None))
        reasoning = {"reasoning_ended": ended, "reasoning_parser_kwargs": options}
        request = Request(request_id, list(prompt), params, None, **reasoning)
        self._manager.grammar_init(request)
        if self._texts is None:
            backend: Any = self._manager.backend
            vocabulary = backend.compile_grammar(StructuredOutputOptions.REGEX, "a").ctx
            info = vocabulary.tokenizer_info
            special = {*info.special_token_ids, *info.stop_token_ids}
            self._texts = TokenTexts(info.decoded_vocab, special)
        return request, self._texts

    def close(self) -> None:
        """Stops the threads; grammars must not be used afterwards."""
        self._thread.shutdown(cancel_futures=True)
        self._manager.clear_backend()


class RequestGrammar:
    """One request's grammar; implements :class:`specserve.core.types.Grammar`."""

    def __init__(
        self,
        manager: StructuredOutputManager,
        given: Future[Given],
        tokenizer: Any,
        thread: ThreadPoolExecutor,
    ) -> None:
        self._manager, self._given, self._tokenizer = manager, given, tokenizer
        self._thread = thread
        self._shortest: Future[float] | None = None

    @property
    def texts(self) -> TokenTexts:
        """Texts of the vocabulary; available once :meth:`forced` has returned a text."""
        _, texts = self._given.result()
        return texts

    def forced(self, answer: Int32Array) -> str:
        """The text that must follow this answer; empty if there is none or while compiling.

        Raises GrammarError for a grammar that may force an endless text, ValueError for refused
        tokens, or the exception of a failed compilation.
        """
        if not self._given.done():
            return ""
        request, _ = self._given.result()
        structured: Any = request.structured_output_request
        grammar = structured.grammar
        if grammar is None:  # it is being compiled
            return ""
        if isinstance(grammar, Exception):
            raise grammar
        if self._shortest is None:
            self._shortest = self._thread.submit(_shortest, grammar.ctx)
        if not self._shortest.done():
            return ""
        if self._shortest.result() > LONGEST:  # xgrammar's search below might not end
            raise GrammarError(f"a part of it may match no text of up to {LONGEST} bytes")
        new = answer[request.num_output_tokens :].tolist()
        if new:
            request.append_output_token_ids(new)
            if not self._manager.accept_tokens(request, new):
                raise ValueError(f"the grammar refuses the answer's tokens {new}")
        if not structured.reasoning_ended or grammar.is_terminated():
            return ""
        try:
            return str(grammar.matcher.find_jump_forward_string())
        except UnicodeDecodeError as error:  # it begins or ends within a character
            return bytes(error.object[: error.start]).decode()

    def usual(self, answer: Int32Array, text: str) -> list[int]:
        """The tokens of ``text`` as the tokenizer splits it after the answer's last tokens.

        If a token would span both, ``text`` alone is tokenized, as the answer's tokens are fixed.
        """
        before = self._tokenizer.decode(answer[-_CONTEXT_TOKENS:])
        known, both = self._encode(before), self._encode(before + text)
        return both[len(known) :] if both[: len(known)] == known else self._encode(text)

    def close(self) -> None:
        """Cancels the request's jobs that no thread has begun."""
        if self._shortest is not None:
            self._shortest.cancel()
        self._given.cancel()
        self._given.add_done_callback(_cancel_compilation)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _shortest(compiled: Any) -> float:
    return longest_of_shortest(str(compiled.grammar))


def _cancel_compilation(given: Future[Given]) -> None:
    if not (given.cancelled() or given.exception()):
        structured: Any = given.result()[0].structured_output_request
        if isinstance(structured._grammar, Future):
            structured._grammar.cancel()
