from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu.mla import (
    BLOCK_SIZE,
    VerifyingCPUMLABackend,
    VerifyingCPUMLAImpl,
    VerifyingMetadataBuilder,
    use_verifying_backend,
)

HEADS, LATENT, ROPE, BLOCK = 2, 512, 64, BLOCK_SIZE
SCALE = 0.1


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a backend of vLLM's CPU build")
def test_vllm_finds_this_backend_under_its_own_name() -> None:
    use_verifying_backend()
    assert AttentionBackendEnum.CPU_MLA.get_class() is VerifyingCPUMLABackend


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the kernel is vLLM's CPU build's")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_a_draft_token_attends_to_its_context_and_to_no_later_token(
    dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    query_lens, seq_lens = [1, 4, 9], [17, 4, 100]
    cache = torch.randn(12, BLOCK, LATENT + ROPE, dtype=dtype)
    blocks = torch.randperm(12)[:9].int()
    table = torch.zeros(3, 7, dtype=torch.int32)
    table[0, :2], table[1, :1], table[2, :7] = blocks[:2], blocks[2:3], torch.arange(7)
    queries = torch.randn(sum(query_lens), HEADS, LATENT + ROPE, dtype=dtype)

    decode = VerifyingMetadataBuilder._build_decode(
        cast(Any, None),
        block_table_tensor=table,
        seq_lens_device=torch.tensor(seq_lens, dtype=torch.int32),
        max_seq_len=max(seq_lens),
        query_start_loc_cpu=torch.tensor([0, 1, 5, 14], dtype=torch.int32),
        query_start_loc_device=torch.tensor([0, 1, 5, 14], dtype=torch.int32),
        num_decode_tokens=14,
        max_query_len=9,
        dcp_tot_seq_lens_device=None,
    )
    attention = VerifyingCPUMLABackend.get_impl_cls().__new__(VerifyingCPUMLAImpl)
    attention.kv_lora_rank, attention.scale = LATENT, SCALE
    found, _ = attention.forward_mqa(
        queries,
        cache,
        cast(Any, SimpleNamespace(decode=decode)),
        cast(Any, 0),
    )

    row = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        context = cache[table[request].long()].flatten(0, 1)
        for visible in range(seq_len - query_len + 1, seq_len + 1):
            scores = queries[row].float() @ context[:visible].float().T * SCALE
            expected = scores.softmax(-1) @ context[:visible, :LATENT].float()
            torch.testing.assert_close(found[row].float(), expected, rtol=tolerance, atol=tolerance)
            row += 1
