"""Reads and encodes questions: texts, token ids and dialogues, from arguments or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specserve.bench.local import LocalModel
from specserve.bench.server import Server
from specserve.bench.token_file import TokenIds, parse_token_ids, read_token_file
from specserve.compare.prompts import read_prompts
from specserve.compare.tasks import Message
from specserve.core.errors import ConfigError

Model = LocalModel | Server
"""A model in an engine that the command starts, or behind a URL."""

Question = str | TokenIds | list[Message]
"""A text to continue, token ids to continue, or a dialogue to answer."""

DEFAULT_TEXTS = (
    "How are you?",
    "Give three tips for staying healthy.",
    "def read_lines(path):\n",
    "import argparse\n\n\ndef main():\n",
)
"""The questions without any input; they are asked twice."""


def read_questions(
    model: Model,
    *,
    texts: Sequence[str] | None = None,
    token_ids: Sequence[str] | None = None,
    file: Path | None = None,
) -> list[Question]:
    """Reads the questions from at most one argument; without any, :data:`DEFAULT_TEXTS`.

    Raises:
        ConfigError: the file or argument is wrong.
    """
    if token_ids is not None:
        return [parse_token_ids(each, "--input-ids", model.vocab_size) for each in token_ids]
    if file is None:
        return list(DEFAULT_TEXTS if texts is None else texts)
    if file.suffix == ".csv":
        most = model.max_model_len - 1
        return list(
            read_token_file(
                file, max_tokens=most, vocab_size=model.vocab_size, field="--input-file"
            )
        )
    allowed = "the path of a .csv file of token ids"
    return [prompt.dialogue for prompt in read_prompts(file, "--input-file", allowed)]


def encode(
    model: Model, question: Question, *, as_chat: bool = False, system: str = ""
) -> TokenIds:
    """The prompt tokens of a question; token ids stay as they are.

    ``as_chat`` makes a text a user message. ``system`` is the system prompt of a dialogue.

    Raises:
        SpecServeError: the tokenizer or the chat template fails.
    """
    if isinstance(question, tuple):
        return question
    if isinstance(question, str):
        if not as_chat:
            return model.encode(question, add_special_tokens=True)
        question = [{"role": "user", "content": question}]
    first = [{"role": "system", "content": system}] if system else []
    return model.render([*first, *question])


def end_token(model: Model, word: str) -> int:
    """The id of an extra end token, given by its id or its text.

    Raises:
        ConfigError: the text is not exactly one token, or the id is not in the vocabulary.
    """
    if word.isascii() and word.isdecimal():
        return parse_token_ids(word, "--add-eos-token", model.vocab_size)[0]
    tokens = model.encode(word, add_special_tokens=False)
    if len(tokens) != 1:
        allowed = f"a token's id, or a text of exactly one token (this one has {len(tokens)})"
        raise ConfigError("--add-eos-token", word, allowed)
    return tokens[0]


def num_new_tokens(
    num_prompt_tokens: int,
    max_model_len: int,
    max_new_tokens: int | None,
    max_length: int | None,
    default: int,
    name: str,
) -> int:
    """Maximum output tokens; ``max_new_tokens`` wins over ``max_length``, which counts the prompt.

    Raises:
        ConfigError: a length does not fit the prompt and ``max_model_len``.
    """
    prompt = f"{name}'s {num_prompt_tokens} tokens"
    left = max_model_len - num_prompt_tokens
    if left < 1:
        allowed = f"less than the model's {max_model_len}"
        raise ConfigError(name, f"{num_prompt_tokens} tokens", allowed)
    if max_new_tokens is not None:
        if max_new_tokens > left:
            allowed = f"at most {left}: the model's {max_model_len} less {prompt}"
            raise ConfigError("--max-new-tokens", max_new_tokens, allowed)
        return max_new_tokens
    if max_length is None:
        return min(default, left)
    if not num_prompt_tokens < max_length <= max_model_len:
        allowed = f"more than {prompt}, and at most the model's {max_model_len}"
        raise ConfigError("--max-length", max_length, allowed)
    return max_length - num_prompt_tokens
