"""Questions with reference answers: tasks on held-out code, or a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specserve.compare.corpus import load_modules
from specserve.compare.prompts import (
    MAX_DRAWS,
    FilePrompt,
    Prompt,
    Tokenizer,
    read_prompts,
    render,
    to_prompt,
)
from specserve.compare.tasks import TaskMaker
from specserve.core.errors import MISSING, ConfigError

TASKS = ("describe", "quote", "rename")
"""Describe a function (the reference is its docstring), quote a function of a file, rename an
identifier in a function."""


def draw_examples(
    kinds: Sequence[str], tokenizer: Tokenizer, num: int, *, max_input: int, max_tokens: int
) -> list[Prompt]:
    """Draws tasks of these kinds in rotation, on held-out modules, always with the same seed.

    Prompts have at most ``max_input`` tokens, and references fewer than ``max_tokens``.

    Raises:
        ConfigError: a kind is unknown or repeated, or no task fits the limits.
    """
    for kind in kinds:
        if kind not in TASKS or kinds.count(kind) > 1:
            raise ConfigError("--tasks", ",".join(kinds), f"{', '.join(TASKS)}, each once")
    maker = TaskMaker(load_modules(held_out=True))
    rng = random.Random(0)
    examples: list[Prompt] = []
    for index in range(num):
        kind = kinds[index % len(kinds)]
        for _ in range(MAX_DRAWS):
            *dialogue, answer = maker.draw(rng, max_input * 4, kind=kind)
            example = replace(render(tokenizer, dialogue), reference=answer["content"])
            reference = tokenizer.encode(example.reference, add_special_tokens=False)
            fits = len(example.token_ids) <= max_input and len(reference) < max_tokens
            if fits and example not in examples:
                examples.append(example)
                break
        else:
            allowed = f"more, or a larger --max-tokens: no {kind} fits for question {index + 1}"
            raise ConfigError("--max-input", max_input, allowed)
    return examples


def read_examples(path: Path, tokenizer: Tokenizer, num: int, *, max_input: int) -> list[Prompt]:
    """Reads the first ``num`` examples of a ``.jsonl`` file, or all if ``num`` is 0.

    Raises:
        ConfigError: the file is malformed or too short, a prompt is too long or lacks a reference.
    """
    if path.suffix != ".jsonl":
        raise ConfigError("--data", str(path), "the path of a .jsonl file")
    entries = read_prompts(path, "--data", "the path of a .jsonl file")
    examples = [
        _checked(f"{path}: example {number}", entry, tokenizer, max_input)
        for number, entry in enumerate(entries[: num or None], 1)
    ]
    if num > len(examples):
        raise ConfigError("--num", num, f"at most {len(examples)}, the examples of {path}")
    return examples


def _checked(where: str, entry: FilePrompt, tokenizer: Tokenizer, max_input: int) -> Prompt:
    if not entry.reference.strip():
        given = entry.reference or MISSING
        raise ConfigError(f"{where}: reference", given, "the text of a good answer")
    if entry.json_schema:
        raise ConfigError(f"{where}: json_schema", entry.json_schema, "none: answers are free text")
    prompt = to_prompt(tokenizer, entry)
    if len(prompt.token_ids) > max_input:
        allowed = f"at most {max_input}, by --max-input and what --max-tokens leaves"
        raise ConfigError(f"{where}: tokens", len(prompt.token_ids), allowed)
    return prompt
