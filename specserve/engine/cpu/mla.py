"""Latent attention on CPU that verifies drafts at the price of decoding.

vLLM 0.32's CPU backend takes a request with more than one token in a step for a prefill: it expands
its whole latent cache to keys and values again, and its rounding differs from that of plain steps.
Here each token of a verified draft is a row of its own for the decode kernel, with as much context
as it may see; so is each token of a prompt no longer than a draft. Where a CPU has AMX and a model
fits it, vLLM has another backend, which is untouched; see :mod:`specserve.engine.cpu.backend`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def use_verifying_backend() -> None:
    """Has vLLM take this module's backend for its own of the same name, in this process."""
    register_backend(
        AttentionBackendEnum.CPU_MLA, f"{__name__}.{VerifyingCPUMLABackend.__qualname__}"
    )


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
        lengths = torch.diff(query_start_loc_cpu).long()
        rows = torch.repeat_interleave(lengths, output_size=num_decode_tokens)
        # Tokens of the same request that come after each.
        after = query_start_loc_cpu[1:][rows] - 1 - torch.arange(num_decode_tokens)
        return MLACommonDecodeMetadata(
            block_table=block_table_tensor[rows].to(torch.int32),
            seq_lens=(seq_lens_device[rows] - after).to(torch.int32),
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
        )


class VerifyingCPUMLABackend(CPUMLABackend):
    """vLLM's CPU backend, but for the layout of the batch."""

    @staticmethod
    def get_builder_cls() -> type[VerifyingMetadataBuilder]:
        """The builder of this module."""
        return VerifyingMetadataBuilder
