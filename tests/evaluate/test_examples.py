import json
from pathlib import Path

import pytest

from specserve.compare.prompts import Tokenizer, load_tokenizer
from specserve.core.errors import ConfigError
from specserve.evaluate.examples import TASKS, draw_examples, read_examples
from tests.integration.cluster import model_path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(model_path("demo-base")))


def test_tasks_alternate_within_their_limits(tokenizer: Tokenizer) -> None:
    examples = draw_examples(TASKS, tokenizer, 6, max_input=400, max_tokens=60)
    beginnings = ["What does this function do?", "Print the function", "Repeat this code"]
    for index, example in enumerate(examples):
        assert beginnings[index % 3] in example.text
        assert len(example.token_ids) <= 400
        assert len(tokenizer.encode(example.reference, add_special_tokens=False)) < 60
        if index % 3 == 1:
            assert example.reference.strip("`python\n") in example.text
    assert examples == draw_examples(TASKS, tokenizer, 6, max_input=400, max_tokens=60)


@pytest.mark.parametrize(
    ("kinds", "limit", "words"),
    [
        (["quote", "sing"], 400, "--tasks: 'quote,sing' is not allowed"),
        (["quote", "quote"], 400, "each once"),
        (["rename"], 5, "--max-input: 5 is not allowed; allowed: more"),
    ],
)
def test_tasks_that_cannot_be_drawn_are_refused(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[str],
    limit: int,
    words: str,
) -> None:
    monkeypatch.setattr("specserve.evaluate.examples.MAX_DRAWS", 20)
    with pytest.raises(ConfigError, match=words):
        draw_examples(kinds, tokenizer, 2, max_input=limit, max_tokens=60)


def write(folder: Path, *lines: object) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_file_has_prompts_or_dialogues(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(
        tmp_path,
        {"prompt": "def add(a, b):", "reference": "return a + b"},
        {"messages": [{"role": "user", "content": "Why?"}], "reference": "Because."},
    )
    plain, dialogue = read_examples(path, tokenizer, 0, max_input=100)
    assert (plain.text, plain.reference) == ("def add(a, b):", "return a + b")
    assert "Why?" in dialogue.text
    assert dialogue.text != "Why?"  # has the chat template
    assert read_examples(path, tokenizer, 1, max_input=100) == [plain]


@pytest.mark.parametrize(
    ("line", "num", "words"),
    [
        ({"prompt": "a"}, 0, "example 2: reference: is missing"),
        ({"prompt": "a", "reference": " "}, 0, "example 2: reference: ' '"),
        ({"prompt": "a", "reference": 1}, 0, "data.jsonl:2: reference: 1"),
        ({"prompt": "a " * 80, "reference": "b"}, 0, "at most 50, by --max-input and"),
        ({"prompt": "a", "reference": "b", "json_schema": {}}, 0, "example 2: json_schema"),
        ({"messages": [], "reference": "b"}, 0, "data.jsonl:2"),
        ({"prompt": "a", "reference": "b"}, 3, "--num: 3 is not allowed; allowed: at most 2"),
    ],
)
def test_an_invalid_file_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, line: dict[str, object], num: int, words: str
) -> None:
    path = write(tmp_path, {"prompt": "a", "reference": "b"}, line)
    with pytest.raises(ConfigError, match=words):
        read_examples(path, tokenizer, num, max_input=50)


def test_a_file_without_references_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "data.txt").write_text("a text\n")
    with pytest.raises(ConfigError, match=r"the path of a \.jsonl file"):
        read_examples(tmp_path / "data.txt", tokenizer, 0, max_input=50)
