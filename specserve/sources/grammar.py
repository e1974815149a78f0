"""Drafts of what a request's grammar forces: structured outputs that can go on in one way only.

Between the values of a JSON object stand keys, quotes and brackets that its schema has fixed. Such
a stretch is xgrammar's jump-forward string (Dong et al., XGrammar, arXiv 2411.15100); SGLang writes
it without asking the model. Here it is a draft: the model confirms how it is split into tokens.

Nothing is learned, and nothing is kept but each request's grammar, until :meth:`close`.
"""

from __future__ import annotations

import logging
from typing import Self

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import GrammarConfig
from specserve.core.types import (
    DraftBatch,
    DraftBuffer,
    Drafts,
    Float32Array,
    Grammar,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.sources.controls import wants_drafts

logger = logging.getLogger(__name__)

ONLY_ONE, USUAL, LAST, UNUSUAL = 1.0, 0.9, 0.5, 0.3
"""Confidence: of a token that alone is allowed; of one of several that begin the same text; of the
text's last one, which the model may write as the beginning of a longer token; of one after an
answer whose end the tokenizer would have split otherwise."""

_CHARS_A_TOKEN = 16
"""A text of more characters for each token that is wanted is cut before it is tokenized."""


class GrammarSource:
    """Drafts the text that a request's grammar forces, up to its end.

    A grammar that cannot be followed costs its request these drafts, and nothing else: the reason
    is logged and shown.
    """

    def __init__(self, config: GrammarConfig, context: SourceContext) -> None:
        self._kind = config.kind
        self._metrics: SpeculationMetrics = context.metrics
        self._grammars: list[Grammar | None] = [None] * context.num_slots
        self._drafts = DraftBuffer(context.num_slots, config.max_draft_len)

    @classmethod
    def build(cls, config: GrammarConfig, context: SourceContext) -> Self:
        """For the registry; a request brings its grammar."""
        return cls(config, context)

    def open(self, slot: int, controls: RequestControls) -> None:
        """Takes the request's grammar, if there is one that it wants drafts of."""
        if wants_drafts(controls, self._kind):
            self._grammars[slot] = controls.grammar

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts:
        """Follows what is new of each answer, and drafts what is forced after it."""
        drafts = self._drafts.rows(len(limits))
        drafts.lengths[:] = 0
        for row, slot in enumerate(batch.slots.tolist()):
            if (grammar := self._grammars[slot]) is None:
                continue
            answer = batch.token_ids[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]]
            limit = min(int(limits[row]), drafts.tokens.shape[1])
            try:
                drafts.lengths[row] = _draft(
                    grammar, answer, drafts.tokens[row, :limit], drafts.confidence[row, :limit]
                )
            except Exception as error:
                self._give_up(slot, error)
        return drafts

    def close(self, slots: Int64Array) -> None:
        """Drops the grammars of these requests."""
        for slot in slots.tolist():
            self._grammars[slot] = None

    def _give_up(self, slot: int, error: Exception) -> None:
        """No drafts for this request any more; others have grammars of their own."""
        self._grammars[slot] = None
        # All tenants see the reason, and the error may quote what this one has sent.
        reason = f"a request's grammar is not followed: {type(error).__name__}, see the log"
        self._metrics.count_error(self._kind)
        self._metrics.set_reachable(self._kind, True, reason)
        logger.warning("No drafts from a request's grammar", exc_info=error)


def _draft(grammar: Grammar, answer: Int32Array, tokens: Int32Array, sure: Float32Array) -> int:
    """Writes the tokens of the forced text, and how sure they are; returns their number."""
    matcher = grammar.after(answer)
    if matcher is None or not len(tokens):
        return 0
    text = matcher.find_jump_forward_string()
    if not text:
        return 0
    split, is_usual = grammar.split(answer, text[: _CHARS_A_TOKEN * len(tokens)])
    num_accepted = 0
    for token in split[: len(tokens)]:
        is_only_one = grammar.num_allowed() == 1
        if not matcher.accept_token(token):
            break
        tokens[num_accepted] = token
        sure[num_accepted] = ONLY_ONE if is_only_one else USUAL if is_usual else UNUSUAL
        num_accepted += 1
    matcher.rollback(num_accepted)
    last = num_accepted - 1
    if 0 < num_accepted == len(split) and sure[last] < ONLY_ONE:
        sure[last] = min(sure[last], LAST)
    return num_accepted
