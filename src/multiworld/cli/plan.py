"""``multiworld plan``: shows which replicas a spec would start, and where. Shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from multiworld.cli.options import JSON, SPEC, new_table, print_table
from multiworld.serve.control.service import machine_of
from multiworld.serve.fleet.desired_state import bounds_of
from multiworld.serve.models.factory import build_model, stage_name
from multiworld.serve.placement.problem_builder import (
    StageOutlook,
    asks_in,
    bottleneck,
    outlook,
    problem_of,
)
from multiworld.serve.resources.amounts import Node
from multiworld.serve.scaling.default_policy import decide
from multiworld.serve.scaling.gears import gears_of
from multiworld.serve.scaling.limits import is_scaled
from multiworld.serve.simulation.model_builder import costs_of, pipeline_of
from multiworld.serve.spec.loader import load_spec
from multiworld.serve.spec.schema import AppSpec, ModelSpec

SHOWN = 6
"""Most gears shown for a model; --json prints all."""

SOLVER = "pip install 'multiworld-elastic[placement]'"
"""Command that installs the solvers."""


PROVEN_GAP = 1e-6
"""Relative gap at which the solvers take a placement for optimal."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The planned placement, and the load that it would carry."""

    stages: list[StageOutlook]
    models: list[dict[str, Any]]
    solver: str
    gap: float | None


def run(path: Path, nodes: Path | None, limit_s: float, *, as_json: bool) -> int:
    """Print what a spec would start; return 1 if not all replicas fit."""
    app = load_spec(path)
    machines = [machine_of(app)] if nodes is None else read_nodes(nodes)
    rows = _rows(app)
    try:
        found = _placed(app, machines, limit_s)
    except ModuleNotFoundError:
        found = None
    _fill(rows, found)
    whole = _whole(app, rows, machines, found)
    if as_json:
        click.echo(json.dumps(whole, indent=2))
    else:
        _show(app, rows, whole, found)
    return 0 if found is None or not any(m["short"] for m in found.models) else 1


def read_nodes(path: Path) -> list[Node]:
    """Return the machines in a file that ``multiworld nodes --json`` has printed."""
    try:
        return TypeAdapter(list[Node]).validate_python(_known(path.read_text()))
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, ValidationError, TypeError, AttributeError) as error:
        raise click.ClickException(
            f"{path} does not list machines; write it with `multiworld nodes --json`, "
            f"or by hand with a name, cpus and memory_bytes each: {error}"
        ) from error


def _known(text: str) -> list[dict[str, Any]]:
    """Return nodes without their free resources: a plan is for empty machines."""
    fields = ("name", "cpus", "memory_bytes", "gpus", "price", "bandwidth")
    return [{k: n[k] for k in fields if k in n} for n in json.loads(text)]


def _rows(app: AppSpec) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, spec in app.models.items():
        model = build_model(spec)
        for number, stage in enumerate(spec.stages):
            low, high = bounds_of(spec, number)
            rows.append(
                {
                    "model": name,
                    "version": spec.version,
                    "stage": number,
                    "name": stage_name(spec, model, number),
                    "replicas": stage.initial_count,
                    "min_replicas": low,
                    "max_replicas": high,
                    "max_batch_size": stage.max_batch_size,
                    "max_wait_ms": stage.max_wait_ms,
                    "ranks": stage.ranks,
                    "device": stage.device,
                    "threads": stage.threads,
                    "cpus": stage.cpus,
                    "memory_mb": stage.memory_mb,
                }
            )
    return rows


def _placed(app: AppSpec, machines: Sequence[Node], limit_s: float) -> Outlook:
    """Place all replicas with the solvers.

    Raises:
        ModuleNotFoundError: The solvers are not installed.
    """
    from multiworld.serve.placement.solver import place

    problem = problem_of(machines, asks_in(app.models))
    found = place(problem, limit_s)
    stages = outlook(problem, found)
    models = []
    for need in problem.models:
        slowest = bottleneck(stages, need.name)
        models.append(
            {
                "model": need.name,
                "demand": app.models[need.name].demand,
                "served": found.served[need.name],
                "bottleneck": None if slowest is None else slowest.stage,
                "at_most": None if slowest is None else slowest.able,
                "short": found.unplaced.get(need.name, ""),
            }
        )
    gap = None if found.gap == float("inf") else found.gap
    return Outlook(stages, models, found.solver, gap)


def _fill(rows: list[dict[str, Any]], found: Outlook | None) -> None:
    for row in rows:
        row["where"], row["busy"] = {}, None
        for stage in found.stages if found else ():
            if (stage.model, stage.stage) == (row["model"], row["stage"]):
                row["where"], row["busy"] = stage.where, stage.busy
                row["replicas"] = sum(stage.where.values()) or row["replicas"]


