"""``multiworld plan``: shows which replicas a spec would start, and where."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import click
import msgspec
from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import JSON, SPEC, FiniteRange, new_table, print_table
from multiworld.errors import PlacementError, SpecError
from multiworld.serve.controller.answers import NodeShown
from multiworld.serve.controller.dtypes import Resolved, resolve
from multiworld.serve.controller.fleet.desired_state import bounds_of, desired_state_of
from multiworld.serve.controller.placement.problem_builder import (
    StageOutlook,
    asks_in,
    bottleneck,
    device_name,
    outlook,
    plan_of,
    problem_of,
)
from multiworld.serve.controller.placement.replica_placement import (
    ReplicaBookings,
    asks_of,
)
from multiworld.serve.controller.placement.solver.problem import UTILISATION, Placement
from multiworld.serve.controller.scaling.default_policy import decide
from multiworld.serve.controller.scaling.limits import is_scaled
from multiworld.serve.controller.scaling.scaling_plans import ScalingPlan, plans_of
from multiworld.serve.controller.service import measured_machine_of
from multiworld.serve.engine.models.factory import build_model, stage_name
from multiworld.serve.machines.amounts import Location, Node
from multiworld.serve.simulation.model_builder import costs_of, pipeline_of
from multiworld.serve.spec.loader import load_spec
from multiworld.serve.spec.schema import AppSpec, ModelSpec
from multiworld.serve.spec.stage import Model

MAX_CPUS, MAX_BYTES = 4096, 2**50  # maximum values for one machine

SHOWN = 6  # maximum number of scaling plans of a model; --json prints all

PROVEN_GAP = 1e-6  # maximum relative gap of a placement that counts as optimal


class PlannedStage(msgspec.Struct, frozen=True):
    """A stage of a spec, and where its replicas would run."""

    model: str
    version: str
    stage: int
    name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    max_batch_size: int
    max_wait_ms: float
    ranks: int
    device: str
    threads: int
    cpus: float | None
    memory_mb: float | None
    where: dict[str, int] = {}
    busy: float | None = None


class PlannedModel(msgspec.Struct, frozen=True):
    """The load that a model would carry, and why its replicas do not all fit."""

    model: str
    demand: float | None
    served: float | None  # None: unknown
    bottleneck: int | None
    at_most: float | None
    short: str


class PlanShown(msgspec.Struct, frozen=True):
    """Complete output of the command."""

    app: str
    launcher: str
    nodes: list[str]
    stages: list[PlannedStage]
    scaling_plans: dict[str, list[ScalingPlan]]
    notes: dict[str, list[str]]
    models: list[PlannedModel]
    solver: str
    gap: float | None
    gateways: int
    listens: str
    processes: int
    dtypes: dict[str, str] = {}


def read_nodes(path: Path) -> list[Node]:
    """Return the machines in a file that ``multiworld nodes --json`` has printed."""
    # Free resources are ignored, because a plan is for empty machines.
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        found = TypeAdapter(list[Node]).validate_python(given)
        for node, entries in zip(found, given, strict=True):
            _check_node(node, entries)
        if len({node.name for node in found}) < len(found):
            raise ValueError("two machines have the same name")
        return found
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise click.ClickException(
            f"{path} does not list machines; write it with `multiworld nodes --json`, "
            f"or by hand with a name, cpus and memory_bytes each: {error}"
        ) from error


def _check_node(node: Node, given: dict[str, object]) -> None:
    """Raise ValueError for unknown fields, and for numbers that no machine has."""
    if unknown := given.keys() - {*NodeShown.__struct_fields__}:
        raise ValueError(f"{node.name}: unknown field {', '.join(sorted(unknown))}")
    sizes = [node.memory_bytes, *(gpu.memory_bytes for gpu in node.gpus)]
    bandwidth = 1.0 if node.bandwidth is None else node.bandwidth
    is_right = {
        "name": bool(node.name),
        "cpus": 0 <= node.cpus <= MAX_CPUS,  # the head node of a cluster may have 0
        "memory_bytes": all(0 <= size <= MAX_BYTES for size in sizes),
        "price": 0 <= node.price < math.inf,
        "bandwidth": 0 < bandwidth < math.inf,
    }
    for field, known in is_right.items():
        if not known:
            raise ValueError(f"machine {node.name!r}: {field} is out of range")


def _rows(
    app: AppSpec, built: Mapping[str, Model], stages: Iterable[StageOutlook]
) -> list[PlannedStage]:
    placed = {(stage.model, stage.stage): stage for stage in stages}
    rows = []
    for name, spec in app.models.items():
        for number, stage in enumerate(spec.stages):
            low, high = bounds_of(spec, number)
            found = placed[name, number]
            rows.append(
                PlannedStage(
                    model=name,
                    version=spec.version,
                    stage=number,
                    name=stage_name(spec, built[name], number),
                    replicas=sum(found.where.values()) or stage.initial_count,
                    min_replicas=low,
                    max_replicas=high,
                    max_batch_size=stage.max_batch_size,
                    max_wait_ms=stage.max_wait_ms,
                    ranks=stage.ranks,
                    device=stage.device,
                    threads=stage.threads,
                    cpus=stage.cpus,
                    memory_mb=stage.memory_mb,
                    where=found.where,
                    busy=found.busy,
                )
            )
    return rows


def _placed(
    app: AppSpec, machines: Sequence[Node], limit_s: float
) -> tuple[Placement, list[StageOutlook], list[PlannedModel]]:
    """Return the planned placement, and the load that it would carry."""
    from multiworld.serve.controller.placement.solver import place

    problem = problem_of(machines, asks_in(app.models))
    found = place(problem, limit_s)
    stages = outlook(problem, found)
    lacking = {
        name
        for name, stage, where in ((s.model, s.stage, s.where) for s in stages)
        # A stage that is scaled to zero needs room, too.
        if sum(where.values()) < max(1, bounds_of(app.models[name], stage)[0])
    }
    models = []
    for need in problem.models:
        slowest = bottleneck(stages, need.name)
        models.append(
            PlannedModel(
                model=need.name,
                demand=app.models[need.name].demand,
                served=found.served[need.name],
                bottleneck=None if slowest is None else slowest.stage,
                at_most=None if slowest is None else slowest.able,
                short=found.unplaced[need.name] if need.name in lacking else "",
            )
        )
    apart = [name for name in app.models if name not in found.served]
    # The solvers ignore the cores and host memory of GPU replicas, and a required GPU
    # index, so also check that the bookings admit the result.
    is_open = apart or not lacking
    spread, short = _admitted(app, machines, found) if is_open else ({}, "")
    if short and not apart:
        named = {m.model for m in models if f" of {m.model} (" in short} or {
            *found.served
        }
        models = [
            msgspec.structs.replace(m, short=short) if m.model in named else m
            for m in models
        ]
    if apart:
        stages += [
            StageOutlook(name, k, {}, 0.0, math.inf)
            for name in apart
            for k in range(len(app.models[name].stages))
        ]
        if not short:
            stages = [replace(s, where=spread[s.model, s.stage]) for s in stages]
        models += [
            PlannedModel(name, app.models[name].demand, None, None, None, short)
            for name in apart
        ]
    return found, stages, models


Spread = dict[tuple[str, int], Counter[str]]  # replicas of each stage, by location


def _admitted(
    app: AppSpec, machines: Sequence[Node], placement: Placement
) -> tuple[Spread, str]:
    """Return where all replicas fit, or else why they do not."""
    specs = {name: {model.version: model} for name, model in app.models.items()}
    solved = Counter((r.model, r.stage) for r in placement.replicas)
    bookings = ReplicaBookings(machines)
    bookings.plan = plan_of(placement, {n: m.version for n, m in app.models.items()})
    desired = desired_state_of(app)
    models = {
        name: replace(
            model,
            replicas=tuple(
                solved[name, stage] or max(1, count)
                for stage, count in enumerate(model.replicas)
            ),
        )
        for name, model in desired.models.items()
    }
    spread: Spread = {}
    # The solvers leave out models with several GPUs a replica; the service places those
    # first, in free resources.
    try:
        placed = bookings.admit(asks_of(replace(desired, models=models), specs))
    except PlacementError as error:
        return spread, str(error)
    for booking in placed.bookings.values():
        model, _, stage = cast("tuple[str, str, int]", booking.post)
        spread.setdefault((model, stage), Counter())[_in_words(booking.spot)] += 1
    return spread, ""


def _in_words(spot: Location) -> str:
    gpus = "+".join(map(str, spot.gpus))
    return f"{spot.node}/gpu{gpus}" if gpus else device_name(spot.node, None)


def _planned(resolved: Resolved, machines: Sequence[Node], limit_s: float) -> PlanShown:
    app, gateway = resolved.app, resolved.app.gateway
    built = {}
    for name, spec in app.models.items():
        try:
            built[name] = build_model(spec)
        except SpecError as error:
            raise SpecError(f"models.{name}: {error}") from error
    found, stages, models = _placed(app, machines, limit_s)
    rows = _rows(app, built, stages)
    workers = sum(row.replicas * row.ranks for row in rows)
    return PlanShown(
        app=app.app,
        launcher=app.launcher,
        nodes=[node.name for node in machines],
        stages=rows,
        scaling_plans={
            name: _scaling_plans(name, spec) for name, spec in app.models.items()
        },
        notes={name: list(model.notes) for name, model in built.items()},
        models=models,
        solver=found.solver,
        gap=None if found.gap == float("inf") else found.gap,
        gateways=app.gateways,
        listens=f"{gateway.host}:{gateway.port or '(a free port)'}",
        processes=workers + app.gateways + 3 + gateway.is_kept,
        dtypes=resolved.why,
    )


# Note on models with a device other than ``cpu``.
UNTRIED = "text generation on GPUs is slow and little tested; see the documentation"


def _show(app: AppSpec, plan: PlanShown) -> None:
    print_table(_table(plan))
    console = Console()
    console.print(
        f"{plan.gateways} gateway(s) at {plan.listens}, a store, a fork server and the "
        f"controller: {plan.processes} processes in all"
    )
    for name, notes in plan.notes.items():
        for note in notes:
            console.print(f"model {name}: {note}", soft_wrap=True, markup=False)
    for name, spec in app.models.items():
        devices = {stage.device for stage in spec.stages}
        if spec.generation is not None and devices != {"cpu"}:
            console.print(f"model {name}: {UNTRIED}", soft_wrap=True, markup=False)
    for name, why in plan.dtypes.items():
        console.print(
            f"model {name} is computed in {why}", soft_wrap=True, markup=False
        )
    for name, scaling_plans in plan.scaling_plans.items():
        if scaling_plans:
            console.print(_scaled(name, scaling_plans), soft_wrap=True, markup=False)
    for model in plan.models:
        console.print(_expected(app, model), soft_wrap=True)
    console.print(f"placed by {plan.solver}, {_quality(plan.gap)}")


def _quality(gap: float | None) -> str:
    """Return in words how far a placement may be from the optimum."""
    if gap is None:
        return "distance from the best placement unknown"
    if gap <= PROVEN_GAP:
        return "proven optimal"
    return f"at most {max(gap, 0.0001):.2%} from the best placement"


def _table(plan: PlanShown) -> Table:
    table = new_table(f"{plan.app}: planned replicas", "model", "stage")
    for title in ("replicas", "batch", "device", "booked", "where"):
        table.add_column(title)
    for row in plan.stages:
        spread = f"{row.replicas}"
        if row.ranks > 1:
            spread += f" of {row.ranks} ranks"
        if row.min_replicas != row.max_replicas:
            spread += f" ({row.min_replicas} to {row.max_replicas})"
        batch = str(row.max_batch_size)
        if row.max_wait_ms:
            batch += f", {row.max_wait_ms:g} ms"
        books = [f"{row.cpus:g} cpus"] if row.cpus else []
        books += [f"{row.memory_mb:g} MiB"] if row.memory_mb else []
        where = [f"{name} x{count}" for name, count in row.where.items()]
        table.add_row(
            escape(f"{row.model} {row.version}"),
            escape(f"{row.stage} {row.name}"),
            spread,
            batch,
            row.device,
            ", ".join(books) or "-",
            escape("\n".join(where)) or "[red]not placed[/]",
        )
    return table


def _scaling_plans(name: str, spec: ModelSpec) -> list[ScalingPlan]:
    """Return an autoscaled model's scaling plans if all item_ms are declared."""
    # Text generation is scaled by tokens, without such plans.
    is_planned = is_scaled(spec) and spec.generation is None
    if not is_planned or not all(stage.item_ms for stage in spec.stages):
        return []
    model = pipeline_of(name, spec, decide, None, 0.0)
    aim = model.objective_s, model.objective_share
    return list(plans_of(costs_of(model), *aim))


