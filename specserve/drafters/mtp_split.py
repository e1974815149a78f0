"""Writes the MTP module of a checkpoint as a folder of its own, which a drafter loads alone.

Bytes are copied as they lie in the files, so that block-FP8 stays what it is, and through a buffer
of fixed size, so that memory does not depend on the checkpoint's. Imports no torch.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from specserve.core.errors import ConfigError, SpecServeError
from specserve.drafters.mtp_files import INDEX, MtpFiles, StoredTensor

SHARD_BYTES = 4 << 30
"""Tensors of one file, in bytes; a larger tensor has a file to itself."""

BUFFER_BYTES = 16 << 20

_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)
"""Small files that are copied where the checkpoint has them."""


def split_mtp(
    files: MtpFiles,
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Writes the module. Nothing stands at ``out`` before all of it is written.

    Args:
        files: the module's tensors.
        out: new folder, or an empty one.
        shard_bytes: tensors of one file, in bytes.
        advance: told how many bytes have been written since it was last called.

    Raises:
        ConfigError: ``out`` holds something.
        SpecServeError: a file cannot be read or written.
    """
    check_out(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        try:
            _write(files, aside, shard_bytes, advance)
            aside.chmod(0o755)
            aside.rename(out)
        except BaseException:
            shutil.rmtree(aside)
            raise
    except OSError as error:
        raise SpecServeError(f"{error.filename or out}: {error.strerror}") from None


def check_out(out: Path) -> None:
    """Raises ConfigError where ``out`` is anything but an empty folder or nothing."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("OUT", str(out), "a folder that does not exist yet, or is empty")


def _write(
    files: MtpFiles, folder: Path, shard_bytes: int, advance: Callable[[int], object]
) -> None:
    shards = list(_shards(files.tensors, shard_bytes))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard, advance)
        places |= dict.fromkeys(shard, name)
    total = sum(tensor.num_bytes for tensor in files.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for name in _FILES:
        if (files.folder / name).exists():
            shutil.copyfile(files.folder / name, folder / name)


def _shards(
    tensors: Mapping[str, StoredTensor], shard_bytes: int
) -> Iterator[dict[str, StoredTensor]]:
    shard: dict[str, StoredTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.num_bytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.num_bytes
    yield shard


def _write_shard(
    path: Path, tensors: Mapping[str, StoredTensor], advance: Callable[[int], object]
) -> None:
    """A safetensors file: the header's length, the header as JSON, the tensors' bytes."""
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
    encoded += b" " * (-len(encoded) % 8)  # the data begins aligned
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
