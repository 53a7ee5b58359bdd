"""``multiworld drain``: replaces one process politely. Shell."""

from __future__ import annotations

from typing import Any

import click

from multiworld.cli.options import JSON, ask, of_service


@click.command()
@click.argument("name")
@of_service
@JSON
def drain(**options: Any) -> None:
    """Take the process NAME (see status) out politely; it is replaced."""
    ask("/drain", "{name} ends its work and leaves", **options)
