"""``multiworld schema``: prints the JSON Schema of a spec."""

from __future__ import annotations

import json

import click

from multiworld.serve.spec import loader


@click.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    click.echo(json.dumps(loader.schema(), indent=2))
