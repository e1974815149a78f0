"""The application's configuration: ``args`` of the Serve application ``specserve.app:build``.

Closed and frozen: an unknown key is an error, and nothing changes after validation. Validation
reads no file; whether a model path exists or the cluster can hold the shards is checked later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from specserve.core.errors import ConfigError
from specserve.core.section import Checkpoint, Resources, Section
from specserve.core.source_config import (
    MIN_TRIE_BYTES,
    DrafterConfig,
    DraftModelConfig,
    MtpConfig,
    SourceConfig,
    TrieConfig,
)
from specserve.core.validation import from_validation_error

_MAX_NAME = 200
_ROUNDING = 1e-6  # sums of parts such as 0.1 are not exact

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ModelConfig(Section):
    """The target model."""

    path: Checkpoint = Field(min_length=1)
    """Folder of a Hugging Face checkpoint, or its id on the hub."""
    served_name: str | tuple[str, ...] = ""
    """Name in the OpenAI API, or a list of names. Metrics and the page show the first one. Empty:
    ``path`` as given."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty: the default one. Of a folder: any name that tells it
    from other weights with the same ``config.json``, so that they share no draft memory."""
    tokenizer: Checkpoint = ""
    """Folder or id of the tokenizer; empty: the model's own."""

    @field_validator("served_name", mode="before")
    @classmethod
    def _check_names(cls, value: object) -> object:
        if value == "":
            return value
        names = value if isinstance(value, list | tuple) else [value]
        if not names or not isinstance(value, str | list | tuple):
            raise ConfigError("", value, "a name, or a list of at least one name")
        for index, name in enumerate(names):
            field = "" if isinstance(value, str) else str(index)
            if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
                raise ConfigError(field, name, f"a name of 1 .. {_MAX_NAME} characters")
            if name in names[:index]:
                raise ConfigError(field, name, "each name at most once")
        return value if isinstance(value, str) else tuple(names)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names in the API."""
        names = self.served_name or self.path
        return (names,) if isinstance(names, str) else names

    @property
    def name(self) -> str:
        """The model's name in answers, metrics and on the page."""
        return self.names[0]


class EngineConfig(Section):
    """The engine. Names and meanings are vLLM's."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights and activations; auto: what vLLM chooses for the checkpoint."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Shards of the model. Each is a Ray actor, except usually a single one on CPU."""
    max_model_len: int = Field(default=0, ge=0)
    """Context length in tokens, prompt and output; 0: the model's own."""
    max_num_seqs: int = Field(default=256, ge=1, le=1 << 20)
    """Requests decoded in one step."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens computed in one step, prefill included."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory for weights and KV cache; on CPU set ``kv_cache_memory_bytes``."""
    kv_cache_memory_bytes: int = Field(default=0, ge=0)
    """Bytes of KV cache per shard; 0: from ``gpu_memory_utilization`` (1 GiB on CPU)."""
    enforce_eager: bool = False
    """Run the model without compilation and CUDA graphs. A CPU machine without a C++ compiler,
    Python's headers or a writable ``VLLM_CACHE_ROOT`` always does."""
    seed: int = Field(default=0, ge=0)
    """Seed of the engine's random numbers."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further options of vLLM's ``AsyncEngineArgs`` and ``FrontendArgs``, by their field names;
    unknown ones are refused when the engine's arguments are built."""


class PlacementConfig(Section):
    """Where replicas and their shards run."""

    num_replicas: int = Field(default=1, ge=1)
    """Replicas of the model, each with shards of its own."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy for the tensor-parallel shards of one replica."""
    num_cpus_per_shard: int = Field(default=1, ge=1)
    """CPUs that a shard reserves; on CPU also its number of threads. HTTP and drafters need a CPU
    beside the threads."""
    shard_resources: Resources = Field(default_factory=dict)
    """Further Ray resources that each shard reserves, by name; amounts greater than 0."""
    timeout_s: float = Field(default=120.0, gt=0)
    """How long to wait for the cluster to hold a replica's shards, in seconds."""

    def shard_bundle(self, *, on_gpu: bool) -> dict[str, float]:
        """The Ray resources that one shard needs, as a placement group's bundle."""
        bundle = {"CPU": float(self.num_cpus_per_shard), **self.shard_resources}
        return {"GPU": 1.0, **bundle} if on_gpu else bundle


class ApiKeyConfig(Section):
    """An API key and its tenant. The file names only the variable that holds the key."""

    env: str
    """Environment variable that holds the key, on every node."""
    tenant: str
    """The key's tenant; a tenant may have several keys."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not _VARIABLE.fullmatch(self.env):
            raise ConfigError("env", self.env, "a variable's name: letters, digits and _")
        check_tenant(self.tenant, "tenant")
        return self


def check_tenant(name: str, field: str) -> None:
    """Raises ConfigError if ``name`` is not a valid tenant name; the error names ``field``."""
    if not _TENANT.fullmatch(name):
        allowed = "1 .. 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        raise ConfigError(field, name, allowed)


def _check_each_once(values: Sequence[str], field: str, allowed: str) -> None:
    """Raises ConfigError for a value that occurs twice; ``field`` is formatted with its index."""
    for index, value in enumerate(values):
        if values.count(value) > 1:
            raise ConfigError(field.format(index), value, allowed)


class HttpConfig(Section):
    """A replica's HTTP server."""

    max_queued_requests: int = Field(default=128, ge=0, le=1 << 20)
    """Requests that may wait beyond the ``max_num_seqs`` being decoded; more are answered 503."""
    retry_after_s: int = Field(default=1, ge=1)
    """``Retry-After`` of these answers, in seconds."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long running requests may take to finish at shutdown, in seconds."""
    api_keys: tuple[ApiKeyConfig, ...] = Field(default=(), strict=False)
    """API keys that requests may use, each with its tenant; empty: no key is required."""
    generation_api: bool = True
    """Answer ``/generate``, ``/generate_stream``, ``/`` and ``/info`` as Text Generation Inference
    does."""
    speculation_page: bool = True
    """Answer ``/speculation``, a page that shows live which tokens are drafted and accepted."""
    memory_api: Literal["with_api_keys", "always", "never"] = "with_api_keys"
    """Answer ``/v1/speculation/memory``, by which clients fill and clear the draft memory. With
    ``always`` and no API keys, every client may do so."""
    show_text: bool = False
    """Show the texts of recent requests on ``/speculation``; otherwise only lengths and sources."""

    @model_validator(mode="after")
    def _each_variable_once(self) -> Self:
        variables = [key.env for key in self.api_keys]
        _check_each_once(variables, "api_keys.{}.env", "each variable at most once")
        return self


