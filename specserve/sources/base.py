"""What every draft source offers. Narrow on purpose: a source knows tokens, not engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import DraftModelConfig, MtpConfig, TrieConfig
from specserve.core.types import (
    BoolArray,
    DraftBatch,
    Drafts,
    Float64Array,
    Int32Array,
    Int64Array,
    RequestControls,
)

if TYPE_CHECKING:
    from specserve.trie.memory import SharedMemory, TrieMemory  # numba takes seconds to import


class Source(Protocol):
    """A source of drafts. All calls come from one thread, the one that runs the decoding steps."""

    def open(self, slot: int, controls: RequestControls) -> None:
        """A request begins, in a slot that is free.

        Args:
            slot: the request's until :meth:`close`.
            controls: what it asked for. A source is also told of requests that take no drafts.
        """
        ...

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts:
        """Guesses the next tokens of every request of the batch, and learns what is new of them.

        Never changes the batch and keeps no reference to its arrays. A request that is absent is
        not finished: it may be pre-empted and come back in any later step, on another row, with
        the same tokens and more.

        Args:
            batch: n requests, all open.
            limits: int32 ``[n]``, the longest draft that is of use to each, at most the source's
                ``max_draft_len``; 0: none is wanted, and the request is shown to be learned from.

        Returns:
            n drafts, each at most ``limits[i]`` tokens long. The arrays may be the source's own,
            and are valid until its next call.

        Raises:
            Exception: anything; the source is then switched off for a while.
        """
        ...

    def close(self, slots: Int64Array) -> None:
        """These requests have finished or were aborted: drops all that is kept for them alone.

        Args:
            slots: int64 ``[m]``, all open; free afterwards.
        """
        ...


@runtime_checkable
class RemoteSource(Source, Protocol):
    """A source that answers from another process: asking it takes time, so it is asked last."""

    def reading_s(self, batch: DraftBatch) -> Float64Array:
        """How long the source would read each text before it can draft, where that delays the
        target.

        Returns:
            float64 ``[n]``, seconds; 0: it can draft at once; infinite: it is reading the text
            now; NaN: it never can.
        """
        ...

    def must_see(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: requests of which the source would miss something in a step without it."""
        ...

    def follow_next(self) -> bool:
        """A draft is wanted of a text of which the source has missed nothing.

        Returns:
            Whether such a text is worth waiting for: it will be the next one that begins.
        """
        ...


class Member(NamedTuple):
    """A source of a chain.

    Attributes:
        kind: as configured, its name in metrics and in ``vllm_xargs.speculation``.
        source: what drafts.
        labels: names of its drafts.
        max_draft_len: longest draft in tokens.
        dynamic: whether its drafts are cut to the length that pays, and it is asked where it pays.
        learns: whether it learns from one request for others: it has to see texts to their ends.
        needs: the field of a request's controls without which it drafts nothing; empty: none.
    """

    kind: str
    source: Source
    labels: tuple[str, ...]
    max_draft_len: int
    dynamic: bool = True
    learns: bool = False
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class SourceContext:
    """What a source may need to know of the replica that it drafts for.

    Attributes:
        num_slots: requests that may be open at a time.
        vocab_size: token ids are 0 .. ``vocab_size - 1``.
        model_identity: the checkpoint's; what one model taught, another must not be told.
        tenants: those that keys are configured for; empty: all requests are one tenant's.
        num_adapters: LoRA adapters that may be loaded at a time beside the model itself.
        adapters: names of the adapters that the configuration loads.
        label_key: see :func:`specserve.trie.namespaces.label`.
        metrics: where a source shows what is its own.
        share: joins a memory to the cluster's; None: there is no cluster.
        tokenizer: hash of the target's vocabulary; empty: unknown.
        hidden_size: width of the target's hidden states; 0: unknown.
        replica: its name in the cluster; empty: it is on its own.
        find_drafter: how to find the drafter of a source, by a call that may take seconds and
            gives its address, None while there is none.
        exits: where a source adds what ends what it has started; called in this order.
    """

    num_slots: int = 64
    vocab_size: int = 2**31 - 1
    model_identity: str = ""
    tenants: tuple[str, ...] = ()
    num_adapters: int = 0
    adapters: tuple[str, ...] = ()
    label_key: bytes = b""
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    share: Callable[[TrieConfig, TrieMemory], SharedMemory] | None = None
    tokenizer: str = ""
    hidden_size: int = 0
    replica: str = ""
    find_drafter: Callable[[DraftModelConfig | MtpConfig], Callable[[], str | None]] = (
        lambda config: lambda: None
    )
    exits: list[Callable[[], None]] = field(default_factory=list)
