"""Latent attention (MLA) on CPU that verifies a draft token at the cost of a decoded token.

vLLM 0.32's CPU backend treats a request with more than one token in a step as a prefill. It expands
the whole latent cache to keys and values again, and rounds differently from a decode step. Here the
decode kernel gets each draft token as its own row, with the context that the token may see. A
prompt that is no longer than a draft is computed in the same way.

The decode kernel reads the context once for each row. For longer drafts vLLM's extend kernel reads
it once for all rows of a request. It needs a CPU with bfloat16 arithmetic. With 1,000 tokens of
context, 9 rows take half the time and 17 rows a third.

vLLM's AMX backend is not changed; see :mod:`specserve.engine.cpu.backend`.
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
"""Positions in a block of the cache; vLLM's backend supports no other size."""

_MAX_DECODE_ROWS = 2
"""Mean rows a request in a step up to which the decode kernel is as fast as the extend kernel."""


def use_verifying_backend() -> None:
    """Replaces vLLM's backend ``CPU_MLA`` by this module's, in this process."""
    register_backend(
        AttentionBackendEnum.CPU_MLA, f"{__name__}.{VerifyingCPUMLABackend.__qualname__}"
    )


class Extension(NamedTuple):
    """Arguments of the extend kernel for a step's n requests with t rows; all int64.

    Attributes:
        slots: ``[n, positions]``, cache slot of each position of a request.
        requests: ``[n]``, each request's row in ``slots``.
        seq_lens: ``[n]``, context lengths with the new rows.
        num_rows: ``[n]``, new rows of each request.
        starts: ``[n]``, first row of each request.
        most_rows: largest of ``num_rows``.
        new_slots: ``[t]``, cache slots of the new rows.
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
    """vLLM's metadata by rows, and the extend kernel's arguments if that kernel is faster."""

    extension: Extension | None = None


class VerifyingMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Lays out decode requests by tokens instead of requests."""

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
        """vLLM's method; tensors ``[requests, ...]`` become tensors ``[tokens, ...]``."""
        starts = query_start_loc_cpu.long()
        lengths = torch.diff(starts)
        rows = torch.repeat_interleave(lengths, output_size=num_decode_tokens)
        # Number of later tokens of the same request.
        after = starts[1:][rows] - 1 - torch.arange(num_decode_tokens)
        seq_lens = seq_lens_device[rows] - after
        extension = None
        if num_decode_tokens > _MAX_DECODE_ROWS * len(lengths) and multiplies_bfloat16():
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
    """vLLM's attention, with the extend kernel for steps with drafts in bfloat16."""

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
    """Whether the CPU has AVX512-BF16, which vLLM's extend kernel is written for."""
    return is_x86() and bool(torch.cpu._is_avx512_bf16_supported())


class VerifyingCPUMLABackend(CPUMLABackend):
    """vLLM's CPU backend with this module's batch layout and attention."""

    @staticmethod
    def get_builder_cls() -> type[VerifyingMetadataBuilder]:
        """The builder of this module."""
        return VerifyingMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[VerifyingCPUMLAImpl]:
        """The attention of this module."""
        return VerifyingCPUMLAImpl
