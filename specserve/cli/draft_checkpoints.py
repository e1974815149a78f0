"""Checks the checkpoints of an application's drafters, if they are on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.drafters.mtp_files import ARCHITECTURE, find_mtp
from specserve.engine.checkpoint import Checkpoint, folder_or_id


def check_draft_checkpoints(
    config: AppConfig, checkpoint: Checkpoint, *, is_elsewhere: bool
) -> list[str]:
    """Checks that draft models and MTP modules exist and fit the target model.

    Args:
        config: the application's configuration.
        checkpoint: the target model's checkpoint.
        is_elsewhere: the application runs on other machines, so files may be missing here.

    Returns:
        One line for each thing that was not checked.

    Raises:
        ConfigError: a draft model is missing or has another vocabulary, or there is no MTP module.
    """
    notes = []
    for index, source in enumerate(config.speculation):
        field = f"speculation.{index}.model"
        if isinstance(source, MtpConfig):
            model, field = (
                (source.model, field) if source.model else (config.model.path, "model.path")
            )
            if source.placement == "in_engine" and checkpoint.architecture != ARCHITECTURE:
                notes.append(f"{model}: the MTP module was not checked: vLLM knows its format")
            elif is_elsewhere and not any(Path(model).glob("*.safetensors")):
                if checkpoint.architecture not in ("", ARCHITECTURE):
                    allowed = f"a checkpoint of {ARCHITECTURE}, not of {checkpoint.architecture}"
                    raise ConfigError("model.path", config.model.path, allowed)
                notes.append(f"{model}: the MTP module was not checked: its weights are not here")
            elif Path(path := folder_or_id(model, field)).is_absolute():
                find_mtp(path, field)
        elif isinstance(source, DraftModelConfig):
            if is_elsewhere and not Path(source.model).is_dir():
                unchecked = "its folder is not here"
            else:
                unchecked = _check_vocabulary(source.model, field, checkpoint)
            if unchecked:
                notes.append(f"{source.model}: the vocabulary was not checked: {unchecked}")
    return notes


def _check_vocabulary(model: str, field: str, checkpoint: Checkpoint) -> str:
    """Compares a draft model's vocabulary with the target's; returns why that fails, or "".

    Raises:
        ConfigError: the vocabularies differ, or the model does not exist.
    """
    path = folder_or_id(model, field)
    if not Path(path).is_absolute() or not Path(checkpoint.tokenizer).is_absolute():
        return "a model of the hub is not looked up"
    if find_spec("transformers") is None:
        return "transformers is not installed"
    from specserve.drafters.vocabulary import fingerprint  # takes seconds

    ours, theirs = fingerprint(checkpoint.tokenizer), fingerprint(path)
    if not ours or not theirs:
        return "a tokenizer cannot be read"
    if ours != theirs:
        raise ConfigError(field, model, f"a model with the vocabulary of {checkpoint.tokenizer}")
    return ""
