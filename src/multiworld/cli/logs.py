"""``multiworld logs``: prints the end of the logs of processes."""

from __future__ import annotations

import json

import click

from multiworld.cli.options import of_service
from multiworld.serve.control.client import Service


@click.command()
@click.argument("name", required=False)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(1),
    default=20,
    help="Lines of each log.",
)
@of_service
def logs(service: Service, name: str | None, lines: int, as_json: bool) -> None:
    """Print the end of the logs of NAME, or of all processes.

    NAME is a process, as status shows it, or the part of that name before a slash: a
    model (shop) or a stage (shop/1).
    """
    paths = sorted(service.folder.logs.glob("*.log"))
    if name is not None:
        stem = name.replace("/", "-")
        paths = [p for p in paths if f"{p.stem}-".startswith(f"{stem}-")]
        if not paths:
            raise click.ClickException(f"no log of {name!r} in {service.folder.logs}")
    ends = {
        path: path.read_text(errors="replace").splitlines()[-lines:] for path in paths
    }
    if as_json:
        found = [{"path": str(path), "lines": end} for path, end in ends.items()]
        click.echo(json.dumps(found, indent=2))
        return
    for path, end in ends.items():
        click.echo(f"==> {path} <==")
        click.echo("\n".join(end))
