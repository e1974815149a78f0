from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import AliasChoices, Field, ValidationError

from specserve.core.errors import MISSING, ConfigError
from specserve.core.section import Section
from specserve.core.validation import from_validation_error


class Circle(Section):
    kind: Literal["circle"]
    radius: float = Field(gt=0)


class Square(Section):
    kind: Literal["square"]
    side: int = Field(default=1, ge=1, le=9)


class Drawing(Section):
    shapes: list[Annotated[Circle | Square, Field(discriminator="kind")]] = Field(default=[])
    labels: dict[str, str] = Field(default={})
    frame: Square | None = None


def refusal(value: object, prefix: str = "") -> tuple[str, object, str]:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(value)
    error = from_validation_error(caught.value, Drawing, prefix)
    assert isinstance(error, ConfigError)
    return error.field, error.value, error.allowed


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], ("args", [], "a mapping with the keys shapes, labels, frame")),
        ({"shapes": 3}, ("shapes", 3, "a list")),
        ({"shapes": [3]}, ("shapes.0", 3, "a mapping")),
        ({"shapes": [{"kind": "oval"}]}, ("shapes.0.kind", "oval", "circle, square")),
        ({"shapes": [{}]}, ("shapes.0.kind", MISSING, "circle, square")),
        (
            {"shapes": [{"kind": "square", "side": 0}]},
            ("shapes.0.side", 0, "an integer >= 1 and <= 9"),
        ),
        (
            {"shapes": [{"kind": "square", "size": 4}]},
            ("shapes.0.size", "size", "kind, side"),
        ),
        (
            {"shapes": [{"kind": "circle"}]},
            ("shapes.0.radius", MISSING, "a value"),
        ),
        (
            {"shapes": [{"kind": "circle", "radius": "2"}]},
            ("shapes.0.radius", "2", "a number > 0"),
        ),
        ({"labels": {"a": 1}}, ("labels.a", 1, "a string")),
        (
            {"frame": {"kind": "square", "side": 2.5}},
            ("frame.side", 2.5, "an integer >= 1 and <= 9"),
        ),
    ],
)
def test_an_error_has_the_field_the_value_and_what_is_allowed(
    value: Any, expected: tuple[str, object, str]
) -> None:
    assert refusal(value) == expected


def test_all_errors_are_reported_unknown_keys_first() -> None:
    shapes = [{"kind": "circle", "radios": 2}, {"kind": "square", "side": 0}]
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate({"shapes": shapes})
    error = from_validation_error(caught.value, Drawing)
    assert [(each.field, each.value) for each in (error, *error.further)] == [
        ("shapes.0.radios", "radios"),
        ("shapes.1.side", 0),
        ("shapes.0.radius", MISSING),
    ]


def test_an_error_in_a_union_is_of_the_best_fitting_member() -> None:
    class Named(Section):
        names: str | list[str]

    with pytest.raises(ValidationError) as caught:
        Named.model_validate({"names": ["a", 1]})
    error = from_validation_error(caught.value, Named)
    assert (str(error), error.further) == ("names.1: 1 is not allowed; allowed: a string", ())


def test_the_allowed_keys_include_a_fields_alias() -> None:
    class Trie(Section):
        longest: int = Field(1, validation_alias=AliasChoices("longest", "decoding_length"))

    with pytest.raises(ValidationError) as caught:
        Trie.model_validate({"len": 2})
    assert from_validation_error(caught.value, Trie).allowed == "longest (or decoding_length)"


def test_the_field_has_the_prefix() -> None:
    assert refusal({"shapes": 3}, "applications.0.args")[0] == "applications.0.args.shapes"
    assert refusal(None, "applications.0.args")[0] == "applications.0.args"
