"""``multiworld status``: shows the processes of a service."""

from __future__ import annotations

import sys
import time

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import of_service, print_json
from multiworld.serve.controller.answers import ProcessShown, StatusAnswer
from multiworld.serve.controller.client import Service

WATCH_S = 0.5  # seconds between updates with --watch
OPERATIONS_SHOWN = 5  # maximum number of operations below the table


def _asked(service: Service) -> StatusAnswer:
    return service.ask("GET", "/status", StatusAnswer, params={"reports": True})


def _watch(service: Service, found: StatusAnswer) -> StatusAnswer:
    """Show the status until Ctrl-C; return the last one."""
    with Live(_shown(found), refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(WATCH_S)
                found = _asked(service)
                live.update(_shown(found))
        except KeyboardInterrupt:
            return found


UNFOLDED = 10_000  # columns; wider than any line

IDENTITY = 12  # shown digits of the hash of a version's files

# Colors of phases; all others are red.
PHASES = {
    "ready": "green",
    "spare": "blue",
    "draining": "yellow",
    "finishing": "yellow",
}


def _shown(found: StatusAnswer) -> Group:
    parts: list[RenderableType] = [_processes(found)]
    parts += [
        f"[red]{escape(failing.model)}, stage {failing.stage}: failed "
        f"{failing.failures} times: {escape(failing.cause)}; next start in "
        f"{failing.next_in_s:.0f} s[/]"
        for failing in found.failing
    ]
    parts += [
        f"[red]{escape(title)} cannot be placed: {escape(why)}[/]"
        for title, why in found.unplaced.items()
    ]
    parts += [
        f"{escape(name)} is computed in {escape(why)}"
        for name, why in found.dtypes.items()
        if "(" in why
    ]
    parts += [
        f"{escape(name)}, version {escape(version)}: {identity[:IDENTITY]}"
        for name, versions in found.identities.items()
        for version, identity in versions.items()
    ]
    if found.trouble:
        parts.append(f"[red]{escape(found.trouble)}[/]")
    if found.operations:
        parts.append("last events:")
    for event in found.operations[-OPERATIONS_SHOWN:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.at))
        parts.append(f"  {at} {event.kind}: {escape(event.text)}")
    return Group(*parts)


def _processes(found: StatusAnswer) -> Table:
    state = "[green]ready[/]" if found.is_ready else "[red]not ready[/]"
    title = f"{found.app} is {state} at {escape(found.url)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.padding = 0, 1, 0, 0
    # Nothing is truncated, because other commands take these names.
    for heading in ("process", "stage", "phase", "since", "pid", "version"):
        table.add_column(heading, no_wrap=True)
    for heading in ("queued", "busy", "done", "lost"):
        table.add_column(heading, justify="right", no_wrap=True)
    for process in found.processes:
        color = PHASES.get(process.phase, "red")
        table.add_row(
            process.name,
            escape(process.stage_name or "-"),
            f"[{color}]{_phase(process, found)}[/]",
            f"{process.since_s:.0f} s",
            str(process.pid or "-"),
            process.version or "-",
            *_work(process, found),
            str(process.restarts),
        )
    return table


def _phase(process: ProcessShown, found: StatusAnswer) -> str:
    """Return the phase and, while an engine starts, its current activity."""
    worker = None if process.is_gateway else found.worker_report(process.name)
    if worker is None or not worker.phase:
        return process.phase
    return f"{process.phase} ({worker.phase})"


def _print(found: StatusAnswer) -> None:
    """Print a status as wide as the terminal, or wider rather than cut a heading."""
    console = Console()
    unbound = console.options.update(max_width=1_000)
    min_width = console.measure(_processes(found), options=unbound).maximum
    # Do not fold in a file or a pipe: other programs read it line by line.
    width = max(console.width, min_width) if console.is_terminal else UNFOLDED
    Console(width=width).print(_shown(found))


def _work(process: ProcessShown, found: StatusAnswer) -> tuple[str, str, str]:
    """Return the numbers of queued, running and finished requests."""
    if process.is_gateway:
        gateway = found.gateway_report(process.name)
        if gateway is None:
            return "0", "?", "0"
        waiting = sum(gateway.waiting.values())
        answered = gateway.counts.get("answered", 0) + sum(gateway.completions.values())
        return str(waiting), str(gateway.in_flight), str(answered)
    worker = found.worker_report(process.name)
    if worker is None:
        return "?", "?", "0"
    done = worker.counts.get("requests", 0)
    return str(worker.queued), str(worker.computing), str(done)


@click.command()
@click.option("--watch", is_flag=True, help="Keep updating the display until Ctrl-C.")
@of_service
def status(service: Service, watch: bool, as_json: bool) -> None:
    """Show the processes of a service and its last events.

    `done` counts finished requests and completions; `lost` counts the processes of the
    stage that were lost.

    Exits with 1 unless all that is wanted is ready. While an update, a replacement or
    a further replica starts, the service answers requests all the same; see /health.
    """
    found = _asked(service)
    if as_json:
        print_json(found)
    elif not watch:
        _print(found)
    elif not sys.stdout.isatty():
        raise click.UsageError(
            "--watch needs a terminal; without one, repeat `multiworld status`"
        )
    else:
        found = _watch(service, found)
    sys.exit(0 if found.is_ready else 1)
