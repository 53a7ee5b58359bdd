"""The ``multiworld`` command."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from multiworld import __version__
from multiworld.cli.serving import COMMANDS
from multiworld.cli.tenancy import COMMANDS as TENANCY
from multiworld.errors import MultiWorldError

F = TypeVar("F", bound=Callable[..., Any])
BACKENDS = ("direct", "gloo")


class _Group(click.Group):
    """The errors of this package are messages to people."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MultiWorldError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="multiworld")
def cli() -> None:
    """Elastic, fault-tolerant worlds (process groups) for PyTorch."""
    # M8D_LOG_LEVEL is the name that programs for pymultiworld know.
    level = os.environ.get("M8D_LOG_LEVEL", "WARNING").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(
        level=known.get(level, logging.WARNING),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _story(*, rate: float, help: str, picture: str) -> Callable[[F], F]:
    """Add the options of a demo in which things happen under load."""
    options = (
        click.option(
            "--rate",
            type=click.FloatRange(0.1, 1000),
            default=rate,
            show_default=True,
            help=help,
        ),
        click.option(
            "--pause-s",
            type=click.FloatRange(0.5, 600),
            default=3.0,
            show_default=True,
            help="Seconds of traffic between the events.",
        ),
        click.option(
            "--picture",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            default=Path(picture),
            show_default=True,
            help="Where to draw the timeline.",
        ),
        click.option(
            "--json", "as_json", is_flag=True, help="Print the outcome as JSON."
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@cli.group(invoke_without_command=True)
@_story(rate=15.0, help="Texts a second.", picture="multiworld-demo.png")
@click.pass_context
def demo(
    context: click.Context, rate: float, pause_s: float, picture: Path, as_json: bool
) -> None:
    """Serve a sentence encoder in three stages, and break it while it answers.

    Each stage has a replica killed, one is stopped, the bottleneck is scaled to 3 and
    back, and the model is replaced by a new version. Exits with 1 if a request was lost
    or answered wrongly.
    """
    if context.invoked_subcommand is None:
        run = _demo("multiworld.demo.pipeline.run")
        sys.exit(run(rate, pause_s, picture.resolve(), as_json=as_json))


@demo.command()
@click.option("--backend", type=click.Choice(BACKENDS), default="direct")
@click.option(
    "--phase-s",
    type=click.FloatRange(0.5, 600),
    default=4.0,
    show_default=True,
    help="Seconds of traffic before the kill, and after the replacement has joined.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def worlds(backend: str, phase_s: float, as_json: bool) -> None:
    """Run a real model on two workers, kill one, and watch the other go on.

    Exits with 1 if an image was lost, or anything else that is promised did not hold.
    """
    sys.exit(_demo("multiworld.demo.worlds.run")(backend, phase_s, as_json=as_json))


@demo.command()
@_story(
    rate=4.0,
    help="Texts a second; tenants ask in bursts for up to three times as many.",
    picture="multiworld-cluster.png",
)
def cluster(rate: float, pause_s: float, picture: Path, as_json: bool) -> None:
    """Serve three tenants on a Ray cluster of four nodes, and take a node away.

    The cluster runs on this machine. Load in bursts has a model scaled, a tenant floods
    the others, a model is added and removed, and the node comes back. Exits with 1 if a
    request was lost or answered wrongly.
    """
    run = _demo("multiworld.demo.cluster.run")
    sys.exit(run(rate, pause_s, picture.resolve(), as_json=as_json))


def _demo(module: str) -> Callable[..., int]:
    try:
        run: Callable[..., int] = importlib.import_module(module).run
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the demo needs {error.name}: pip install 'multiworld-elastic[demo]'"
        ) from error
    return run


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> None:
    """Check this installation and this machine; exits with 1 if something fails."""
    from multiworld.cli.doctor import examine, report

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in findings], indent=2))
    else:
        report(findings)
    sys.exit(1 if any(finding.status == "fail" for finding in findings) else 0)


@cli.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on: one that the members reach, of this host.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=29500, show_default=True)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Remember epochs in this file, so that a restart goes on with the numbers.",
)
@click.option(
    "--while-locked",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="End when no process holds a shared lock on this file any more.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def store(
    host: str,
    port: int,
    state: Path | None,
    while_locked: Path | None,
    as_json: bool,
) -> None:
    """Serve the place where the members of worlds meet, until it is stopped.

    Members find it by MULTIWORLD_STORE or the store= of join. Losing it hurts no ready
    world; members come back by themselves when it is started again. A second one can
    stand by: give the members both addresses, with a comma between.

    A secret is taken from MULTIWORLD_SECRET or MULTIWORLD_SECRET_FILE, certificates
    from MULTIWORLD_TLS_CERT, MULTIWORLD_TLS_KEY and MULTIWORLD_TLS_CA.
    """
    from multiworld.cli.store import run

    sys.exit(run(host, port, state, while_locked, as_json=as_json))


@cli.command()
@click.argument("names", nargs=-1, metavar="[SUITE]...")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option(
    "--quick", is_flag=True, help="Few sizes and messages: to see that it runs."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="Keep JSON and pictures in this folder.",
)
@click.option(
    "--with",
    "apart",
    type=click.Choice(["pymultiworld", "ucxx", "nixl", "ray"]),
    multiple=True,
    help="Let it take part (ray in serving, others in p2p); may be repeated.",
)
@click.option(
    "--environments",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="Where those environments are kept.  [default: ~/.cache/multiworld/bench]",
)
@click.option("--json", "as_json", is_flag=True, help="Print all samples as JSON.")
def bench(
    names: tuple[str, ...],
    rounds: int,
    quick: bool,
    out: Path | None,
    apart: tuple[str, ...],
    environments: Path | None,
    as_json: bool,
) -> None:
    """Measure this machine's data path, beside what else one could use.

    \b
    p2p          streams and round trips, 64 B to 64 MB
    fan          one leader and 1 to 8 worlds
    collectives  2, 4 and 8 ranks, 4 KB to 16 MB
    many         1 to 1,000 worlds in a process
    joining      a busy world while others join and break
    watching     fault management on and off
    hosts        TCP between two network namespaces (as root)
    serving      requests a second and latency, empty stages and MiniLM
    nccl         worlds on GPUs beside torch.distributed (where there is one)

    All contenders run in turns in the same minutes: compare within a table. pyzmq takes
    part if it is installed. Those of --with are installed at the first need: that takes
    a package index and up to six gigabytes (pymultiworld needs an old torch).
    """
    from multiworld.cli.bench import BenchOptions, run

    wish = BenchOptions(
        rounds, out, apart, environments, is_quick=quick, as_json=as_json
    )
    sys.exit(run(names, wish))


for command in (*COMMANDS, *TENANCY):
    cli.add_command(command)


def main() -> None:
    """Entry point of the console script."""
    cli()


if __name__ == "__main__":
    main()
