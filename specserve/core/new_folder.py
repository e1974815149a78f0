"""Writes a folder atomically: it appears complete, or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specserve.core.errors import ConfigError, SpecServeError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out``, renamed to ``out`` when the block succeeds.

    ``out`` is a new folder, or an empty one; its parents are created.

    Raises:
        ConfigError: ``out`` is not empty.
        SpecServeError: a file cannot be read or written, here or in the block.
    """
    check_out(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
            aside = Path(name)
            yield aside
            aside.chmod(0o755)
            aside.rename(out)  # then the clean-up finds nothing to remove
    except OSError as error:
        raise SpecServeError(f"{error.filename or out}: {error.strerror}") from None


def check_out(out: Path) -> None:
    """Raises ConfigError unless ``out`` is an empty folder or does not exist."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("OUT", str(out), "a folder that does not exist yet, or is empty")
