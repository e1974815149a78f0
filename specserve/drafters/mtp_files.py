"""The files of a checkpoint's MTP module: finds them, fetches them, splits them off.

Finding reads only the headers of the files that contain the module; other shards may be missing.
Splitting copies the stored bytes, so block-FP8 weights stay unchanged. It uses a buffer of fixed
size, so memory does not grow with the checkpoint. Headers are read and written here, because the
safetensors library neither tells where a tensor's bytes are nor copies them without loading.
Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from specserve.core.errors import ConfigError, SpecServeError, reason_of
from specserve.core.new_folder import new_folder

ARCHITECTURE = "DeepseekV3ForCausalLM"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OWN_EMBEDDING, OWN_HEAD = "embed_tokens.weight", "shared_head.head.weight"

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

BUFFER_BYTES = 16 << 20

_SMALL_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)
"""Small files that are copied where the checkpoint has them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor stored in a safetensors file: bytes ``begin .. end - 1``.

    ``dtype`` is safetensors' name: ``BF16``, ``F8_E4M3``, ...
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """The tensor's size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class MtpFiles:
    """The MTP module's part of a checkpoint, whole or split off.

    Attributes:
        folder: folder of the checkpoint.
        config: content of its config.json.
        layer: prefix of the names of the module's own tensors: ``model.layers.61.``.
        tensors: tensors by full name. They include the target's embedding and head if the module
            has no copies of its own.
    """

    folder: Path
    config: dict[str, Any]
    layer: str
    tensors: dict[str, StoredTensor]

    @property
    def embedding(self) -> str:
        """Name of the embedding's tensor."""
        return next(n for n in (self.layer + OWN_EMBEDDING, EMBEDDING) if n in self.tensors)

    @property
    def head(self) -> str:
        """Name of the head's tensor; the embedding's if they are tied."""
        names = (self.layer + OWN_HEAD, HEAD, self.embedding)
        return next(name for name in names if name in self.tensors)


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
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        stored |= read_header(file)
    absent = [name for name in places if name not in stored]
    if absent:
        raise _Unfit(f"files that hold what {INDEX} says: {absent[0]} is missing")
    # In the order of the files, so that they are read from front to back.
    order = sorted(places, key=lambda name: (stored[name].file, stored[name].begin))
    return MtpFiles(folder, config, layer, {name: stored[name] for name in order})


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
        return dict.fromkeys(read_header(folder / SINGLE), folder / SINGLE)
    files = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or any(Path(str(f)).name != f for f in files.values()):
        raise _Unfit(f"a {INDEX} with a `weight_map` of file names")
    return {name: folder / file for name, file in files.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """A safetensors file's tensors by their names."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(length)
            header = json.loads(stream.read(length))
            size = os.fstat(stream.fileno()).st_size
        header.pop("__metadata__", None)
        data = 8 + length
        tensors = {
            name: StoredTensor(
                file,
                entry["dtype"],
                tuple(entry["shape"]),
                data + entry["data_offsets"][0],
                data + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        }
    except FileNotFoundError:
        raise _Unfit(f"a checkpoint with all its files: {file.name} is missing") from None
    except OSError as error:
        raise _Unfit(f"a readable {file.name} ({error.strerror})") from None
    except (ValueError, AttributeError, LookupError, TypeError):
        raise _Unfit(f"a whole {file.name}: its header is not safetensors'") from None
    if any(tensor.end > size for tensor in tensors.values()):
        raise _Unfit(f"a whole {file.name}: its end is missing")
    return tensors


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


def split_mtp(
    files: MtpFiles,
    out: Path,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Writes the module as a checkpoint of one safetensors file.

    ``out`` appears only when it is complete.

    Args:
        files: the module's files.
        out: new folder, or an empty one.
        advance: called with the number of bytes written since its last call.

    Raises:
        ConfigError: ``out`` is not empty.
        SpecServeError: a file cannot be read or written.
    """
    with new_folder(out) as folder:
        _write(folder / SINGLE, files.tensors, advance)
        for name in _SMALL_FILES:
            if (files.folder / name).exists():
                shutil.copyfile(files.folder / name, folder / name)


def _write(
    path: Path, tensors: Mapping[str, StoredTensor], advance: Callable[[int], object]
) -> None:
    """Writes a safetensors file: the header's length, the header as JSON, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        offsets = [offset, offset + tensor.num_bytes]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        offset = offsets[1]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the data
    with path.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            _copy(tensor, stream, advance)


def _copy(tensor: StoredTensor, stream: BinaryIO, advance: Callable[[int], object]) -> None:
    with tensor.file.open("rb") as source:
        source.seek(tensor.begin)
        left = tensor.num_bytes
        while left:
            piece = source.read(min(left, BUFFER_BYTES))
            if not piece:
                raise SpecServeError(f"{tensor.file}: became shorter while it was read")
            stream.write(piece)
            advance(len(piece))
            left -= len(piece)
