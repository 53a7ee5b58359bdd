"""The commands of ``multiworld`` that are about serving; each imports what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from multiworld.serve.control.client import Service

F = TypeVar("F", bound=Callable[..., Any])

SPEC = click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
STATE = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="The service's folder; by default ~/.local/state/multiworld/APP, or below "
    "MULTIWORLD_STATE.",
)


def of_service(command: F) -> F:
    """Add the options that find a running service."""
    app = click.option("--app", help="Name of the service; not needed if one runs.")
    return STATE(app(command))


def service_of(app: str | None, state: Path | None) -> Service:
    """Return the running service that is meant."""
    found: Service = need("multiworld.serve.control.client").Service(app, state)
    return found


def need(module: str) -> Any:
    """Import a module that needs the extra ``serve``."""
    import importlib

    # A factory is found where the command is given, as with `python -m`.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("multiworld"):
            raise
        raise click.ClickException(
            f"this needs {error.name}: pip install 'multiworld-elastic[serve]'"
        ) from error


@click.command()
@SPEC
@STATE
@click.option("-v", "--verbose", is_flag=True, help="Say what happens.")
@JSON
def serve(spec: Path, state: Path | None, verbose: bool, as_json: bool) -> None:
    """Serve the models of SPEC (a YAML file) until Ctrl-C.

    If the controller of a service was lost, this adopts its processes, which went on
    answering meanwhile.
    """
    module = need("multiworld.cli.serve")
    sys.exit(module.serve(spec, state, as_json=as_json, is_verbose=verbose))


@click.command()
@SPEC
@click.option(
    "--nodes",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Plan for the machines in this file, as `multiworld nodes --json` prints "
    "them; by default for this machine.",
)
@click.option(
    "--limit",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    help="Seconds that the solvers may take.",
)
@JSON
def plan(spec: Path, nodes: Path | None, limit: float, as_json: bool) -> None:
    """Show what SPEC would start, where, and what to expect of it; start nothing.

    Exits with 1 if not all of it has a place.
    """
    module = need("multiworld.cli.plan")
    sys.exit(module.plan(spec, nodes, limit, as_json=as_json))


@click.command()
@SPEC
@click.option("--model", help="Which of the spec's models; the first by default.")
@click.option("--rows", type=click.IntRange(1, 4096), default=1, show_default=True)
@click.option("--repeats", type=click.IntRange(1, 1000), default=20, show_default=True)
@JSON
def partition(
    spec: Path, model: str | None, rows: int, repeats: int, as_json: bool
) -> None:
    """Measure what each stage of a model costs, and propose where to cut it.

    Loads the model in this process, one stage at a time.
    """
    module = need("multiworld.cli.partition")
    sys.exit(module.run(spec, model, rows, repeats, as_json=as_json))


@click.command()
@SPEC
@click.option("--model", help="Which of the spec's models; the first by default.")
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1, 4096),
    multiple=True,
    default=(1, 4, 16),
    show_default=True,
    help="Rows of a batch; may be given several times.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=10, show_default=True)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to keep it, for `profile:` in the spec.",
)
@JSON
def profile(
    spec: Path,
    model: str | None,
    batches: tuple[int, ...],
    repeats: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure what the stages of a model need: time, memory, bytes per hop.

    Loads the model in this process, one stage at a time.
    """
    module = need("multiworld.cli.profile")
    sizes = sorted(set(batches))
    sys.exit(module.run(spec, model, sizes, repeats, out, as_json=as_json))


@click.command()
@of_service
@JSON
def nodes(app: str | None, state: Path | None, as_json: bool) -> None:
    """Show the machines of the running service, or this machine if none runs."""
    module = need("multiworld.cli.resources")
    client = need("multiworld.serve.control.client")
    if app is None and state is None and not client.running():
        sys.exit(module.this_machine(as_json=as_json))
    sys.exit(module.nodes(service_of(app, state), as_json=as_json))


