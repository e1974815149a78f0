"""vLLM and transformers compute the same log-probabilities for the project's own weights.

Otherwise speculation could be lossless and the text wrong. With other rope parameters vLLM's rotary
embedding on CPU differs from the reference by several nats.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specserve.compare.corpus import load_modules

MODELS = Path(__file__).parents[2] / "configs" / "models"
NUM_TOKENS = 600
LARGEST_DIFFERENCE = 0.01
"""In nats per token."""

_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    folder, method = sys.argv[1:3]
    prompts = json.load(sys.stdin)
    backend = {"attention_backend": "CPU_MLA"}  # of latent attention: AMX's has no float32
    speculative = {"method": method, "num_speculative_tokens": 1} | backend
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=4,
              speculative_config=speculative if method != "none" else None,
              worker_cls="specserve.engine.cpu.worker.CpuWorker", **backend)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    logprobs = [
        [entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], p[1:])]
        for o, p in zip(outputs, prompts)
    ]
    print("LOGPROBS", json.dumps(logprobs))

if __name__ == "__main__":
    main()
"""


_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""One process, and a KV cache of 1 GiB instead of half of the memory."""


def _prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [module.text for module in load_modules(held_out=True)]
    ids = [tokenizer(text[:6000]).input_ids for text in texts if len(text) > 6000]
    return [i[:NUM_TOKENS] for i in ids[:3]]


def _logprobs_of_vllm(
    folder: Path, method: str, prompts: list[list[int]], script: Path
) -> list[list[float]]:
    script.write_text(_VLLM)
    done = subprocess.run(
        [sys.executable, str(script), str(folder), method],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **_ENVIRONMENT},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert lines, done.stderr[-3000:]
    logprobs: list[list[float]] = json.loads(lines[0].removeprefix("LOGPROBS "))
    return logprobs


@torch.no_grad()
def _logprobs_of_transformers(folder: Path, prompts: list[list[int]]) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        all_logprobs = model(ids).logits[0].log_softmax(dim=-1)
        logprobs.append(all_logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())
    return logprobs


@pytest.mark.parametrize(("name", "method"), [("demo-base", "mtp"), ("demo-draft", "none")])
def test_vllm_gives_the_prompt_log_probabilities_of_transformers(
    name: str, method: str, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="the log-probabilities are vLLM's")
    folder = MODELS / name
    prompts = _prompts(folder)
    ours = _logprobs_of_vllm(folder, method, prompts, tmp_path / "logprobs.py")
    reference = _logprobs_of_transformers(folder, prompts)
    differences = [
        abs(a - b) for x, y in zip(ours, reference, strict=True) for a, b in zip(x, y, strict=True)
    ]
    assert len(differences) == 3 * (NUM_TOKENS - 1)
    assert max(differences) < LARGEST_DIFFERENCE


def test_the_weights_stay_small() -> None:
    sizes = {p.parent.name: p.stat().st_size for p in MODELS.glob("*/model.safetensors")}
    assert sizes.keys() == {"demo-base", "demo-draft"}
    assert sizes["demo-base"] <= 24e6
    assert sizes["demo-draft"] <= 5e6