def _scaled(name: str, scaling_plans: list[ScalingPlan]) -> str:
    """Return a line about the load that each scaling plan carries."""
    shown = [f"{_rate(g.rate)} with {list(g.replicas)}" for g in scaling_plans[:SHOWN]]
    more = f"; {len(scaling_plans) - SHOWN} more" if len(scaling_plans) > SHOWN else ""
    return (
        f"{name} is scaled by load; requests/s that replicas answer within the "
        f"objective, queues included: {'; '.join(shown)}{more}"
    )


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _expected(app: AppSpec, model: PlannedModel) -> str:
    said = f"{model.model}: "
    if model.demand and model.served is not None:
        said += f"serves {_rate(model.served)} of {_rate(model.demand)} rows/s; "
    spec = app.models[model.model]
    is_known = model.bottleneck is not None and model.at_most is not None
    if not is_known and spec.engine is not None:
        said += "the computing time of an engine is not known"
    elif not is_known and any(stage.item_ms for stage in spec.stages):
        said += "nothing is served"
    elif model.bottleneck is None or model.at_most is None:
        said += (
            "no stage has a computing time, so the bottleneck is not known; run "
            "`multiworld profile SPEC --out FILE`, and add `profile: FILE` to the model"
        )
    else:
        number = model.bottleneck
        stage = spec.stages[number].name or number
        said += (
            f"bottleneck: stage {stage}, at most {_rate(model.at_most)} rows/s with "
            f"its replicas {UTILISATION:.0%} busy"
        )
    said = escape(said)
    if model.short:
        said += f"\n  [red]not all replicas fit[/]: {escape(model.short)}"
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
    type=FiniteRange(0, 3600),
    default=5.0,
    help="Maximum seconds for the solvers.",
)
@JSON
def plan(spec: Path, nodes: Path | None, limit: float, as_json: bool) -> None:
    """Show which replicas SPEC would start, and where; start nothing.

    Also shows the load that they would carry. Exits with 1 if not all replicas fit on
    the machines.
    """
    app = load_spec(spec)
    machines = [measured_machine_of(app)] if nodes is None else read_nodes(nodes)
    resolved = resolve(app, machines, {})
    planned = _planned(resolved, machines, limit)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(planned), indent=2))
    else:
        _show(resolved.app, planned)
    sys.exit(1 if any(model.short for model in planned.models) else 0)
