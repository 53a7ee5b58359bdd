"""``multiworld scale``: runs a stage in another number of replicas. Shell."""

from __future__ import annotations

from typing import Any

import click

from multiworld.cli.options import JSON, ask, of_service


@click.command()
@click.argument("model")
@click.argument("stage")
@click.argument("replicas", type=click.IntRange(0, 4096))
@of_service
@JSON
def scale(**options: Any) -> None:
    """Run a STAGE (its name or number) of MODEL in so many REPLICAS."""
    ask("/scale", "{model}/{stage}: from {before} to {replicas}", **options)
