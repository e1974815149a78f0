"""Fills the generated parts of the pages when they are built; mkdocs loads this file as a hook.

What is between ``<!-- generate: configuration -->`` and ``<!-- end -->`` in a page is replaced by
what the code says.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
from collections.abc import Iterator
from textwrap import dedent
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specserve.cli.main import build_parser
from specserve.core.config import AppConfig
from specserve.core.metric_specs import ALL, OF_DRAFTERS
from specserve.core.source_config import SourceConfig
from tests.peers.__main__ import BENCHMARKS

SOURCES: tuple[type[BaseModel], ...] = get_args(get_args(SourceConfig)[0])

_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
_LENGTHS = {"min_length": "at least {} long", "max_length": "at most {} long"}
_OTHER_HOSTS = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc=\"?(?:https?:)?//"
    r"|<link\b[^>]*rel=\"?(?:stylesheet|preconnect|preload)[^>]*href=\"?(?:https?:)?//"
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with its generated parts; called by mkdocs."""
    pattern = r"(?s)<!-- generate: (\w+) -->.*?<!-- end -->"
    return re.sub(pattern, lambda found: PARTS[found[1]](), markdown)


def on_post_page(output: str, **_: Any) -> str:
    """The page as it is; called by mkdocs.

    Raises:
        ValueError: a reader's browser would load something from another host.
    """
    if found := _OTHER_HOSTS.search(output):
        raise ValueError(f"a page loads something from another host: {found[0]}...")
    return output


def configuration() -> str:
    """A section for each part of the application's ``args``, with a table of its keys."""
    parts = []
    for name, field in AppConfig.model_fields.items():
        if get_origin(field.annotation) is not tuple:
            parts.append(_section(name, name, field.annotation))
            continue
        for source in SOURCES:
            (kind,) = get_args(source.model_fields["kind"].annotation)
            parts.append(_section(f"{name}: {kind}", f"{name}.N", source))
    return "\n\n".join(parts)


def commands() -> str:
    """What ``--help`` says of each command."""
    os.environ["COLUMNS"] = "96"  # argparse wraps at this width
    return "\n\n".join(_helps(build_parser(), 2))


def metrics() -> str:
    """A table of all metrics."""
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for spec in dict.fromkeys((*ALL, *OF_DRAFTERS)):
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.description} |")
    return "\n".join(rows)


def benchmarks() -> str:
    """A table of the benchmarks."""
    rows = [f"| `{name}` | {what} |" for name, what in BENCHMARKS.items()]
    return "\n".join(["| benchmark | what it measures |", "| --- | --- |", *rows])


PARTS = {each.__name__: each for each in (configuration, commands, metrics, benchmarks)}


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields of a section and its bases."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            (tree,) = ast.parse(dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    text = ast.literal_eval(below.value)
                    found[ast.unparse(field.target)] = " ".join(text.split())
    return found


def default(field: FieldInfo) -> str:
    """A field's default as a Serve file writes it."""
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value == ():
        return "`[]`"
    text = {"": '""', True: "true", False: "false"}
    return f"`{text.get(value, str(value)) if isinstance(value, str | bool) else value}`"


def allowed(field: FieldInfo) -> str:
    """Which values a field takes: the literals, or its type and limits."""
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    limits = [
        words.format(getattr(limit, name))
        for limit in field.metadata
        for name, words in (_BOUNDS | _LENGTHS).items()
        if hasattr(limit, name)
    ]
    return ", ".join((_type(kind), *limits))


def _type(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return " or ".join(map(_type, get_args(kind)))
    if get_origin(kind) is dict:
        return "mapping"
    if get_origin(kind) is tuple:
        return "list"
    names = {str: "string", int: "integer", float: "number", bool: "`true`, `false`"}
    return names[kind]


def _section(title: str, prefix: str, section: Any) -> str:
    told = docstrings(section)
    rows = ["| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        rows.append(_row(f"{prefix}.{name}", field, told[name]))
        if get_origin(field.annotation) is tuple:
            (each, _) = get_args(field.annotation)
            rows += [
                _row(f"{prefix}.{name}.N.{key}", part, docstrings(each)[key])
                for key, part in each.model_fields.items()
            ]
    return f"## `{title}`\n\n{_markdown(inspect.getdoc(section) or '')}\n\n" + "\n".join(rows)


def _row(key: str, field: FieldInfo, meaning: str) -> str:
    return f"| `{key}` | {default(field)} | {allowed(field)} | {_markdown(meaning)} |"


def _markdown(docstring: str) -> str:
    return docstring.replace("``", "`").replace("|", "\\|")


def _helps(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{parser.prog}`\n\n```text\n{parser.format_help().rstrip()}\n```"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _helps(command, level + 1)
