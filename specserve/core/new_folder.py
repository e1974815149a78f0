"""A folder that a command writes: all of it is there in the end, or nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specserve.core.errors import ConfigError, SpecServeError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out``, which takes its place when the block has ended well.

    ``out`` is a new folder, or an empty one; its parents are made.

    Raises:
        ConfigError: ``out`` holds something.
        SpecServeError: a file cannot be read or written, here or in the block.
    """
    check_out(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
            aside = Path(name)
            yield aside
            aside.chmod(0o755)
            aside.rename(out)  # and nothing is left to be removed
    except OSError as error:
        raise SpecServeError(f"{error.filename or out}: {error.strerror}") from None


def check_out(out: Path) -> None:
    """Raises ConfigError where ``out`` is anything but an empty folder or nothing."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("OUT", str(out), "a folder that does not exist yet, or is empty")
