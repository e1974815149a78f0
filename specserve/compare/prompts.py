"""The prompts of a comparison: five built-in sets, or the user's file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specserve.compare.corpus import load_modules
from specserve.compare.documents import ask, load_documents
from specserve.compare.tasks import Message, TaskMaker
from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, reason_of
from specserve.engine.chat_template import read_chat_template

FIELD = "--prompts"

BUILT_IN = ("te", "tc", "chat", "code", "docs")
"""The built-in sets: questions in English and in Chinese, dialogues of several turns, tasks on
held-out modules of Python's standard library, questions on long documents."""

_DATA = Path(__file__).with_name("data")

DEFAULT_NUM_PROMPTS = 16

CODE_TOKENS = (300, 650)
"""Shortest and longest ``code`` prompt, in tokens. A prompt of kind ``complete`` has only a
function's head and docstring, so its lower limit is a third of this."""

DOCS_TOKENS = (1000, 2000)
"""Shortest and longest ``docs`` prompt, in tokens."""

MAX_DRAWS = 5000
"""Most draws for one ``code`` prompt or for all ``docs`` prompts; about one draw in ten fits."""

CODE_KINDS = ("quote", "rename", "complete", "continue")
"""Tasks of the ``code`` set, used in rotation. ``continue`` is plain text, the others dialogues."""


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that this package uses."""

    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        """A dialogue rendered by the chat template."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt after the chat template and the tokenizer.

    Attributes:
        text: the rendered prompt.
        token_ids: tokens of ``text``.
        prediction: tokens of the predicted output; empty: none.
        json_schema: JSON schema of the answer, as a JSON text; empty: none.
        reference: a good answer; empty: unknown.
    """

    text: str
    token_ids: tuple[int, ...]
    prediction: tuple[int, ...] = ()
    json_schema: str = ""
    reference: str = ""


class FilePrompt(NamedTuple):
    """One entry of a prompt file: a text or a dialogue, and the optional fields of `Prompt`."""

    dialogue: list[Message] | str
    prediction: str = ""
    json_schema: str = ""
    reference: str = ""


def load_tokenizer(path: str, revision: str = "", *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a checkpoint folder or hub id.

    Raises:
        ConfigError: the checkpoint has no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        allowed = f"a checkpoint with a tokenizer ({reason_of(error)})"
        raise ConfigError("model", path, allowed) from None
    return tokenizer


def configured_tokenizer(config: AppConfig, chat_template: str = "") -> Tokenizer:
    """The tokenizer of an application's model.

    Its chat template is the argument, else ``engine.vllm.chat_template``, else its own. It gets
    ``engine.vllm.default_chat_template_kwargs``.

    Raises:
        ConfigError: the model has no tokenizer, or the template is not valid.
    """
    model = config.model
    tokenizer = load_tokenizer(model.tokenizer or model.path, **config.pretrained_options)
    if template := chat_template or config.engine.vllm.get("chat_template"):
        field = "--chat-template" if chat_template else "engine.vllm.chat_template"
        use_chat_template(tokenizer, template, field)
    if options := config.engine.vllm.get("default_chat_template_kwargs"):
        apply = partial(tokenizer.apply_chat_template, **options)
        tokenizer.apply_chat_template = apply  # type: ignore[method-assign]
    return tokenizer


def use_chat_template(tokenizer: Tokenizer, template: str, field: str) -> None:
    """Replaces the tokenizer's chat template.

    Args:
        tokenizer: is changed.
        template: the template or its file, as :func:`read_chat_template` takes it.
        field: the field or option that gave the template, for errors.

    Raises:
        ConfigError: the file is missing, or the template cannot render a question.
    """
    tokenizer.chat_template = read_chat_template(template, field)
    try:
        render(tokenizer, [{"role": "user", "content": "a"}])
    except ConfigError as error:
        allowed = f"a chat template, or the path of its file ({reason_of(error)})"
        raise ConfigError(field, template, allowed) from None


def load_prompts(
    name: str, tokenizer: Tokenizer, *, num_prompts: int = 0, seed: int = 0
) -> list[Prompt]:
    """The prompts of a built-in set, drawn by ``seed``, or of a ``.jsonl`` or ``.txt`` file.

    ``num_prompts`` 0: :data:`DEFAULT_NUM_PROMPTS` prompts of a set, or all prompts of a file.

    Raises:
        ConfigError: unknown name, unreadable file, or fewer prompts than asked for.
    """
    if name in BUILT_IN:
        num_prompts = num_prompts or DEFAULT_NUM_PROMPTS
        if name == "code":
            return _code(tokenizer, num_prompts, seed)
        if name == "docs":
            return _docs(tokenizer, num_prompts, seed)
        entries = read_prompts(_DATA / f"{name}.jsonl", FIELD, "")
        random.Random(seed).shuffle(entries)
    else:
        entries = read_prompts(Path(name), FIELD, ", ".join(BUILT_IN))
        num_prompts = num_prompts or len(entries)
    if num_prompts > len(entries):
        raise ConfigError(
            "--num-prompts", num_prompts, f"at most {len(entries)}, the prompts of {name}"
        )
    return [to_prompt(tokenizer, entry) for entry in entries[:num_prompts]]


def check_lengths(prompts: Sequence[Prompt], name: str, max_model_len: int) -> None:
    """Checks that each prompt leaves room for at least one output token.

    Raises:
        ConfigError: a prompt is too long; the error has its number and length.
    """
    for number, prompt in enumerate(prompts, 1):
        if len(prompt.token_ids) >= max_model_len:
            size, allowed = f"{len(prompt.token_ids)} tokens", f"at most {max_model_len - 1}"
            raise ConfigError(f"{FIELD}: {name}: prompt {number}", size, allowed)


def to_prompt(tokenizer: Tokenizer, entry: FilePrompt) -> Prompt:
    """Renders and tokenizes a file's prompt and keeps its optional fields."""
    prediction = tokenizer.encode(entry.prediction, add_special_tokens=False)
    return replace(
        render(tokenizer, entry.dialogue),
        prediction=tuple(prediction),
        json_schema=entry.json_schema,
        reference=entry.reference,
    )


