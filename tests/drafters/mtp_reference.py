"""Reference for the MTP layer: the demo base's training code on held-out text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from specserve.compare.corpus import load_modules
from specserve.core.types import Int32Array
from tools.demo_models.base_model import BaseModel
from tools.demo_models.export import base_tensors
from tools.demo_models.shapes import BaseShape

MODEL = Path(__file__).parents[2] / "configs/models/demo-base"
NUM_TOKENS = 600
SHAPE = BaseShape()


class Text:
    """A text, its hidden states in the base model, and the results of the MTP layer.

    Attributes:
        tokens: int32 ``[NUM_TOKENS]``.
        states: float32 ``[NUM_TOKENS, hidden_size]``.
    """

    def __init__(self, model: BaseModel, tokens: Tensor) -> None:
        self._model = model
        self._ids = tokens.unsqueeze(0)
        with torch.inference_mode():
            self._hidden = model.hidden(self._ids)
            results = model.mtp_hidden(self._hidden[:, :-1], self._ids[:, 1:])
            self._firsts = model.lm_head(results)[0].argmax(-1).tolist()
        self.tokens: Int32Array = tokens.numpy().astype(np.int32)
        self.states: npt.NDArray[np.float32] = self._hidden[0].numpy()

    @torch.inference_mode()
    def entries(self, end: int, begin: int = 0) -> Tensor:
        """Results of entries ``begin .. end - 1``, computed without those before ``begin``."""
        return self._results(self._hidden[:, begin:end], self._ids[:, begin + 1 : end + 1], begin)

    @torch.inference_mode()
    def draft(self, num_tokens: int, length: int = 1, begin: int = 0) -> tuple[int, ...]:
        """The draft that continues the first ``num_tokens`` tokens."""
        if length == 1 and begin == 0:
            return (self._firsts[num_tokens - 2],)
        states = self._hidden[:, begin : num_tokens - 1]
        following = self._ids[:, begin + 1 : num_tokens]
        for _ in range(length):
            last = self._results(states, following, begin)[-1:]
            token = self._model.lm_head(last).argmax(-1, keepdim=True)
            states = torch.cat([states, last.unsqueeze(0)], 1)
            following = torch.cat([following, token], 1)
        return tuple(following[0, -length:].tolist())

    def _results(self, states: Tensor, following: Tensor, begin: int) -> Tensor:
        if begin == 0:
            return self._model.mtp_hidden(states, following)[0]
        mtp, embedded = self._model.mtp, self._model.embed_tokens(following)
        mixed = mtp.eh_proj(torch.cat([mtp.enorm(embedded), mtp.hnorm(states)], -1))
        end = begin + states.shape[1]
        rotation = (self._model.cos[begin:end], self._model.sin[begin:end])
        out: Tensor = mtp.norm(mtp.block(mixed, rotation))[0]
        return out


@cache
def base_model() -> BaseModel:
    """The demo base with its trained weights, in float32."""
    model = BaseModel(SHAPE, max_tokens=NUM_TOKENS).eval()
    stored = load_file(MODEL / "model.safetensors")
    with torch.no_grad():
        for name, tensor in base_tensors(model).items():  # views of the model's tensors
            tensor.copy_(stored[name])
    return model


@cache
def texts() -> tuple[Text, ...]:
    """Three texts of Python code."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    modules = (module.text for module in load_modules(held_out=True))
    codes = (tokenizer.encode(text[:20_000], add_special_tokens=False).ids for text in modules)
    long = [ids[:NUM_TOKENS] for ids in codes if len(ids) >= NUM_TOKENS]
    return tuple(Text(base_model(), torch.tensor(ids)) for ids in long[:3])
