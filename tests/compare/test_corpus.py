from __future__ import annotations

from pathlib import Path

import pytest

from specserve.compare.corpus import (
    is_held_out,
    load_modules,
    module_paths,
    standard_library,
)
from specserve.core.errors import ConfigError


def test_training_never_reads_a_held_out_module() -> None:
    root = standard_library()
    held_out = {module.name for module in load_modules(held_out=True)}
    trained = {module.name for module in load_modules(held_out=False)}
    assert held_out
    assert not held_out & trained
    assert held_out | trained <= {p.relative_to(root).as_posix() for p in module_paths(root)}


def test_the_split_depends_only_on_the_path() -> None:
    assert [
        name for name in ("ast.py", "functools.py", "json/decoder.py") if is_held_out(name)
    ] == [
        "ast.py",
        "functools.py",
    ]


def test_test_suites_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for name in ("kept/a.py", "test/b.py", "site-packages/c.py", "kept/__pycache__/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * 200)
    (tmp_path / "kept" / "too_short.py").write_text("x = 1\n")
    assert module_paths(tmp_path) == [tmp_path / "kept" / "a.py"]


def test_a_folder_without_python_files_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"corpus: .*{tmp_path.name}"):
        load_modules(tmp_path, held_out=False)