class AppConfig(Section):
    """Everything ``specserve.app:build`` takes."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    speculation: tuple[SourceConfig, ...] = Field(default=(), strict=False)
    """Draft sources; empty: no speculation. Each kind at most once."""
    placement: PlacementConfig = PlacementConfig()
    http: HttpConfig = HttpConfig()

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        kinds = [source.kind for source in self.speculation]
        _check_each_once(kinds, "speculation.{}.kind", "each kind of source at most once")
        for index, source in enumerate(self.speculation):
            for option in ("max_model_len", "max_num_batched_tokens"):
                limit = getattr(self.engine, option)
                if limit and source.max_draft_len >= limit:
                    raise ConfigError(
                        f"speculation.{index}.max_draft_len",
                        source.max_draft_len,
                        f"less than engine.{option} ({limit})",
                    )
        return self

    @model_validator(mode="after")
    def _a_step_has_a_token_for_each_request(self) -> Self:
        most, least = self.engine.max_num_batched_tokens, self.engine.max_num_seqs
        if most < least:
            allowed = f"at least engine.max_num_seqs ({least})"
            raise ConfigError("engine.max_num_batched_tokens", most, allowed)
        if self.engine.vllm.get("enable_lora") and self.speculation:  # a rule of vLLM
            width = self.num_speculative_tokens + 1
            if most < least * width:
                allowed = (
                    f"at least {least * width}, engine.max_num_seqs ({least}) * {width}, the "
                    "longest draft and a token, with enable_lora"
                )
                raise ConfigError("engine.max_num_batched_tokens", most, allowed)
        return self

    @model_validator(mode="after")
    def _each_trie_has_room(self) -> Self:
        vllm = self.engine.vllm
        adapters = vllm.get("max_cpu_loras") or vllm.get("max_loras") or 1
        num_adapters = adapters if vllm.get("enable_lora") and isinstance(adapters, int) else 0
        for index, source in enumerate(self.speculation):
            if isinstance(source, TrieConfig):
                tenants = {"" if source.share_tenants else key.tenant for key in self.http.api_keys}
                num_tries = max(len(tenants), 1) * (1 + num_adapters)
                if source.max_bytes < num_tries * MIN_TRIE_BYTES:
                    allowed = (
                        f"at least {num_tries * MIN_TRIE_BYTES}, {MIN_TRIE_BYTES} for each of "
                        f"{num_tries} tenants and adapters"
                    )
                    raise ConfigError(f"speculation.{index}.max_bytes", source.max_bytes, allowed)
        return self

    @model_validator(mode="after")
    def _in_engine_is_alone(self) -> Self:
        for index, source in self.placed("in_engine").items():
            if len(self.speculation) > 1:
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
        """The sources placed beside rank 0, by their index."""
        return self.placed("beside_rank_0")

    @property
    def drafts_in_engine(self) -> bool:
        """Whether vLLM drafts by one of its own methods instead of our sources."""
        return bool(self.placed("in_engine"))

    @property
    def pretrained_options(self) -> dict[str, Any]:
        """Keyword arguments of transformers' ``from_pretrained`` for the model's files."""
        trusts = self.engine.vllm.get("trust_remote_code") is True
        return {"revision": self.model.revision or "main", "trust_remote_code": trusts}

    @property
    def has_sources(self) -> bool:
        """Whether any of our sources drafts."""
        return bool(self.speculation) and not self.drafts_in_engine

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the drafts of all sources."""
        return tuple(label.name for source in self.speculation for label in source.LABELS)

    @property
    def num_speculative_tokens(self) -> int:
        """The longest draft that any source may make, in tokens; 0: no speculation."""
        return max((source.max_draft_len for source in self.speculation), default=0)

    def placed(self, *placements: str) -> dict[int, DraftModelConfig | MtpConfig]:
        """The model-based sources with one of these placements, by their index."""
        return {
            index: source
            for index, source in enumerate(self.speculation)
            if isinstance(source, DrafterConfig) and source.placement in placements
        }


def parse(args: object, prefix: str = "") -> AppConfig:
    """Validates an application's ``args``, as read from the Serve YAML file.

    ``prefix`` is the dotted path of ``args`` in that file; errors put it before their fields.

    Raises:
        ConfigError: names field, value and what is allowed; ``further`` has the other errors.
    """
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        raise from_validation_error(error, AppConfig, prefix) from None
