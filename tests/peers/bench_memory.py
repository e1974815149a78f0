"""One engine with a memory: vLLM's suffix decoding and ours, on texts seen before and never seen.

    python -m tests.peers memory [--rounds 4]

As ``engine``, but each round has prompts of its own, since a memory would know the others by heart:

    random  random tokens at temperature 1: nothing can be foreseen, drafting only costs
    code    tasks on held-out code, other ones in each round
    again   tasks on the same few files in each round, in other words and with other edits

The peer needs ``pip install --no-deps arctic-inference==0.1.1``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specserve.compare.corpus import Module, load_modules
from specserve.compare.machine import circumstances
from specserve.compare.prompts import Tokenizer, load_prompts, load_tokenizer
from specserve.compare.tasks import TaskMaker
from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import NgramConfig
from specserve.engine.generation import Job, Sampling
from tests.peers.bench_engine import Contender, compare, measured_config

NUM_FILES = 3
FILE_CHARS = 6000
TASK_CHARS = 3000
RANDOM_PROMPT_TOKENS, RANDOM_VOCAB = 200, 4000
EDITS = ("rename", "repeat", "strip_docstring", "quote")
"""Kinds of tasks whose answers stand, with changes, in the file."""


def contenders(config: AppConfig) -> list[Contender]:
    """No speculation, vLLM's two methods without a model, ours without and with a memory."""
    if {source.kind for source in config.speculation} < {"ngram", "trie"}:
        raise ConfigError("speculation", [], "sources of the kinds ngram and trie")
    usual = NgramConfig(
        kind="ngram", max_draft_len=5, min_matching_ngram_size=2, max_matching_ngram_size=3
    )
    with_usual = config.model_copy(update={"speculation": (usual,)})
    return [
        Contender("none", "none", config),
        Contender("ngram+trie", "ngram+trie", config),
        Contender("vLLM ngram (k=5, 2..3)", "vllm-ngram", with_usual),
        Contender("the same, our kernels", "vllm-ngram", with_usual, on_our_kernels=True),
        Contender("vLLM suffix (k=16)", "vllm-suffix:16", config),
        Contender("suffix, our kernels", "vllm-suffix:16", config, on_our_kernels=True),
    ]


def random_jobs(vocab_size: int, number: int, max_tokens: int, seed: int) -> list[Job]:
    """Prompts of random tokens, continued at random."""
    rng = random.Random(seed)
    sampling = Sampling(max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
    prompts = [
        tuple(rng.randrange(vocab_size) for _ in range(RANDOM_PROMPT_TOKENS)) for _ in range(number)
    ]
    return [Job(prompt, sampling) for prompt in prompts]


def asked_again(seed: int) -> list[Module]:
    """The files that ``again_jobs`` are about."""
    large = [module for module in load_modules(held_out=True) if len(module.text) >= FILE_CHARS]
    modules = random.Random(seed).sample(large, NUM_FILES)
    return [Module(name=module.name, text=module.text[:FILE_CHARS]) for module in modules]


def again_jobs(
    tokenizer: Tokenizer, files: Sequence[Module], number: int, max_tokens: int, seed: int
) -> list[Job]:
    """Tasks on ``files``, in words and with edits drawn by ``seed``."""
    tasks, rng = TaskMaker(list(files)), random.Random(seed)
    jobs = []
    for index in range(number):
        task = tasks.draw(rng, TASK_CHARS, kind=EDITS[index % len(EDITS)])
        text = tokenizer.apply_chat_template(
            task.messages[:-1], add_generation_prompt=True, tokenize=False
        )
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        jobs.append(Job(ids, Sampling(max_tokens=max_tokens)))
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table a concurrency and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = measured_config(args.config)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.revision)
    files = asked_again(args.seed)
    number, max_tokens = args.num_prompts, args.max_tokens
    rounds = []
    for seed in range(args.seed, args.seed + args.rounds):
        code = load_prompts("code", tokenizer, num_prompts=number, seed=seed)
        rounds.append(
            {
                "random": random_jobs(RANDOM_VOCAB, number, max_tokens, seed),
                "code": [Job(each.token_ids, Sampling(max_tokens=max_tokens)) for each in code],
                "again": again_jobs(tokenizer, files, number, max_tokens, seed),
            }
        )
    rows = compare(Console(), contenders(config), rounds)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "memory", **circumstances(), **document}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
