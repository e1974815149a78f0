"""One engine with a model that drafts: in a process of its own, and in vLLM's engine.

    python -m tests.peers drafters [--rounds 2]

As ``engine``. The same MTP module and the same draft model draft on both sides, always as many
tokens: what differs is where they run and who wrote them. Acceptance at a position is the share of
all drafts whose token there was accepted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specserve.bench.machine import circumstances
from specserve.bench.prompts import load_prompts, load_tokenizer
from specserve.core.config import AppConfig, DraftModelConfig, MtpConfig
from specserve.engine.generation import Job, Sampling
from specserve.serve.config_file import read
from tests.peers.bench_engine import KV_CACHE_BYTES, Contender, compare
from tests.peers.tables import print_rows

DRAFT_MODEL = "configs/models/demo-draft"


def contenders(config: AppConfig, mtp_tokens: int, draft_tokens: int) -> list[Contender]:
    """No speculation, and each module on both sides; on CPU vLLM's also with our kernels."""
    mtp = _with(config, MtpConfig(kind="mtp", max_draft_len=mtp_tokens, dynamic=False, num_cpus=0))
    model = DraftModelConfig(
        kind="draft_model",
        model=DRAFT_MODEL,
        max_draft_len=draft_tokens,
        dynamic=False,
        num_cpus=0,
    )
    draft = _with(config, model)
    return [
        Contender("none", "none", mtp),
        Contender("mtp", "mtp", mtp),
        Contender("vLLM mtp, our kernels", f"vllm-mtp:{mtp_tokens}", mtp, on_our_kernels=True),
        Contender("vLLM mtp", f"vllm-mtp:{mtp_tokens}", mtp),
        Contender("draft_model", "draft_model", draft),
        Contender(
            "vLLM draft_model, our kernels", f"vllm-draft:{DRAFT_MODEL}", draft, on_our_kernels=True
        ),
        Contender("vLLM draft_model", f"vllm-draft:{DRAFT_MODEL}", draft),
    ]


def acceptance(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each set and method, over all concurrencies, the acceptance at each position."""
    found: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    for row in rows:
        if not row["drafts"]:
            continue
        drafted, accepted = found.setdefault((row["set"], row["method"]), ([], []))
        for sums, counts in (
            (drafted, row["drafted_at_position"]),
            (accepted, row["accepted_at_position"]),
        ):
            sums.extend([0] * (len(counts) - len(sums)))
            for position, count in enumerate(counts):
                sums[position] += count
    longest = max(len(drafted) for drafted, _ in found.values())
    return [
        {
            "set": name,
            "method": method,
            **{
                f"position_{index + 1}": round(accepted[index] / max(drafted[index], 1), 3)
                if index < len(drafted)
                else ""
                for index in range(longest)
            },
            "drafts": drafted[0],
        }
        for (name, method), (drafted, accepted) in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table a concurrency, one of acceptance and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/mtp.yaml"))
    parser.add_argument("--sets", default="code,chat", help="prompt sets")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--mtp-tokens", type=int, default=2)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = read(args.config).applications[0].config
    engine = config.engine.model_copy(update={"kv_cache_memory_bytes": KV_CACHE_BYTES})
    config = config.model_copy(update={"engine": engine})
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.revision)
    sampling = Sampling(max_tokens=args.max_tokens)
    jobs = {
        name: [
            Job(prompt.token_ids, sampling)
            for prompt in load_prompts(
                name, tokenizer, num_prompts=args.num_prompts, seed=args.seed
            )
        ]
        for name in args.sets.split(",")
    }
    console = Console()
    entrants = contenders(config, args.mtp_tokens, args.draft_tokens)
    rows = compare(console, entrants, [jobs] * args.rounds)
    accepted = acceptance(rows)
    print_rows(console, "acceptance at each position", accepted)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(
        json.dumps({"benchmark": "drafters", **circumstances(), **document, "acceptance": accepted})
    )
    return 0


def _with(config: AppConfig, source: MtpConfig | DraftModelConfig) -> AppConfig:
    return config.model_copy(update={"speculation": (source,)})


if __name__ == "__main__":
    raise SystemExit(main())
