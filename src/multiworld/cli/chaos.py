"""``multiworld chaos``: breaks a replica on purpose. Shell."""

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
    help="How long it is cut off.",
)
@of_service
@JSON
def chaos(**options: Any) -> None:
    """Break a replica of a STAGE of MODEL on purpose.

    kill: SIGKILL. stop: SIGSTOP. cut: nothing it sends or is sent arrives for a while.
    """
    ask("/chaos", "{action}: {name} (process {pid})", **options)
