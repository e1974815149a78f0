"""Drafts from a text that the client expects as the answer: OpenAI's predicted outputs.

The answer is followed along the prediction from its beginning. After a deviation, the answer's last
tokens are searched in the prediction, as in prompt lookup, and drafts continue from the match.
Among equally long matches the nearest one after the last certain place wins, as in an alignment of
the two texts.

There is no index. After a deviation each call scans the prediction: about 1 ns a token, 4 us for
4,096 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.core.compile import direct, inner, kernel
from specserve.core.source_config import PredictionConfig
from specserve.core.types import (
    DraftBatch,
    Drafts,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.sources.controls import wants_drafts
from specserve.sources.ngram import UInt64Array, array_at

ENOUGH_TOKENS = 4
"""Most tokens of a match that count. A match of this length makes its place certain; of several the
nearest one wins."""

NEARBY_TOKENS = 64
"""A match of one token is enough within so many tokens after the last certain place."""

_DOUBT = 8.0
"""The confidence after a match of ``m`` tokens is ``m^2 / (m^2 + 8)``. Each draft token makes the
match one token longer."""

_ADDRESS, _SIZE, _SEEN, _PLACE, _MATCHED, _ALIGNED, _NUM_COLUMNS = range(7)
"""Columns of a request: address of its prediction; number of its tokens, 0: no prediction; output
tokens processed; position in the prediction of the next token, -1: unknown; tokens that
matched before it; last certain place in the prediction."""

_INITIAL_STATE = (0, 0, ENOUGH_TOKENS, 0)
"""The columns from ``_SEEN`` on, before the answer's first token."""


class PredictionSource:
    """Drafts by copying from the text that a request predicts.

    Several predictions of a request are concatenated, so that a match may be in any of them. Memory
    per request: 8 bytes a token, until :meth:`close`.
    """

    def __init__(self, config: PredictionConfig, context: SourceContext) -> None:
        num_slots = context.num_slots
        self._texts: list[UInt64Array | None] = [None] * num_slots
        self._requests: Int64Array = np.zeros((num_slots, _NUM_COLUMNS), np.int64)
        batch, drafts = DraftBatch.empty(), Drafts.empty(0, 1)
        self._step = direct(draft_step, batch[:4], batch.num_tokens, self._requests, drafts)

    def open(self, slot: int, controls: RequestControls) -> None:
        """Keeps the request's prediction, if it has one and takes drafts of this source."""
        if controls.prediction and wants_drafts(controls, "prediction"):
            text = np.frombuffer(controls.prediction, np.int32).astype(np.uint64)
            self._texts[slot] = text
            self._requests[slot] = (text.ctypes.data, len(text), *_INITIAL_STATE)

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        """Follows each answer's new tokens in its prediction, and copies the tokens after them."""
        self._step(batch[:4], limits, self._requests, drafts)

    def close(self, slots: Int64Array) -> None:
        """Frees the predictions of these requests."""
        for slot in slots.tolist():
            self._texts[slot] = None
        self._requests[slots] = 0


def num_predicted(prediction: Int32Array, answer: Sequence[int]) -> int:
    """Number of an answer's tokens that its prediction, int32 ``[m]``, predicted correctly."""
    request = np.array((0, 0, *_INITIAL_STATE), np.int64)
    text = np.array(answer, np.int32)
    return int(follow_each(prediction.astype(np.uint64), text, request))


@inner
def _copy(prediction, place, matched, draft, confidence):  # type: ignore[no-untyped-def]
    """Fills ``draft`` with the tokens from ``place`` on, after a match of ``matched`` tokens."""
    for j in range(draft.shape[0]):
        draft[j] = prediction[place + j]
        evidence = float(matched + j) ** 2
        confidence[j] = evidence / (evidence + _DOUBT)


@inner
def _matched(prediction, place, output, length):  # type: ignore[no-untyped-def]
    """Length of the match before ``place`` and at the output's end, at most ``ENOUGH_TOKENS``."""
    longest = min(place, length, ENOUGH_TOKENS)
    size = 0
    while size < longest and prediction[place - size - 1] == np.uint64(output[length - size - 1]):
        size += 1
    return size


@inner
def _align(prediction, output, length, request):  # type: ignore[no-untyped-def]
    """Finds the place in the prediction that the output is at, and writes it to ``request``.

    Searches the longest suffix of ``output[:length]``, from the last certain place to the
    prediction's end and then from its beginning. The first of equally long matches wins.
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
    """Processes the new tokens of ``output[:length]``; after a deviation searches its last tokens.

    Args:
        prediction: uint64 ``[m]``.
        output: int32 ``[>= length]``.
        length: tokens of the output.
        request: int64 ``[_NUM_COLUMNS]``, updated.

    Returns:
        Number of new tokens that the prediction predicted correctly.
    """
    num_predicted, seen = 0, request[_SEEN]
    for position in range(seen, length):
        place = request[_PLACE]
        is_known = 0 <= place < prediction.shape[0]
        if is_known and prediction[place] == np.uint64(output[position]):
            num_predicted += 1
            request[_PLACE] += 1
            request[_MATCHED] += 1
            if request[_MATCHED] >= ENOUGH_TOKENS:
                request[_ALIGNED] = request[_PLACE]
        else:
            request[_PLACE] = -1
    if request[_PLACE] < 0 and seen < length:
        _align(prediction, output, length, request)
    request[_SEEN] = max(seen, length)
    return num_predicted


@kernel
def follow_each(prediction, output, request):  # type: ignore[no-untyped-def]
    """Follows an output one token a step; returns how many tokens were predicted correctly."""
    num_predicted = 0
    for position in range(output.shape[0]):
        num_predicted += _follow(prediction, output, position + 1, request)
    return num_predicted


@kernel
def draft_step(batch, limits, requests, drafts):  # type: ignore[no-untyped-def]
    """One decoding step of the batch: follows the new tokens and copies the drafts.

    Args:
        batch: the first four arrays of a :class:`specserve.core.types.DraftBatch`.
        limits: int32 ``[n]``, longest draft.
        requests: int64 ``[slots, _NUM_COLUMNS]``; updated.
        drafts: all of length 0; all but the labels is written.
    """
    slots, token_ids, num_tokens, num_prompt_tokens = batch
    for i, slot in enumerate(slots):
        request = requests[slot]
        size = request[_SIZE]
        if size == 0:
            continue
        prediction = array_at(request[_ADDRESS], size)
        output = token_ids[i, num_prompt_tokens[i] :]
        _follow(prediction, output, num_tokens[i] - num_prompt_tokens[i], request)
        place = request[_PLACE]
        limit = min(limits[i], size - place)
        if place >= 0 and limit > 0:
            draft, confidence = drafts.tokens[slot, :limit], drafts.confidence[slot]
            _copy(prediction, place, request[_MATCHED], draft, confidence)
            drafts.lengths[slot] = limit
