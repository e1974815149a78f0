"""Where a configured model is: a folder of this machine or an id on the hub.

Imports nothing of vLLM, so that a file can be checked on a machine without it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from specserve.core.config import ModelConfig
from specserve.core.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ALLOWED = "a folder with a config.json, or a hub id org/name"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as found.

    Attributes:
        path: absolute path of the folder, or the hub id.
        tokenizer: the same for the tokenizer.
        is_local: whether ``path`` is a folder of this machine.
        architecture: the model class that its config.json names; empty for a hub id.
    """

    path: str
    tokenizer: str
    is_local: bool
    architecture: str


def find_checkpoint(model: ModelConfig, prefix: str = "model") -> Checkpoint:
    """Finds the model's and the tokenizer's folder; hub ids are not looked up.

    Relative folders start from the current directory.

    Args:
        model: the section to check.
        prefix: dotted path of the section, for errors.

    Raises:
        ConfigError: no such folder, or its config.json is missing or not a model's.
    """
    path = _folder_or_id(model.path, f"{prefix}.path")
    tokenizer = model.path if not model.tokenizer else model.tokenizer
    is_local = Path(path).is_absolute()
    return Checkpoint(
        path=path,
        tokenizer=_folder_or_id(tokenizer, f"{prefix}.tokenizer"),
        is_local=is_local,
        architecture=_architecture(Path(path), model.path, f"{prefix}.path") if is_local else "",
    )


def _folder_or_id(value: str, field: str) -> str:
    folder = Path(value)
    if folder.is_dir():
        return str(folder.resolve())
    # "configs/modelz" has the form of a hub id, but whoever has a folder "configs" meant a path.
    if _HUB_ID.fullmatch(value) and not folder.parent.is_dir():
        return value
    raise ConfigError(field, value, _ALLOWED)


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
