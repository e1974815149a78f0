"""What draft sources are asked and what they answer: arrays of a batch, no object a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from specserve.core.token_texts import TokenTexts

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt16Array = npt.NDArray[np.uint16]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


class Grammar(Protocol):
    """The grammar that a request's answer keeps, as the engine follows it for the request alone."""

    @property
    def texts(self) -> TokenTexts:
        """Of the vocabulary; known where anything is forced."""
        ...

    def forced(self, answer: Int32Array) -> str:
        """Follows the answer up to its end.

        Args:
            answer: int32 ``[m]``, the output tokens so far; those of the last call and more.

        Returns:
            The text that certainly comes next; empty: nothing is forced, as while the grammar is
            being compiled, while the model reasons, and after the grammar's end.

        Raises:
            Exception: the grammar cannot be followed.
        """
        ...

    def usual(self, answer: Int32Array, text: str) -> list[int]:
        """The tokens of ``text`` as the tokenizer has them after the answer so far."""
        ...


class RequestControls(msgspec.Struct, frozen=True):
    """What one request asked of speculation, through ``vllm_xargs``, and for whom.

    Attributes:
        speculation: ``auto`` (all configured sources), ``off``, or the kind of one source.
        max_draft_tokens: upper bound of a draft's length in tokens; -1 leaves it to the sources.
        learn: whether the request's text may be remembered beyond the request.
        adapter: name of the request's LoRA adapter; empty: none.
        tenant: whose request it is, told by the server and never by the client; empty without
            API keys.
        cache_salt: the client's own; only requests of the same one may see by their speed what
            others have sent.
        prediction: token ids of the text that the client expects as the answer, int32; empty: none.
        report: whether the answer is to tell what speculation did.
        grammar: what the answer keeps to; None: nothing, or no source drafts from that.
    """

    speculation: str = "auto"
    max_draft_tokens: int = -1
    learn: bool = True
    adapter: str = ""
    tenant: str = ""
    cache_salt: str = ""
    prediction: bytes = b""
    report: bool = False
    grammar: Grammar | None = None


class HiddenStates(NamedTuple):
    """The target's last hidden states of the step that has just run, after the final norm.

    The last states of a request may be of draft tokens that were refused: of a request with m
    tokens now, the states of positions up to m - 2 count.

    Attributes:
        to_host: starts to copy the states of some rows of the batch, int64 ``[r]``; to be called
            within the step. What it returns waits for the copy: uint16
            ``[sum(num_tokens[rows]), hidden_size]``, bits of bfloat16, the rows one after another.
        num_tokens: int32 ``[n]``, states of each request.
        starts: int32 ``[n]``, position in the request's text of the first of its states.
    """

    to_host: Callable[[Int64Array], Callable[[], UInt16Array]]
    num_tokens: Int32Array
    starts: Int32Array


class DraftBatch(NamedTuple):
    """One decoding step's question: what comes next for each of these n requests?

    The arrays may be views into the engine's buffers, valid only during the call. They are
    contiguous and writable, as kernels take them without being compiled anew.

    Attributes:
        slots: int64 ``[n]``. A request has its slot from its first step to its last, whichever row
            it has in a step. Slots are below ``SourceContext.num_slots``.
        token_ids: int32 ``[n, >= max(num_tokens)]``; ``token_ids[i, :num_tokens[i]]`` is the
            prompt followed by the output so far.
        num_tokens: int32 ``[n]``, prompt and output tokens known.
        num_prompt_tokens: int32 ``[n]``.
        hidden_states: what drafters that continue the target's own states need; None where the
            engine gives none.
    """

    slots: Int64Array
    token_ids: Int32Array
    num_tokens: Int32Array
    num_prompt_tokens: Int32Array
    hidden_states: HiddenStates | None = None

    @classmethod
    def empty(cls) -> DraftBatch:
        """Of no request."""
        rows = np.zeros(0, np.int32)
        return cls(np.zeros(0, np.int64), np.zeros((0, 1), np.int32), rows, rows)


class Drafts(NamedTuple):
    """A source's guesses at the next tokens of n requests.

    Attributes:
        tokens: int32 ``[n, k]``; ``tokens[i, :lengths[i]]`` is request i's draft.
        lengths: int32 ``[n]``; 0: no guess.
        confidence: float32 ``[n, k]``, how sure the source is of each token, those before it given,
            0 .. 1. It need not be right: the policy learns what each level of it is worth.
        labels: uint8 ``[n]``, index of each draft's label in the source's ``LABELS``.
    """

    tokens: Int32Array
    lengths: Int32Array
    confidence: Float32Array
    labels: UInt8Array

    @classmethod
    def empty(cls, num_rows: int, max_len: int) -> Drafts:
        """No guess for any of ``num_rows`` requests, with room for drafts of ``max_len`` tokens."""
        return cls(
            np.zeros((num_rows, max_len), np.int32),
            np.zeros(num_rows, np.int32),
            np.zeros((num_rows, max_len), np.float32),
            np.zeros(num_rows, np.uint8),
        )


class DraftBuffer:
    """Where a source writes its drafts, anew in each step: of at most ``num_slots`` requests."""

    def __init__(self, num_slots: int, max_draft_len: int) -> None:
        self._all = self._rows = Drafts.empty(num_slots, max_draft_len)

    def rows(self, num_rows: int) -> Drafts:
        """Room for the drafts of so many requests, with what was written there before.

        The same object as long as the number stays: its arrays need not be checked again.
        """
        if len(self._rows.lengths) != num_rows:
            self._rows = Drafts._make(column[:num_rows] for column in self._all)
        return self._rows
