"""The sources' configuration: the entries of ``speculation``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import AliasChoices, Field, model_validator

from specserve.core.errors import ConfigError
from specserve.core.section import Checkpoint, Resources, Section

MAX_DRAFT_TOKENS = 128
"""vLLM's rejection sampler takes at most this many draft tokens a request and step."""

DraftLength = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]

_OF_DRAFTERS = ("dynamic", "dtype", "num_cpus", "num_gpus", "max_texts", "timeout_s")
_WITHOUT_EFFECT = {
    "actor": (),
    "beside_rank_0": ("num_actors", "resources"),
    "in_engine": ("num_actors", "resources", *_OF_DRAFTERS),
}
"""Options of drafters that must keep their defaults with a placement, as they have no effect."""
_OF_STORE = ("store_resources", "snapshot_url", "snapshot_interval_s")
"""Options of the trie's store."""


class Label(NamedTuple):
    """The name of a source's drafts in metrics and on the page: letters, digits and ``_``.

    The colours on the page are ``#rrggbb``, for a light and for a dark background.
    """

    name: str
    light: str
    dark: str


class SourceSection(Section):
    """Base of the entries of ``speculation``, with the properties of each kind of source.

    Attributes:
        SOURCE: ``module:class`` of the implementation, imported only if the source is configured,
            and called with this configuration and the replica's context.
        LABELS: labels of its drafts; the source itself has the first label's colour.
        NEEDS: the field of ``RequestControls`` that it drafts from; it is not asked while no
            request has this field. Empty: it drafts for all requests.
    """

    SOURCE: ClassVar[str]
    LABELS: ClassVar[tuple[Label, ...]]
    NEEDS: ClassVar[Literal["", "prediction", "grammar"]] = ""

    kind: str
    """The kind of source."""
    max_draft_len: DraftLength
    """Longest draft in tokens."""
    dynamic: bool = True
    """Shorten or skip drafts that do not save time, by recent acceptance and verification cost."""

    def _refuse_changed(self, names: Iterable[str], where: str) -> None:
        """Refuses other values than the defaults of options without effect, ``where`` says when."""
        for name in names:
            usual = type(self).model_fields[name].get_default(call_default_factory=True)
            if (value := getattr(self, name)) != usual:
                raise ConfigError(name, value, f"{usual or 'empty'}, {where}")


class NgramConfig(SourceSection):
    """Prompt lookup: drafts are what followed the last tokens in the request's own text."""

    SOURCE = "specserve.sources.ngram:NgramSource"
    LABELS = (Label("ngram", "#0b6bb3", "#5cb0ee"),)

    kind: Literal["ngram"]
    max_draft_len: DraftLength = 8
    max_matching_ngram_size: int = Field(default=4, ge=1, le=16)
    """Longest suffix of the context that is looked up; tried first."""
    min_matching_ngram_size: int = Field(default=1, ge=1, le=16)
    """Shortest suffix that is looked up. Between the two, each size is twice the one before."""

    @model_validator(mode="after")
    def _sizes_are_ordered(self) -> Self:
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise ConfigError(
                "min_matching_ngram_size",
                self.min_matching_ngram_size,
                f"1 .. max_matching_ngram_size ({self.max_matching_ngram_size})",
            )
        return self


class PredictionConfig(SourceSection):
    """Predicted outputs: drafts are copied from the text that a request expects as its answer."""

    SOURCE = "specserve.sources.prediction:PredictionSource"
    LABELS = (Label("prediction", "#7d6600", "#d9bb3c"),)
    NEEDS = "prediction"

    kind: Literal["prediction"]
    max_draft_len: DraftLength = 16


class GrammarConfig(SourceSection):
    """Structured outputs: drafts are what a request's grammar forces."""

    SOURCE = "specserve.sources.grammar:GrammarSource"
    LABELS = (Label("grammar", "#4f7300", "#a3c94a"),)
    NEEDS = "grammar"

    kind: Literal["grammar"]
    max_draft_len: DraftLength = 16


MIN_TRIE_BYTES = 66_704
"""Smallest memory of a tenant's or an adapter's texts: its tables and 16 pages."""


