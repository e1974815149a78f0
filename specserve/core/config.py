"""The application's configuration: ``args`` of the Serve application ``specserve.app:build``.

Closed and frozen: an unknown key is an error, and nothing changes after validation. No file is
read here; whether a model path exists or a cluster can hold the shards is checked where that is
needed.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specserve.core.errors import ConfigError
from specserve.core.validation import from_validation_error

MAX_DRAFT_TOKENS = 128
"""vLLM's rejection sampler takes at most this many draft tokens a request and step."""

_OF_DRAFTERS = ("dynamic", "dtype", "num_cpus", "num_gpus", "max_texts", "timeout_s")
_NOT_WHERE = {
    "actor": (),
    "beside_rank_0": ("num_actors", "resources"),
    "in_engine": ("num_actors", "resources", *_OF_DRAFTERS),
}
"""Options of drafters that mean nothing in a place."""

_ROUNDING = 1e-6  # sums of parts such as 0.1 are not exact

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Section(BaseModel):
    """Base of all sections: closed, frozen, no silent conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _check_further_resources(value: dict[str, float]) -> dict[str, float]:
    for name, amount in value.items():
        if name in ("CPU", "GPU"):
            raise ConfigError(name, amount, "names other than CPU and GPU, which are set apart")
        if not 0 < amount < float("inf"):
            raise ConfigError(name, amount, "a number > 0")
    return value


class ModelConfig(Section):
    """The target model."""

    path: str = Field(min_length=1)
    """Folder of a Hugging Face checkpoint, or its id on the hub."""
    served_name: str = Field(default="", max_length=200)
    """Name in the OpenAI API; empty: ``path`` as given."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty: the default one."""
    tokenizer: str = ""
    """Folder or id of the tokenizer; empty: the model's own."""

    @property
    def name(self) -> str:
        """The model's name in the API and in metrics."""
        return self.served_name or self.path


class EngineConfig(Section):
    """The engine. Names and meanings are vLLM's."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    max_model_len: int = Field(default=0, ge=0)
    """Context length in tokens, prompt and output; 0: the model's own."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Requests decoded in one step."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens computed in one step, prefill included."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory for weights and KV cache; on CPU ``kv_cache_memory_bytes`` rules."""
    kv_cache_memory_bytes: int = Field(default=0, ge=0)
    """KV cache in bytes a shard; 0: from ``gpu_memory_utilization`` (1 GiB on CPU)."""
    enforce_eager: bool = False
    seed: int = Field(default=0, ge=0)
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further options of vLLM's ``AsyncEngineArgs`` and ``FrontendArgs``, by their field names;
    unknown ones are refused when the engine's arguments are built."""


class NgramConfig(Section):
    """Prompt lookup: drafts are copied from the request's own prompt and output."""

    kind: Literal["ngram"]
    max_draft_len: int = Field(default=8, ge=1, le=MAX_DRAFT_TOKENS)
    """Longest draft in tokens."""
    max_matching_ngram_size: int = Field(default=4, ge=1, le=16)
    """Longest suffix of the context that is looked up; tried first."""
    min_matching_ngram_size: int = Field(default=2, ge=1, le=16)
    """Shortest suffix that is looked up."""
    use_oldest: bool = False
    """Of several matches of one length take the oldest instead of the newest."""
    dynamic: bool = True
    """Shorten or skip drafts that do not pay, by recent acceptance and the cost of verifying."""

    @model_validator(mode="after")
    def _sizes_are_ordered(self) -> Self:
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise ConfigError(
                "min_matching_ngram_size",
                self.min_matching_ngram_size,
                f"1 .. max_matching_ngram_size ({self.max_matching_ngram_size})",
            )
        return self


class TrieConfig(Section):
    """Memory decoding: drafts of what followed before, in any request's text."""

    kind: Literal["trie"]
    decoding_length: int = Field(default=16, ge=1, le=MAX_DRAFT_TOKENS)
    """Longest draft in tokens."""
    min_match_len: int = Field(default=2, ge=2, le=16)
    """Shortest context, in tokens, that has to have stood before."""
    dynamic: bool = True
    """Shorten or skip drafts that do not pay, by recent acceptance and the cost of verifying."""
    max_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Memory of a replica's trie, about 65 bytes a token; each namespace has an equal part."""
    share: Literal["cluster", "replica"] = "cluster"
    """Who learns from a replica's traffic: all replicas, or itself alone."""
    share_tenants: bool = False
    """One memory for all tenants. Then a request's speed tells what others asked before."""
    learn_prompts: bool = True
    """Learn from prompts too, not only from what the model wrote."""
    num_store_shards: int = Field(default=1, ge=1, le=64)
    """Actors that hold the cluster's memory, each with namespaces of its own."""
    store_resources: dict[str, float] = Field(default_factory=dict)
    """Ray resources that each of these reserves, by name; amounts greater than 0."""
    snapshot_url: str = ""
    """Folder or fsspec URL where the cluster's memory survives restarts; empty: nowhere."""
    snapshot_interval_s: float = Field(default=60.0, ge=1.0)
    """Seconds between two snapshots."""

    _check_resources = field_validator("store_resources")(_check_further_resources)

    @property
    def max_draft_len(self) -> int:
        """Longest draft in tokens."""
        return self.decoding_length

    @model_validator(mode="after")
    def _snapshots_are_the_clusters(self) -> Self:
        url = self.snapshot_url
        if url and self.share != "cluster":
            raise ConfigError("snapshot_url", url, "empty, unless share is cluster")
        if url and "://" not in url and not url.startswith("/"):
            raise ConfigError(
                "snapshot_url", url, "an absolute path, or a URL: any node may read it"
            )
        return self


