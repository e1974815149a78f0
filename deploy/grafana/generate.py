"""Writes the Grafana dashboard: ``python -m deploy.grafana.generate``, at the repository's root."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from deploy.grafana.panels import Panel, rows
from deploy.grafana.series import ours
from specserve.core.metric_specs import DRAFTER_UP

DASHBOARD = Path(__file__).parent / "dashboards/specserve.json"
COLUMNS = 3
PANEL_WIDTH, PANEL_HEIGHT = 24 // COLUMNS, 8  # Grafana's grid is 24 wide
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard in Grafana's JSON model."""
    return {
        "uid": "specserve",
        "title": "specserve",
        "description": "Written by deploy/grafana/generate.py: change that.",
        "tags": ["specserve"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _laid_out(rows()),
    }


def _variables() -> list[dict[str, Any]]:
    query = f"label_values({ours(DRAFTER_UP).name}, model)"
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": "model"},
            "refresh": 2,  # whenever the time range changes
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _laid_out(panels_by_row: dict[str, list[Panel]]) -> list[dict[str, Any]]:
    ids = count(1)
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in panels_by_row.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        made.append(
            {"id": next(ids), "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        y += 1
        for index, panel in enumerate(panels):
            line, column = divmod(index, COLUMNS)
            x, top = column * PANEL_WIDTH, y + line * PANEL_HEIGHT
            place = {"x": x, "y": top, "w": PANEL_WIDTH, "h": PANEL_HEIGHT}
            made.append({"id": next(ids), "gridPos": place, **_drawn(panel)})
        y += -(-len(panels) // COLUMNS) * PANEL_HEIGHT
    return made


def _drawn(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "legendFormat": f"{legend} {{{{namespace}}}}",
                "expr": expr,
            }
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """Returns the content of the dashboard's file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text())
