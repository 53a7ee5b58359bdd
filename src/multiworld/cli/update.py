"""``multiworld update``: updates a running service to another spec."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import msgspec

from multiworld.cli.options import SPEC, of_service, show
from multiworld.serve.controller.answers import StatusAnswer, Updated, plain
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.spec.loader import read_text

LOOK_S = 0.3  # seconds between checks of the progress
# Maximum seconds for the controller to answer, which it does after fetching models.
FETCH_S = 3600.0
EXTRA_S = 10.0  # seconds to wait beyond the spec's ready_s


@click.command()
@SPEC
@click.option("--no-wait", is_flag=True, help="Return as soon as the spec is accepted.")
@of_service
def update(service: Service, spec: Path, no_wait: bool, as_json: bool) -> None:
    """Update the running service to SPEC, without a pause.

    The new version of a model starts beside the old one, and takes over once all its
    replicas are ready; a version that does not become ready is rolled back. Waits for
    the outcome, and exits with 1 after a rollback. Ctrl-C stops the waiting, not the
    update.
    """
    text = read_text(spec)
    service.ask("GET", "/status", StatusAnswer)  # fail early if the controller hangs
    body = {"text": text, "where": str(spec.absolute())}
    if not as_json:
        click.echo("the controller reads the spec, and fetches what is new in it ...")
    try:
        answer = service.ask("POST", "/update", Updated, json=body, limit_s=FETCH_S)
    except KeyboardInterrupt:
        raise _interrupted("may continue") from None
    wanted = ", ".join(f"{name} {v}" for name, v in answer.versions.items())
    if no_wait:
        show(plain(answer), as_json=as_json, text=f"accepted: {wanted}")
        return
    if not as_json:
        click.echo(f"updating to {wanted} ...")
    try:
        failure = _wait(service, answer)
    except KeyboardInterrupt:
        raise _interrupted("continues") from None
    outcome = {**msgspec.structs.asdict(answer), "failure": failure}
    show(outcome, as_json=as_json, text=failure or f"done: {wanted}")
    sys.exit(1 if failure else 0)


def _interrupted(what: str) -> click.ClickException:
    text = f"stopped waiting; the update {what}, see `multiworld status`"
    return click.ClickException(text)


def _wait(service: Service, answer: Updated) -> str:
    """Wait until the update is done; return the reason for a failure, or ""."""
    patience_s = answer.ready_s + EXTRA_S
    limit, most = time.monotonic() + patience_s, 0
    while True:
        status = service.ask("GET", "/status", StatusAnswer)
        active, versions = status.active, answer.versions
        # Read the events after the status: a rollback also changes the desired state,
        # and would otherwise look like another update.
        params = {"since": answer.since}
        events = service.ask("GET", "/events", list[HistoryEntry], params=params)
        mine = tuple(f"{name}: version {v} " for name, v in versions.items())
        for event in events:
            if event.kind == "rolled back" and event.text.startswith(mine):
                return f"rolled back: {event.text}"
        wanted = {name: model.version for name, model in status.wanted.models.items()}
        others = [name for name, v in versions.items() if wanted.get(name) != v]
        if others:
            found = ", ".join(f"{name} {wanted.get(name, '(none)')}" for name in others)
            return f"superseded by another update, to {found}"
        ready = sum(
            p.phase == "ready" and answer.versions.get(p.model) == p.version
            for p in status.processes
        )
        if ready > most:  # restart the time limit for the next replica
            limit, most = time.monotonic() + patience_s, ready
        is_active = all(active.get(name) == v for name, v in versions.items())
        if is_active and status.is_ready:
            return ""
        if time.monotonic() > limit:
            short = [f"{k}: {why}" for k, why in status.unplaced.items()]
            short += [f"{f.model}: {f.cause}" for f in status.failing]
            reason = "; ".join(short) or "see `multiworld explain`"
            return f"the update made no progress for {patience_s:g} s: {reason}"
        time.sleep(LOOK_S)
