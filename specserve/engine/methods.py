"""Names of draft methods in comparisons."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError

NONE, ALL = "none", "all"

HF = "hf"
"""transformers' `generate` instead of vLLM; only `specserve evaluate` accepts it."""

PEERS = {
    "vllm-ngram": "vLLM's prompt lookup, with the settings of a configured `ngram`",
    "vllm-suffix": "vLLM's suffix decoding; `vllm-suffix:K` drafts at most K tokens (16)",
    "vllm-mtp": "vLLM's MTP drafting; `vllm-mtp:K` drafts K tokens (1)",
    "vllm-draft": "vLLM's draft model; `vllm-draft:PATH` names the model",
}
"""vLLM's own draft methods, with descriptions."""

FIELD = "--methods"


@dataclass(frozen=True, slots=True)
class Method:
    """A draft method: ``none``, ``all``, configured sources joined by ``+``, or one of vLLM's.

    Attributes:
        name: the name without its argument.
        argument: text after the colon of a peer's name; empty: the default.
        sources: kinds of specserve's sources in use; empty for ``none`` and for peers.
        on_our_kernels: whether a peer runs on CPU with specserve's kernels; set by code only.
    """

    name: str
    argument: str = ""
    sources: tuple[str, ...] = ()
    on_our_kernels: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name

    @property
    def is_none(self) -> bool:
        """Whether the method is plain decoding without speculation."""
        return self.name == NONE

    @property
    def is_peer(self) -> bool:
        """Whether this is one of vLLM's own methods."""
        return self.name in PEERS

    def number(self, default: int) -> int:
        """The argument as a number of draft tokens.

        Raises:
            ConfigError: it is not a whole number from 1 on.
        """
        if not self.argument:
            return default
        if not self.argument.isdecimal() or int(self.argument) < 1:
            raise ConfigError(FIELD, str(self), f"{self.name}:K with a whole number K >= 1")
        return int(self.argument)

    def narrowed(self, config: AppConfig) -> AppConfig:
        """The configuration with only this method's sources."""
        kept = tuple(source for source in config.speculation if source.kind in self.sources)
        return config.model_copy(update={"speculation": kept})


def parse_method(text: str, config: AppConfig, also: tuple[str, ...] = ()) -> Method:
    """Parses one method's name; ``also`` are further allowed names.

    Raises:
        ConfigError: unknown name, a source that is not configured, or a missing argument.
    """
    kinds = tuple(source.kind for source in config.speculation)
    name, _, argument = text.strip().partition(":")
    if name in PEERS:
        method = Method(name, argument)
        if name == "vllm-draft" and not argument:
            raise ConfigError(FIELD, text, "vllm-draft:PATH, with the draft model's path")
        if name in ("vllm-suffix", "vllm-mtp"):
            method.number(default=1)
        return method
    if not argument:
        if name in (NONE, *also):
            return Method(name)
        if name == ALL and kinds:
            return Method(ALL, sources=kinds)
        asked = tuple(name.split("+"))
        if set(asked) <= set(kinds) and len(set(asked)) == len(asked):
            return Method(name, sources=asked)
    known = [NONE, *([ALL] if kinds else []), *also, *kinds, *PEERS]
    raise ConfigError(FIELD, text, f"{', '.join(known)}; sources of the config may be joined by +")


def parse_methods(text: str, config: AppConfig, also: tuple[str, ...] = ()) -> list[Method]:
    """Parses a comma-separated list of method names.

    Raises:
        ConfigError: as :func:`parse_method`, a name occurs twice, or a package is not installed.
    """
    methods: list[Method] = []
    for name in text.split(","):
        method = parse_method(name, config, also)
        if method in methods:
            raise ConfigError(FIELD, text, "each method once")
        if method.name == "vllm-suffix" and importlib.util.find_spec("arctic_inference") is None:
            needed = "pip install --no-deps arctic-inference==0.1.1"
            raise ConfigError(FIELD, name, f"methods without it, or install it: {needed}")
        methods.append(method)
    return methods
