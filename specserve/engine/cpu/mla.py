"""Latent attention on CPU that verifies drafts at the price of decoding.

vLLM 0.32's CPU backend takes a request with more than one token in a step for a prefill: it expands
its whole latent cache to keys and values again, and its rounding differs from that of plain steps.
Here each token of a verified draft is a row of its own for the decode kernel, with as much context
as it may see; so is each token of a prompt no longer than a draft.

The decode kernel reads the context once for each row. In a step with longer drafts, vLLM's kernel
that extends a cache reads it once for all rows of a request, where the CPU multiplies bfloat16: 9
rows of 1,000 tokens of context take half the time, 17 a third.

Where a CPU has AMX and a model fits it, vLLM has another backend, which is untouched; see
:mod:`specserve.engine.cpu.backend`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from specserve.engine.cpu.backend import is_x86

BLOCK_SIZE = 16
"""Positions of a block of the cache: the only one that vLLM's backend has."""

_FEW_ROWS = 2
"""Rows a request up to which the decode kernel takes no longer, on average of a step's requests."""


def use_verifying_backend() -> None:
    """Has vLLM take this module's backend for its own of the same name, in this process."""
    register_backend(
        AttentionBackendEnum.CPU_MLA, f"{__name__}.{VerifyingCPUMLABackend.__qualname__}"
    )


class Extension(NamedTuple):
    """A step's n requests with t rows, as the kernel takes them that extends a cache; all int64.

    Attributes:
        slots: ``[n, positions]``, where each position of a request is in the cache.
        requests: ``[n]``, row of ``slots``.
        seq_lens: ``[n]``, with the new rows.
        num_rows: ``[n]``.
        starts: ``[n]``, first row of each request.
        most_rows: of a request.
        new_slots: ``[t]``, where the new rows are in the cache.
    """

    slots: torch.Tensor
    requests: torch.Tensor
    seq_lens: torch.Tensor
    num_rows: torch.Tensor
    starts: torch.Tensor
    most_rows: int
    new_slots: torch.Tensor


@dataclass
class VerifyingDecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's, by rows; with the same by requests where that takes less time in bfloat16."""

    extension: Extension | None = None


class VerifyingMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Lays out the batch by tokens instead of requests, as far as requests decode."""

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> MLACommonDecodeMetadata:
        """vLLM's method; tensors of ``[requests, ...]`` become such of ``[tokens, ...]``."""
        starts = query_start_loc_cpu.long()
        lengths = torch.diff(starts)
        rows = torch.repeat_interleave(lengths, output_size=num_decode_tokens)
        # Tokens of the same request that come after each.
        after = starts[1:][rows] - 1 - torch.arange(num_decode_tokens)
        seq_lens = seq_lens_device[rows] - after
        extension = None
        if num_decode_tokens > _FEW_ROWS * len(lengths) and multiplies_bfloat16():
            table = block_table_tensor[:, : -(-max_seq_len // BLOCK_SIZE), None].long()
            slots = (table * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
            extension = Extension(
                slots=slots,
                requests=torch.arange(len(lengths)),
                seq_lens=seq_lens_device.long(),
                num_rows=lengths,
                starts=starts[:-1],
                most_rows=max_query_len,
                new_slots=slots[rows, seq_lens.long() - 1],
            )
        return VerifyingDecodeMetadata(
            block_table=block_table_tensor[rows].to(torch.int32),
            seq_lens=seq_lens.to(torch.int32),
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            extension=extension,
        )


class VerifyingCPUMLAImpl(CPUMLAImpl):
    """vLLM's attention, but for steps with drafts in bfloat16."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """vLLM's method of this name."""
        cache = kv_c_and_k_pe_cache
        assert isinstance(attn_metadata.decode, VerifyingDecodeMetadata)
        extension = attn_metadata.decode.extension
        if extension is None or cache.dtype != torch.bfloat16:
            attended: tuple[torch.Tensor, None] = super().forward_mqa(
                q, cache, attn_metadata, layer
            )
            return attended
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        found = q.new_empty(*q.shape[:2], self.kv_lora_rank)
        keys = cache.view(-1, 1, cache.shape[-1])
        new_keys = keys[extension.new_slots]
        ops.cpu_mla_extend(
            q.contiguous(),
            new_keys,
            new_keys[..., : self.kv_lora_rank],
            found,
            keys,
            keys[..., : self.kv_lora_rank],
            *extension[:-1],
            self.scale,
            0.0,
            False,
            0,
            None,
            None,
            None,
        )
        return found, None


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the CPU has the instructions that vLLM's kernel for extensions is written for."""
    return is_x86() and bool(torch.cpu._is_avx512_bf16_supported())


class VerifyingCPUMLABackend(CPUMLABackend):
    """vLLM's CPU backend, but for the layout of the batch and for drafts."""

    @staticmethod
    def get_builder_cls() -> type[VerifyingMetadataBuilder]:
        """The builder of this module."""
        return VerifyingMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[VerifyingCPUMLAImpl]:
        """The attention of this module."""
        return VerifyingCPUMLAImpl
