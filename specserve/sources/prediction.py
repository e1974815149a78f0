"""Drafts from a text that the client expects as the answer: OpenAI's predicted outputs.

The prediction is followed from its beginning. Where the answer departs from it, each new token is
looked up in the prediction together with those before it, as in prompt lookup
(:mod:`specserve.sources.ngram`), and followed from there. Of several places the nearest one after
the last place where the answer was known to be is taken, as an alignment of the two texts would.

Nothing is indexed. A request that has departed from its prediction costs a scan of it each time
that the source is asked: a nanosecond a token, 4 us for a prediction of 4,096.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.core.compile import direct, inner, kernel
from specserve.core.source_config import PredictionConfig
from specserve.core.types import (
    DraftBatch,
    DraftBuffer,
    Drafts,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.sources.controls import wants_drafts
from specserve.sources.ngram import UInt64Array, array_at, copy_from

ENOUGH_TOKENS = 4
"""A match of so many tokens is as good as a longer one: of such matches the nearest is taken, and
the answer is known to be there."""

NEARBY_TOKENS = 64
"""So far ahead a single token is match enough: an edit is seldom longer, and a token seldom far."""

_ADDRESS, _SIZE, _SEEN, _PLACE, _MATCHED, _ALIGNED, _NUM_COLUMNS = range(7)
"""Columns of a request: where its prediction is, and its tokens, 0: it has none; output tokens that
were followed; position in the prediction of what comes next, -1: unknown; tokens that matched
before it; where the answer surely was last."""

_BEGINNING = (0, 0, ENOUGH_TOKENS, 0)
"""The columns from ``_SEEN`` on, before the answer's first token."""


class PredictionSource:
    """Drafts by copying from the text that a request predicts.

    Several predictions are one text, one after the other: the first one is followed first, and any
    place of any of them may be joined. Memory a request: 8 bytes a token, until :meth:`close`.
    """

    def __init__(self, config: PredictionConfig, context: SourceContext) -> None:
        num_slots = context.num_slots
        self._texts: list[UInt64Array | None] = [None] * num_slots
        self._requests: Int64Array = np.zeros((num_slots, _NUM_COLUMNS), np.int64)
        self._drafts = DraftBuffer(num_slots, config.max_draft_len)
        batch, drafts = DraftBatch.empty(), self._drafts.rows(0)
        self._step = direct(draft_step, batch[:4], batch.num_tokens, self._requests, drafts)

    @property
    def num_bytes(self) -> int:
        """Memory of all predictions."""
        return sum(text.nbytes for text in self._texts if text is not None)

    def open(self, slot: int, controls: RequestControls) -> None:
        """Takes the request's prediction, if there is one that it wants drafts of."""
        if controls.prediction and wants_drafts(controls, "prediction"):
            text = np.frombuffer(controls.prediction, np.int32).astype(np.uint64)
            self._texts[slot] = text
            self._requests[slot] = (text.ctypes.data, len(text), *_BEGINNING)

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts:
        """Follows what is new of each answer, and copies what its prediction says comes next."""
        drafts = self._drafts.rows(len(limits))
        self._step(batch[:4], limits, self._requests, drafts)
        return drafts

    def close(self, slots: Int64Array) -> None:
        """Frees the predictions of these requests."""
        for slot in slots.tolist():
            self._texts[slot] = None
        self._requests[slots] = 0


def num_foretold(prediction: Int32Array, answer: Sequence[int]) -> int:
    """How many tokens of an answer its prediction, int32 ``[m]``, foretold, each in its place."""
    request = np.array((0, 0, *_BEGINNING), np.int64)
    text = np.array(answer, np.int32)
    return int(follow_each(prediction.astype(np.uint64), text, request))


@inner
def _matched(prediction, place, output, length):  # type: ignore[no-untyped-def]
    """Tokens before ``place`` that also end ``output[:length]``, of those that count."""
    longest = min(place, length, ENOUGH_TOKENS)
    size = 0
    while size < longest and prediction[place - size - 1] == np.uint64(output[length - size - 1]):
        size += 1
    return size


@inner
def _join(prediction, output, length, request):  # type: ignore[no-untyped-def]
    """Finds the place in the prediction that the output is at, and notes it in ``request``.

    The longest suffix of ``output[:length]`` is searched; its nearest place after the one where the
    output was last known to be, and from the beginning after the prediction's end.
    """
    last, aligned = np.uint64(output[length - 1]), request[_ALIGNED]
    request[_PLACE], request[_MATCHED] = -1, 0
    for begin, end in ((aligned, prediction.shape[0]), (0, aligned)):
        for position in range(begin, end):
            if prediction[position] == last:
                matched = _matched(prediction, position + 1, output, length)
                is_near = aligned <= position < aligned + NEARBY_TOKENS
                if matched > request[_MATCHED] and (matched > 1 or is_near):
                    request[_PLACE], request[_MATCHED] = position + 1, matched
                    if matched == ENOUGH_TOKENS:
                        request[_ALIGNED] = position + 1
                        return


@inner
def _follow(prediction, output, length, request):  # type: ignore[no-untyped-def]
    """Follows ``output[:length]`` from where it was left; where it is lost, its end is looked up.

    Args:
        prediction: uint64 ``[m]``.
        output: int32 ``[>= length]``.
        length: tokens of the output.
        request: int64 ``[_NUM_COLUMNS]``, updated.

    Returns:
        How many of the new tokens the prediction foretold.
    """
    num_foretold, seen = 0, request[_SEEN]
    for position in range(seen, length):
        place = request[_PLACE]
        is_known = 0 <= place < prediction.shape[0]
        if is_known and prediction[place] == np.uint64(output[position]):
            num_foretold += 1
            request[_PLACE] += 1
            request[_MATCHED] += 1
            if request[_MATCHED] >= ENOUGH_TOKENS:
                request[_ALIGNED] = request[_PLACE]
        else:
            request[_PLACE] = -1
    if request[_PLACE] < 0 and seen < length:
        _join(prediction, output, length, request)
    request[_SEEN] = max(seen, length)
    return num_foretold


@kernel
def follow_each(prediction, output, request):  # type: ignore[no-untyped-def]
    """Follows an output token by token; returns how many of them the prediction foretold."""
    num_foretold = 0
    for position in range(output.shape[0]):
        num_foretold += _follow(prediction, output, position + 1, request)
    return num_foretold


@kernel
def draft_step(batch, limits, requests, drafts):  # type: ignore[no-untyped-def]
    """One decoding step of the batch: follow what is new, and copy what comes next.

    Args:
        batch: the arrays of a :class:`specserve.core.types.DraftBatch`.
        limits: int32 ``[n]``, longest draft.
        requests: int64 ``[slots, _NUM_COLUMNS]``; updated.
        drafts: of n requests, written but for their labels.
    """
    slots, token_ids, num_tokens, num_prompt_tokens = batch
    for i in range(slots.shape[0]):
        drafts.lengths[i] = 0
        request = requests[slots[i]]
        size = request[_SIZE]
        if size == 0:
            continue
        prediction = array_at(request[_ADDRESS], size)
        output = token_ids[i, num_prompt_tokens[i] :]
        _follow(prediction, output, num_tokens[i] - num_prompt_tokens[i], request)
        place = request[_PLACE]
        limit = min(limits[i], drafts.tokens.shape[1], size - place)
        if place >= 0 and limit > 0:
            draft, confidence = drafts.tokens[i, :limit], drafts.confidence[i]
            copy_from(prediction, size, place, request[_MATCHED], draft, confidence)
            drafts.lengths[i] = limit
