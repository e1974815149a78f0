from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specserve.core.config import ModelConfig, parse
from specserve.core.errors import ConfigError
from specserve.core.source_config import MAX_DRAFT_TOKENS, DraftModelConfig

BESIDE = {"kind": "mtp", "placement": "beside_rank_0"}


def args(**sections: Any) -> dict[str, Any]:
    return {"model": {"path": "some/model"}} | sections


def test_a_model_path_is_all_that_is_needed() -> None:
    config = parse(args())
    assert config.model.name == "some/model"
    assert config.speculation == ()
    assert config.num_speculative_tokens == 0


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    drafter = {"kind": "draft_model", "model": "~/small"}
    config = parse({"model": {"path": "~/large"}, "speculation": [drafter]})
    assert config.model.path == config.model.name == "/home/me/large"
    assert isinstance(config.speculation[0], DraftModelConfig)
    assert config.speculation[0].model == "/home/me/small"


def test_the_first_served_name_is_the_models_name() -> None:
    model = parse({"model": {"path": "m", "served_name": ["demo", "default"]}}).model
    assert (model.name, model.names) == ("demo", ("demo", "default"))
    assert ModelConfig.model_validate(model.model_dump(mode="json"), strict=False) == model


def test_the_longest_source_sets_the_number_of_speculative_tokens() -> None:
    config = parse(args(speculation=[{"kind": "ngram", "max_draft_len": 5}]))
    assert config.num_speculative_tokens == 5


def test_mindies_name_sets_the_longest_draft_of_a_trie() -> None:
    config = parse(args(speculation=[{"kind": "trie", "decoding_length": 7}]))
    assert config.speculation[0].max_draft_len == config.num_speculative_tokens == 7


def test_a_config_is_frozen() -> None:
    config = parse(args())
    with pytest.raises(ValidationError, match="frozen"):
        config.model.path = "other"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engin": {}}, r"^engin: 'engin' is not allowed; allowed: model, engine, speculation, "),
        ({"model": {}}, r"^model\.path: is missing; allowed: a value$"),
        (
            {"engine": {"dtype": "int4"}},
            r"^engine\.dtype: 'int4' .* auto, bfloat16, float16, float32$",
        ),
        *(
            ({"model": {"path": "m", "served_name": value}}, rf"^model\.served_name{message}$")
            for value, message in (
                ([], r": \[\] .* a name, or a list of at least one name"),
                (5, r": 5 .* a name, or a list of at least one name"),
                (["a", "b", "a"], r"\.2: 'a' .* each name at most once"),
                (["a", ""], r"\.1: '' .* a name of 1 \.\. 200 characters"),
                ([None], r"\.0: None .* a name of 1 \.\. 200 characters"),
                ("a" * 201, r": 'aaa.* a name of 1 \.\. 200 characters"),
            )
        ),
        ({"engine": {"seed": "1"}}, r"^engine\.seed: '1' .* an integer >= 0$"),
        ({"engine": {"enforce_eager": 1}}, r"^engine\.enforce_eager: 1 .* true or false$"),
        ({"speculation": False}, r"^speculation: False is not allowed; allowed: a list$"),
        (
            {"speculation": [{"kind": "ngram"}, {"kind": "ngram"}]},
            r"^speculation\.0\.kind: 'ngram' .* each kind of source at most once$",
        ),
        (
            {"speculation": [{"kind": "ngram", "max_draft_len": MAX_DRAFT_TOKENS + 1}]},
            r"^speculation\.0\.max_draft_len: 129 .* an integer >= 1 and <= 128$",
        ),
        (
            {"engine": {"max_model_len": 8}, "speculation": [{"kind": "ngram"}]},
            r"^speculation\.0\.max_draft_len: 8 .* less than engine\.max_model_len \(8\)$",
        ),
        (
            {"engine": {"max_num_batched_tokens": 4}, "speculation": [{"kind": "ngram"}]},
            r"^speculation\.0\.max_draft_len: 8 .* less than engine\.max_num_batched_tokens \(4\)$",
        ),
        (
            {"engine": {"max_num_batched_tokens": 64, "max_num_seqs": 128}},
            r"^engine\.max_num_batched_tokens: 64 .* at least engine\.max_num_seqs \(128\)$",
        ),
        (
            {"engine": {"vllm": {"enable_lora": True}}, "speculation": [{"kind": "ngram"}]},
            r"^engine\.max_num_batched_tokens: 2048 .* at least 2304, engine\.max_num_seqs \(256\) "
            r"\* 9, the longest draft and a token, with enable_lora$",
        ),
        (
            {"speculation": [{"kind": "mtp", "placement": "in_engine", "model": "module"}]},
            r"^speculation\.0\.model: 'module' .* empty, where placement is in_engine$",
        ),
        (
            {"speculation": [{"kind": "mtp", "placement": "in_engine", "dynamic": False}]},
            r"^speculation\.0\.dynamic: False .* True, where placement is in_engine$",
        ),
        (
            {"speculation": [{**BESIDE, "num_gpus": 0.2}]},
            r"^speculation\.0\.num_gpus: 0\.2 .* at most 0\.1, "
            r"what engine\.gpu_memory_utilization \(0\.9\) leaves of a GPU$",
        ),
        (
            {"speculation": [{"kind": "mtp", "num_gpus": 2}]},
            r"^speculation\.0\.num_gpus: 2 .* a number >= 0 and <= 1$",
        ),
        (
            {"speculation": [{**BESIDE, "num_cpus": 2.0}]},
            r"^speculation\.0\.num_cpus: 2\.0 .* at most 1, "
            r"what placement\.num_cpus_per_shard \(1\) reserves$",
        ),
        (
            {"speculation": [{**BESIDE, "num_actors": 2}]},
            r"^speculation\.0\.num_actors: 2 .* 1, where placement is beside_rank_0$",
        ),
        (
            {"speculation": [{**BESIDE, "resources": {"mark": 1.0}}]},
            r"^speculation\.0\.resources: {'mark': 1\.0} .* empty, where placement is beside_",
        ),
        (
            {"speculation": [{"kind": "trie", "snapshot_url": "memory"}]},
            r"^speculation\.0\.snapshot_url: 'memory' .* an absolute path, or a URL",
        ),
        (
            {"speculation": [{"kind": "trie", "snapshot_url": "/m", "share": "replica"}]},
            r"^speculation\.0\.snapshot_url: '/m' .* empty, unless share is cluster$",
        ),
        (
            {"speculation": [{"kind": "trie", "snapshot_interval_s": 4, "share": "replica"}]},
            r"^speculation\.0\.snapshot_interval_s: 4.* 60.0, unless share is cluster$",
        ),
        (
            {"speculation": [{"kind": "trie", "decoding_length": 0}]},
            r"^speculation\.0\.decoding_length: 0 .* an integer >= 1 and <= 128$",
        ),
        (
            {"speculation": [{"kind": "trie", "max_draft_len": 5, "decoding_length": 7}]},
            r"^speculation\.0\.decoding_length: 7 is not allowed; allowed: no other name",
        ),
        (
            {"engine": {"max_model_len": 8}, "speculation": [{"kind": "trie"}]},
            r"^speculation\.0\.max_draft_len: 16 .* less than engine\.max_model_len \(8\)$",
        ),
        (
            {"placement": {"shard_resources": {"fast": 0.0}}},
            r"^placement\.shard_resources\.fast: 0\.0 .* a number > 0$",
        ),
        (
            {"speculation": [{"kind": "trie", "store_resources": {"head": 0.0}}]},
            r"^speculation\.0\.store_resources\.head: 0\.0 .* a number > 0$",
        ),
        (
            {"placement": {"shard_resources": {"GPU": 2.0}}},
            r"^placement\.shard_resources\.GPU: 2\.0 .* names other than CPU and GPU,",
        ),
        (
            {"speculation": [{"kind": "ngram", "min_matching_ngram_size": 9}]},
            r"^speculation\.0\.min_matching_ngram_size: 9 .* 1 \.\. max_matching_ngram_size \(4\)$",
        ),
        (
            {"http": {"api_keys": [{"env": "A-KEY", "tenant": "a"}]}},
            r"^http\.api_keys\.0\.env: 'A-KEY' .* a variable's name: letters, digits and _$",
        ),
        (
            {"http": {"api_keys": [{"env": "A", "tenant": "a"}, {"env": "B", "tenant": "-"}]}},
            r"^http\.api_keys\.1\.tenant: '-' .* letters, digits, '\.', '_' or '-', the first",
        ),
        (
            {"http": {"api_keys": [{"env": "A", "tenant": "a"}, {"env": "A", "tenant": "b"}]}},
            r"^http\.api_keys\.0\.env: 'A' .* each variable at most once$",
        ),
        (
            {"http": {"api_keys": [{"env": "A", "tenant": "a", "key": "sk"}]}},
            r"^http\.api_keys\.0\.key: 'key' .* env, tenant$",
        ),
        ({"http": {"api_keys": ["sk-1"]}}, r"^http\.api_keys\.0: .* the keys env, tenant$"),
    ],
)
def test_an_error_is_reported_in_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(args(**sections))
    assert "\n" not in str(caught.value)


