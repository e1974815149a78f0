from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specserve.core.config import AppConfig
from specserve.core.source_config import SourceConfig

SOURCES = get_args(get_args(SourceConfig)[0])
README = (Path(__file__).parents[1] / "README.md").read_text()


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value == ():
        return "`[]`"
    text = {"": '""', True: "true", False: "false"}
    return f"`{text.get(value, str(value)) if isinstance(value, str | bool) else value}`"


def expected() -> dict[str, str]:
    """Every key of ``args`` with its default, or those of the kinds of sources that have it."""
    rows: dict[str, list[str]] = {}
    for name, section in AppConfig.model_fields.items():
        kinds: tuple[Any, ...] = (section.annotation,)
        if get_origin(section.annotation) is tuple:
            kinds, name = SOURCES, f"{name}.N"
        for kind in kinds:
            assert issubclass(kind, BaseModel)
            for key, field in kind.model_fields.items():
                row = f"{name}.{key}"
                if default(field) not in (defaults := rows.setdefault(row, [])):
                    defaults.append(default(field))
                if get_origin(field.annotation) is tuple:
                    for each, part in get_args(field.annotation)[0].model_fields.items():
                        rows[f"{row}.N.{each}"] = [default(part)]
    return {row: ", ".join(defaults) for row, defaults in rows.items()}


def test_the_readme_tells_every_key_and_its_default() -> None:
    rows = re.findall(r"^\| `(\w+\.[\w.]+)` \| (.*?) \|", README, flags=re.MULTILINE)
    assert dict(rows) == expected()
