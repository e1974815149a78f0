"""What proposers are asked and what they answer: small frozen values, no behaviour.

Structs of msgspec: many are made in each step, and a frozen dataclass takes seven times
as long to make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


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
    """

    speculation: str = "auto"
    max_draft_tokens: int = -1
    learn: bool = True
    adapter: str = ""
    tenant: str = ""
    cache_salt: str = ""


class HiddenStates(msgspec.Struct, frozen=True):
    """The target's last hidden states of the step that has just run, after the final norm.

    The last rows of a request may be of draft tokens that were refused: of a request with n tokens
    now, the states of positions up to n - 2 count.

    Attributes:
        to_host: copies them: uint16 ``[sum(num_tokens), hidden_size]``, the bits of bfloat16; the
            requests' rows follow one another in the batch's order. To be called within the step.
        num_tokens: how many of the rows belong to each request.
        starts: position in the request's text of the first of its rows.
    """

    to_host: Callable[[], npt.NDArray[np.uint16]]
    num_tokens: tuple[int, ...]
    starts: tuple[int, ...]


class DraftBatch(msgspec.Struct, frozen=True):
    """One decoding step's question: what comes next for each of these requests?

    The arrays are views into the engine's buffers, valid only during the call; row ``i`` belongs
    to ``request_ids[i]`` in this step and to another request in the next.

    Attributes:
        request_ids: n engine-wide unique ids.
        token_ids: int32 ``[n, >= max(num_tokens)]``; ``token_ids[i, :num_tokens[i]]`` is the
            prompt followed by the output so far.
        num_tokens: int32 ``[n]``, prompt and output tokens known.
        num_prompt_tokens: int32 ``[n]``.
        max_draft_tokens: int32 ``[n]``, the longest draft that can be used; 0: none.
        controls: n, what each request asked for; empty: nothing special of any.
        hidden_states: what drafters that continue the target's own states need; None where the
            engine gives none.
    """

    request_ids: list[str]
    token_ids: Int32Array
    num_tokens: Int32Array
    num_prompt_tokens: Int32Array
    max_draft_tokens: Int32Array
    controls: tuple[RequestControls, ...] = ()
    hidden_states: HiddenStates | None = None

    def __len__(self) -> int:
        return len(self.request_ids)


class Draft(msgspec.Struct, frozen=True):
    """A guess at a request's next tokens.

    Attributes:
        tokens: the guessed tokens, in order; may be empty.
        source: who guessed: one of the labels of a kind of source.
        match_len: how many tokens of context the guess rests on; 0 where that has no meaning.
        chances: how sure the source is of each token, those before it given, 0 .. 1; empty: it
            does not say.
    """

    tokens: tuple[int, ...]
    source: str
    match_len: int = 0
    chances: tuple[float, ...] = ()

    def cut(self, num_tokens: int) -> Self:
        """The first ``num_tokens`` tokens of this draft."""
        if len(self.tokens) <= num_tokens:
            return self
        return msgspec.structs.replace(
            self,
            tokens=self.tokens[:num_tokens],
            chances=self.chances[:num_tokens],
        )


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request's last draft, and what the target wrote in that step.

    Attributes:
        request_id: whose draft it was.
        draft: the draft as sent to verification; None if the request had none.
        num_accepted: how many of its tokens the target accepted.
        new_tokens: the tokens the target emitted in the step: the accepted ones and one of its own.
    """

    request_id: str
    draft: Draft | None
    num_accepted: int
    new_tokens: tuple[int, ...]