def test_args_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^args: None is not allowed; allowed: a mapping"):
        parse(None)


def test_a_tenant_may_have_several_keys() -> None:
    keys = [{"env": "A_OLD", "tenant": "a"}, {"env": "A_NEW", "tenant": "a"}]
    assert [key.tenant for key in parse(args(http={"api_keys": keys})).http.api_keys] == ["a", "a"]


def test_an_in_engine_source_must_be_the_only_one() -> None:
    in_engine = {"kind": "mtp", "placement": "in_engine"}
    assert parse({"model": {"path": "m"}, "speculation": [in_engine]}).drafts_in_engine
    with pytest.raises(ConfigError) as refused:
        parse({"model": {"path": "m"}, "speculation": [{"kind": "ngram"}, in_engine]})
    assert refused.value.field == "speculation.1.placement"
    assert refused.value.value == "in_engine"


def test_drafters_beside_rank_0_share_what_the_engine_leaves_of_its_gpu() -> None:
    engine = {"gpu_memory_utilization": 0.7}
    other = {"kind": "draft_model", "model": "m", "placement": "beside_rank_0", "num_cpus": 0.5}
    mtp = {**BESIDE, "num_cpus": 0.5, "num_gpus": 0.2}
    config = parse(args(engine=engine, speculation=[{"kind": "ngram"}, mtp, other]))
    assert list(config.beside_rank_0) == [1, 2]
    assert parse(args(engine=engine, speculation=[mtp, {**other, "num_gpus": 0.1}])).beside_rank_0
    with pytest.raises(ConfigError, match=r"^speculation\.1\.num_gpus: 0\.11 .* at most 0\.1, "):
        parse(args(engine=engine, speculation=[mtp, {**other, "num_gpus": 0.11}]))
