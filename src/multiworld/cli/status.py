"""``multiworld status``: shows the processes of a service."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import Age, of_service, print_json
from multiworld.serve.controller.answers import ProcessShown, StatusAnswer
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.observe.facts import Facts, ModelFacts

WATCH_S = 0.5  # seconds between updates with --watch
OPERATIONS_SHOWN = 5  # maximum number of operations below the table


@dataclass(frozen=True, slots=True)
class Seen:
    """Content to show: the status, and the facts about load.

    Attributes:
        since: Epoch seconds; later events are shown. None: the last ones.
    """

    status: StatusAnswer
    facts: Facts
    since: float | None

    @property
    def events(self) -> Sequence[HistoryEntry]:
        if self.since is None:
            return self.status.operations[-OPERATIONS_SHOWN:]
        return [each for each in self.facts.events if each.at >= self.since]

    @property
    def heading(self) -> str:
        known, since = self.facts.events, self.since
        # The facts have the latest events only.
        is_cut = since is not None and bool(known) and known[0].at >= since
        if is_cut and known[0].number > 1:
            return f"last {len(known)} events (earlier ones are not shown):"
        return "last events:"


def _status(service: Service) -> StatusAnswer:
    return service.ask("GET", "/status", StatusAnswer, params={"reports": True})


def _asked(service: Service, since_s: float | None) -> Seen:
    since = None if since_s is None else time.time() - since_s
    return Seen(_status(service), service.ask("GET", "/facts", Facts), since)


def _watch(service: Service, found: Seen, since_s: float | None) -> Seen:
    """Show the status until Ctrl-C; return the last one."""
    with Live(_shown(found), refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(WATCH_S)
                found = _asked(service, since_s)
                live.update(_shown(found))
        except KeyboardInterrupt:
            return found


UNFOLDED = 10_000  # width in columns that no line exceeds

IDENTITY = 12  # number of digits shown of the hash of a version's files

# Colors of phases; all others are red.
PHASES = {
    "ready": "green",
    "spare": "blue",
    "draining": "yellow",
    "finishing": "yellow",
}


def _shown(seen: Seen) -> Group:
    found = seen.status
    parts: list[RenderableType] = [_processes(seen)]
    troubles = seen.facts.troubles
    for name, model in seen.facts.models.items():
        parts.append(f"{escape(name)}: {escape(_load(model))}")
        if model.bottleneck and not any(model.bottleneck in each for each in troubles):
            parts.append(f"{escape(name)}: {escape(model.bottleneck)}")
    parts += [f"[yellow]{escape(each)}[/]" for each in troubles]
    parts += [
        f"[red]{escape(failing.model)}, stage {failing.stage}: failed "
        f"{failing.failures} times; next start in {failing.next_in_s:.0f} s[/]"
        for failing in found.failing
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
    if seen.events:
        parts.append(seen.heading)
    for event in seen.events:
        at = time.strftime("%H:%M:%S", time.localtime(event.at))
        parts.append(f"  {at} {event.kind}: {escape(event.text)}")
    return Group(*parts)


def _load(model: ModelFacts) -> str:
    """Return a model's load in words, of the last ten seconds and the last minute."""
    parts = [f"{model.requests_s:.1f} requests/s"]
    if model.tokens_s:
        parts.append(f"{model.tokens_s:.0f} tokens/s")
    if model.failures_s:
        parts.append(f"{model.failures_s:.1f} fail/s")
    parts.append(f"{model.in_flight} in flight, {model.waiting} waiting at gateways")
    for what, spread in (
        ("answers", model.answers),
        ("queue", model.queue),
        ("first token", model.first_tokens),
        ("between tokens", model.between_tokens),
    ):
        if spread is not None:
            parts.append(f"{what} {_time(spread.p50)} (p99 {_time(spread.p99)})")
    if model.oldest_s >= 1.0:
        parts.append(f"the oldest without a token or answer: {model.oldest_s:.0f} s")
    return "; ".join(parts)


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def _processes(seen: Seen) -> Table:
    found = seen.status
    state = "[green]ready[/]" if found.is_ready else "[red]not ready[/]"
    title = f"{found.app} is {state} at {escape(found.url)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.padding = 0, 1, 0, 0
    # Nothing is truncated, because other commands take these names.
    for heading in ("process", "stage", "phase", "since", "pid", "version"):
        table.add_column(heading, no_wrap=True)
    for heading in ("queued", "busy", "done", "lost", "step", "cores"):
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
            *_pace(seen.facts, process.name),
        )
    return table


def _pace(facts: Facts, name: str) -> tuple[str, str]:
    """Return the time of a step, and the used cores."""
    replica = facts.replicas.get(name)
    if replica is None:
        gateway = facts.gateways.get(name)
        return "-", "-" if gateway is None else f"{gateway.cores:.2f}"
    step = "-" if replica.step_s is None else f"{1000 * replica.step_s:.3g} ms"
    return step, f"{replica.cores:.2f}"


def _phase(process: ProcessShown, found: StatusAnswer) -> str:
    """Return the phase and, while an engine starts, its current activity."""
    worker = None if process.is_gateway else found.worker_report(process.name)
    if worker is None or not worker.phase:
        return process.phase
    return f"{process.phase} ({worker.phase})"


def _print(found: Seen) -> None:
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
@click.option(
    "--since",
    type=Age(),
    metavar="AGE",
    help="Show the events of the last 90s, 5m, 2h ..., not only the last ones.",
)
@of_service
def status(service: Service, watch: bool, since: float | None, as_json: bool) -> None:
    """Show the processes of a service and its last events.

    `done` counts finished requests and completions; `lost` counts the processes of the
    stage that were lost; `step` is the mean time of the latest steps, and `cores` the
    processor time per second.

    Exits with 1 unless every desired process is ready. This does not mean that the
    service is down: it also answers while replacements or an update get ready.
    `/health` says whether every model can answer.
    """
    if as_json:
        answer = _status(service)
        print_json(answer)
        sys.exit(0 if answer.is_ready else 1)
    found = _asked(service, since)
    if not watch:
        _print(found)
    elif not sys.stdout.isatty():
        raise click.UsageError(
            "--watch needs a terminal; without one, repeat `multiworld status`"
        )
    else:
        found = _watch(service, found, since)
    sys.exit(0 if found.status.is_ready else 1)
