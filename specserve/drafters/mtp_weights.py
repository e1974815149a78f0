"""Reads the MTP module's tensors one at a time, and converts them to the type it computes in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specserve.core.errors import ConfigError
from specserve.drafters.mtp_files import MtpFiles

_FACTORS = "_scale_inv"
"""Suffix that turns a block-FP8 weight's name into that of its blocks' scale factors."""

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The module's weights, or those of a part of it.

    Attributes:
        dtype: what they are converted to.
        prefix: path of the part, between the layer's name and a tensor's.
    """

    files: MtpFiles
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""

    def part(self, name: str) -> MtpWeights:
        """The weights of one of its parts."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The layer's tensor ``name``; dtype None: :attr:`dtype`.

        Raises:
            ConfigError: it is missing, or its shape or type is not supported.
            SpecServeError: its file cannot be read.
        """
        return self._read(f"{self.files.layer}{self.prefix}{name}", shape, dtype or self.dtype)

    def embedding(self, *shape: int) -> Tensor:
        """The module's embedding or, where it has none, the target's."""
        return self._read(self.files.embedding, shape, self.dtype)

    def head(self, *shape: int) -> Tensor:
        """The module's head or, where it has none, the target's."""
        return self._read(self.files.head, shape, self.dtype)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self._stored(name, shape)
        if tensor.dtype == torch.float8_e4m3fn:
            block = self._block()
            blocks = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
            tensor = dequantize(tensor, self._stored(name + _FACTORS, blocks), block)
        elif tensor.dtype not in _TYPES:
            raise self._unfit(f"{name} in a type other than {tensor.dtype}")
        return tensor.to(dtype)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.files.tensors:
            raise self._unfit(name)
        tensor = self.files.read(name)
        if tensor.shape != shape:
            raise self._unfit(f"{name} of shape {list(shape)}, not {list(tensor.shape)}")
        return tensor.to(self.device)

    def _block(self) -> tuple[int, int]:
        config = self.files.config.get("quantization_config") or {}
        rows, columns = config.get("weight_block_size") or (128, 128)
        return rows, columns

    def _unfit(self, wanted: str) -> ConfigError:
        return ConfigError("model", str(self.files.folder), f"a checkpoint with {wanted}")


def dequantize(weight: Tensor, factors: Tensor, block: tuple[int, int]) -> Tensor:
    """A block-FP8 weight as float32.

    Args:
        weight: float8_e4m3fn ``[rows, columns]``.
        factors: one per block; blocks at the lower and the right edge may be smaller.
        block: rows and columns of a block.
    """
    rows, columns = weight.shape
    scales = factors.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * scales.repeat_interleave(block[1], 1)[:, :columns]
