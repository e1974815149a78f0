import json
import shutil
from pathlib import Path

import pytest

from specserve.compare.comparison import Settings, jobs_of
from specserve.compare.prompts import (
    BUILT_IN,
    CODE_TOKENS,
    DOCS_TOKENS,
    check_lengths,
    configured_tokenizer,
    load_prompts,
    load_tokenizer,
    render,
    use_chat_template,
)
from specserve.core.config import parse
from specserve.core.errors import ConfigError
from tests.integration.cluster import model_path


class WordTokenizer:
    """One token for each word, with a chat template that keeps role and content."""

    def __init__(self, chat_template: str | None = "yes") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [len(word) for word in text.split()]
        return [0, *ids] if add_special_tokens else ids

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        turns = [f"<{m['role']}> {m['content']}" for m in conversation]
        return " ".join(["<begin>", *turns, "<assistant>"])


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_set_has_sixteen_prompts_for_the_assistant(name: str) -> None:
    prompts = load_prompts(name, WordTokenizer())
    assert len({prompt.text for prompt in prompts}) == 16
    if name != "code":
        assert all(prompt.text.endswith("<assistant>") for prompt in prompts)
        assert all(prompt.token_ids[0] == len("<begin>") for prompt in prompts)


@pytest.mark.parametrize("name", BUILT_IN)
def test_prompts_depend_on_the_seed(name: str) -> None:
    first, again, other = (
        load_prompts(name, WordTokenizer(), num_prompts=4, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_code_prompts_keep_to_their_length_and_mix_tasks() -> None:
    prompts = load_prompts("code", WordTokenizer(), num_prompts=8)
    assert all(len(prompt.token_ids) <= CODE_TOKENS[1] for prompt in prompts)
    long = [prompt for prompt in prompts if len(prompt.token_ids) >= CODE_TOKENS[0]]
    assert len(long) >= 6
    texts = "\n".join(prompt.text for prompt in prompts)
    assert "renamed to" in texts
    assert "Print the function" in texts
    plain = [prompt for prompt in prompts if "<user>" not in prompt.text]
    assert len(plain) == 2


def test_docs_prompts_are_long_and_some_ask_for_a_quotation() -> None:
    prompts = load_prompts("docs", WordTokenizer(), num_prompts=8)
    assert all(DOCS_TOKENS[0] <= len(prompt.token_ids) <= DOCS_TOKENS[1] for prompt in prompts)
    (quoted, *_) = [prompt.text for prompt in prompts if "word for word" in prompt.text]
    beginning = quoted.split("`")[1]
    assert beginning in " ".join(quoted.split("word for word.")[1].split())


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_chat_template_replaces_the_tokenizers_own(tmp_path: Path, in_a_file: bool) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    tokenizer = load_tokenizer(str(model_path("demo-draft")))
    use_chat_template(tokenizer, str(file) if in_a_file else template, "--chat-template")
    (prompt,) = load_prompts("te", tokenizer, num_prompts=1)
    assert prompt.text.startswith("[user] ")


def test_a_dialogue_is_rendered_with_the_applications_template_options() -> None:
    template = "{{ messages[0].content }}{% if thinks %} hm{% endif %}"
    options = {"chat_template": template, "default_chat_template_kwargs": {"thinks": True}}
    model = {"path": str(model_path("demo-draft"))}
    tokenizer = configured_tokenizer(parse({"model": model, "engine": {"vllm": options}}))
    assert render(tokenizer, [{"role": "user", "content": "a"}]).text == "a hm"


@pytest.mark.parametrize("template", ["missing.jinja", "{% for", "{{ messages[3].content.x() }}"])
def test_an_invalid_chat_template_is_refused(template: str) -> None:
    tokenizer = load_tokenizer(str(model_path("demo-draft")))
    with pytest.raises(ConfigError, match=r"^--chat-template: .* a chat template, or the path"):
        use_chat_template(tokenizer, template, "--chat-template")


def test_a_tokenizers_code_runs_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = str(tmp_path / "modules")  # transformers copies it there
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    (tmp_path / "config.json").write_text("{}")
    auto = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": auto}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    mark = 'own'\n"
    )
    shutil.copy(model_path("demo-draft") / "tokenizer.json", tmp_path)
    assert load_tokenizer(str(tmp_path), trust_remote_code=True).mark == "own"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="contains custom code"):
        load_tokenizer(str(tmp_path))


def test_more_prompts_than_a_set_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 16"):
        load_prompts("te", WordTokenizer(), num_prompts=17)


def test_a_model_without_chat_template_gets_the_plain_texts() -> None:
    (prompt,) = load_prompts("te", WordTokenizer(None), num_prompts=1)
    assert "<user>" not in prompt.text
    assert prompt.token_ids[0] == 0


def test_a_file_keeps_its_order(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("first one\n\nsecond\n")
    assert [p.text for p in load_prompts(str(text), WordTokenizer())] == ["first one", "second"]
    lines = tmp_path / "own.jsonl"
    message = {"role": "user", "content": "hello"}
    lines.write_text(json.dumps({"prompt": "raw"}) + "\n" + json.dumps({"messages": [message]}))
    loaded = load_prompts(str(lines), WordTokenizer())
    assert [p.text for p in loaded] == ["raw", "<begin> <user> hello <assistant>"]


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (text := tmp_path / "own.txt").write_bytes("a\fb\u2028c\r\nd".encode())
    assert [p.text for p in load_prompts(str(text), WordTokenizer())] == ["a\fb\u2028c", "d"]


def test_a_prompt_without_room_for_an_answer_is_named(tmp_path: Path) -> None:
    (text := tmp_path / "own.txt").write_text("one\none two three four\n")
    prompts = load_prompts(str(text), WordTokenizer(None))
    longest = len(prompts[1].token_ids)
    check_lengths(prompts, str(text), longest + 1)
    with pytest.raises(
        ConfigError, match=rf"prompt 2: '{longest} tokens' .* at most {longest - 1}"
    ):
        check_lengths(prompts, str(text), longest)


def test_a_line_may_have_a_prediction_or_a_json_schema(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "prediction": "two words"},
        {"prompt": "a", "json_schema": {"type": "integer"}},
        {"prompt": "a"},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = load_prompts(str(path), WordTokenizer())
    fields = [(each.prediction, each.json_schema) for each in prompts]
    assert fields == [((3, 5), ""), ((), '{"type": "integer"}'), ((), "")]
    jobs = jobs_of(prompts, Settings(max_tokens=5, tolerance=0.0))
    sampling = [job.sampling for job in jobs]
    assert [(each.prediction, each.json_schema) for each in sampling] == fields


@pytest.mark.parametrize(
    ("known", "field"), [({"prediction": 3}, "prediction"), ({"json_schema": "{}"}, "json_schema")]
)
def test_a_prediction_or_schema_of_a_wrong_type_is_refused(
    tmp_path: Path, known: dict[str, object], field: str
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "a", **known}))
    with pytest.raises(ConfigError) as raised:
        load_prompts(str(path), WordTokenizer())
    assert raised.value.field == f"{path}:1: {field}"


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", '"text"', "{}", '{"prompt": ""}', '{"messages": [{"role": "user"}]}'),
        *('{"prompt": "a \\ud83d"}', '{"prompt": "a", "reference": "\\ud83d"}'),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError) as raised:
        load_prompts(str(path), WordTokenizer())
    assert raised.value.field == f"{path}:2"


def test_an_unknown_set_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for name in ("english", str(tmp_path / "missing.txt"), str(empty)):
        with pytest.raises(ConfigError) as raised:
            load_prompts(name, WordTokenizer())
        assert raised.value.field == "--prompts"
