"""Finds a configured model, a local folder or a hub id, and computes its identity.

Imports no vLLM, so a configuration can be checked on a machine without it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from specserve.core.config import AppConfig, ModelConfig
from specserve.core.errors import ConfigError, reason_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ALLOWED = "a folder with a config.json, or a hub id org/name"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
)
"""Files that define the vocabulary. A checkpoint has some of them."""

_PART_BYTES = 1 << 16
"""Bytes hashed of each weight file. Training changes weights everywhere, so a part is enough."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model and its tokenizer.

    Attributes:
        path: absolute path of the model's folder, or its hub id.
        tokenizer: absolute path of the tokenizer's folder, or its hub id.
        architecture: the model class that config.json names; empty for a hub id.
    """

    path: str
    tokenizer: str
    architecture: str

    @property
    def is_local(self) -> bool:
        """Whether the model is a folder on this machine."""
        return bool(self.architecture)


def find_checkpoint(model: ModelConfig, prefix: str = "model") -> Checkpoint:
    """Finds the folders of the model and its tokenizer. Hub ids are not looked up.

    Relative paths start from the current directory. Errors name the section ``prefix``.

    Raises:
        ConfigError: no such folder, or its config.json is missing or names no architecture.
    """
    path = folder_or_id(model.path, f"{prefix}.path")
    tokenizer = folder_or_id(model.tokenizer or model.path, f"{prefix}.tokenizer")
    architecture = ""
    if Path(path).is_absolute():
        architecture = _architecture(Path(path), model.path, f"{prefix}.path")
    return Checkpoint(path, tokenizer, architecture)


def model_identity(model: ModelConfig) -> str:
    """Returns the model's identity, 32 hexadecimal digits. Models with one identity share a memory.

    The identity hashes the revision, config.json and the tokenizer's files, or the hub id. It does
    not depend on the node or the folder. Weights are not read, so a retrained model with the same
    config.json needs another ``model.revision``. A hub id without revision always counts as the
    same model.

    Raises:
        ConfigError: the model's or the tokenizer's folder is missing or cannot be read.
    """
    checkpoint = find_checkpoint(model)
    tokenizer = model.tokenizer or model.path
    identity = blake2b(digest_size=16)
    for part in (
        model.revision.encode(),
        *_contents(checkpoint.path, ("config.json",), model.path, "model.path"),
        *_contents(checkpoint.tokenizer, _TOKENIZER_FILES, tokenizer, "model.tokenizer"),
    ):
        identity.update(len(part).to_bytes(8, "little") + part)
    return identity.hexdigest()


def text_config(config: AppConfig) -> Any:
    """The transformers configuration of the model, or of its text part.

    Raises:
        ConfigError: transformers cannot read the model's configuration.
    """
    from transformers import AutoConfig  # seconds to import

    path = config.model.path
    try:
        return AutoConfig.from_pretrained(path, **config.pretrained_options).get_text_config()
    except (OSError, ValueError) as error:
        allowed = f"a model that transformers reads ({reason_of(error)})"
        raise ConfigError("model.path", path, allowed) from None


def text_sizes(config: AppConfig) -> tuple[int, int]:
    """Context length in tokens and vocabulary size. Raises like :func:`text_config`."""
    text = text_config(config)
    return config.engine.max_model_len or text.max_position_embeddings, text.vocab_size


def fingerprint(model: ModelConfig) -> str:
    """Returns a checkpoint's fingerprint, 32 hexadecimal digits, without reading all weights.

    It hashes :func:`model_identity` and the name, the size and a part of each weight file.

    Raises:
        ConfigError: the model's or the tokenizer's folder is missing or cannot be read.
    """
    digest = blake2b(model_identity(model).encode(), digest_size=16)
    folder = Path(find_checkpoint(model).path)
    if folder.is_absolute():
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with file.open("rb") as weights:
                    size = weights.seek(0, os.SEEK_END)
                    weights.seek(size // 2)
                    digest.update(f"{file.name} {size} ".encode() + weights.read(_PART_BYTES))
            except OSError as error:
                allowed = f"a readable {file.name} ({error.strerror})"
                raise ConfigError("model.path", model.path, allowed) from None
    return digest.hexdigest()


def _contents(place: str, names: Sequence[str], value: str, field: str) -> list[bytes]:
    """Names and contents of the files that exist in a folder; for a hub id, the id."""
    folder = Path(place)
    if not folder.is_absolute():
        return [place.encode()]
    parts = []
    for name in names:
        try:
            content = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(field, value, f"a readable {name} ({error.strerror})") from None
        parts += [name.encode(), content]
    return parts


def folder_or_id(value: str, field: str) -> str:
    """Returns the absolute path of the folder ``value``, or ``value`` if it is a hub id.

    Raises:
        ConfigError: it is neither; the error names ``field``.
    """
    folder = Path(value)
    if folder.is_dir():
        return str(folder.resolve())
    # "configs/modelz" also has the form of a hub id. If a folder "configs" exists, it is a path.
    if _HUB_ID.fullmatch(value) and not folder.parent.is_dir():
        return value
    where = "" if folder.is_absolute() else f"; looked for in {Path.cwd()}"
    raise ConfigError(field, value, f"{_ALLOWED}{where}")


def _architecture(folder: Path, value: str, field: str) -> str:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(field, value, _ALLOWED) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid JSON"
        raise ConfigError(field, value, f"a readable config.json ({reason})") from None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(field, value, "a config.json that names the model's `architectures`")
    return names[0]
