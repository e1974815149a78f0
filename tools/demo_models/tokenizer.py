"""The demo models' tokenizer: byte-level BPE with the special tokens of a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from specserve.compare.tasks import Message

BOS, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [BOS, END, PAD, *(f"<|{role}|>" for role in ROLES)]
BOS_ID, END_ID, PAD_ID = range(3)

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception("Unknown role '" ~ message['role'] ~ "': system, user or assistant") -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?[A-Za-z]+| ?\d{1,3}| ?[^\sA-Za-z\d\p{L}]+| ?\p{L}+"
    r"|\n[ \t]*(?=\S)|\s+(?!\S)|\s+"
)
"""Words, numbers of up to 3 digits, runs of symbols, line breaks with the next indentation."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE; it has `vocab_size` entries if the texts are large enough."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a plain document: begin token, the text's tokens, end token."""
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encodes many plain documents, on all cores."""
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [[BOS_ID, *one.ids, END_ID] for one in encoded]


def encode_chat(
    tokenizer: Tokenizer, messages: list[Message], *, add_generation_prompt: bool = False
) -> list[int]:
    """Encodes a dialogue; equals the tokens of the rendered chat template."""
    ids = [BOS_ID]
    for message in messages:
        ids.append(SPECIAL_TOKENS.index(f"<|{message['role']}|>"))
        ids.extend(tokenizer.encode(message["content"], add_special_tokens=False).ids)
        ids.append(END_ID)
    if add_generation_prompt:
        ids.append(SPECIAL_TOKENS.index("<|assistant|>"))
    return ids
