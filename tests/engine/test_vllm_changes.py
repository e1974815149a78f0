"""docs/vllm-changes.md lists every assignment onto an object that is not specserve's own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "specserve"
FOLDERS = ("engine", "serve")
"""Packages that use vLLM's objects. A row names a file of `serve` with its package."""
DOCUMENT = ROOT / "docs/vllm-changes.md"
_CALLS = (
    "setattr",
    "delattr",
    "register_backend",
    "register_impl",
    "register_kernels",
    "register_mla_prefill_backend",
    "set_default",
)
_ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([^`]+)` \| (.+) \| `([\w/]+\.py)::(test_\w+)` \|$")


def rows() -> list[tuple[str, str, str, str, str]]:
    """File, target, reason, test file and test of each row."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    matches = [(line, _ROW.match(line)) for line in lines]
    assert [line for line, match in matches if match is None] == []
    return [(m[1], m[2], m[3], m[4], m[5]) for _, m in matches if m is not None]


def assigned(tree: ast.AST) -> set[str]:
    """Assignments of a module to objects other than ``self``, or to vLLM's part of ``self``."""
    foreign = _of_vllm(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _CALLS:
            found.add(f"{ast.unparse(node.func)}({ast.unparse(node.args[0])})")
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and not _is_own(node)
        ):
            found.add(ast.unparse(node))
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and isinstance(node.value, ast.Attribute)
            and not _is_own(node.value)
            and ast.unparse(node.value) != "os.environ"
        ):
            found.add(f"{ast.unparse(node.value)}[]")
        elif isinstance(node, ast.ClassDef) and foreign & {ast.unparse(b) for b in node.bases}:
            found |= {ast.unparse(each) for each in _public_of_self(node)}
    return found


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def _of_vllm(tree: ast.AST) -> set[str]:
    """Names of vLLM's classes, and of the bases of mixins that stand for them."""
    return {"_Worker", "_Executor"} | {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def _public_of_self(node: ast.ClassDef) -> Iterator[ast.Attribute]:
    """Attributes of vLLM's that a subclass sets. Our own attributes begin with ``_``."""
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    for each in stored:
        if isinstance(each.ctx, ast.Store) and _is_own(each) and not each.attr.startswith("_"):
            yield each


def test_the_tables_list_every_assignment_and_nothing_else() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix().removeprefix("engine/"), target)
        for folder in FOLDERS
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for target in assigned(ast.parse(path.read_text()))
    }
    listed = [(file, target) for file, target, *_ in rows()]
    assert len(set(listed)) == len(listed)
    not_listed, gone = found - set(listed), set(listed) - found
    assert not not_listed, f"add a row to {DOCUMENT.name} for each of {sorted(not_listed)}"
    assert not gone, f"take the rows of {sorted(gone)} out of {DOCUMENT.name}"


def test_every_row_has_a_reason_and_names_an_existing_test() -> None:
    for file, target, why, test_file, test in rows():
        assert why.split("|")[0].strip(), (file, target)
        source = (ROOT / "tests/engine" / test_file).read_text()
        assert re.search(rf"^(async )?def {test}\(", source, re.M), f"{test_file}::{test}"


@pytest.mark.parametrize(
    ("code", "target"),
    [
        ("runner.x = 1", "runner.x"),
        ("a, module.function = f()", "module.function"),
        ("runner.x: int = 1", "runner.x"),
        ("runner.x += 1", "runner.x"),
        ("del runner.x", "runner.x"),
        ("self.model_runner.x = 1", "self.model_runner.x"),
        ("runner.table[0] = 1", "runner.table[]"),
        ("del self.model_runner.table[0]", "self.model_runner.table[]"),
        ("setattr(runner, name, 1)", "setattr(runner)"),
        ("for runner.x in y: pass", "runner.x"),
        ("with f() as runner.x: pass", "runner.x"),
        ("from vllm.a import B\nclass C(B):\n def f(self): self.x = 1", "self.x"),
    ],
)
def test_each_form_of_an_assignment_is_found(code: str, target: str) -> None:
    assert assigned(ast.parse(code)) == {target}


@pytest.mark.parametrize(
    "code",
    [
        "self.x = 1",
        "self.x[0] = 1",
        "x[0] = 1",
        "x = runner.x",
        "class C:\n def f(self): self.x = 1",
        "from vllm.a import B\nclass C(B):\n def f(self): self._x = 1",
    ],
)
def test_an_assignment_to_our_own_object_is_not_found(code: str) -> None:
    assert not assigned(ast.parse(code))
