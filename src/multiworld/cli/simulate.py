"""``multiworld simulate``: replays a trace against autoscaling policies."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from multiworld.cli.options import (
    JSON,
    SPEC,
    FiniteRange,
    check_writable,
    finite,
    new_table,
    print_table,
)
from multiworld.cli.plan import read_nodes
from multiworld.serve.controller.scaling import (
    reference_policies,
)
from multiworld.serve.controller.scaling.policies import BUILT_IN, policy_of
from multiworld.serve.controller.scaling.scaling_plans import plan_for, plans_of
from multiworld.serve.controller.scaling.snapshot import Policy
from multiworld.serve.engine.models.factory import import_factory
from multiworld.serve.machines.amounts import needs_of
from multiworld.serve.machines.bookings import Bookings
from multiworld.serve.simulation import traces
from multiworld.serve.simulation.model_builder import (
    Machines,
    costs_of,
    pipeline_of,
    with_fleet,
)
from multiworld.serve.simulation.oracle import with_foresight
from multiworld.serve.simulation.pipeline import (
    Arrival,
    PipelineModel,
    Room,
    SimulationResult,
)
from multiworld.serve.simulation.replay import simulate as replay
from multiworld.serve.simulation.score import Score, judge
from multiworld.serve.spec.loader import load_spec
from multiworld.serve.spec.profiles import ModelProfile, load_profile
from multiworld.serve.spec.schema import NAME, AppSpec, ModelSpec

MAX_REPLICAS = 4096  # per stage; the limit that a spec has, too

OWN = "spec"  # the policy that the spec chooses
ORACLE = "oracle"  # the policy that knows the future
COMPARED = (OWN, *BUILT_IN, ORACLE)  # policies compared by default
NO_TEXTS = (ORACLE, "fixed")  # policies that do not support text generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options of the command line; see their help."""

    spec: Path
    traces: Sequence[str]
    generated: Sequence[str]
    policies: Sequence[str]
    by_tokens: bool
    stretch: float
    begin_s: float
    seconds: float | None
    start_s: float
    nodes: Path | None
    seed: int
    plot: Path | None
    as_json: bool


def _compared(app: AppSpec) -> list[str]:
    has_texts = any(model.generation is not None for model in app.models.values())
    return [name for name in COMPARED if name not in NO_TEXTS or not has_texts]


def _simulated(
    options: SimulationOptions,
    app: AppSpec,
    policy_name: str,
    models: list[PipelineModel],
    arrivals: dict[str, list[Arrival]],
) -> list[SimulationResult]:
    asked = [arrivals[model] for model in app.models]
    chance = random.Random(options.seed).random
    try:
        return replay(models, asked, chance, _room(options, app))
    except click.ClickException:
        raise
    except Exception as error:
        if ":" not in policy_name and policy_name != OWN:
            raise  # the policy is part of this package, so this is a bug
        raise click.ClickException(
            f"policy {policy_name} failed: {type(error).__name__}: {error}"
        ) from error


def _draw(
    options: SimulationOptions, path: Path, outcomes: dict[str, list[SimulationResult]]
) -> None:
    try:
        from multiworld.serve.simulation.picture import draw

        draw(path, _title(options), outcomes)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"--plot needs {error.name}: pip install 'multiworld-elastic[demo]'"
        ) from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--plot {path}: {error}") from error
    click.echo(f"drew {path}", err=options.as_json)


# Input.


def _arrivals(options: SimulationOptions, app: AppSpec) -> dict[str, list[Arrival]]:
    """Return the arrivals of every model, ordered by time."""
    found: dict[str, list[Arrival]] = {name: [] for name in app.models}
    for text in options.traces:
        model, path = _assigned(text, app)
        if not Path(path).exists() and "=" in text:
            model, path = _first(app), text  # ``text`` is a file name with =
        read = traces.read_trace(Path(path), by_tokens=options.by_tokens)
        _add(found, model, read)
    for text in options.generated:
        model, described = _assigned(text, app)
        _add(found, model, traces.generated(described, options.seed))
    if not any(found.values()):
        raise click.UsageError("give --trace or --generate")
    end_s = (
        float("inf") if options.seconds is None else options.begin_s + options.seconds
    )
    for name, all_ in found.items():
        cut = traces.between(sorted(all_), options.begin_s, end_s)
        found[name] = traces.stretched(cut, options.stretch)
    if not any(found.values()):
        raise click.UsageError(
            "the trace has no request in the chosen part; see --from and --seconds"
        )
    return found


