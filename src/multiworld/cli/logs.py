"""``multiworld logs``: prints lines of the logs of processes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import click

from multiworld.cli.options import Age, of_service
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.launchers.base import began_at
from multiworld.serve.controller.log_files import END, entries_of, last_lines
from multiworld.serve.controller.processes import LOG_NAME

LINES = 20  # last lines shown of each log; --request and --since search all lines


def _chosen(
    path: Path, count: int, request: str | None, since: float | None
) -> list[str]:
    entries = entries_of(last_lines(path))
    if since is not None:
        entries = [each for each in entries if (each.at or 0.0) >= since]
    if request is not None:
        entries = [each for each in entries if each.is_about(request)]
    lines = [line for each in entries for line in each.lines]
    return lines[-count:]


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
    help=f"Number of lines to print of each log; {LINES} by default, or all with "
    "--request or --since.",
)
@click.option("--request", metavar="ID", help="Only lines that name this request.")
@click.option(
    "--since",
    type=Age(),
    metavar="AGE",
    help="Only lines of the last 90s, 5m, 2h, 1d ...",
)
@click.option(
    "--ended", is_flag=True, help="Also print logs of processes that have exited."
)
@of_service
def logs(
    service: Service,
    name: str | None,
    lines: int | None,
    request: str | None,
    since: float | None,
    ended: bool,
    as_json: bool,
) -> None:
    """Print the end of the logs of NAME, or of all processes.

    NAME is a process, as status shows it, or the part of that name before a slash: a
    model (shop) or a stage (shop/1, or by its name, shop/middle). For a model or a
    stage, prints the logs of running replicas, or of exited ones if none runs.
    """
    paths = sorted(service.folder.logs.glob("*.log"))
    left_out = 0
    if name is not None:
        paths = _named(service, name, paths)
    if not ended and request is None:
        # Leave out logs of exited processes. With --request they are searched, too,
        # because the request may have been at a lost replica.
        living = _living(service)
        others = (p for p in paths if LOG_NAME.fullmatch(p.name) is None)
        # Logs of the store, the keeper and launchers.
        living |= {path.stem for path in others}
        chosen = [path for path in paths if path.stem in living] or paths
        left_out, paths = len(paths) - len(chosen), chosen
    is_all = request is not None or since is not None
    count = lines or (END if is_all else LINES)
    after = None if since is None else time.time() - since
    found = {path: _chosen(path, count, request, after) for path in paths}
    if is_all:
        found = {path: shown for path, shown in found.items() if shown}
    if as_json:
        told = [{"path": str(path), "lines": shown} for path, shown in found.items()]
        click.echo(json.dumps(told, indent=2))
        return
    for path, shown in found.items():
        click.echo(f"==> {path} <==")
        click.echo("\n".join(shown))
    if is_all and not found:
        click.echo("no matching lines", err=True)
    if left_out:
        text = f"({left_out} more logs of exited processes: --ended)"
        click.echo(text, err=True)


def _living(service: Service) -> set[str]:
    """Return the stems of the logs of living gateways and replicas."""
    record = service.folder.load()
    processes = record.processes if record else []
    living = [p.name for p in processes if p.node or began_at(p.pid) == p.began]
    return {name.replace("/", "-") for name in living}


def _named(service: Service, name: str, paths: list[Path]) -> list[Path]:
    name = _numbered(service, name)
    # A log's name is MODEL-STAGE-NUMBER, gateway-NUMBER or launcher-ID. Require
    # exactly ``count`` numbers: another model's name may be this one's with a number.
    count = 1 if name in ("gateway", "launcher") else 2 - name.count("/")
    stem = re.escape(name.replace("/", "-")) + f"((-[0-9a-f]+){{{count}}})?"
    found = [path for path in paths if re.fullmatch(stem, path.stem)]
    if not found:
        stems = sorted(re.sub(r"-(\d+)$", "", log.stem) for log in paths)
        known = ", ".join(dict.fromkeys(stems)) or "none"
        raise click.ClickException(
            f"no log of {name!r} in {service.folder.logs}; there are logs of {known} "
            "(MODEL-STAGE)"
        )
    return found
