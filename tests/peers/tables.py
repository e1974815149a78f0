"""Prints rows as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_rows(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints a column for each key of the first row, except keys with lists."""
    table = Table(title=title)
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    for name in names:
        is_text = rows[0][name] != "" and isinstance(rows[0][name], str)
        table.add_column(name.replace("_", " "), justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(v if isinstance(v := row[name], str) else f"{v:,}" for name in names))
    console.print(table)
