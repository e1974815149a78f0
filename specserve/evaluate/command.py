"""``specserve evaluate``: checks that speculation keeps the quality of answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.compare.arguments import in_existing_folder, number_from, only_application
from specserve.core.errors import ConfigError

if TYPE_CHECKING:
    from specserve.compare.prompts import Prompt, Tokenizer
    from specserve.core.config import AppConfig
    from specserve.engine.methods import Method

# `run` imports the rest, so that `specserve --help` stays fast.

DEFAULT_NUM = 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "evaluate",
        help="check that answers are as good with speculation as without, and as Hugging Face's",
        description="Asks questions that have reference answers, one at a time and greedily. The "
        "engine answers with and without speculation, and so does Hugging Face's `generate`. "
        "Prints times, ROUGE and the share of equal texts. Exit code 1 if a method's texts differ "
        "beyond near ties and its ROUGE-1 is more than 0.5 points from that of `none`.",
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help="Serve configuration file")
    add("--methods", default=None, help="as for `compare`, and `hf`: Hugging Face's `generate`; "
        "`none` always runs (default: none,all,hf)")  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tasks", default="describe,quote,rename", help="on held-out code: "
        "describe a function (as its docstring does), quote a function of a file, or rename an "
        "identifier in a function (default: %(default)s)")  # fmt: skip
    what.add_argument("--data", type=Path, metavar="FILE", help='.jsonl with "prompt" or '
        '"messages", and "reference"')  # fmt: skip
    add("--num", type=number_from(1), default=0, help=f"questions (default: {DEFAULT_NUM}, or all "
        "of a file)")  # fmt: skip
    add("--max-tokens", type=number_from(2), default=100, help="of an answer (default: "
        "%(default)s)")  # fmt: skip
    add("--max-input", type=number_from(1), default=923, metavar="N", help="most tokens of a "
        "question (default: %(default)s, or what --max-tokens leaves of the context)")  # fmt: skip
    add("--rouge1-threshold", type=float, default=None, metavar="X", help="fail where a method's "
        "ROUGE-1 is below it, in points from 0 to 100 (default: none)")  # fmt: skip
    add("--save-output", type=Path, default=None, metavar="FILE", help="write everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the evaluation and returns the exit code: 1 if quality was lost, else 0."""
    from rich.console import Console

    from specserve.compare.comparison import Comparison, Settings, compare
    from specserve.compare.lossless import BF16_TOLERANCE, default_tolerance
    from specserve.compare.prompts import configured_tokenizer
    from specserve.compare.report import document, write_json
    from specserve.engine.methods import HF
    from specserve.evaluate.quality import judge_quality
    from specserve.evaluate.report import differences, failures, table, with_quality

    threshold = args.rouge1_threshold
    if threshold is not None and not 0 <= threshold <= 100:
        raise ConfigError("--rouge1-threshold", threshold, "0 to 100")
    in_existing_folder("--save-output", args.save_output)
    config = only_application(args.config)
    methods, reference = _methods(args.methods, config)
    examples = _examples(args, config, configured_tokenizer(config))
    tolerance = default_tolerance(config.engine.dtype)
    if reference.name == HF:  # another implementation rounds differently, even in float32
        tolerance = BF16_TOLERANCE
    settings = Settings(max_tokens=args.max_tokens, tolerance=tolerance)
    console = Console(markup=False)
    what = str(args.data or args.tasks)

    def save(content: dict[str, Any]) -> None:
        if args.save_output:
            write_json(args.save_output, content)
            console.out(f"written: {args.save_output}", highlight=False)

    def save_unfinished(comparison: Comparison) -> None:
        save(document(comparison, config, what))

    comparison = compare(config, methods, examples, settings, console, reference, save_unfinished)
    found = judge_quality(comparison)
    lost = failures(found, threshold)
    title = f"{config.model.name}, {len(examples)} questions of {what}"
    console.print(table(comparison, found, reference, title))
    for line in [*differences(found, reference), *lost]:
        console.print(line, highlight=False)
    content = document(comparison, config, what)
    save(with_quality(content, comparison, found, reference, lost))
    console.print(f"Quality kept: {'NO' if lost else 'yes'}")
    return 1 if lost else 0


def _methods(text: str | None, config: AppConfig) -> tuple[list[Method], Method]:
    """The methods to run, and the reference method: ``hf`` if it runs, else ``none``."""
    from specserve.engine.methods import ALL, HF, NONE, Method, parse_methods

    if text is None:
        text = f"{NONE},{ALL},{HF}" if config.speculation else f"{NONE},{HF}"
    methods = parse_methods(text, config, also=(HF,))
    if Method(NONE) not in methods:
        methods.insert(0, Method(NONE))
    return methods, Method(HF) if Method(HF) in methods else Method(NONE)


def _examples(args: argparse.Namespace, config: AppConfig, tokenizer: Tokenizer) -> list[Prompt]:
    from specserve.engine.checkpoint import text_sizes
    from specserve.evaluate.examples import draw_examples, read_examples

    longest = text_sizes(config)[0] - args.max_tokens
    if longest < 1:
        allowed = f"fewer than the context length, {longest + args.max_tokens}"
        raise ConfigError("--max-tokens", args.max_tokens, allowed)
    max_input = min(args.max_input, longest)
    if args.data:
        return read_examples(args.data, tokenizer, args.num, max_input=max_input)
    return draw_examples(
        [each.strip() for each in args.tasks.split(",")],
        tokenizer,
        args.num or DEFAULT_NUM,
        max_input=max_input,
        max_tokens=args.max_tokens,
    )
