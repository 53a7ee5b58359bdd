"""``multiworld demo``: injects faults under load, and checks every answer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import click

from multiworld.cli.ending import end_as_ctrl_c
from multiworld.cli.options import PICTURES, FiniteRange, check_writable

BACKENDS = ("direct", "gloo")

NEEDED = "the demo needs {}: pip install 'multiworld-elastic[demo]'"


@click.group(invoke_without_command=True)
@click.option(
    "--tokens",
    type=click.IntRange(8, 4096),
    default=160,
    help="Maximum number of tokens of an answer.",
)
@click.option(
    "--pause-s",
    type=FiniteRange(0.5, 600),
    default=3.0,
    help="Seconds of traffic between events.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("multiworld-demo.png"),
    help="File to draw the timeline into.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.pass_context
def demo(
    context: click.Context, tokens: int, pause_s: float, picture: Path, as_json: bool
) -> None:
    """Stream chats from a language model in three stages, and inject faults.

    Eight chats stream at once. A replica of each stage and a gateway are killed, a
    replica is stopped, and the bottleneck stage is scaled to 3 replicas and back. Every
    token is compared with what the undisturbed model would choose. Exits with 1 if a
    stream was cut or a token was wrong. The first time, the model (98 MB) is fetched
    and converted.
    """
    end_as_ctrl_c()
    if context.invoked_subcommand is None:
        check_writable("--picture", picture.resolve(), PICTURES)
        if importlib.util.find_spec("matplotlib") is None:  # draws the outcome
            raise click.ClickException(NEEDED.format("matplotlib"))
        run = _demo("multiworld.demo.chats.run")
        sys.exit(run(tokens, pause_s, picture.resolve(), as_json=as_json))


@demo.command()
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="direct",
    help="Backend of the worlds.",
)
@click.option(
    "--phase-s",
    type=FiniteRange(0.5, 600),
    default=4.0,
    help="Seconds of traffic before the kill, and after the replacement has joined.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def worlds(backend: str, phase_s: float, as_json: bool) -> None:
    """Send traffic through three worlds, and kill a worker that is in two of them.

    The other world keeps working while a replacement joins. Exits with 1 if an answer
    was wrong or another guarantee did not hold.
    """
    sys.exit(_demo("multiworld.demo.worlds.run")(backend, phase_s, as_json=as_json))


def _demo(module: str) -> Callable[..., int]:
    try:
        run: Callable[..., int] = importlib.import_module(module).run
    except ModuleNotFoundError as error:
        raise click.ClickException(NEEDED.format(error.name)) from error
    return run
