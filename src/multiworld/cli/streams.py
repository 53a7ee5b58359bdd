"""``multiworld streams``: shows the live streams of a service."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import new_table, of_service, print_json, print_table
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.observe.facts import Facts, StreamFacts

# Seconds to wait for streams: gateways report them only after a client asks for facts.
FIRST_S = 3.0


def _table(found: Sequence[StreamFacts], now: float) -> Table:
    table = new_table("", "request", "tenant", "model")
    for column in ("state", "tokens", "age", "longest pause", "chain"):
        table.add_column(column)
    for each in found:
        attempt = f", attempt {each.attempt}" if each.attempt else ""
        made = f"{each.made:,} after {each.prompt:,}"
        table.add_row(
            escape(each.request),
            escape(each.tenant or "-"),
            escape(each.model),
            each.phase + attempt,
            made if each.made else f"none yet, prompt {each.prompt:,}",
            f"{max(0.0, now - each.began_at):.1f} s",
            f"{each.longest_s:.2f} s" if each.longest_s else "-",
            escape(" > ".join(each.chain) or "none"),
        )
    return table


@click.command()
@click.option("--tenant", help="Show the streams of this tenant only.")
@of_service
def streams(service: Service, tenant: str | None, as_json: bool) -> None:
    """Show the live streams, those in trouble first, then the oldest.

    Each gateway shows at most 100 of its streams. `multiworld cancel REQUEST` ends one,
    and `multiworld logs --request REQUEST` prints the log entries about it.
    """
    facts = service.ask("GET", "/facts", Facts)
    if not facts.streams:
        time.sleep(FIRST_S)
        facts = service.ask("GET", "/facts", Facts)
    found = [
        each
        for each in facts.streams.values()
        if tenant is None or each.tenant == tenant
    ]
    if as_json:
        print_json(found)
        return
    if not found:
        whose = "" if tenant is None else f" of tenant {tenant}"
        click.echo(f"there are no live streams{whose}")
        return
    print_table(_table(found, facts.at))
