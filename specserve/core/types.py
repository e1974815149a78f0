"""Input and output of draft sources: arrays of a whole batch, without an object per request."""

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
    """The grammar of one request's answer; the engine keeps its state for this request only."""

    @property
    def texts(self) -> TokenTexts:
        """Texts of the vocabulary's tokens; available when a text is forced."""
        ...

    def forced(self, answer: Int32Array) -> str:
        """Follows the answer to its end, and returns the text that must come next.

        Args:
            answer: int32 ``[m]``, the output tokens so far; extends the answer of the last call.

        Returns:
            The forced text; empty: nothing is forced. That includes the time while the grammar is
            being compiled, while the model reasons, and after the grammar's end.

        Raises:
            Exception: the grammar cannot be followed.
        """
        ...

    def usual(self, answer: Int32Array, text: str) -> list[int]:
        """The tokens into which the tokenizer splits ``text`` after the answer so far."""
        ...

    def close(self) -> None:
        """Ends what is still computed for the request, which has ended."""
        ...


class RequestControls(msgspec.Struct, frozen=True):
    """One request's options for speculation, from ``vllm_xargs``, and its tenant.

    Attributes:
        speculation: ``auto`` (all configured sources), ``off``, or the kind of one source.
        max_draft_tokens: upper bound of a draft's length in tokens; -1 leaves it to the sources.
        learn: whether the request's text may be kept after the request.
        adapter: name of the request's LoRA adapter; empty: none.
        tenant: the request's tenant, set by the server and never by the client; empty without
            API keys.
        cache_salt: set by the client; empty without API keys. Drafters and the grammar source share
            nothing between requests with different salts.
        prediction: token ids of the text that the client expects as the answer, int32; empty: none.
        report: whether the answer must contain a report of speculation.
        grammar: the answer's grammar; None: it has none, or no source drafts from grammars.
        began: when the text began, in seconds since 1970; 0.0: it begins now.
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
    began: float = 0.0


class HiddenStates(NamedTuple):
    """The target's last hidden states of the step that has just run, after the final norm.

    The last states of a request may belong to rejected draft tokens: for a request with m tokens,
    only the states of positions up to m - 2 are valid.

    Attributes:
        to_host: starts to copy the states of the given batch rows, int64 ``[r]``; call it within
            the step. The function that it returns waits for the copy: uint16
            ``[sum(num_tokens[rows]), hidden_size]``, bfloat16 bits, row after row.
        num_tokens: int32 ``[n]``, number of states of each request.
        starts: int32 ``[n]``, position in the request's text of its first state.
    """

    to_host: Callable[[Int64Array], Callable[[], UInt16Array]]
    num_tokens: Int32Array
    starts: Int32Array


class DraftBatch(NamedTuple):
    """The n requests of one decoding step, for which a source drafts.

    The arrays may be views into the engine's buffers, valid only during the call. They are
    contiguous and writable, so that kernels take them without another compilation.

    Attributes:
        slots: int64 ``[n]``. A request keeps its slot from its first step to its last; its row may
            change. Slots are below ``SourceContext.num_slots``.
        token_ids: int32 ``[n, >= max(num_tokens)]``; ``token_ids[i, :num_tokens[i]]`` is the
            prompt followed by the output so far.
        num_tokens: int32 ``[n]``, prompt and output tokens known.
        num_prompt_tokens: int32 ``[n]``.
        hidden_states: the target's states, for drafters that need them; None: the engine provides
            none.
    """

    slots: Int64Array
    token_ids: Int32Array
    num_tokens: Int32Array
    num_prompt_tokens: Int32Array
    hidden_states: HiddenStates | None = None

    @classmethod
    def empty(cls) -> DraftBatch:
        """A batch without requests."""
        rows = np.zeros(0, np.int32)
        return cls(np.zeros(0, np.int64), np.zeros((0, 1), np.int32), rows, rows)


class Drafts(NamedTuple):
    """A source's drafts, by slot, each of at most k tokens.

    Attributes:
        tokens: int32 ``[slots, k]``; ``tokens[slot, :lengths[slot]]`` is a request's draft.
        lengths: int32 ``[slots]``; 0: no draft.
        confidence: float32 ``[slots, k]``, 0 .. 1, the source's confidence in each token, given
            those before it. It need not be calibrated: the policy learns the acceptance per level.
        labels: uint8 ``[slots]``, index of each draft's label in the source's ``LABELS``.
    """

    tokens: Int32Array
    lengths: Int32Array
    confidence: Float32Array
    labels: UInt8Array

    @classmethod
    def empty(cls, *shape: int) -> Drafts:
        """Empty drafts: ``[slots, k]``, or of several sources ``[sources, slots, k]``."""
        tokens, confidence = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        return cls(
            tokens, np.zeros(shape[:-1], np.int32), confidence, np.zeros(shape[:-1], np.uint8)
        )
