"""Interfaces of draft sources. They hold tokens and arrays only, and nothing of the engine."""

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
    """A source of drafts. All calls come from the thread that runs the decoding steps."""

    def open(self, slot: int, controls: RequestControls) -> None:
        """Registers a new request. This is called for requests without drafts too.

        Args:
            slot: a free slot; it belongs to the request until :meth:`close`.
            controls: the request's options.
        """
        ...

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        """Drafts the next tokens of every request of the batch, and learns from its new tokens.

        Must not change the batch or keep a reference to any array. An absent request has not ended:
        it may be pre-empted. It may return in any later step, on another row, with the same tokens
        and more.

        Args:
            batch: n requests, all open.
            limits: int32 ``[n]``, longest useful draft of each, at most the source's
                ``max_draft_len``; 0: no draft is wanted, the source may only learn.
            drafts: written, by slot: request i's draft, at most ``limits[i]`` tokens long, goes to
                ``slots[i]``. The batch's lengths are 0 before the call; the other arrays have the
                contents of earlier steps. The labels are 0 if the source never writes them. Other
                slots must not be changed: they may hold drafts of pre-empted requests.

        Raises:
            Exception: any; the caller then switches the source off for a while.
        """
        ...

    def close(self, slots: Int64Array) -> None:
        """Drops all that is kept only for these requests, which have finished or were aborted.

        Args:
            slots: int64 ``[m]``, all open; free afterwards.
        """
        ...


@runtime_checkable
class LearningSource(Source, Protocol):
    """A source that learns from one request for others, and so must see each text's end."""

    def finish(self, batch: DraftBatch) -> None:
        """Learns the last tokens of requests that end; :meth:`close` follows.

        The source may have been skipped in the last steps, or be behind a long text.

        Args:
            batch: n requests, all open.
        """
        ...


@runtime_checkable
class RemoteSource(Source, Protocol):
    """A source in another process. It is asked last, because a call takes long."""

    def reading_s(self, batch: DraftBatch) -> Float64Array:
        """Seconds that the source needs for each text's prefill before it can draft.

        Returns:
            float64 ``[n]``; 0: it can draft at once, or its prefill does not delay the target;
            infinite: the prefill is running; NaN: it cannot draft.
        """
        ...

    def are_followed(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: requests of which the source loses data in a step that does not call it."""
        ...

    def follow_next(self) -> bool:
        """Tells the source to follow the next text that begins, from its first step on.

        Returns:
            Whether a probe should wait for that text; false: the source can draft for any text.
        """
        ...


class Member(NamedTuple):
    """A source with its properties, as a chain uses it.

    Attributes:
        kind: as configured; its name in metrics and in ``vllm_xargs.speculation``.
        source: the source.
        labels: names of its drafts in metrics.
        max_draft_len: longest draft in tokens.
        dynamic: whether it is asked, and its drafts are sent, only where the expected gain pays.
        needs: the field of a request's controls without which it drafts nothing; empty: none.
    """

    kind: str
    source: Source
    labels: tuple[str, ...]
    max_draft_len: int
    dynamic: bool = True
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class SourceContext:
    """Properties of the replica that a source drafts for.

    Attributes:
        num_slots: most requests that may be open at a time.
        vocab_size: token ids are 0 .. ``vocab_size - 1``.
        model_identity: identifies the checkpoint; memories of different models are kept apart.
        tenants: tenants with configured API keys; empty: all requests belong to one tenant.
        num_adapters: most LoRA adapters that may be loaded at a time.
        adapters: names of the adapters that the configuration loads.
        label_key: see :func:`specserve.trie.namespaces.label`.
        metrics: where a source reports metrics of its own.
        share: connects a memory to the cluster's; None: there is no cluster.
        tokenizer: hash of the target's vocabulary; empty: unknown.
        hidden_size: width of the target's hidden states; 0: unknown.
        replica: name of the replica in the cluster; empty: it runs alone.
        find_drafter: returns the function that finds the drafter of a source. That function may
            take seconds; it returns the drafter's URL, or None while there is no drafter.
        exits: functions that a source adds to stop what it started; called in this order.
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
