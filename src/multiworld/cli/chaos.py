"""``multiworld chaos``: injects a fault into a replica or a gateway."""

from __future__ import annotations

import click

from multiworld.cli.options import FiniteRange, of_service, show
from multiworld.serve.controller.answers import FaultInjected, plain
from multiworld.serve.controller.client import Service


@click.command()
@click.argument("action", type=click.Choice(["kill", "stop", "cut"]))
@click.argument("model")
@click.argument("stage", default="")
@click.option(
    "--seconds",
    type=FiniteRange(0.1, 3600),
    default=5.0,
    help="Duration of a cut.",
)
@of_service
def chaos(
    service: Service, action: str, model: str, stage: str, seconds: float, as_json: bool
) -> None:
    """Inject a fault into a replica of STAGE (its name or number) of MODEL.

    To inject it into a gateway, write `gateway` in place of MODEL, and omit STAGE.

    kill: send SIGKILL. stop: send SIGSTOP. cut: drop all traffic from and to the
    replica for --seconds.
    """
    what = {"action": action, "model": model, "stage": stage, "seconds": seconds}
    broken = service.ask("POST", "/chaos", FaultInjected, json=what)
    text = f"{action}: {broken.name} (process {broken.pid})"
    show(plain(broken), as_json=as_json, text=text)
