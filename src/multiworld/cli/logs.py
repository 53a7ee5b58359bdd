"""``multiworld logs``: prints the end of the logs of processes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import click

from multiworld.cli.options import of_service
from multiworld.serve.controller.client import Service

END = 2**20  # bytes to read at the end of a log


def _end_of(path: Path, lines: int) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - END))
            return file.read(END).decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:  # removed in the meantime, like other old logs
        return []


def _numbered(service: Service, name: str) -> str:
    """Replace the stage's name by its number, as in the names of logs."""
    model, slash, stage = name.partition("/")
    record = service.folder.load() if slash else None
    for spec in (record.specs if record else {}).get(model, {}).values():
        names = [one.name for one in spec.stages]
        if stage in names:
            return f"{model}/{names.index(stage)}"
    return name


@click.command()
@click.argument("name", required=False)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(1),
    default=20,
    help="Number of lines to print of each log.",
)
@of_service
def logs(service: Service, name: str | None, lines: int, as_json: bool) -> None:
    """Print the end of the logs of NAME, or of all processes.

    NAME is a process, as status shows it, or the part of that name before a slash: a
    model (shop) or a stage (shop/1, or by its name, shop/middle).
    """
    paths = sorted(service.folder.logs.glob("*.log"))
    if name is not None:
        name = _numbered(service, name)
        # MODEL-STAGE-NUMBER, gateway-NUMBER or launcher-ID; another model's name may be
        # this one's with a number.
        count = 1 if name in ("gateway", "launcher") else 2 - name.count("/")
        stem = re.escape(name.replace("/", "-")) + f"((-[0-9a-f]+){{{count}}})?"
        every = paths
        paths = [path for path in paths if re.fullmatch(stem, path.stem)]
        if not paths:
            stems = sorted(re.sub(r"-(\d+)$", "", log.stem) for log in every)
            known = ", ".join(dict.fromkeys(stems)) or "none"
            raise click.ClickException(
                f"no log of {name!r} in {service.folder.logs}; there are those of "
                f"{known} (MODEL-STAGE)"
            )
    ends = {path: _end_of(path, lines) for path in paths}
    if as_json:
        found = [{"path": str(path), "lines": end} for path, end in ends.items()]
        click.echo(json.dumps(found, indent=2))
        return
    for path, end in ends.items():
        click.echo(f"==> {path} <==")
        click.echo("\n".join(end))
