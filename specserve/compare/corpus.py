"""The demo models' corpus: Python's standard library, of which some modules are held out.

This module does not import torch, so that benchmarks load the held-out modules quickly.
"""

from __future__ import annotations

import contextlib
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from specserve.core.errors import ConfigError

HELD_OUT_ONE_IN = 25
"""One module in this many, chosen by a hash of its path, is held out from training."""

MIN_BYTES, MAX_BYTES = 400, 400_000

SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",  # tables of code points: many tokens, nothing to learn
        "idle_test",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file: `name` is its path under the corpus root with `/`, `text` its content."""

    name: str
    text: str


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def module_paths(root: Path) -> list[Path]:
    """The corpus's Python files under `root`, sorted, without tests and installed packages."""
    paths = []
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in folders):
            continue
        if path.name.startswith("_sysconfigdata"):
            continue
        if MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
            paths.append(path)
    return paths


def is_held_out(name: str) -> bool:
    """Whether a module is held out from training; `name` is its path under the corpus root.

    The rule hashes the path alone, so it is the same on every machine and Python version.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def load_modules(root: Path | None = None, *, held_out: bool) -> list[Module]:
    """The held-out modules of the corpus, or the training modules; skips files that are not UTF-8.

    Raises:
        ConfigError: the folder has no such module.
    """
    root = root or standard_library()
    modules = []
    for path in module_paths(root):
        name = path.relative_to(root).as_posix()
        if is_held_out(name) is not held_out:
            continue
        with contextlib.suppress(UnicodeDecodeError):
            modules.append(Module(name=name, text=path.read_text(encoding="utf-8")))
    if not modules:
        part = "held-out" if held_out else "training"
        raise ConfigError("corpus", str(root), f"a folder with a {part} Python file")
    return modules
