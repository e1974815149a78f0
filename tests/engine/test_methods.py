import pytest

from specserve.core.config import AppConfig, parse
from specserve.core.errors import ConfigError
from specserve.engine.methods import parse_method, parse_methods


@pytest.fixture
def config() -> AppConfig:
    return parse({"model": {"path": "m"}, "speculation": [{"kind": "ngram"}]})


def test_none_leaves_no_source(config: AppConfig) -> None:
    method = parse_method("none", config)
    assert method.is_none
    assert method.narrowed(config).speculation == ()


@pytest.mark.parametrize("name", ["all", "ngram"])
def test_a_method_keeps_its_sources(config: AppConfig, name: str) -> None:
    assert parse_method(name, config).narrowed(config).speculation == config.speculation


def test_a_peer_method_has_an_argument(config: AppConfig) -> None:
    method = parse_method("vllm-mtp:3", config)
    assert method.is_peer
    assert method.number(default=1) == 3
    assert str(method) == "vllm-mtp:3"
    assert parse_method("vllm-suffix", config).number(default=16) == 16


@pytest.mark.parametrize(
    "name",
    ["", "trie", "ngram+ngram", "ngram+trie", "none:1", "vllm-mtp:0", "vllm-mtp:x", "vllm-draft"],
)
def test_an_unknown_or_incomplete_name_is_refused_with_the_known_ones(
    config: AppConfig, name: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_method(name, config)
    assert raised.value.field == "--methods"
    assert "vllm-" in raised.value.allowed or "none" in raised.value.allowed


def test_all_needs_a_configured_source() -> None:
    with pytest.raises(ConfigError):
        parse_method("all", parse({"model": {"path": "m"}}))


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_method_without_its_package_is_refused_before_any_engine_starts(
    config: AppConfig, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_installed else None)
    if is_installed:
        assert len(parse_methods("none,vllm-suffix", config)) == 2
    else:
        with pytest.raises(ConfigError, match=r"vllm-suffix.*pip install .*arctic-inference"):
            parse_methods("none,vllm-suffix", config)


def test_a_method_given_twice_is_refused(config: AppConfig) -> None:
    assert [str(m) for m in parse_methods("none,ngram", config)] == ["none", "ngram"]
    with pytest.raises(ConfigError):
        parse_methods("none,ngram,none", config)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (2, 4)),
        ({"max_matching_ngram_size": 1}, (1, 1)),
        ({"min_matching_ngram_size": 1, "max_matching_ngram_size": 3}, (1, 3)),
    ],
)
def test_vllms_prompt_lookup_needs_two_tokens_unless_configured(
    options: dict[str, int], sizes: tuple[int, int]
) -> None:
    from specserve.engine.offline import _peer_speculation  # imports vLLM

    config = parse({"model": {"path": "m"}, "speculation": [{"kind": "ngram", **options}]})
    section = _peer_speculation(config, parse_method("vllm-ngram", config))
    assert (section["prompt_lookup_min"], section["prompt_lookup_max"]) == sizes
