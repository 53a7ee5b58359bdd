"""``multiworld audit``: shows administrative operations on a service."""

from __future__ import annotations

import click
from rich.markup import escape

from multiworld.cli import options
from multiworld.serve.controller.client import Service
from multiworld.serve.tenants.records import AuditEntry


@click.command()
@click.option(
    "-n",
    "--last",
    type=click.IntRange(1, 1_000_000),
    default=20,
    help="Number of operations to show.",
)
@options.of_service
def audit(service: Service, last: int, as_json: bool) -> None:
    """Show the last administrative operations and their outcomes."""
    found = service.ask("GET", "/audit", list[AuditEntry], params={"last": last})
    if as_json:
        options.print_json(found)
        return
    table = options.new_table("administrative operations", "when")
    for title in ("who", "operation", "arguments", "outcome"):
        table.add_column(title)
    for entry in found:
        what = ", ".join(f"{k}={v}" for k, v in entry.what.items())
        texts = entry.who, entry.act, what, entry.outcome
        table.add_row(options.local_time(entry.at), *map(escape, texts))
    options.print_table(table)