class DrafterConfig(Section):
    """What the models that draft have in common: actors of their own, shared by the replicas."""

    placement: Literal["actor", "beside_rank_0", "in_engine"] = "actor"
    """Where it runs: in actors of its own; in one of each replica's own, in the place of the first
    shard and with a part of its GPU; or in vLLM's engine by vLLM's own method, which drafts alone
    and knows neither ``dynamic`` nor requests' controls."""
    max_draft_len: int = Field(default=3, ge=1, le=MAX_DRAFT_TOKENS)
    """Longest draft in tokens."""
    dynamic: bool = True
    """Shorten or skip drafts that do not pay, by recent acceptance and the cost of verifying."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type to compute in; auto: float32 on CPU, bfloat16 on a GPU."""
    num_actors: int = Field(default=1, ge=1, le=1024)
    """Drafters that the replicas share; each replica talks to one of them."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that a drafter reserves; on CPU also its number of threads, at least 1."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs that a drafter reserves, or a part of one."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources that a drafter reserves, by name; amounts greater than 0."""
    max_texts: int = Field(default=64, ge=1)
    """Texts that a drafter remembers, of all replicas together; the KV cache has room for these."""
    timeout_s: float = Field(default=0.25, gt=0, le=60)
    """How long a decoding step waits for a draft, in seconds; then it goes on without."""

    _check_resources = field_validator("resources")(_check_further_resources)

    @model_validator(mode="after")
    def _its_place_has_its_options(self) -> Self:
        for name in _NOT_WHERE[self.placement]:
            usual = type(self).model_fields[name].get_default(call_default_factory=True)
            if (value := getattr(self, name)) != usual:
                allowed = f"{usual or 'empty'}, where placement is {self.placement}"
                raise ConfigError(name, value, allowed)
        return self


class DraftModelConfig(DrafterConfig):
    """A smaller model with the target's vocabulary."""

    kind: Literal["draft_model"]
    model: str = Field(min_length=1)
    """Folder of a Hugging Face checkpoint, or its id on the hub."""


class MtpConfig(DrafterConfig):
    """The target's multi-token prediction module."""

    kind: Literal["mtp"]
    model: str = ""
    """Folder of its weights as ``specserve split-mtp`` writes them, or a checkpoint's, or the id of
    one on the hub; empty: the target's own, as it must be ``in_engine``."""
    max_draft_len: int = Field(default=1, ge=1, le=MAX_DRAFT_TOKENS)
    """Longest draft in tokens; from the second one on it is fed its own hidden states."""

    @model_validator(mode="after")
    def _in_engine_it_is_the_targets_own(self) -> Self:
        if self.model and self.placement == "in_engine":
            raise ConfigError("model", self.model, "empty, where placement is in_engine")
        return self


SourceConfig = Annotated[
    NgramConfig | TrieConfig | DraftModelConfig | MtpConfig, Field(discriminator="kind")
]
"""One entry of ``speculation``; ``kind`` tells which."""


class PlacementConfig(Section):
    """Where replicas and their shards run."""

    num_replicas: int = Field(default=1, ge=1)
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy for the tensor-parallel shards of one replica."""
    num_cpus_per_shard: int = Field(default=1, ge=1)
    """CPUs that a shard reserves; on CPU also its number of threads."""
    shard_resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources that each shard reserves, by name; amounts greater than 0."""
    timeout_s: float = Field(default=120.0, gt=0)
    """How long to wait for the cluster to hold a replica's shards, in seconds."""

    _check_resources = field_validator("shard_resources")(_check_further_resources)

    def shard_bundle(self, *, on_gpu: bool) -> dict[str, float]:
        """The Ray resources that one shard needs, as a placement group's bundle."""
        bundle = {"CPU": float(self.num_cpus_per_shard), **self.shard_resources}
        return {"GPU": 1.0, **bundle} if on_gpu else bundle


class ApiKeyConfig(Section):
    """An API key and whose it is. The key itself never stands in a file."""

    env: str
    """Environment variable that holds the key where the application is built."""
    tenant: str
    """Whose key it is; a tenant may have several."""

    @model_validator(mode="after")
    def _names_are_names(self) -> Self:
        if not _VARIABLE.fullmatch(self.env):
            raise ConfigError("env", self.env, "a variable's name: letters, digits and _")
        check_tenant(self.tenant, "tenant")
        return self


