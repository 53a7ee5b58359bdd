"""``multiworld resources``: shows the resources that every replica books and uses."""

from __future__ import annotations

import json

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import new_table, of_service, print_table
from multiworld.serve.controller.answers import ProcessShown, StatusAnswer, plain
from multiworld.serve.controller.client import Service
from multiworld.serve.machines.amounts import mib


class _Row(msgspec.Struct, frozen=True):
    """Resources that a replica books and uses; None if it did not report them."""

    name: str
    node: str
    phase: str
    booked_cpus: float
    booked_memory_bytes: int
    memory_bytes: int | None
    gpu_memory_bytes: int | None
    cpu_s: float | None
    computed_s: float | None


def _table(app: str, rows: list[_Row]) -> Table:
    table = new_table(f"{app}: resources of its replicas", "replica")
    table.add_column("node")
    table.add_column("phase")
    for column in ("memory", "booked", "GPU memory", "cpu", "computing"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            escape(row.name),
            escape(row.node),
            row.phase,
            _size(row.memory_bytes),
            _size(row.booked_memory_bytes) if row.booked_memory_bytes else "-",
            _size(row.gpu_memory_bytes) if row.gpu_memory_bytes else "-",
            _seconds(row.cpu_s),
            _seconds(row.computed_s),
        )
    return table


def _row(process: ProcessShown, status: StatusAnswer) -> _Row:
    said = status.worker_report(process.name)
    return _Row(
        name=process.name,
        node=process.node,
        phase=process.phase,
        booked_cpus=process.booked_cpus,
        booked_memory_bytes=process.booked_memory_bytes,
        memory_bytes=None if said is None else said.memory_bytes,
        gpu_memory_bytes=None if said is None else said.gpu_memory_bytes,
        cpu_s=None if said is None else said.cpu_s,
        computed_s=None if said is None else said.computed_s,
    )


def _size(size: int | None) -> str:
    return "?" if size is None else mib(size)


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.1f} s"


@click.command()
@of_service
def resources(service: Service, as_json: bool) -> None:
    """Show the resources that every replica books and uses."""
    status = service.ask("GET", "/status", StatusAnswer, params={"reports": True})
    rows = [_row(p, status) for p in status.processes if not p.is_gateway]
    if as_json:
        out = {"replicas": plain(rows), "unplaced": status.unplaced}
        click.echo(json.dumps(out, indent=2))
        return
    print_table(_table(status.app, rows))
    console = Console()
    for title, why in status.unplaced.items():
        text = f"[red]{escape(title)} cannot be placed[/]: {escape(why)}"
        console.print(text, soft_wrap=True)
