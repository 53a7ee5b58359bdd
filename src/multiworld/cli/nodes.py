"""``multiworld nodes``: shows the machines of a service. Shell."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from multiworld.cli.options import JSON, new_table, of_service, print_table, service_of
from multiworld.serve.control.client import running
from multiworld.serve.resources.amounts import MIB, mib
from multiworld.serve.resources.inventory import this_node


def _show_nodes(found: list[dict[str, Any]], title: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = new_table(title, "name")
    for column in ("address", "cpus", "memory", "GPUs"):
        table.add_column(column)
    table.add_column("replicas", no_wrap=True)
    for node in found:
        table.add_row(
            node["name"],
            node["address"],
            _of(node, "cpus", 1.0, "g"),
            _of(node, "memory_bytes", MIB, ",.0f") + " MiB",
            "\n".join(_gpu(gpu, node) for gpu in node["gpus"]) or "none",
            "\n".join(node.get("replicas", ())),
        )
    print_table(table)


def _of(node: dict[str, Any], name: str, unit: float, form: str) -> str:
    has = format(node[name] / unit, form)
    free = node.get(f"free_{name}")
    return has if free is None else f"{free / unit:{form}} free of {has}"


def _gpu(gpu: dict[str, Any], node: dict[str, Any]) -> str:
    free = node.get("free_gpu_memory_bytes", {}).get(str(gpu["index"]))
    left = "" if free is None else f"{mib(free)} free of "
    return f"{gpu['index']} {gpu['kind']} ({left}{mib(gpu['memory_bytes'])})"


@click.command()
@of_service
@JSON
def nodes(app: str | None, state: Path | None, as_json: bool) -> None:
    """Show the machines of a service, or this machine if none runs."""
    if app is None and state is None and not running():
        found, title = [asdict(this_node())], "this machine"
    else:
        found, title = service_of(app, state).ask("GET", "/nodes"), "machines"
    _show_nodes(found, title, as_json=as_json)
