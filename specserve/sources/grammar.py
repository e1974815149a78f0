"""Drafts of what a request's grammar forces: structured outputs that can go on in one way only.

Between the values of a JSON object stand keys, quotes and brackets that its schema has fixed. Such
a stretch is xgrammar's jump-forward string (Dong et al., XGrammar, arXiv 2411.15100); SGLang writes
it without asking the model. Here it is a draft: the model confirms how it is split into tokens.

What is learned is how the model splits (:mod:`specserve.sources.splits`). Of a request nothing but
its grammar is kept, until :meth:`GrammarSource.close`.
"""

from __future__ import annotations

import logging

from specserve.core.source_config import GrammarConfig
from specserve.core.types import (
    DraftBatch,
    DraftBuffer,
    Drafts,
    Grammar,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.sources.controls import wants_drafts
from specserve.sources.splits import Splits

logger = logging.getLogger(__name__)

_CHARS_A_TOKEN = 16
"""A text of more characters for each token that is wanted is cut before it is split."""


class GrammarSource:
    """Drafts the text that a request's grammar forces, up to its end.

    A grammar that cannot be followed costs its request these drafts, and nothing else: the reason
    is logged and shown.
    """

    def __init__(self, config: GrammarConfig, context: SourceContext) -> None:
        self._kind, self._metrics = config.kind, context.metrics
        self._requests: list[_Request | None] = [None] * context.num_slots
        self._splits = Splits()
        self._drafts = DraftBuffer(context.num_slots, config.max_draft_len)

    def open(self, slot: int, controls: RequestControls) -> None:
        """Takes the request's grammar, if there is one that it wants drafts of."""
        if controls.grammar is not None and wants_drafts(controls, self._kind):
            self._requests[slot] = _Request(controls.grammar, controls, self._splits)

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts:
        """Follows what is new of each answer, and drafts what is forced after it."""
        drafts = self._drafts.rows(len(limits))
        drafts.lengths[:] = 0
        for row, slot in enumerate(batch.slots.tolist()):
            if (request := self._requests[slot]) is None:
                continue
            answer = batch.token_ids[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]]
            try:
                found = request.draft(answer, min(int(limits[row]), drafts.tokens.shape[1]))
            except Exception as error:
                self._give_up(slot, error)
                continue
            drafts.lengths[row] = len(found)
            for place, (token, sure) in enumerate(found):
                drafts.tokens[row, place], drafts.confidence[row, place] = token, sure
        return drafts

    def close(self, slots: Int64Array) -> None:
        """Drops the grammars of these requests."""
        for slot in slots.tolist():
            self._requests[slot] = None

    def _give_up(self, slot: int, error: Exception) -> None:
        """No drafts for this request any more; others have grammars of their own."""
        self._requests[slot] = None
        # All tenants see the reason, and the error may quote what this one has sent.
        reason = f"a request's grammar is not followed: {type(error).__name__}, see the log"
        self._metrics.count_error(self._kind)
        self._metrics.set_reachable(self._kind, True, reason)
        logger.warning("No drafts from a request's grammar", exc_info=error)


class _Request:
    """One request's grammar, and the text that it forced where the request was last asked for."""

    def __init__(self, grammar: Grammar, controls: RequestControls, splits: Splits) -> None:
        self._grammar, self._splits, self._learns = grammar, splits, controls.learn
        self._owner = controls.tenant, controls.adapter, controls.cache_salt
        self._forced, self._num_seen = b"", 0

    def draft(self, answer: Int32Array, limit: int) -> list[tuple[int, float]]:
        """The tokens that are forced after the answer, at most so many, and how sure each is."""
        grammar = self._grammar
        text = grammar.forced(answer)
        if self._forced and self._learns:
            self._learn(answer)
        self._num_seen, self._forced = len(answer), b""
        if not text or limit <= 0:
            return []
        text = text[: _CHARS_A_TOKEN * limit]
        self._forced = text.encode()
        return self._splits.split(
            self._owner,
            int(answer[-1]) if len(answer) else -1,
            self._forced,
            grammar.texts,
            lambda: grammar.usual(answer, text),
            limit,
        )

    def _learn(self, answer: Int32Array) -> None:
        """Notes how the text has been split that was forced before the answer's new tokens."""
        text, texts = self._forced, self._grammar.texts
        before = int(answer[self._num_seen - 1]) if self._num_seen else -1
        for token in answer[self._num_seen :].tolist():
            if not (size := texts.size(token, text)):
                return
            self._splits.note(self._owner, before, text, token)
            text, before = text[size:], token