@click.command()
@of_service
@JSON
def resources(app: str | None, state: Path | None, as_json: bool) -> None:
    """Show what every replica has booked, and what it uses at this moment."""
    module = need("multiworld.cli.resources")
    sys.exit(module.resources(service_of(app, state), as_json=as_json))


@click.command()
@SPEC
@click.option(
    "--trace",
    "traces",
    multiple=True,
    metavar="[MODEL=]FILE",
    help="A CSV file of requests: Azure's LLM traces, BurstGPT, or seconds in the "
    "first column. May be repeated, for several models; by default for the first.",
)
@click.option(
    "--generate",
    "generated",
    multiple=True,
    metavar="[MODEL=]WHAT",
    help="poisson:rate=5,seconds=600 or gamma:rate=5,seconds=600,cv=4; several one "
    "after the other with + between.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="spec (the spec's own), queued (Ray Serve's rule), threshold, fixed, "
    "fixed:N,N,…, oracle, or package.module:function. May be repeated; by default all "
    "the named ones.",
)
@click.option(
    "--by-tokens", is_flag=True, help="A request takes as long as its tokens say."
)
@click.option(
    "--stretch",
    type=click.FloatRange(1e-6, 1e6),
    default=1.0,
    show_default=True,
    help="Replay the trace in so many times its time.",
)
@click.option(
    "--from",
    "begin_s",
    type=click.FloatRange(0),
    default=0.0,
    help="Leave out the first so many seconds of the trace.",
)
@click.option("--seconds", type=click.FloatRange(0.001), help="Of the trace.")
@click.option(
    "--start-s",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Seconds until a replica that is started is ready.",
)
@click.option(
    "--nodes",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The machines that there are, as `multiworld nodes --json` prints them; by "
    "default replicas have a place everywhere.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw it into this file.",
)
@JSON
def simulate(spec: Path, policies: tuple[str, ...], **options: Any) -> None:
    """Replay a trace of requests against scaling policies, without any worker.

    Stages compute as long as SPEC says (item_ms, or profile:), and are scaled within
    their autoscaling_config. `attained` is the share of all requests that were answered
    within objective_ms; `replica-s` is what that cost.
    """
    module = need("multiworld.cli.simulate")
    chosen = policies or module.COMPARED
    wanted = module.SimulationOptions(spec=spec, policies=chosen, **options)
    sys.exit(module.run(wanted))


@click.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    sys.exit(need("multiworld.cli.serve").print_schema())


@click.command()
@of_service
@click.option("--watch", is_flag=True, help="Go on showing it until Ctrl-C.")
@JSON
def status(app: str | None, state: Path | None, watch: bool, as_json: bool) -> None:
    """Show what runs; exits with 1 if it is not ready."""
    service = service_of(app, state)
    module = need("multiworld.cli.operate")
    sys.exit(module.status(service, as_json=as_json, watch=watch))


@click.command()
@click.option(
    "-n", "--last", type=click.IntRange(0, 200), default=10, show_default=True
)
@click.option(
    "--snapshots", is_flag=True, help="With --json: all that decisions were made from."
)
@of_service
@JSON
def explain(
    last: int, snapshots: bool, app: str | None, state: Path | None, as_json: bool
) -> None:
    """Say who waits for whom, and why it was scaled and placed as it is."""
    module, service = need("multiworld.cli.explain"), service_of(app, state)
    sys.exit(module.explain(service, last, snapshots=snapshots, as_json=as_json))


def _asks(path: str, text: str) -> Callable[..., None]:
    """Return a function that asks the controller and prints the outcome."""

    def ask(app: str | None, state: Path | None, as_json: bool, **what: Any) -> None:
        service = service_of(app, state)
        answer = service.ask("POST", path, json=what)
        shown = text.format(**{**what, **answer})
        need("multiworld.cli.operate").show(answer, as_json=as_json, text=shown)

    return ask


@click.command()
@click.argument("model")
@click.argument("stage")
@click.argument("replicas", type=click.IntRange(0, 4096))
@of_service
@JSON
def scale(**options: Any) -> None:
    """Run a STAGE (its name or number) of MODEL in so many REPLICAS."""
    _asks("/scale", "{model}/{stage}: from {before} to {replicas}")(**options)


