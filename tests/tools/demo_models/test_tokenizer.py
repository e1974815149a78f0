from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tools.demo_models.tokenizer import BOS_ID, END_ID, encode_chat, encode_text, save_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Repeat.\n```python\nx = {}\n```"},
    {"role": "assistant", "content": "x = {}"},
]


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x\r\n", "中文 and émoji 🙂", "    a  =  1234567\n\n\n", ""]
)
def test_any_text_is_restored_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = encode_text(tokenizer, text)
    assert (ids[0], ids[-1]) == (BOS_ID, END_ID)
    assert tokenizer.decode(ids[1:-1]) == text


def test_training_dialogues_have_the_chat_templates_tokens(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path, max_tokens=128)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for messages, prompt in ((MESSAGES, False), (MESSAGES[:2], True)):
        rendered = loaded.apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
        assert rendered == encode_chat(tokenizer, messages, add_generation_prompt=prompt)
    assert loaded.eos_token_id == END_ID
    assert loaded("x").input_ids[0] == BOS_ID


def test_the_chat_template_refuses_an_unknown_role(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, max_tokens=128)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(Exception, match="Unknown role 'tool'"):
        loaded.apply_chat_template([{"role": "tool", "content": "x"}])
