"""``multiworld update``: another spec for a running service. Shell."""

from __future__ import annotations

from pathlib import Path

import click

from multiworld.cli.options import JSON, SPEC, of_service, service_of, show


@click.command()
@SPEC
@of_service
@JSON
def update(spec: Path, app: str | None, state: Path | None, as_json: bool) -> None:
    """Have the running service be as SPEC says, without a pause.

    A model with a new version is started beside the old one and takes over when all of
    it is ready; one that does not become ready is rolled back.
    """
    try:
        text = spec.read_text()
    except OSError as error:
        raise click.ClickException(f"cannot read {spec}: {error.strerror}") from error
    service = service_of(app, state)
    answer = service.ask(
        "POST", "/update", json={"text": text, "where": str(spec.resolve())}
    )
    wanted = ", ".join(f"{name} {v}" for name, v in answer["versions"].items())
    show(answer, as_json=as_json, text=f"wanted now: {wanted}; see multiworld status")
