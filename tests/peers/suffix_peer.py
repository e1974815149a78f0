"""The peer of the draft memory: Arctic Inference's suffix trees, called as vLLM calls them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from specserve.core.errors import SpecServeError
from specserve.core.types import Int32Array

MAX_MODEL_LEN = 1 << 20


def arctic() -> Any:
    """The peer's module.

    Raises:
        SpecServeError: it is not installed. The message says how to install it.
    """
    try:
        from arctic_inference import suffix_decoding
    except ImportError:
        command = "pip install --no-deps arctic-inference==0.1.1"
        raise SpecServeError(f"the peer is missing: {command}") from None
    return suffix_decoding


class VllmSuffix:
    """vLLM's suffix proposer with its default settings.

    Args:
        max_draft_len: longest draft in tokens.
    """

    def __init__(self, max_draft_len: int) -> None:
        arctic()
        # Imported here, since only the peer needs vLLM.
        from vllm.config.speculative import SpeculativeConfig
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        settings = {
            name: getattr(SpeculativeConfig, name)
            for name in vars(SpeculativeConfig)
            if name.startswith("suffix_decoding_")
        }
        self.settings = settings | {"num_speculative_tokens": max_draft_len}
        self.proposer = SuffixDecodingProposer(
            SimpleNamespace(
                speculative_config=SimpleNamespace(**self.settings),
                model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            )
        )
        self.cache = self.proposer.suffix_cache
        self.max_draft_len = max_draft_len

    def learn(self, name: str, text: Int32Array) -> None:
        """Learns a text as the output of an earlier request."""
        self.cache.start_request(name, np.empty(0, np.int32))
        self.cache.add_active_response(name, text)
        self.cache.stop_request(name)

    def propose(
        self,
        request_ids: Sequence[str],
        token_ids: Int32Array,
        num_tokens: Int32Array,
        num_prompt_tokens: Int32Array,
        sampled_token_ids: list[list[int]],
    ) -> list[list[int]]:
        """One step of a batch. All its requests are decoded, and missing requests have ended."""
        batch = SimpleNamespace(
            req_ids=request_ids,
            num_tokens_no_spec=num_tokens,
            req_id_to_index={name: row for row, name in enumerate(request_ids)},
            num_prompt_tokens=num_prompt_tokens,
            token_ids_cpu=token_ids,
        )
        drafts: list[list[int]] = self.proposer.propose(
            self.max_draft_len, batch, sampled_token_ids
        )
        return drafts