def _add(
    found: dict[str, list[Arrival]], model: str, arrivals: Sequence[Arrival]
) -> None:
    """Give each request to the model that it names, or else to `model`."""
    for arrival in arrivals:
        found[arrival.model if arrival.model in found else model].append(arrival)


def _assigned(text: str, app: AppSpec) -> tuple[str, str]:
    """Split ``MODEL=TEXT``; without a model, return the first model of the spec."""
    name, equals, rest = text.partition("=")
    if equals and name in app.models:
        return name, rest
    if equals and re.fullmatch(NAME, name) and not Path(text).exists():
        known = ", ".join(app.models)
        raise click.UsageError(f"no model {name!r} in {text!r}; there are: {known}")
    return _first(app), text


def _first(app: AppSpec) -> str:
    return next(iter(app.models))


def _model(
    options: SimulationOptions,
    app: AppSpec,
    name: str,
    chosen: str,
    arrivals: Sequence[Arrival],
) -> PipelineModel:
    spec = app.models[name]
    measured = _measured(options, spec)
    model = pipeline_of(name, spec, reference_policies.fixed, measured, options.start_s)
    kind, _, counts = chosen.partition(":")
    if model.limits is not None and chosen in NO_TEXTS:
        raise click.UsageError(
            f"policy {chosen} does not support models that generate text; give "
            "spec, queued, threshold, or fixed:N,N,…"
        )
    if kind == "fixed":
        return with_fleet(model, _fleet(model, counts, arrivals))
    if chosen == "oracle":
        return with_foresight(
            model, arrivals, lambda: random.Random(options.seed).random
        )
    is_scaled = any(stage.limits for stage in model.stages)
    if chosen == OWN and not is_scaled:
        return model  # the spec fixes the number of its replicas
    return replace(model, policy=_policy(spec, chosen))


def _policy(spec: ModelSpec, chosen: str) -> Policy:
    if chosen == OWN:
        return policy_of(spec)
    if chosen in BUILT_IN:
        return BUILT_IN[chosen]
    if ":" not in chosen:
        names = [OWN, *BUILT_IN, "oracle", "fixed:N,N,…"]
        known = ", ".join([*names, "package.module:function"])
        raise click.UsageError(f"no policy {chosen!r}; there are: {known}")
    return import_factory(chosen)


def _fleet(
    model: PipelineModel, counts: str, arrivals: Sequence[Arrival]
) -> tuple[int, ...]:
    """Return a fixed fleet: as given, or the smallest that carries the mean load."""
    if counts:
        try:
            given = tuple(int(count) for count in counts.split(","))
        except ValueError:
            given = ()
        fits = all(1 <= count <= MAX_REPLICAS for count in given)
        if len(given) != len(model.stages) or not fits:
            raise click.UsageError(
                f"fixed:{counts}: give {len(model.stages)} numbers from 1 to "
                f"{MAX_REPLICAS:,}, one for each stage"
            )
        return given
    plans = plans_of(costs_of(model), model.objective_s, model.objective_share)
    span_s = max(1.0, arrivals[-1].at) if arrivals else 1.0
    return plans[plan_for(plans, len(arrivals) / span_s)].replicas


def _measured(options: SimulationOptions, spec: ModelSpec) -> ModelProfile | None:
    if spec.profile is None:
        return None
    return load_profile(options.spec.parent / Path(spec.profile).expanduser())


def _room(options: SimulationOptions, app: AppSpec) -> Room:
    if options.nodes is None:
        return Room()
    needs = {name: tuple(needs_of(spec)) for name, spec in app.models.items()}
    return Machines(Bookings(read_nodes(options.nodes)), needs)


# Output.


def _title(options: SimulationOptions) -> str:
    names = [Path(text.rpartition("=")[2]).name for text in options.traces]
    return ", ".join([*names, *options.generated])


