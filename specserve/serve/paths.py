"""The path of a call within its application."""

from __future__ import annotations

from starlette.types import Scope


def path_of(scope: Scope) -> str:
    """Returns the path after the application's prefix, without a slash at its end."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.rstrip("/")
