"""The files of a checkpoint's MTP module: finds them, fetches them, splits them off.

Finding reads only the headers of the files that contain the module; other shards may be missing.
Splitting copies the tensors as they are stored, so block-FP8 weights stay unchanged. The files are
mapped into memory, so memory does not grow with the checkpoint. Only reading and writing tensors
imports torch.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from specserve.core.errors import ConfigError, SpecServeError, reason_of
from specserve.core.new_folder import new_folder

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE = "DeepseekV3ForCausalLM"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OWN_EMBEDDING, OWN_HEAD = "embed_tokens.weight", "shared_head.head.weight"

_SMALL_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)
"""Small files that are copied where the checkpoint has them."""


@dataclass(frozen=True, slots=True)
class MtpFiles:
    """The MTP module's part of a checkpoint, whole or split off.

    Attributes:
        folder: folder of the checkpoint.
        config: content of its config.json.
        layer: prefix of the names of the module's own tensors: ``model.layers.61.``.
        tensors: the file of each tensor, by full name. They include the target's embedding and head
            if the module has no copies of its own.
    """

    folder: Path
    config: dict[str, Any]
    layer: str
    tensors: dict[str, Path]

    @property
    def embedding(self) -> str:
        """Name of the embedding's tensor."""
        return next(n for n in (self.layer + OWN_EMBEDDING, EMBEDDING) if n in self.tensors)

    @property
    def head(self) -> str:
        """Name of the head's tensor; the embedding's if they are tied."""
        names = (self.layer + OWN_HEAD, HEAD, self.embedding)
        return next(name for name in names if name in self.tensors)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, mapped into memory.

        Raises:
            SpecServeError: its file cannot be read.
        """
        file = self.tensors[name]
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise SpecServeError(f"{file}: {reason_of(error)}") from None
        return tensor


def find_mtp(folder: str, field: str) -> MtpFiles:
    """Finds the module in a checkpoint's folder; errors name the folder's option, ``field``.

    Raises:
        ConfigError: it is no checkpoint of DeepSeek-V3's architecture, has no MTP layer or more
            than one, or a file that contains the module is missing or damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(field, folder, "a folder with a config.json and safetensors files")
    try:
        return _find(path)
    except _Unfit as unfit:
        raise ConfigError(field, folder, str(unfit)) from None


def fetch_mtp(model: str, revision: str) -> str:
    """Fetches from the hub only those files of a model that contain its MTP module.

    Returns:
        folder in this machine's cache of the hub.

    Raises:
        ConfigError: there is no such model, it cannot be fetched, or it has no MTP module.
    """
    # Installed with the engine; a local checkpoint is found and split without it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    fetch = partial(hf_hub_download, model, revision=revision or None)
    try:
        folder = Path(fetch("config.json")).parent
        try:
            fetch(INDEX)
        except EntryNotFoundError:
            fetch(SINGLE)
        else:
            _, _, places = _look_up(folder)
            for name in sorted({file.name for file in places.values()}):
                fetch(name)
    except _Unfit as unfit:
        raise ConfigError("model", model, str(unfit)) from None
    except (OSError, ValueError) as error:
        allowed = f"a folder, or a model that the hub has ({reason_of(error)})"
        raise ConfigError("model", model, allowed) from error
    return str(folder)


class _Unfit(Exception):
    """Says in words what would have been accepted."""


def _find(folder: Path) -> MtpFiles:
    config, layer, places = _look_up(folder)
    names = {file: _names(file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in names[file]:
            raise _Unfit(f"files that hold what {INDEX} says: {name} is missing")
    return MtpFiles(folder, config, layer, places)


def _look_up(folder: Path) -> tuple[dict[str, Any], str, dict[str, Path]]:
    """The checkpoint's config.json, the module's layer, and the file of each of its tensors."""
    config = _read_json(folder / "config.json")
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise _Unfit(f"a checkpoint of {ARCHITECTURE}, not of {architectures}")
    number = config.get("num_hidden_layers")
    layer = f"model.layers.{number}."
    places = _places(folder)
    own = [name for name in places if name.startswith(layer)]
    if not isinstance(number, int) or f"{layer}eh_proj.weight" not in own:
        raise _Unfit(f"a checkpoint with an MTP layer, {layer}*")
    if f"model.layers.{number + 1}.eh_proj.weight" in places:
        raise _Unfit("a checkpoint with one MTP layer, not with several")
    if layer + OWN_EMBEDDING not in own:
        own.append(EMBEDDING)
    if layer + OWN_HEAD not in own and not config.get("tie_word_embeddings"):
        own.append(HEAD)
    missing = [name for name in own if name not in places]
    if missing:
        raise _Unfit(f"a checkpoint with {missing[0]}")
    return config, layer, {name: places[name] for name in own}


def _places(folder: Path) -> dict[str, Path]:
    """The file of every tensor of the checkpoint."""
    if not (folder / INDEX).exists():
        return dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)
    files = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or any(Path(str(f)).name != f for f in files.values()):
        raise _Unfit(f"a {INDEX} with a `weight_map` of file names")
    return {name: folder / file for name, file in files.items()}


def _names(file: Path) -> set[str]:
    """Names of a safetensors file's tensors."""
    try:
        with safe_open(file, framework="np") as opened:  # imports no torch
            return set(opened.keys())
    except FileNotFoundError:
        raise _Unfit(f"a checkpoint with all its files: {file.name} is missing") from None
    except (OSError, SafetensorError) as error:
        raise _Unfit(f"a whole {file.name} ({reason_of(error)})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _Unfit(f"a folder with a readable {path.name} ({error.strerror})") from None
    except ValueError:
        raise _Unfit(f"a {path.name} of valid JSON") from None
    if not isinstance(content, dict):
        raise _Unfit(f"a {path.name} that is a JSON object")
    return content


def split_mtp(files: MtpFiles, out: Path) -> int:
    """Writes the module as a checkpoint of one safetensors file; returns its tensors' bytes.

    ``out`` appears only when it is complete.

    Args:
        files: the module's files.
        out: new folder, or an empty one.

    Raises:
        ConfigError: ``out`` is not empty.
        SpecServeError: a file cannot be read or written.
    """
    from safetensors.torch import save_file  # imports torch, which takes seconds

    with new_folder(out) as folder:
        tensors = {name: files.read(name) for name in files.tensors}
        try:
            save_file(tensors, folder / SINGLE, {"format": "pt"})
        except SafetensorError as error:
            raise SpecServeError(f"{out}: {reason_of(error)}") from None
        (folder / SINGLE).chmod(0o644)  # safetensors lets only the owner read it
        for name in _SMALL_FILES:
            if (files.folder / name).exists():
                shutil.copyfile(files.folder / name, folder / name)
    return sum(tensor.nbytes for tensor in tensors.values())