class TrieConfig(SourceSection):
    """Memory decoding: drafts are what followed the same context in any request's text."""

    SOURCE = "specserve.sources.trie:TrieSource.build"
    LABELS = (
        Label("trie_local", "#0a7a58", "#43c39b"),
        Label("trie_cluster", "#7748c2", "#b696f2"),
    )

    kind: Literal["trie"]
    max_draft_len: DraftLength = Field(
        default=16, validation_alias=AliasChoices("max_draft_len", "decoding_length")
    )
    """Longest draft in tokens. ``decoding_length``, MindIE's name, is accepted too."""
    min_match_len: int = Field(default=2, ge=2, le=16)
    """Shortest context in tokens that must have occurred before."""
    max_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Bytes of a replica's trie, about 61 per token; each namespace has an equal part, at least
    66,704 bytes."""
    share: Literal["cluster", "replica"] = "cluster"
    """Which replicas learn from a replica's requests: all replicas, or only itself."""
    share_tenants: bool = False
    """Use one memory for all tenants. A request's speed then reveals what others asked before."""
    learn_prompts: bool = True
    """Learn from prompts too, not only from the model's outputs."""
    store_resources: Resources = Field(default_factory=dict)
    """Ray resources that the cluster's memory reserves, by name; amounts greater than 0."""

    snapshot_url: str = ""
    """Folder or fsspec URL for snapshots of the cluster's memory; empty: restarts lose it."""
    snapshot_interval_s: float = Field(default=60.0, ge=1.0)
    """Seconds between two snapshots."""

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_one_length(cls, given: Any) -> Any:
        if isinstance(given, dict) and {"max_draft_len", "decoding_length"} <= given.keys():
            other = "no other name of max_draft_len beside it"
            raise ConfigError("decoding_length", given["decoding_length"], other)
        return given

    @model_validator(mode="after")
    def _snapshots_are_the_clusters(self) -> Self:
        url = self.snapshot_url
        if self.share != "cluster":
            self._refuse_changed(_OF_STORE, "unless share is cluster")
        if url and "://" not in url and not url.startswith("/"):
            raise ConfigError(
                "snapshot_url", url, "an absolute path, or a URL: any node may read it"
            )
        return self


class DrafterConfig(SourceSection):
    """Options common to all models that draft."""

    SOURCE = "specserve.sources.remote:DrafterClient"
    NEEDS_STATES: ClassVar[bool] = False
    """Whether it drafts from the target's hidden states, which must be sent to it."""

    placement: Literal["actor", "beside_rank_0", "in_engine"] = "actor"
    """Where it runs. ``actor``: in actors that replicas share. ``beside_rank_0``: in one actor per
    replica, beside the first shard, with a part of its GPU. ``in_engine``: in vLLM, as the only
    source, without ``dynamic`` and without requests' controls."""
    max_draft_len: DraftLength = 3
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the computation; auto: float32 on CPU, bfloat16 on a GPU."""
    num_actors: int = Field(default=1, ge=1, le=1024)
    """Drafters that the replicas share; each replica talks to one of them."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that a drafter reserves; on CPU also its number of threads, at least 1."""
    num_gpus: float = Field(default=0.0, ge=0, le=1)
    """Part of a GPU that a drafter reserves; 1: a whole one; 0: it computes on CPUs, also on a node
    with GPUs. It never uses more than one."""
    resources: Resources = Field(default_factory=dict)
    """Further Ray resources that a drafter reserves, by name; amounts greater than 0."""
    max_texts: int = Field(default=64, ge=1)
    """Texts that a drafter's KV cache holds, of all its replicas together."""
    timeout_s: float = Field(default=0.25, gt=0, le=60)
    """Longest wait of a decoding step for a draft, in seconds; then it continues without one."""

    @model_validator(mode="after")
    def _its_place_has_its_options(self) -> Self:
        unused = _WITHOUT_EFFECT[self.placement]
        self._refuse_changed(unused, f"where placement is {self.placement}")
        return self


class DraftModelConfig(DrafterConfig):
    """A smaller model with the target's vocabulary."""

    LABELS = (Label("draft_model", "#a95300", "#eea24f"),)

    kind: Literal["draft_model"]
    model: Checkpoint = Field(min_length=1)
    """Folder of a Hugging Face checkpoint, or its id on the hub."""


class MtpConfig(DrafterConfig):
    """The target's multi-token prediction module."""

    LABELS = (Label("mtp", "#b02a77", "#f083bd"),)
    NEEDS_STATES = True

    kind: Literal["mtp"]
    model: Checkpoint = ""
    """Folder that ``specserve split-mtp`` wrote, or a checkpoint's folder or id on the hub. Empty:
    the target's own module; with ``in_engine`` it must be empty."""
    max_draft_len: DraftLength = 1
    """Longest draft in tokens. From the second token on, the module uses its own hidden states."""

    @model_validator(mode="after")
    def _in_engine_it_is_the_targets_own(self) -> Self:
        if self.model and self.placement == "in_engine":
            raise ConfigError("model", self.model, "empty, where placement is in_engine")
        return self


SourceConfig = Annotated[
    NgramConfig | PredictionConfig | GrammarConfig | TrieConfig | DraftModelConfig | MtpConfig,
    Field(discriminator="kind"),
]
"""One entry of ``speculation``, selected by ``kind``. Adding a class here registers a source."""


def source_sections() -> dict[str, type[SourceSection]]:
    """The configuration class of each kind of source."""
    sections: tuple[type[SourceSection], ...] = get_args(get_args(SourceConfig)[0])
    return {get_args(each.model_fields["kind"].annotation)[0]: each for each in sections}
