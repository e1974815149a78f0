"""The MTP module of a checkpoint on the hub: the few files that it is in are fetched, no others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from specserve.core.errors import ConfigError
from specserve.drafters.mtp_files import INDEX, SINGLE, files_of_mtp
from specserve.drafters.unreadable import UNREADABLE, reason_of


def fetch_mtp(model: str, revision: str, field: str) -> str:
    """Folder in the hub's cache of this machine, with the module's files.

    Args:
        model: id on the hub.
        revision: branch, tag or commit; empty: the default one.
        field: what the user named the model by, for errors.

    Raises:
        ConfigError: there is no such model, it cannot be fetched, or it has no MTP module.
    """
    fetch = partial(hf_hub_download, model, revision=revision or None)
    try:
        folder = Path(fetch("config.json")).parent
        try:
            fetch(INDEX)
        except EntryNotFoundError:
            fetch(SINGLE)
        else:
            for name in sorted(files_of_mtp(folder, field, model)):
                fetch(name)
    except UNREADABLE as error:
        allowed = f"a folder, or a model that the hub has ({reason_of(error)})"
        raise ConfigError(field, model, allowed) from error
    return str(folder)
