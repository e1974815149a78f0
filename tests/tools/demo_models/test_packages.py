from __future__ import annotations

import sysconfig
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from specserve.compare.corpus import is_held_out
from specserve.core.errors import ConfigError
from tools.demo_models.packages import MAX_PACKAGE_BYTES, is_permissive, permissive_packages

CODE = "x = 1\n" * 200


def _package(folder: Path, metadata: str, files: dict[str, str]) -> Distribution:
    info = folder / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: toy\nVersion: 1.0\n{metadata}\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    return Distribution.at(info)


@pytest.mark.parametrize(
    ("metadata", "allowed"),
    [
        ("License-Expression: MIT", True),
        ("License-Expression: BSD-2-Clause AND Apache-2.0 WITH LLVM-exception", True),
        ("License-Expression: MPL-2.0 AND MIT", False),
        ("License: MPL-2.0 AND MIT", False),
        ("License: Copyright\nClassifier: License :: OSI Approved :: BSD License", True),
        ("Classifier: License :: OSI Approved :: Python Software Foundation License", True),
        ("License: GPLv2", False),
        ("License: GPLv2, parts are MIT", False),
        ("License: MIT\nClassifier: License :: OSI Approved :: GNU GPL", False),
        ("Summary: says nothing of its licence", False),
    ],
)
def test_every_licence_that_the_metadata_names_must_be_permissive(
    metadata: str, allowed: bool, tmp_path: Path
) -> None:
    assert is_permissive(_package(tmp_path, metadata, {})) is allowed


def test_a_packages_modules_exclude_tests_and_held_out_files(
    tmp_path: Path,
) -> None:
    names = [f"toy/module_{i}.py" for i in range(100)]
    files = dict.fromkeys([*names, "toy/tests/a.py", "toy/b.txt", "../bin/c.py"], CODE)
    folder = tmp_path / "site-packages"
    _package(folder, "License: MIT", files)
    modules = permissive_packages(folder)["toy"]
    assert [m.name for m in modules] == sorted(n for n in names if not is_held_out(n))
    assert 0 < len(modules) < len(names)


def test_a_package_larger_than_the_limit_is_left_out(tmp_path: Path) -> None:
    count = MAX_PACKAGE_BYTES // 90_000 + 2
    files = {f"toy/part_{i}.py": "x = 1\n" * 15_000 for i in range(count)}
    _package(tmp_path, "License: MIT", files)
    with pytest.raises(ConfigError, match="a site-packages folder"):
        permissive_packages(tmp_path)


def test_the_installed_packages_have_enough_code_to_train_on() -> None:
    packages = permissive_packages(Path(sysconfig.get_path("purelib")))
    assert "pydantic-settings" in packages
    assert "tqdm" not in packages  # partly under the Mozilla Public License
    assert sum(len(modules) for modules in packages.values()) > 500
