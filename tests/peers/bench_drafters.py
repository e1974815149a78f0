"""One engine with a drafting model: in a separate process, and inside vLLM's engine.

    python -m tests.peers drafters [--rounds 2]

It works like ``engine``. Both sides use the same MTP module and the same draft model with the same
draft length. They differ in implementation and place. Acceptance at a position is the share of all
drafts whose token there was accepted.

On CPU vLLM cannot serve a draft model with a target that has latent attention, as no block size
suits both. So the draft model's target is a copy of itself with noise in the weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer, load_prompts
from specserve.core.config import AppConfig
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.engine.generation import Job, Sampling
from tests.peers.bench_engine import Contender, compare, measured_config
from tests.peers.tables import print_rows

DRAFT_MODEL = Path("configs/models/demo-draft")

NOISE = 0.1
"""Noise in the draft model's target, as a share of each matrix's standard deviation."""


def mtp_contenders(config: AppConfig, num_tokens: int) -> list[Contender]:
    """No speculation, and the MTP module on both sides. vLLM's also runs with our CPU kernels."""
    source = MtpConfig(kind="mtp", max_draft_len=num_tokens, dynamic=False, num_cpus=0)
    config = config.model_copy(update={"speculation": (source,)})
    return _on_both_sides(config, "mtp", f"vllm-mtp:{num_tokens}")


def draft_model_contenders(
    config: AppConfig, draft_model: Path, target: Path, num_tokens: int
) -> list[Contender]:
    """The same with the draft model, for a target that vLLM can serve with it."""
    source = DraftModelConfig(
        kind="draft_model",
        model=str(draft_model),
        max_draft_len=num_tokens,
        dynamic=False,
        num_cpus=0,
    )
    model = config.model.model_copy(update={"path": str(target)})
    config = config.model_copy(update={"model": model, "speculation": (source,)})
    return _on_both_sides(config, "draft_model", f"vllm-draft:{draft_model}")


def _on_both_sides(config: AppConfig, ours: str, theirs: str) -> list[Contender]:
    return [
        Contender("none", "none", config),
        Contender(ours, ours, config),
        Contender(f"vLLM {ours}, our kernels", theirs, config, on_our_kernels=True),
        Contender(f"vLLM {ours}", theirs, config),
    ]


def blurred_copy(model: Path, out: Path, seed: int) -> None:
    """Writes a copy of a model with noise in its matrices."""
    shutil.copytree(model, out)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(out / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * NOISE
            weights[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def acceptance(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance at each position by set and method, over all concurrencies."""
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
    """Prints a table per concurrency, one of acceptance and, last, one line of JSON."""
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
    config = measured_config(args.config)
    tokenizer = configured_tokenizer(config)
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
    rows = compare(console, mtp_contenders(config, args.mtp_tokens), [jobs] * args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        blurred_copy(DRAFT_MODEL, target, args.seed)
        entrants = draft_model_contenders(config, DRAFT_MODEL, target, args.draft_tokens)
        rows += compare(console, entrants, [jobs] * args.rounds)
    accepted = acceptance(rows)
    print_rows(console, "acceptance at each position", accepted)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(
        json.dumps({"benchmark": "drafters", **circumstances(), **document, "acceptance": accepted})
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
