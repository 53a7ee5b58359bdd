"""``multiworld demo``: injects faults under load and counts lost requests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from multiworld.cli.ending import end_as_ctrl_c
from multiworld.cli.options import FiniteRange

F = TypeVar("F", bound=Callable[..., Any])
BACKENDS = ("direct", "gloo")


def _story(*, rate: float, help: str, picture: str) -> Callable[[F], F]:
    """Add the options of a demo with events under a load of requests."""
    option = click.option(
        "--rate",
        type=FiniteRange(0.1, 1000),
        default=rate,
        show_default=True,
        help=help,
    )
    shown = _shown(picture=picture)
    return lambda command: option(shown(command))


def _shown(*, picture: str) -> Callable[[F], F]:
    """Add the options of a demo with events."""
    options = (
        click.option(
            "--pause-s",
            type=FiniteRange(0.5, 600),
            default=3.0,
            show_default=True,
            help="Seconds of traffic between events.",
        ),
        click.option(
            "--picture",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            default=Path(picture),
            show_default=True,
            help="File to draw the timeline into.",
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


@click.group(invoke_without_command=True)
@click.option(
    "--tokens",
    type=click.IntRange(8, 4096),
    default=160,
    show_default=True,
    help="Most tokens of an answer.",
)
@_shown(picture="multiworld-demo.png")
@click.pass_context
def demo(
    context: click.Context, tokens: int, pause_s: float, picture: Path, as_json: bool
) -> None:
    """Stream chats from a language model in three stages, and inject faults.

    Eight chats stream at once. A replica of each stage is killed, one is stopped, and
    the bottleneck is scaled to 3 and back. Every token is compared with what the
    undisturbed model would choose. Exits with 1 if a stream was cut or a token was
    wrong. The first time, the model (98 MB) is fetched and converted.
    """
    end_as_ctrl_c()
    if context.invoked_subcommand is None:
        run = _demo("multiworld.demo.chats.run")
        sys.exit(run(tokens, pause_s, picture.resolve(), as_json=as_json))


@demo.command()
@_story(rate=15.0, help="Texts a second.", picture="multiworld-embeddings.png")
def embeddings(rate: float, pause_s: float, picture: Path, as_json: bool) -> None:
    """Serve a sentence encoder in three stages, and inject faults under load.

    A replica of each stage is killed, one is stopped, the bottleneck is scaled to 3 and
    back, and the model is replaced by a new version. Exits with 1 if a request was lost
    or answered wrongly.
    """
    run = _demo("multiworld.demo.pipeline.run")
    sys.exit(run(rate, pause_s, picture.resolve(), as_json=as_json))


@demo.command()
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="direct",
    show_default=True,
    help="Backend of the worlds.",
)
@click.option(
    "--phase-s",
    type=FiniteRange(0.5, 600),
    default=4.0,
    show_default=True,
    help="Seconds of traffic before the kill, and after the replacement has joined.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def worlds(backend: str, phase_s: float, as_json: bool) -> None:
    """Run a real model on two workers, and kill one; the other keeps working.

    Exits with 1 if an image was lost or another guarantee did not hold.
    """
    sys.exit(_demo("multiworld.demo.worlds.run")(backend, phase_s, as_json=as_json))


@demo.command()
@_story(
    rate=4.0,
    help="Texts a second; bursts of the tenants reach three times this rate.",
    picture="multiworld-cluster.png",
)
def cluster(rate: float, pause_s: float, picture: Path, as_json: bool) -> None:
    """Serve three tenants on a Ray cluster of four nodes, and remove a node.

    The cluster runs on this machine. Bursts of load scale a model, one tenant floods
    the service, a model is added and removed, and the node is added again. Exits with 1
    if a request was lost or answered wrongly.
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
