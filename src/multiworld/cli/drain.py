"""``multiworld drain``: replaces one process without losing a request. Shell."""

from __future__ import annotations

from typing import Any

import click

from multiworld.cli.options import JSON, ask, of_service


@click.command()
@click.argument("name")
@of_service
@JSON
def drain(**options: Any) -> None:
    """Replace the process NAME (see status) without losing a request.

    Its replacement is started first; when that is ready, the process finishes its work
    and exits.
    """
    ask(
        "/drain",
        "{name}: starting its replacement; then it finishes its work and exits",
        **options,
    )
