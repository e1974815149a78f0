"""The README and the pages say what the code says."""

from __future__ import annotations

import argparse
import re
import runpy
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from specserve.cli.main import build_parser
from specserve.core.config import AppConfig
from specserve.core.metric_specs import ALL, OF_DRAFTERS
from specserve.core.source_config import SourceConfig
from specserve.engine.refused_options import NOT_WITH_KEYS
from tests.peers.speed_chart import CHART, drawn

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = runpy.run_path(str(ROOT / "docs/generate.py"))
SOURCES = get_args(get_args(SourceConfig)[0])


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every class of the configuration, with its prefix in a Serve file."""
    for name, field in AppConfig.model_fields.items():
        if get_origin(field.annotation) is tuple:
            yield from ((f"{name}.N", each) for each in SOURCES)
        else:
            section: Any = field.annotation
            yield name, section
            for key, part in section.model_fields.items():
                if get_origin(part.annotation) is tuple:
                    yield f"{name}.{key}.N", get_args(part.annotation)[0]


def test_the_configuration_page_has_every_key_with_its_default_and_a_meaning() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+) \|$", GENERATED["configuration"](), re.M
    )
    keys = [f"{prefix}.{key}" for prefix, section in sections() for key in section.model_fields]
    assert sorted(key for key, *_ in rows) == sorted(keys)
    defaults = {(key, default) for key, default, *_ in rows}
    assert {
        ("model.path", "required"),
        ("model.served_name", '`""`'),
        ("engine.enforce_eager", "`false`"),
        ("speculation.N.max_draft_len", "`8`"),
        ("speculation.N.max_draft_len", "`3`"),
        ("speculation.N.timeout_s", "`0.25`"),
        ("http.api_keys", "`[]`"),
    } <= defaults


def test_the_configuration_page_has_limits_and_choices() -> None:
    page = GENERATED["configuration"]()
    assert "| `engine.tensor_parallel_size` | `1` | integer, ≥ 1, ≤ 1024 |" in page
    assert "| `engine.gpu_memory_utilization` | `0.9` | number, > 0.0, ≤ 1.0 |" in page
    assert '| `model.served_name` | `""` | string or list |' in page
    assert "| `speculation.N.share` | `cluster` | `cluster`, `replica` |" in page


def test_the_page_of_commands_has_every_command() -> None:
    page = GENERATED["commands"]()
    names = set(commands(build_parser()))
    assert {"specserve check", "specserve trie warm"} <= names
    assert all(f"usage: {name} " in page for name in names)


def commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The full names of a parser's command and of those below it."""
    yield parser.prog
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from commands(below)


def test_the_tenants_page_has_every_option_refused_with_keys() -> None:
    page = (ROOT / "docs/operations/tenants.md").read_text()
    (sentence,) = re.findall(r"are refused with `api_keys`: ([^.]*)\.", page)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(NOT_WITH_KEYS)


def test_the_metrics_page_has_every_metric() -> None:
    names = re.findall(r"^\| `(\w+)` \|", GENERATED["metrics"](), re.M)
    assert set(names) == {spec.name for spec in (*ALL, *OF_DRAFTERS)}


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://example.org/a.js"></script>',
        "<script src=//example.org/a.js></script>",
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<img alt="" src="https://example.org/a.png">',
    ],
)
def test_a_page_that_loads_from_another_host_is_refused(tag: str) -> None:
    refuse: Callable[[str], str] = GENERATED["on_post_page"]
    with pytest.raises(ValueError, match="another host"):
        refuse(f"<html>{tag}</html>")
    own = '<script src="a.js"></script><a href="https://example.org">a link</a>'
    assert refuse(own) == own


def test_the_pages_include_each_generated_part_once() -> None:
    asked = re.findall(r"<!-- generate: (\w+) -->", "".join(map(Path.read_text, PAGES)))
    assert sorted(asked) == sorted(GENERATED["PARTS"])


def test_a_generated_part_replaces_its_note_for_readers_of_the_repository() -> None:
    fill: Callable[[str], str] = GENERATED["on_page_markdown"]
    page = "before\n<!-- generate: benchmarks -->\n\na note\n\n<!-- end -->\nafter"
    assert fill(page) == f"before\n{GENERATED['benchmarks']()}\nafter"
    for path in PAGES:
        assert "this part is empty" not in fill(path.read_text())


def test_the_documented_constants_have_their_values() -> None:
    page = (ROOT / "docs/choice.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \| ([\d.]+) \|", page, re.M)
    assert len(rows) > 5
    for module, name, value in rows:
        package = "policy" if (ROOT / f"specserve/policy/{module}.py").exists() else "sources"
        found = getattr(import_module(f"specserve.{package}.{module}"), name)
        assert found == float(value), (module, name)


def test_the_chart_is_drawn_from_the_current_table() -> None:
    assert CHART.read_text() == drawn(), "run: python -m tests.peers.speed_chart"


def test_the_readme_is_short_and_begins_with_two_commands() -> None:
    assert len(README.splitlines()) <= 150
    commands = re.findall(r"^```\n(.*?)```", README, re.M | re.S)
    assert commands[0] == "make serve\nmake test\n"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=str)
def test_links_and_images_of_a_page_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).is_file(), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=str)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    pattern = r"`((?:configs|deploy|k8s|docs|tests|specserve)/[\w./-]+)`"
    for path in re.findall(pattern, page.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=str)
def test_serve_files_in_the_pages_are_valid(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S):
        content = yaml.safe_load(block)
        for application in content.get("applications", ()):
            AppConfig.model_validate(application["args"])
        if "http" in content:
            AppConfig.model_validate({"model": {"path": "a"}, "http": content["http"]})


def test_the_architecture_lists_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    listed = set(re.findall(r"^\| `specserve/([\w.]+)` \|", page, re.M))
    packages = {path.parent.name for path in (ROOT / "specserve").glob("*/__init__.py")}
    assert listed == packages | {"app.py"}
