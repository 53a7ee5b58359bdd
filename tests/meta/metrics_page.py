"""Writer of the tables in ``docs/reference/metrics.md``.

``python -m tests.meta.metrics_page`` fills each block between
``<!-- metrics NAMES -->`` and ``<!-- end -->`` with what a gateway shows. NAMES are
patterns, as in shells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from multiworld.serve.gateway.http.metrics import COUNTERS, HISTOGRAMS, render
from multiworld.serve.gateway.http.vllm_metrics import HISTOGRAMS as VLLM_HISTOGRAMS
from multiworld.serve.wire.control_messages import (
    ROWS_BOUNDS,
    SECONDS_BOUNDS,
    FleetReport,
    GatewayReport,
    TenantLoad,
    WorkerReport,
)
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
BLOCK = re.compile(r"(<!-- metrics ([^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)

HEAD = "| name | type | labels | meaning |\n|---|---|---|---|\n"


class Row(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def rows() -> list[Row]:
    """Return a row for each metric of a service with one replica."""
    text = render(_sums(), _gateways(), _fleet(), _table()).decode()
    return [
        Row(family.name + "_total" * (family.type == "counter"), *_rest(family))
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    ]


def _rest(family: object) -> tuple[str, tuple[str, ...], str]:
    labels: dict[str, None] = {}
    for sample in family.samples:  # type: ignore[attr-defined]
        labels.update(dict.fromkeys(sample.labels))
    labels.pop("le", None)
    return family.type, tuple(labels), family.documentation  # type: ignore[attr-defined]


def _sums() -> dict[tuple[str, tuple[str, ...]], float]:
    sums = {(kind, labels): 1.0 for kind, (_, labels) in COUNTERS.items()}
    for kind in (*HISTOGRAMS, *(kind for kind, _ in VLLM_HISTOGRAMS.values())):
        sums[f"{kind}_seconds", ("model",)] = 1.0
    sums["finished", ("model", "stop")] = 1.0
    return sums


def _gateways() -> dict[str, GatewayReport]:
    report = GatewayReport(
        waiting={"model": 1}, connected=("m/0/1",), tenants={"tenant": TenantLoad()}
    )
    return {"gateway/1": report}


def _fleet() -> FleetReport:
    worker = WorkerReport(
        batch_rows=(0,) * (len(ROWS_BOUNDS) + 1),
        batch_seconds=(0,) * (len(SECONDS_BOUNDS) + 1),
    )
    return FleetReport(
        replicas={"m/0/1": worker},
        steps_s={"m/0/1": 1.0},
        unplaced=(("m", "1"),),
    )


def _table() -> RoutingTable:
    replica = Replica("m/0/1", "m", "1", 0, ReplicaState.READY)
    return RoutingTable(1, ("g",), {"m": Route("1", {"1": 1})}, {"m/0/1": replica})


def page(text: str) -> str:
    """Return the page with the tables of its blocks."""
    known = rows()

    def table(block: re.Match[str]) -> str:
        found = "".join(_lines(known, block[2].split()))
        return f"{block[1]}{HEAD}{found}{block[3]}"

    return BLOCK.sub(table, text)


def _lines(known: list[Row], patterns: list[str]) -> Iterator[str]:
    for pattern in patterns:
        for row in known:
            if fnmatchcase(row.name, pattern):
                labels = ", ".join(f"`{label}`" for label in row.labels)
                yield f"| `{row.name}` | {row.kind} | {labels} | {row.meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