def _whole(
    app: AppSpec,
    rows: list[dict[str, Any]],
    machines: Sequence[Node],
    found: Outlook | None,
) -> dict[str, Any]:
    gateway = app.gateway
    workers = sum(row["replicas"] * row["ranks"] for row in rows)
    return {
        "app": app.app,
        "launcher": app.launcher,
        "nodes": [node.name for node in machines],
        "stages": rows,
        "gears": {name: _gears(name, spec) for name, spec in app.models.items()},
        "notes": {name: list(build_model(m).notes) for name, m in app.models.items()},
        "models": found.models if found else [],
        "solver": found.solver if found else None,
        "gap": found.gap if found else None,
        "gateways": gateway.replicas,
        "listens": f"{gateway.host}:{gateway.port or '(a free port)'}",
        "processes": workers + gateway.replicas + 3,
    }


def _show(
    app: AppSpec,
    rows: list[dict[str, Any]],
    whole: dict[str, Any],
    found: Outlook | None,
) -> None:
    print_table(_table(app, rows))
    console = Console()
    console.print(
        f"{whole['gateways']} gateway(s) at {whole['listens']}, a store, a fork server "
        f"and the controller: {whole['processes']} processes in all"
    )
    for name, notes in whole["notes"].items():
        for note in notes:
            console.print(f"model {name}: {note}", soft_wrap=True, markup=False)
    for name, gears in whole["gears"].items():
        if gears:
            console.print(_scaled(name, gears), soft_wrap=True, markup=False)
    if found is None:
        console.print(f"no placement planned: the solvers are missing; {SOLVER}")
        return
    for model in found.models:
        console.print(_expected(app, model), soft_wrap=True)
    console.print(f"placed by {found.solver}, {_quality(found.gap)}")


def _quality(gap: float | None) -> str:
    """Return in words how far a placement may be from the best one."""
    if gap is None:
        return "distance from the best placement unknown"
    if gap <= PROVEN_GAP:
        return "proven optimal"
    return f"at most {max(gap, 0.0001):.2%} from the best placement"


def _table(app: AppSpec, rows: list[dict[str, Any]]) -> Table:
    table = new_table(f"{app.app}: planned replicas", "model", "stage")
    for title in ("replicas", "batch", "device", "booked", "where"):
        table.add_column(title)
    for row in rows:
        spread = f"{row['replicas']}"
        if row["ranks"] > 1:
            spread += f" of {row['ranks']} ranks"
        if row["min_replicas"] != row["max_replicas"]:
            spread += f" ({row['min_replicas']} to {row['max_replicas']})"
        batch = str(row["max_batch_size"])
        if row["max_wait_ms"]:
            batch += f", {row['max_wait_ms']:g} ms"
        books = [f"{row['cpus']:g} cpus"] if row["cpus"] else []
        books += [f"{row['memory_mb']:g} MiB"] if row["memory_mb"] else []
        where = [f"{name} x{count}" for name, count in row["where"].items()]
        table.add_row(
            f"{row['model']} {row['version']}",
            f"{row['stage']} {row['name']}",
            spread,
            batch,
            row["device"],
            ", ".join(books) or "-",
            "\n".join(where) or "[red]no place[/]",
        )
    return table


def _gears(name: str, spec: ModelSpec) -> list[dict[str, Any]]:
    """Return the gears of an autoscaled model whose item_ms are all declared."""
    if not is_scaled(spec) or not all(stage.item_ms for stage in spec.stages):
        return []
    model = pipeline_of(name, spec, decide, {}, 0.0)
    aim = model.objective_s, model.objective_share
    return [asdict(gear) for gear in gears_of(costs_of(model), *aim)]


def _scaled(name: str, gears: list[dict[str, Any]]) -> str:
    """Return a line about the load that each gear carries."""
    shown = [f"{_rate(g['rate'])} with {list(g['replicas'])}" for g in gears[:SHOWN]]
    more = f"; {len(gears) - SHOWN} more" if len(gears) > SHOWN else ""
    return (
        f"{name} is scaled by load, requests/s with replicas: {'; '.join(shown)}{more}"
    )


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _expected(app: AppSpec, model: dict[str, Any]) -> str:
    name, spec = model["model"], app.models[model["model"]]
    said = f"{name}: "
    if model["demand"]:
        said += f"serves {_rate(model['served'])} of {_rate(model['demand'])} rows/s; "
    if model["bottleneck"] is None:
        said += (
            "bottleneck unknown; give item_ms: or profile: (see `multiworld profile`)"
        )
    else:
        stage = spec.stages[model["bottleneck"]].name or model["bottleneck"]
        said += f"bottleneck: stage {stage}, at most {_rate(model['at_most'])} rows/s"
    if model["short"]:
        said += f"\n  [red]not all replicas fit[/]: {model['short']}"
    return said


@click.command()
@SPEC
@click.option(
    "--nodes",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Plan for the machines in this file, which `multiworld nodes --json` "
    "wrote; by default for this machine.",
)
@click.option(
    "--limit",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    help="Most seconds for the solvers.",
)
@JSON
def plan(spec: Path, nodes: Path | None, limit: float, as_json: bool) -> None:
    """Show which replicas SPEC would start, and where; start nothing.

    Also shows the load that they would carry. Exits with 1 if not all replicas fit on
    the machines.
    """
    sys.exit(run(spec, nodes, limit, as_json=as_json))
