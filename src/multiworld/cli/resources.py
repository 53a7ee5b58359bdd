"""``multiworld nodes`` and ``multiworld resources``: what there is, and who uses it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from multiworld.serve.control.client import Service
from multiworld.serve.resources.amounts import MIB, mib
from multiworld.serve.resources.inventory import this_node


def this_machine(*, as_json: bool) -> int:
    """Show this machine, without any service."""
    node = asdict(this_node())
    _show_nodes([node], "this machine", as_json=as_json)
    return 0


def nodes(service: Service, *, as_json: bool) -> int:
    """Show the machines of a service."""
    found = service.ask("GET", "/nodes")
    _show_nodes(found, "machines", as_json=as_json)
    return 0


def _show_nodes(found: list[dict[str, Any]], title: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table(title=title)
    for column in ("name", "address", "cpus", "memory", "GPUs", "replicas"):
        table.add_column(column)
    for node in found:
        table.add_row(
            node["name"],
            node["address"],
            _of(node, "cpus", 1.0, "g"),
            _of(node, "memory_bytes", MIB, ",.0f") + " MiB",
            ", ".join(_gpu(gpu, node) for gpu in node["gpus"]) or "none",
            ", ".join(node.get("replicas", ())) or "",
        )
    Console().print(table)


def _of(node: dict[str, Any], name: str, unit: float, form: str) -> str:
    has = format(node[name] / unit, form)
    free = node.get(f"free_{name}")
    return has if free is None else f"{free / unit:{form}} free of {has}"


def _gpu(gpu: dict[str, Any], node: dict[str, Any]) -> str:
    free = node.get("free_gpu_memory_bytes", {}).get(str(gpu["index"]))
    left = "" if free is None else f"{mib(free)} free of "
    return f"{gpu['index']} {gpu['kind']} ({left}{mib(gpu['memory_bytes'])})"


def resources(service: Service, *, as_json: bool) -> int:
    """Show what every replica has booked, and what it uses now."""
    status = service.ask("GET", "/status", params={"reports": True})
    rows = [_row(p, status) for p in status["processes"] if p["model"]]
    if as_json:
        out = {"replicas": rows, "unplaced": status["unplaced"]}
        click.echo(json.dumps(out, indent=2))
        return 0
    table = Table(title=f"{status['app']}: what its replicas use")
    for column in ("replica", "node", "phase"):
        table.add_column(column)
    for column in ("memory", "booked", "GPU memory", "cpu", "computing"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            row["node"],
            row["phase"],
            _size(row["memory_bytes"]),
            _size(row["booked_memory_bytes"]) if row["booked_memory_bytes"] else "-",
            _size(row["gpu_memory_bytes"]) if row["gpu_memory_bytes"] else "-",
            _seconds(row["cpu_s"]),
            _seconds(row["computed_s"]),
        )
    console = Console()
    console.print(table)
    for title, why in status["unplaced"].items():
        console.print(f"[red]{title} has no place[/]: {why}", soft_wrap=True)
    return 0


def _row(process: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    said = status["reports"].get(process["name"]) or {}
    return {
        "name": process["name"],
        "node": process["node"],
        "phase": process["phase"],
        "booked_cpus": process["booked_cpus"],
        "booked_memory_bytes": process["booked_memory_bytes"],
        "memory_bytes": said.get("memory_bytes"),
        "gpu_memory_bytes": said.get("gpu_memory_bytes"),
        "cpu_s": said.get("cpu_s"),
        "computed_s": said.get("computed_s"),
    }


def _size(size: int | None) -> str:
    return "?" if size is None else mib(size)


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.1f} s"
