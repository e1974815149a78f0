"""Draws the chart of README.md from the table in docs/benchmarks/index.md.

    python -m tests.peers.speed_chart

``python -m tests.peers switched`` measures the table.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.peers.svg import Chart, Line, page

ROOT = Path(__file__).parents[2]
TABLE, CHART = ROOT / "docs/benchmarks/index.md", ROOT / "docs/images/speed.svg"
SETS = {"code": "code", "chat": "dialogues"}
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
ALL = "all"

Speeds = dict[tuple[str, str], list[tuple[float, float]]]


def speeds(markdown: str) -> Speeds:
    """(concurrency, ratio to no speculation) for each set and source of the table."""
    header, rows = re.findall(r"^(\| prompts .*)\n\| --- .*\n((?:\|.*\n)+)", markdown, re.M)[0]
    names = [cell.strip(" `") for cell in header.split("|")[1:-1]]
    found: Speeds = {}
    for row in rows.splitlines():
        cells = dict(zip(names, (cell.strip(" `") for cell in row.split("|")[1:-1]), strict=True))
        for name in names[3 : names.index(ALL) + 1]:
            point = float(cells["concurrency"]), float(cells[name])
            found.setdefault((cells["prompts"], name), []).append(point)
    return found


def charts(found: Speeds) -> list[Chart]:
    """A chart for each of ``SETS``: all sources together, each alone, and no speculation."""
    return [
        Chart(
            f"Tokens per second over no speculation: {title}",
            "concurrent requests",
            [
                *(
                    Line("all sources" if name == ALL else f"{name} alone", points)
                    for (of, name), points in reversed(found.items())
                    if of == prompts
                ),
                Line("no speculation", [(each, 1.0) for each in CONCURRENCIES], dashed=True),
            ],
            CONCURRENCIES,
        )
        for prompts, title in SETS.items()
    ]


def drawn() -> str:
    """Content of the chart's file from the table."""
    return page(charts(speeds(TABLE.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    CHART.write_text(drawn(), encoding="utf-8")
