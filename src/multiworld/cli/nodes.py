"""``multiworld nodes``: shows the machines of a service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from multiworld.cli import options
from multiworld.config import MIB
from multiworld.serve.controller.answers import NodeShown
from multiworld.serve.controller.client import Service, running
from multiworld.serve.machines.amounts import Gpu, Node, mib
from multiworld.serve.machines.inventory import this_node


def _table(found: Sequence[NodeShown] | Sequence[Node], title: str) -> Table:
    table = options.new_table(title, "name")
    for column in ("address", "cpus", "memory", "GPUs"):
        table.add_column(column)
    table.add_column("replicas", no_wrap=True)
    for node in found:
        shown = node if isinstance(node, NodeShown) else None
        free_cpus = None if shown is None else shown.free_cpus
        free_bytes = None if shown is None else shown.free_memory_bytes
        table.add_row(
            escape(node.name),
            escape(node.address),
            _of(node.cpus, free_cpus, 1.0, "g"),
            _of(node.memory_bytes, free_bytes, MIB, ",.0f") + " MiB",
            escape("\n".join(_gpu(gpu, shown) for gpu in node.gpus)) or "none",
            "\n".join(shown.replicas if shown else ()),
        )
    return table


def _of(total: float, free: float | None, unit: float, form: str) -> str:
    has = format(total / unit, form)
    return has if free is None else f"{free / unit:{form}} free of {has}"


def _gpu(gpu: Gpu, node: NodeShown | None) -> str:
    free = None if node is None else node.free_gpu_memory_bytes.get(gpu.index)
    left = "" if free is None else f"{mib(free)} free of "
    return f"{gpu.index} {gpu.kind} ({left}{mib(gpu.memory_bytes)})"


@click.command()
@options.STATE
@options.APP
@options.JSON
def nodes(app: str | None, state: Path | None, as_json: bool) -> None:
    """Show the machines of a service, or this machine if none runs."""
    if app is None and state is None and not running():
        here = this_node()
        if as_json:
            click.echo(json.dumps([asdict(here)], indent=2))
        else:
            options.print_table(_table([here], "this machine"))
        return
    found = Service(app, state).ask("GET", "/nodes", list[NodeShown])
    if as_json:
        options.print_json(found)
    else:
        options.print_table(_table(found, "machines"))