def _whole(
    scores: Sequence[Score], outcomes: Mapping[str, Sequence[SimulationResult]]
) -> dict[str, Any]:
    return {
        "scores": [asdict(score) for score in scores],
        "decisions": {
            name: {o.model: [asdict(d) for d in o.decided] for o in found}
            for name, found in outcomes.items()
        },
    }


def _table(scores: Sequence[Score], app: AppSpec) -> Table:
    several = len(app.models) > 1
    names = ("model", "policy") if several else ("policy",)
    table = new_table("results by policy", *names)
    table.caption = "attained: within the objective · lost: refused, or too late"
    table.caption_justify = "left"
    for title in (
        "attained",
        "good/s",
        "replica-s",
        "p50 ms",
        "p99 ms",
        "lost",
        "changes",
        "flaps",
    ):
        table.add_column(title, justify="right")
    for v in sorted(scores, key=lambda v: list(app.models).index(v.model)):
        row = [
            v.policy,
            f"{v.attained:.2%}",
            f"{v.goodput:.2f}",
            f"{v.replica_s:,.0f}",
            f"{v.p50_s * 1000:,.0f}",
            f"{v.p99_s * 1000:,.0f}",
            str(v.refused + v.late),
            str(v.changes),
            str(v.flaps),
        ]
        table.add_row(*([v.model, *row] if several else row))
    return table


@click.command()
@SPEC
@click.option(
    "--trace",
    "traces",
    multiple=True,
    metavar="[MODEL=]FILE",
    help="CSV file of requests: Azure's LLM traces, BurstGPT, or seconds in the first "
    "column. Without MODEL, for the first model. May be repeated.",
)
@click.option(
    "--generate",
    "generated",
    multiple=True,
    metavar="[MODEL=]WHAT",
    help="Generated requests: poisson:rate=5,seconds=600 or "
    "gamma:rate=5,seconds=600,cv=4; join phases with +.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="spec (the spec's own), queued (Ray Serve's rule), threshold, fixed, "
    "fixed:N,N,…, oracle, or package.module:function. May be repeated; by default "
    "spec, queued, threshold, and, unless a model generates text, fixed and oracle.",
)
@click.option(
    "--by-tokens",
    is_flag=True,
    help="Make the computing time of a request proportional to its tokens.",
)
@click.option(
    "--stretch",
    type=FiniteRange(1e-6, 1e6),
    default=1.0,
    help="Factor on the duration of the trace; 2 halves the rate.",
)
@click.option(
    "--from",
    "begin_s",
    type=FiniteRange(0),
    default=0.0,
    help="Skip this many seconds at the start of the trace.",
)
@click.option(
    "--seconds",
    type=FiniteRange(0.001),
    help="Replay this many seconds of the trace; by default all.",
)
@click.option(
    "--start-s",
    type=FiniteRange(0),
    default=1.0,
    help="Seconds from the start of a replica until it is ready.",
)
@click.option(
    "--nodes",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of machines, as `multiworld nodes --json` prints them; by default "
    "machines have room for any number of replicas.",
)
@click.option("--seed", type=int, default=0, help="Seed of all randomness.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to draw the results into.",
)
@JSON
def simulate(**given: Any) -> None:
    """Replay a trace of requests against autoscaling policies, without any worker.

    Stages take the computing times of SPEC (item_ms, or profile:) and scale within
    their autoscaling_config. `attained` is the share of all requests that were answered
    within objective_ms; `replica-s` is the cost, in seconds of running replicas.
    """
    options = SimulationOptions(**given)
    if options.plot is not None:
        check_writable("--plot", options.plot)
    app = load_spec(options.spec)
    arrivals = _arrivals(options, app)
    outcomes: dict[str, list[SimulationResult]] = {}
    for name in options.policies or _compared(app):
        models = [
            _model(options, app, model, name, arrivals[model]) for model in app.models
        ]
        outcomes[name] = _simulated(options, app, name, models, arrivals)
    # A model without requests takes room, but has no score.
    scores = [
        judge(policy, one)
        for policy, found in outcomes.items()
        for one in found
        if arrivals[one.model]
    ]
    if options.as_json:
        whole = finite(_whole(scores, outcomes))
        click.echo(json.dumps(whole, indent=2, default=str))
    else:
        print_table(_table(scores, app))
    if options.plot is not None:
        _draw(options, options.plot, outcomes)