@click.command()
@SPEC
@of_service
@JSON
def update(spec: Path, app: str | None, state: Path | None, as_json: bool) -> None:
    """Have the running service be as SPEC says, without a pause.

    A model with a new version is started beside the old one and takes over when all of
    it is ready; one that does not become ready is rolled back.
    """
    try:
        text = spec.read_text()
    except OSError as error:
        raise click.ClickException(f"cannot read {spec}: {error.strerror}") from error
    service = service_of(app, state)
    answer = service.ask(
        "POST", "/update", json={"text": text, "where": str(spec.resolve())}
    )
    wanted = ", ".join(f"{name} {v}" for name, v in answer["versions"].items())
    show = need("multiworld.cli.operate").show
    show(answer, as_json=as_json, text=f"wanted now: {wanted}; see multiworld status")


@click.command()
@click.argument("name")
@of_service
@JSON
def drain(**options: Any) -> None:
    """Take the process NAME (see status) out politely; it is replaced."""
    _asks("/drain", "{name} ends its work and leaves")(**options)


@click.command()
@click.argument("action", type=click.Choice(["kill", "stop", "cut"]))
@click.argument("model")
@click.argument("stage")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=5.0,
    show_default=True,
    help="How long it is cut off.",
)
@of_service
@JSON
def chaos(**options: Any) -> None:
    """Break a replica of a STAGE of MODEL on purpose.

    kill: SIGKILL. stop: SIGSTOP. cut: nothing it sends or is sent arrives for a while.
    """
    _asks("/chaos", "{action}: {name} (process {pid})")(**options)


@click.command()
@click.argument("name", required=False)
@click.option("-n", "--lines", type=click.IntRange(1), default=20, show_default=True)
@of_service
@JSON
def logs(
    name: str | None, lines: int, app: str | None, state: Path | None, as_json: bool
) -> None:
    """Print the end of the logs of NAME, or of all processes.

    NAME is that of a process, as in status, or what comes before a slash in it: of a
    model, a version, a stage.
    """
    module = need("multiworld.cli.operate")
    sys.exit(module.logs(service_of(app, state), name, lines, as_json=as_json))


@click.command()
@of_service
@JSON
def shutdown(app: str | None, state: Path | None, as_json: bool) -> None:
    """End a service: what was accepted is answered first."""
    service = service_of(app, state)
    sys.exit(need("multiworld.cli.operate").shutdown(service, as_json=as_json))


@click.command()
@click.argument("url")
@click.argument("model")
@click.option("--rate", type=click.FloatRange(0.01, 1e5), default=10, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1), default=10, show_default=True)
@click.option(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Texts to embed, one a line, in turn.",
)
@click.option(
    "--body",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JSON body of the Open Inference Protocol to send instead of texts.",
)
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="PEM file with the certificates to trust, for an https:// URL.",
)
@click.option(
    "--key",
    envvar="MULTIWORLD_KEY",
    help="API key of a tenant; better in MULTIWORLD_KEY, where nobody sees it.",
)
@JSON
def load(
    url: str,
    model: str,
    rate: float,
    seconds: float,
    texts: Path | None,
    body: Path | None,
    ca: Path | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Send requests to MODEL at URL at a steady rate, and say what came back.

    Open loop: a request leaves when it is due, whatever became of the ones before, and
    its latency counts from then. Exits with 1 if one failed.
    """
    module = need("multiworld.cli.load")
    target = module.target_of(url, model, texts, body, "The quick brown fox.")
    target = module.with_key(module.trusting(target, ca), key)
    sys.exit(module.run(target, rate, seconds, as_json=as_json))


COMMANDS = (
    serve,
    plan,
    partition,
    profile,
    nodes,
    resources,
    simulate,
    schema,
    status,
    explain,
    scale,
    update,
    drain,
    chaos,
    logs,
    shutdown,
    load,
)
