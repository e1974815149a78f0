"""Converts a pydantic ``ValidationError`` to a ``ConfigError``: field, value, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from specserve.core.errors import MISSING, ConfigError

_WORDS = {
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",  # YAML and JSON know no tuples
    "none_required": "nothing",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def from_validation_error(
    error: ValidationError, model: type[BaseModel], prefix: str = ""
) -> ConfigError:
    """The errors of ``model``'s validation, as one :class:`ConfigError` with further ones.

    Unknown keys come before missing ones: a misspelt key often causes both. A ``ConfigError`` from
    a validator keeps its text. ``prefix`` is the dotted path of the validated value in the user's
    file; empty: errors name fields relative to that value, and the value itself ``args``.
    """
    problems = error.errors(include_url=False)
    problems.sort(key=lambda problem: problem["type"] == "missing")
    found: dict[str, ConfigError] = {}
    for problem in problems:
        each = _config_error(problem, model, prefix)
        found.setdefault(each.field, each)
    # For a union, keep the error deepest in the value: that member fits best.
    return ConfigError.first_of(
        [each for field, each in found.items() if not any(f.startswith(f"{field}.") for f in found)]
    )


def _config_error(problem: ErrorDetails, model: type[BaseModel], prefix: str) -> ConfigError:
    kind, loc = problem["type"], problem["loc"]
    if kind == "invalid_key":  # e.g. YAML reads the key `on` as true
        kind, loc = "extra_forbidden", (*loc[:-1], str(problem["input"]))
    place = _locate(model, loc)
    path = [prefix, *place.path] if prefix else place.path
    context = problem.get("ctx", {})
    value: object = problem["input"]
    if isinstance(cause := context.get("error"), ConfigError):
        path, value, allowed = [*path, cause.field], cause.value, cause.allowed
    elif kind == "extra_forbidden":
        value, allowed = path[-1], _keys(place.annotation)
    elif kind == "missing":
        value, allowed = MISSING, "a value"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = str(context["discriminator"]).strip("'")
        path = [*path, tag]
        value = value.get(tag, MISSING) if isinstance(value, dict) else value
        tags = [get_args(each.model_fields[tag].annotation) for each in _models(place.annotation)]
        allowed = ", ".join(str(each) for literal in tags for each in literal)
    elif kind in ("model_type", "model_attributes_type"):
        models = _models(place.annotation)
        keys = f" with the keys {_keys(models[0])}" if len(models) == 1 else ""
        allowed = f"a mapping{keys}"
    elif kind in ("literal_error", "enum"):
        allowed = str(context["expected"]).replace(" or ", ", ").replace("'", "")
    elif place.field and place.annotation in (int, float):
        allowed = _number(place.field)
    else:
        allowed = _WORDS.get(kind) or _plain(problem["msg"])
    return ConfigError(".".join(filter(None, path)) or "args", value, allowed)


class _Place(NamedTuple):
    """Where a problem is.

    Attributes:
        path: keys and indices as the user wrote them.
        field: declaration of the last key.
        annotation: type expected at the place; for an unknown key, the model without that key.
    """

    path: list[str]
    field: FieldInfo | None
    annotation: Any


def _locate(model: type[BaseModel], loc: Sequence[int | str]) -> _Place:
    """Follows pydantic's location, without the union tags that it puts between the keys."""
    place = _Place([], None, model)
    for part in loc:
        path = [*place.path, str(part)]
        members, models = _members(place.annotation), _models(place.annotation)
        mappings = [member for member in members if get_origin(member) is dict]
        if isinstance(part, int):
            place = _Place(path, None, next(iter(get_args(members[0])), None))
        elif len(models) > 1 and (tagged := _with_tag(models, part)):
            place = place._replace(annotation=tagged)
        elif models:
            owner = next((each for each in models if _field(each, part)), models[0])
            field = _field(owner, part)
            place = _Place(path, field, field.annotation if field else owner)
        elif mappings:
            place = _Place(path, None, get_args(mappings[0])[1])
        # else: the name of a union's member, which is not in the user's file
    return place


def _names(name: str, field: FieldInfo) -> list[str]:
    """Names of a field in the user's file: its own name, then its aliases."""
    alias = field.validation_alias
    others = alias.choices if isinstance(alias, AliasChoices) else []
    return [name, *(str(other) for other in others if other != name)]


def _field(model: type[BaseModel], key: str) -> FieldInfo | None:
    """The field that a key of the user's file names; None: no such field."""
    fields = model.model_fields.items()
    return next((field for name, field in fields if key in _names(name, field)), None)


def _keys(model: type[BaseModel]) -> str:
    """All keys of a section; a field's aliases follow in brackets."""
    keys = []
    for field_name, field in model.model_fields.items():
        name, *others = _names(field_name, field)
        keys.append(f"{name} (or {', '.join(others)})" if others else name)
    return ", ".join(keys)


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union; any other type is its own single alternative."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for arg in get_args(annotation) for member in _members(arg)]
    return [annotation]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections among the alternatives."""
    members = _members(annotation)
    return [each for each in members if isinstance(each, type) and issubclass(each, BaseModel)]


def _with_tag(models: list[type[BaseModel]], tag: str) -> type[BaseModel] | None:
    for model in models:
        literals = [field.annotation for field in model.model_fields.values()]
        if any(get_origin(a) is Literal and tag in get_args(a) for a in literals):
            return model
    return None


def _number(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(limit, name)
    ]
    noun = "an integer" if field.annotation is int else "a number"
    return " ".join([noun, " and ".join(bounds)]).strip()


def _plain(message: str) -> str:
    """pydantic's sentence as a phrase: "Input should be a valid date" is "a valid date"."""
    text = re.sub(r"^(Value error, |[A-Z]\w+ should (be|have) )", "", " ".join(message.split()))
    return text[:1].lower() + text[1:]
