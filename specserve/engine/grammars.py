"""The grammars of requests with structured outputs, where drafts are made.

vLLM's scheduler has a matcher of each such request. It may be in another process, and has not been
told of a step's tokens when the drafts for the next step are made. So rank 0 has matchers of its
own, compiled and followed by vLLM's own manager: what a request asks for, and where a reasoning
model begins to be constrained, is decided by the same code.
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

from specserve.core.token_texts import TokenTexts
from specserve.core.types import Int32Array

_CONTEXT_TOKENS = 4
"""Of the answer, that a forced text is tokenized after."""


Given = tuple[Request, TokenTexts]
"""What the thread makes: a request like the one that is served, given to vLLM's manager for its
grammar alone, and the texts of the vocabulary."""


class Grammars:
    """Compiles grammars, in a thread of their own: no step waits for that.

    Only xgrammar's: the other backends do not tell what is forced.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._manager = StructuredOutputManager(vllm_config)
        # A copy: Rust's part of a tokenizer is changed by what other threads encode.
        self._tokenizer: Any = copy.deepcopy(self._manager.tokenizer)
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._thread.submit(int).result()  # started now: in a step a failure would end the engine
        self._texts: TokenTexts | None = None  # the thread's, from the first grammar on

    def open(self, request_id: str, state: Any) -> RequestGrammar | None:
        """The grammar of a request that begins; None: it has none that could be followed.

        Args:
            request_id: vLLM's.
            state: the model runner's of the request.
        """
        params, prompt = state.sampling_params, state.prompt_token_ids
        wanted = params.structured_outputs if params is not None else None
        if wanted is None or wanted._backend != "xgrammar" or prompt is None:
            return None
        given = self._thread.submit(self._give, request_id, prompt, params)
        return RequestGrammar(self._manager, given, self._tokenizer)

    def _give(self, request_id: str, prompt: list[int], params: SamplingParams) -> Given:
        request = Request(request_id, list(prompt), params, None)
        self._manager.grammar_init(request)
        if self._texts is None:
            backend: Any = self._manager.backend
            vocabulary = backend.compile_grammar(StructuredOutputOptions.REGEX, "a").ctx
            info = vocabulary.tokenizer_info
            special = {*info.special_token_ids, *info.stop_token_ids}
            self._texts = TokenTexts(info.decoded_vocab, special)
        return request, self._texts

    def close(self) -> None:
        """Ends the threads; no grammar is followed afterwards."""
        self._thread.shutdown(cancel_futures=True)
        self._manager.clear_backend()


class RequestGrammar:
    """One request's grammar, see :class:`specserve.core.types.Grammar`."""

    def __init__(
        self, manager: StructuredOutputManager, given: Future[Given], tokenizer: Any
    ) -> None:
        self._manager, self._given, self._tokenizer = manager, given, tokenizer

    @property
    def texts(self) -> TokenTexts:
        """Of the vocabulary; known where anything is forced."""
        _, texts = self._given.result()
        return texts

    def forced(self, answer: Int32Array) -> str:
        """The text that certainly comes after this answer; empty also while it is not known."""
        if not self._given.done():
            return ""
        request, _ = self._given.result()
        structured: Any = request.structured_output_request
        grammar = structured.grammar
        if grammar is None:  # it is being compiled
            return ""
        if isinstance(grammar, Exception):
            raise grammar
        new = answer[request.num_output_tokens :].tolist()
        if new:
            request.append_output_token_ids(new)
            if not self._manager.accept_tokens(request, new):
                raise ValueError(f"the grammar refuses the answer's tokens {new}")
        if not structured.reasoning_ended or grammar.is_terminated():
            return ""
        return str(grammar.matcher.find_jump_forward_string())

    def usual(self, answer: Int32Array, text: str) -> list[int]:
        """The tokens of ``text`` as the tokenizer has them after the answer's last ones.

        Where it would join the two, the text alone is tokenized: the answer's tokens are written.
        """
        before = self._tokenizer.decode(answer[-_CONTEXT_TOKENS:])
        known, both = self._encode(before), self._encode(before + text)
        return both[len(known) :] if both[: len(known)] == known else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
