"""The Grafana board, checked by Grafana's own types where there is npm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.operate.typescript import errors_of, install, needs_npm

BOARD = Path(__file__).parents[2] / "examples" / "monitoring" / "grafana.json"
SCHEMA = "@grafana/schema@13.2.3"
RAW = "@grafana/schema/dist/types/raw/composable"
OPTIONS = (
    *("--noEmit", "--strict", "--skipLibCheck", "--target", "es2022"),
    *("--module", "esnext", "--moduleResolution", "node10"),
)

# JSON has plain strings where the types have the names of enumerations.
MODULE = """
import type {{ Dashboard }} from "@grafana/schema";
import type * as stat from "{raw}/stat/panelcfg/x/types.gen";
import type * as lines from "{raw}/timeseries/panelcfg/x/types.gen";
type Plain<T> = T extends string ? `${{T}}`
    : T extends number | boolean | null | undefined ? T
    : T extends (infer U)[] ? Plain<U>[]
    : T extends object ? {{ [K in keyof T]?: Plain<T[K]> }} : T;
export const board: Plain<Dashboard> = {board};
export const stats: Plain<stat.Options>[] = {stats};
export const options: Plain<lines.Options>[] = {options};
export const fields: Plain<lines.FieldConfig>[] = {fields};
"""

# Fields of an annotation that only Prometheus' data source knows.
OF_PROMETHEUS = ("expr", "titleFormat")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300), needs_npm]


def module_of(board: dict[str, Any]) -> str:
    for each in board["annotations"]["list"]:
        for name in OF_PROMETHEUS:
            each.pop(name)
    by_type: dict[str, list[Any]] = {"stat": [], "timeseries": []}
    for panel in board["panels"]:
        by_type[panel["type"]].append(panel)
    lines = by_type["timeseries"]
    parts = {
        "board": board,
        "stats": [panel["options"] for panel in by_type["stat"]],
        "options": [panel["options"] for panel in lines],
        "fields": [p["fieldConfig"]["defaults"].get("custom", {}) for p in lines],
    }
    texts = {name: json.dumps(part, indent=1) for name, part in parts.items()}
    return MODULE.format(raw=RAW, **texts)


def test_board_has_the_types_that_grafana_reads(tmp_path: Path) -> None:
    compiler = install(tmp_path, SCHEMA)
    path = tmp_path / "board.ts"
    path.write_text(module_of(json.loads(BOARD.read_text())))
    assert errors_of(compiler, tmp_path, *OPTIONS, path.name) == ""
    wrong = json.loads(BOARD.read_text())
    wrong["panels"][0]["gridPos"]["h"] = "high"
    wrong["panels"][0]["options"]["colorMode"] = "rainbow"
    path.write_text(module_of(wrong))
    found = errors_of(compiler, tmp_path, *OPTIONS, path.name)
    assert "'string' is not assignable to type 'number'" in found
    assert "rainbow" in found