def render(tokenizer: Tokenizer, dialogue: Sequence[Message] | str) -> Prompt:
    """Renders a dialogue by the chat template, or a plain string, and tokenizes it.

    If the tokenizer has no chat template, the messages are joined by line breaks.

    Raises:
        ConfigError: the template refuses the dialogue.
    """
    if isinstance(dialogue, str):
        return _plain(tokenizer, dialogue)
    if not tokenizer.chat_template:
        return _plain(tokenizer, "\n".join(message["content"] for message in dialogue))
    try:
        text = tokenizer.apply_chat_template(
            list(dialogue), add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a Jinja template can raise anything
        allowed = f"what the chat template takes ({reason_of(error)})"
        raise ConfigError("messages", list(dialogue), allowed) from None
    # The template has already written the special tokens.
    return Prompt(text, tuple(tokenizer.encode(text, add_special_tokens=False)))


def _plain(tokenizer: Tokenizer, text: str) -> Prompt:
    return Prompt(text, tuple(tokenizer.encode(text, add_special_tokens=True)))


def _code(tokenizer: Tokenizer, num_prompts: int, seed: int) -> list[Prompt]:
    modules = load_modules(held_out=True)
    tasks = TaskMaker(modules)
    rng = random.Random(seed)
    max_chars = _num_chars(tokenizer, [module.text for module in modules], CODE_TOKENS[1])
    lowest, highest = CODE_TOKENS
    prompts: list[Prompt] = []
    for index in range(num_prompts):
        kind = CODE_KINDS[index % len(CODE_KINDS)]
        shortest = lowest // 3 if kind == "complete" else lowest
        for _ in range(MAX_DRAWS):
            dialogue: list[Message] | str
            if kind == "continue":
                lines = rng.choice(modules).text.splitlines(keepends=True)
                dialogue = _head(lines[rng.randrange(len(lines)) :], max_chars)
            else:
                # `draw` limits question and answer together; the answer is removed here.
                dialogue = tasks.draw(rng, max_chars * 2, kind=kind)[:-1]
            prompt = render(tokenizer, dialogue)
            if shortest <= len(prompt.token_ids) <= highest and prompt not in prompts:
                prompts.append(prompt)
                break
        else:
            allowed = f"a tokenizer that makes prompts of {lowest} to {highest} tokens"
            raise ConfigError(FIELD, "code", allowed)
    return prompts


def _docs(tokenizer: Tokenizer, num_prompts: int, seed: int) -> list[Prompt]:
    documents = load_documents()
    rng = random.Random(seed)
    max_chars = _num_chars(tokenizer, documents, DOCS_TOKENS[1])
    prompts: list[Prompt] = []
    for _ in range(MAX_DRAWS):
        if len(prompts) == num_prompts:
            return prompts
        prompt = render(tokenizer, ask(documents, len(prompts), rng, max_chars))
        if DOCS_TOKENS[0] <= len(prompt.token_ids) <= DOCS_TOKENS[1] and prompt not in prompts:
            prompts.append(prompt)
    lowest, highest = DOCS_TOKENS
    allowed = f"at most {len(prompts)}, the prompts of docs of {lowest} to {highest} tokens"
    raise ConfigError("--num-prompts", num_prompts, allowed)


def _num_chars(tokenizer: Tokenizer, texts: Sequence[str], num_tokens: int) -> int:
    """Estimates how many characters of these texts make ``num_tokens`` tokens."""
    heads = [text[:1000] for text in texts]
    head_tokens = sum(len(tokenizer.encode(head, add_special_tokens=False)) for head in heads)
    return round(num_tokens * sum(map(len, heads)) / head_tokens)


def _head(lines: Sequence[str], max_chars: int) -> str:
    """The first lines up to ``max_chars``, then half a line, so that the text ends unfinished."""
    size, taken = 0, []
    for line in lines:
        if size + len(line) > max_chars:
            taken.append(line[: len(line) // 2])
            break
        taken.append(line)
        size += len(line)
    return "".join(taken)


def read_prompts(path: Path, field: str, or_else: str) -> list[FilePrompt]:
    """Reads the prompts of a file, one per line.

    Args:
        path: a ``.txt`` file of texts, or a ``.jsonl`` file with ``prompt`` or ``messages``.
        field: the option that named the file, for errors.
        or_else: what the option takes instead of a file, for errors.

    Raises:
        ConfigError: the file is missing, of another type, not UTF-8 or empty, or a line is wrong.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise ConfigError(field, str(path), f"{or_else}, or the path of a .jsonl or .txt file")
    try:
        content = path.read_bytes()
        lines = content.decode().replace("\r\n", "\n").split("\n")  # U+2028 does not end a line
    except OSError as error:
        raise ConfigError(field, str(path), f"a readable UTF-8 file ({error})") from None
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        where = f"{path}: line {number}"
        raise ConfigError(where, content[error.start : error.end], "UTF-8 text") from None
    prompts: list[FilePrompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            prompts.append(FilePrompt(line) if path.suffix == ".txt" else _from_json(line, where))
    if not prompts:
        raise ConfigError(field, str(path), "a file with at least one prompt")
    return prompts


def _from_json(line: str, where: str) -> FilePrompt:
    allowed = 'a JSON object with "prompt": text, or "messages": [{"role": .., "content": ..}]'
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise ConfigError(where, line, allowed) from None
    except UnicodeEncodeError:
        raise ConfigError(where, line, "text without single surrogates") from None
    if not isinstance(entry, dict):
        raise ConfigError(where, line, allowed)
    for name in ("prediction", "reference"):
        if not isinstance(entry.get(name, ""), str):
            raise ConfigError(f"{where}: {name}", entry[name], "a text")
    schema = entry.get("json_schema")
    if schema is not None and not isinstance(schema, dict):
        raise ConfigError(f"{where}: json_schema", schema, "a JSON schema, which is an object")
    answer = {
        "prediction": entry.get("prediction", ""),
        "json_schema": "" if schema is None else json.dumps(schema),
        "reference": entry.get("reference", ""),
    }
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if isinstance(prompt, str) and prompt and messages is None:
        return FilePrompt(prompt, **answer)
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return FilePrompt(messages, **answer)
    raise ConfigError(where, line, allowed)


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
