"""Typical JSON schemas. Their strings are short, so that a small model ends them."""

from __future__ import annotations

import json
import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("batch", "branch", "count", "device", "event", "group", "label", "limit", "score", "user")

NUMBER: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
YES_OR_NO: Schema = {"type": "boolean"}


def text(max_length: int = 12) -> Schema:
    """A short text."""
    return {"type": "string", "pattern": f"^[a-z ]{{1,{max_length}}}$"}


def one_of(*values: str) -> Schema:
    """An enumeration."""
    return {"enum": list(values)}


def several(items: Schema, least: int, most: int) -> Schema:
    """An array."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(**properties: Schema) -> Schema:
    """An object with all of these keys and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


ADDRESS = record(
    street_name=text(), house_number=NUMBER, country=one_of("Germany", "Greece", "France")
)

SCHEMAS: dict[str, Schema] = {
    "flat": record(name=text(), age=NUMBER, member=YES_OR_NO, language=one_of("de", "en", "fr")),
    "nested": record(
        customer=record(name=text(), shipping_address=ADDRESS, billing_address=ADDRESS),
        total=NUMBER,
    ),
    "deep": record(a=record(b=record(c=record(d=record(e=record(value=NUMBER)))))),
    "enums": record(
        severity=one_of("informational", "warning", "critical"),
        component=one_of("scheduler", "executor", "tokenizer", "sampler"),
        environment=one_of("production", "staging", "development"),
        status=one_of("acknowledged", "investigating", "resolved"),
    ),
    "array": several(record(identifier=NUMBER, label=one_of("positive", "negative")), 6, 6),
    "mixed": record(
        tags=several(one_of("alpha", "beta", "gamma"), 2, 5), scores=several(NUMBER, 3, 3)
    ),
    "long-keys": record(
        customer_identification_number=NUMBER,
        preferred_communication_channel=one_of("electronic_mail", "telephone"),
        estimated_time_of_arrival_in_minutes=NUMBER,
        requires_additional_verification=YES_OR_NO,
        number_of_previous_support_requests=NUMBER,
    ),
    "tool-call": record(
        name={"const": "get_current_weather"},
        arguments=record(
            location=text(), unit=one_of("celsius", "fahrenheit"), include_forecast=YES_OR_NO
        ),
    ),
    "extraction": record(
        people=several(record(first_name=text(8), last_name=text(8), occupation=text()), 2, 2),
        organisations=several(record(name=text(), headquarters=ADDRESS), 1, 1),
    ),
    "text": record(summary=text(120), answer=text(60)),
}
"""Schemas by their use. The last one forces almost nothing."""


def random_record(rng: random.Random) -> Schema:
    """A schema of an object with four to eight random keys."""
    kinds = (text(), NUMBER, YES_OR_NO, one_of("low", "medium", "high"), several(NUMBER, 1, 3))
    number = rng.randint(4, 8)
    return record(**{"_".join(rng.sample(_WORDS, 2)): rng.choice(kinds) for _ in range(number)})


def question(schema: Schema) -> str:
    """A prompt that contains the schema and asks for an answer in it."""
    return f"Schema:\n{json.dumps(schema)}\nAnswer:\n"
