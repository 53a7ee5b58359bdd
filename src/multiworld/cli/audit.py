"""``multiworld audit``: shows administrative operations on a service."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.markup import escape

from multiworld.cli.options import (
    JSON,
    local_time,
    new_table,
    of_service,
    print_json,
    print_table,
    service_of,
)
from multiworld.serve.control.client import Service
from multiworld.serve.tenants.records import AuditEntry


def run(service: Service, last: int, *, as_json: bool) -> int:
    found = service.ask("GET", "/audit", list[AuditEntry], params={"last": last})
    if as_json:
        print_json(found)
        return 0
    table = new_table("administrative operations", "when")
    for title in ("who", "operation", "arguments", "outcome"):
        table.add_column(title)
    for entry in found:
        what = ", ".join(f"{k}={v}" for k, v in entry.what.items())
        texts = entry.who, entry.act, what, entry.outcome
        table.add_row(local_time(entry.at), *map(escape, texts))
    print_table(table)
    return 0


@click.command()
@click.option(
    "-n",
    "--last",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Number of operations to show.",
)
@of_service
@JSON
def audit(last: int, app: str | None, state: Path | None, as_json: bool) -> None:
    """Show the last administrative operations and their outcomes."""
    service = service_of(app, state)
    sys.exit(run(service, last, as_json=as_json))
