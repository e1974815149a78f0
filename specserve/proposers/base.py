"""What every draft source offers. Narrow on purpose: a source knows tokens, not engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import DraftModelConfig, MtpConfig, TrieConfig
from specserve.core.types import Draft, DraftBatch

if TYPE_CHECKING:
    from specserve.trie.memory import SharedMemory, TrieMemory  # numba takes seconds to import


class Proposer(Protocol):
    """A source of drafts. All calls come from one thread, the one that runs the decoding steps."""

    def propose(self, batch: DraftBatch) -> list[Draft]:
        """Guesses the next tokens of every request of the batch.

        May update what the source remembers of these requests; never changes ``batch`` and keeps
        no reference to its arrays, which are the engine's own and change after the call.

        Args:
            batch: n requests. A request that is absent is not finished: it may be pre-empted and
                come back in any later step, on another row, with the same tokens and more.

        Returns:
            n drafts, in the batch's order, each at most ``batch.max_draft_tokens[i]`` tokens long;
            a draft without tokens says that the source has no guess.

        Raises:
            Exception: anything; the chain then switches the source off for a while.
        """
        ...

    def forget(self, request_ids: list[str]) -> None:
        """Drops all that is kept for these finished or aborted requests; unknown ids are fine."""
        ...


@runtime_checkable
class Reader(Protocol):
    """A source that has to read a text before it can draft, which takes time."""

    def reading_s(self, batch: DraftBatch) -> Sequence[float]:
        """How long it would take to read what is not known of each text, where that costs the
        target time.

        Returns:
            n times seconds; infinite: it cannot draft for that text now; NaN: it never can.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SourceContext:
    """What a source may need to know of the replica that it drafts for.

    Attributes:
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
