"""``specserve compare``: the same prompts under several methods, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from specserve.compare.arguments import (
    at_least_zero,
    in_existing_folder,
    number_from,
    only_application,
)

# `run` imports the rest, so that `specserve --help` stays fast.


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "compare",
        help="run the same prompts under several ways to draft, and check that the text is equal",
        description="Runs the same prompts offline, one engine after another, and prints a table. "
        "With `none` among the methods, greedy output is checked against it: exit code 1 if "
        "speculation has changed the text.",
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help="Serve configuration file")
    add("--methods", default="none,all", help="`none`, `all`, kinds of configured sources (`a+b` "
        "together), or vLLM's own: vllm-ngram, vllm-suffix[:K], vllm-mtp[:K], vllm-draft:PATH; "
        "separated by commas (default: %(default)s)")  # fmt: skip
    add("--prompts", default="code", help="te (English), tc (Chinese), chat, code, docs (long "
        "documents), or a .jsonl or .txt file (default: %(default)s)")  # fmt: skip
    add("--chat-template", default="", help="Jinja template that writes dialogues, or its file "
        "(default: engine.vllm.chat_template, then the tokenizer's own)")  # fmt: skip
    add("--num-prompts", type=number_from(1), default=0, help="default: 16, or all of a file")
    add("--max-tokens", type=number_from(1), default=128, help="default: %(default)s")
    add("--concurrency", type=number_from(1), default=1, help="prompts at a time (default: "
        "%(default)s)")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--seed", type=number_from(0), default=0, help="of prompts and sampling (default: "
        "%(default)s)")  # fmt: skip
    add("--repeat", type=number_from(1), default=1, help="passes over the prompts, each in a new "
        "engine (default: %(default)s)")  # fmt: skip
    add("--tolerance", type=float, default=None, help="largest difference of two tokens' "
        "log-probabilities that counts as a tie, in nats (default: 0.1; 0 in float32)")  # fmt: skip
    add("--save-output", type=Path, default=None, metavar="FILE", help="write everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the comparison and returns the exit code: 1 if speculation changed the text, else 0."""
    from rich.console import Console

    from specserve.compare.comparison import Comparison, Settings, compare
    from specserve.compare.lossless import default_tolerance
    from specserve.compare.prompts import check_lengths, configured_tokenizer, load_prompts
    from specserve.compare.report import document, explanation, table, write_json
    from specserve.engine.checkpoint import text_sizes
    from specserve.engine.methods import NONE, Method, parse_methods

    config = only_application(args.config)
    methods = parse_methods(args.methods, config)
    tolerance = args.tolerance
    if tolerance is None:
        tolerance = default_tolerance(config.engine.dtype)
    settings = Settings(
        max_tokens=args.max_tokens,
        concurrency=args.concurrency,
        temperature=at_least_zero("--temperature", args.temperature),
        seed=args.seed,
        repeat=args.repeat,
        tolerance=at_least_zero("--tolerance", tolerance),
    )
    in_existing_folder("--save-output", args.save_output)
    tokenizer = configured_tokenizer(config, args.chat_template)
    prompts = load_prompts(args.prompts, tokenizer, num_prompts=args.num_prompts, seed=args.seed)
    check_lengths(prompts, args.prompts, text_sizes(config)[0])
    console = Console(markup=False)

    def save(comparison: Comparison) -> None:
        if args.save_output:
            write_json(args.save_output, document(comparison, config, args.prompts))
            console.out(f"written: {args.save_output}", highlight=False)

    comparison = compare(config, methods, prompts, settings, console, Method(NONE), save)
    console.print(table(comparison, f"{config.model.name}, {len(prompts)} prompts of "
                        f"{args.prompts}, concurrency {args.concurrency}"))  # fmt: skip
    for line in explanation(comparison):
        console.print(line, highlight=False)
    if comparison.verdicts:
        console.print(f"Lossless: {'yes' if comparison.is_lossless else 'NO'}")
    else:
        why = "needs `none` and another method" if settings.temperature == 0 else "needs greedy"
        console.print(f"Lossless: not checked ({why})")
    save(comparison)
    return 0 if comparison.is_lossless else 1
