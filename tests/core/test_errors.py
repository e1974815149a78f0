from __future__ import annotations

import pickle

from specserve.core.errors import ConfigError, MissingExtraError, SpecServeError, shorten


def test_a_config_error_says_field_value_and_what_is_allowed() -> None:
    error = ConfigError("engine.dtype", "int4", "bfloat16")
    assert str(error) == "engine.dtype: 'int4' is not allowed; allowed: bfloat16"
    assert isinstance(error, SpecServeError)
    assert isinstance(error, ValueError)


def test_a_config_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a.b", [1], "2")))
    assert (error.field, error.value, error.allowed) == ("a.b", [1], "2")
    assert str(error) == "a.b: [1] is not allowed; allowed: 2"


def test_a_long_value_is_cut_and_kept_on_one_line() -> None:
    text = shorten({"key": "line\n" * 100})
    assert len(text) == 80
    assert "\n" not in text
    assert text.endswith("...")


def test_a_missing_vllm_names_both_ways_to_install_it() -> None:
    message = str(MissingExtraError("compare"))
    assert "make setup" in message
    assert "specserve[gpu]" in message