def check_tenant(name: str, field: str) -> None:
    """Raises ConfigError where ``name`` is not a tenant's name; ``field`` says where it stood."""
    if not _TENANT.fullmatch(name):
        allowed = "1 .. 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        raise ConfigError(field, name, allowed)


class HttpConfig(Section):
    """The HTTP side of a replica."""

    max_queued_requests: int = Field(default=128, ge=0)
    """Requests that may wait beyond the ``max_num_seqs`` being decoded; more are answered 503."""
    retry_after_s: int = Field(default=1, ge=1)
    """``Retry-After`` of that answer, in seconds."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long running requests may take to finish at shutdown, in seconds."""
    api_keys: tuple[ApiKeyConfig, ...] = ()
    """Keys that requests may come with, each with its tenant; empty: no key is asked for."""
    speculation_page: bool = True
    """Answer ``/speculation``, a page that shows live what is drafted and accepted."""
    show_text: bool = False
    """Show the texts of recent requests on that page; otherwise lengths and sources alone."""

    @field_validator("api_keys", mode="before")
    @classmethod
    def _keys_to_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _each_variable_once(self) -> Self:
        counts = Counter(key.env for key in self.api_keys)
        for index, key in enumerate(self.api_keys):
            if counts[key.env] > 1:
                raise ConfigError(f"api_keys.{index}.env", key.env, "each variable at most once")
        return self


class AppConfig(Section):
    """Everything ``specserve.app:build`` takes."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    speculation: tuple[SourceConfig, ...] = ()
    """Draft sources; empty: no speculation. Each kind at most once."""
    placement: PlacementConfig = PlacementConfig()
    http: HttpConfig = HttpConfig()

    @field_validator("speculation", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        counts = Counter(source.kind for source in self.speculation)
        for index, source in enumerate(self.speculation):
            if counts[source.kind] > 1:
                raise ConfigError(
                    f"speculation.{index}.kind", source.kind, "each kind of source at most once"
                )
            length = "decoding_length" if source.kind == "trie" else "max_draft_len"
            for option in ("max_model_len", "max_num_batched_tokens"):
                limit = getattr(self.engine, option)
                if limit and source.max_draft_len >= limit:
                    raise ConfigError(
                        f"speculation.{index}.{length}",
                        source.max_draft_len,
                        f"less than engine.{option} ({limit})",
                    )
        return self

    @model_validator(mode="after")
    def _in_engine_is_alone(self) -> Self:
        for index, source in enumerate(self.speculation):
            if (
                isinstance(source, DrafterConfig)
                and source.placement == "in_engine"
                and len(self.speculation) > 1
            ):
                field = f"speculation.{index}.placement"
                allowed = "actor or beside_rank_0, where there are other sources"
                raise ConfigError(field, source.placement, allowed)
        return self

    @model_validator(mode="after")
    def _rank_0_has_room_for_drafters(self) -> Self:
        share, num_cpus = self.engine.gpu_memory_utilization, self.placement.num_cpus_per_shard
        for name, room, giver in (
            ("num_gpus", 1 - share, f"engine.gpu_memory_utilization ({share:g}) leaves of a GPU"),
            ("num_cpus", num_cpus, f"placement.num_cpus_per_shard ({num_cpus}) reserves"),
        ):
            for index, source in self.beside_rank_0.items():
                amount = getattr(source, name)
                if amount > room + _ROUNDING:
                    allowed = f"at most {max(round(room, 4), 0):g}, what {giver}"
                    raise ConfigError(f"speculation.{index}.{name}", amount, allowed)
                room -= amount
        return self

    @property
    def beside_rank_0(self) -> dict[int, DraftModelConfig | MtpConfig]:
        """The sources that draft in rank 0's place, by their index."""
        return {
            index: source
            for index, source in enumerate(self.speculation)
            if isinstance(source, DrafterConfig) and source.placement == "beside_rank_0"
        }

    @property
    def drafts_in_engine(self) -> bool:
        """Whether vLLM drafts by a method of its own instead of our sources."""
        return any(
            isinstance(source, DrafterConfig) and source.placement == "in_engine"
            for source in self.speculation
        )

    @property
    def num_speculative_tokens(self) -> int:
        """The longest draft that any source may make, in tokens; 0: no speculation."""
        return max((source.max_draft_len for source in self.speculation), default=0)


def parse(args: object, prefix: str = "") -> AppConfig:
    """Validates an application's ``args``.

    Args:
        args: the mapping as read from the Serve YAML file.
        prefix: dotted path of ``args`` in that file, put before the fields in errors;
            empty: fields are told from below ``args``.

    Raises:
        ConfigError: the first problem, with field, value and what is allowed.
    """
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        raise from_validation_error(error, AppConfig, prefix) from None
