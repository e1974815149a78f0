"""Drafts text that a request's grammar forces, for structured outputs.

A JSON schema fixes the keys, quotes and brackets between the values of an object. xgrammar calls
such text the jump-forward string (Dong et al., XGrammar, arXiv 2411.15100). SGLang emits it without
a forward pass. Here it is a draft, because the model decides how it is split into tokens.

:mod:`specserve.sources.splits` learns these splits. Only the grammar of a request is kept, until
:meth:`GrammarSource.close`.
"""

from __future__ import annotations

from specserve.core.errors import GrammarError
from specserve.core.source_config import GrammarConfig
from specserve.core.types import (
    DraftBatch,
    Drafts,
    Grammar,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.sources.controls import wants_drafts
from specserve.sources.passing_reasons import PassingReasons
from specserve.sources.splits import Splits

_BYTES_A_TOKEN = 16
"""Most bytes per wanted token; a longer forced text is cut before it is tokenized."""


class GrammarSource:
    """Drafts the text that each request's grammar forces next.

    If a grammar cannot be followed, its request gets no more of these drafts. The reason is logged,
    and shown for some minutes as the source's ``reason``.
    """

    def __init__(self, config: GrammarConfig, context: SourceContext) -> None:
        self._kind, self._metrics = config.kind, context.metrics
        self._requests: list[_Request | None] = [None] * context.num_slots
        self._splits = Splits()
        self._failures = PassingReasons(context.metrics, config.kind)

    def open(self, slot: int, controls: RequestControls) -> None:
        """Keeps the request's grammar, if it has one and takes drafts of this source."""
        self._failures.note("")  # old ones are no longer shown
        if controls.grammar is not None and wants_drafts(controls, self._kind):
            self._requests[slot] = _Request(controls.grammar, controls, self._splits)

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        """Advances each grammar by the new tokens of its answer, and drafts the forced text."""
        for row, slot in enumerate(batch.slots.tolist()):
            if (request := self._requests[slot]) is None:
                continue
            answer = batch.token_ids[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]]
            try:
                found = request.draft(answer, int(limits[row]))
            except Exception as error:
                self._give_up(slot, error)
                continue
            drafts.lengths[slot] = len(found)
            for place, (token, sure) in enumerate(found):
                drafts.tokens[slot, place], drafts.confidence[slot, place] = token, sure

    def close(self, slots: Int64Array) -> None:
        """Drops the grammars of these requests."""
        for slot in slots.tolist():
            if (request := self._requests[slot]) is not None:
                request.grammar.close()
            self._requests[slot] = None

    def _give_up(self, slot: int, error: Exception) -> None:
        """Stops the drafts of one request after an error, and reports the reason."""
        self._requests[slot] = None
        # All tenants see the reason, and another error's message may quote a request.
        expected = isinstance(error, GrammarError)
        why = str(error) if expected else f"{type(error).__name__}, see the log"
        reason = f"a request's grammar is not followed: {why}"
        self._failures.note(reason, reason, None if expected else error)
        self._metrics.count_error(self._kind)


class _Request:
    """One request's grammar, and what is left of the text that it forced.

    xgrammar's search takes time for each byte. So it is called again only after the whole text.
    """

    def __init__(self, grammar: Grammar, controls: RequestControls, splits: Splits) -> None:
        self.grammar, self._splits, self._learns = grammar, splits, controls.learn
        self._owner = controls.tenant, controls.adapter, controls.cache_salt
        self._forced, self._num_seen = b"", 0

    def draft(self, answer: Int32Array, limit: int) -> list[tuple[int, float]]:
        """At most ``limit`` tokens of the text that is forced next, each with its confidence."""
        self._follow(answer)
        if limit <= 0:
            return []
        self._forced = self._forced or self.grammar.forced(answer).encode()
        if not self._forced:
            return []
        text = self._forced[: _BYTES_A_TOKEN * limit]
        return self._splits.split(
            self._owner,
            int(answer[-1]) if len(answer) else -1,
            text,
            self.grammar.texts,
            lambda: self.grammar.usual(answer, text.decode(errors="ignore")),
            limit,
        )

    def _follow(self, answer: Int32Array) -> None:
        """Removes the answer's new tokens from the forced text, and records its split."""
        before = int(answer[self._num_seen - 1]) if self._num_seen else -1
        for token in answer[self._num_seen :].tolist() if self._forced else ():
            size = self.grammar.texts.size(token, self._forced)
            if size and self._learns:
                self._splits.note(self._owner, before, self._forced, token)
            self._forced, before = self._forced[size:] if size else b"", token
        self._num_seen = len(answer)
