"""``multiworld chaos``: injects a fault into a replica. Shell."""

from __future__ import annotations

from typing import Any

import click

from multiworld.cli.options import JSON, ask, of_service


@click.command()
@click.argument("action", type=click.Choice(["kill", "stop", "cut"]))
@click.argument("model")
@click.argument("stage")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=5.0,
    show_default=True,
    help="Duration of a cut.",
)
@of_service
@JSON
def chaos(**options: Any) -> None:
    """Inject a fault into a replica of STAGE (its name or number) of MODEL.

    kill: send SIGKILL. stop: send SIGSTOP. cut: drop everything that it sends or is
    sent, for --seconds.
    """
    ask("/chaos", "{action}: {name} (process {pid})", **options)
