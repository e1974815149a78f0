from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specserve.core.config import AppConfig, NgramConfig, TrieConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value == ():
        return "[]"
    text = {"": '""', True: "true", False: "false"}
    return text.get(value, str(value)) if isinstance(value, str | bool) else str(value)


def expected() -> dict[str, str]:
    """Every key of ``args`` with its default, as the README has to say it."""
    rows: dict[str, str] = {}
    for name, section in AppConfig.model_fields.items():
        kinds: tuple[Any, ...] = (section.annotation,)
        if get_origin(section.annotation) is tuple:
            kinds, name = (NgramConfig, TrieConfig), f"{name}.N"
        for kind in kinds:
            assert issubclass(kind, BaseModel)
            for key, field in kind.model_fields.items():
                row = f"{name}.{key}"
                assert rows.setdefault(row, default(field)) == default(field)
                if get_origin(field.annotation) is tuple:
                    for each, part in get_args(field.annotation)[0].model_fields.items():
                        rows[f"{row}.N.{each}"] = default(part)
    return rows


def test_the_readme_tells_every_key_and_its_default() -> None:
    rows = re.findall(r"^\| `(\w+\.[\w.]+)` \| (.*?) \|", README, flags=re.MULTILINE)
    assert dict(rows) == {
        key: value if value == "required" else f"`{value}`" for key, value in expected().items()
    }
