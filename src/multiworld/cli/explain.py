"""``multiworld explain``: shows which process waits for which, and why."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import click

from multiworld.cli.options import of_service
from multiworld.serve.controller import answers
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.fleet.entries import (
    Assessment,
    Decision,
    HistoryEntry,
)
from multiworld.serve.controller.observe.facts import Facts
from multiworld.serve.wire.control_messages import GatewayReport, WorkerReport

# Explanation of a process that sent no report.
SILENT = "does not answer: it is stopped, busy in a long call, or cut off"

LONG_S = 0.1  # shortest step, in seconds, that is mentioned


def _show_events(events: Sequence[HistoryEntry]) -> None:
    if events:
        click.echo("\nthe last events:")
    for event in events:
        when = time.strftime("%H:%M:%S", time.localtime(event.at))
        ago_s = time.time() - event.at
        click.echo(f"  {when} ({ago_s:.0f} s ago) {event.kind}: {event.text}")


def _show_assessments(assessments: Sequence[Assessment]) -> None:
    if assessments:
        click.echo("\nthe last assessments:")
    for assessment in assessments:
        about = f" of {assessment.about}" if assessment.about else ""
        ago_s = time.time() - assessment.at
        click.echo(f"  {assessment.kind}{about} ({ago_s:.0f} s ago): {assessment.what}")


def _show_decisions(decisions: Sequence[Decision]) -> None:
    if not decisions:
        click.echo("\nno decisions about scaling or placement yet")
        return
    click.echo("\nthe last decisions (--json --snapshots prints their inputs, too):")
    for decision in decisions:
        when = time.strftime("%H:%M:%S", time.localtime(decision.at))
        about = f" {decision.about}" if decision.about else ""
        click.echo(f"  {when} {decision.kind}{about}: {decision.what}")


def _explained(process: answers.ProcessShown, found: answers.StatusAnswer) -> str:
    if process.phase in ("launching", "joined"):
        return f"{process.phase} for {process.since_s:.1f} s: loading its stage"
    if process.phase == "loaded":
        return f"has waited {process.since_s:.1f} s for a probe to come back"
    if process.is_gateway:
        gateway = found.gateway_report(process.name)
        return SILENT if gateway is None else _gateway_work(gateway)
    worker = found.worker_report(process.name)
    if worker is None:
        return SILENT
    if process.model in found.dtypes:
        return _generator_work(worker)
    return _worker_work(worker)


def _gateway_work(report: GatewayReport) -> str:
    at = [f"{count} at {name}" for name, count in report.load.items() if count]
    waiting = sum(report.waiting.values())
    silent = f"; silent: {', '.join(report.silent)}" if report.silent else ""
    return (
        f"{_count(report.in_flight, 'request')} in flight"
        f"{' (' + ', '.join(at) + ')' if at else ''}, {waiting} waiting to be "
        f"sent{silent}"
    )


def _generator_work(report: WorkerReport) -> str:
    parts = []
    if report.computing:
        parts.append(f"generates {_count(report.computing, 'sequence')}")
    if report.computing_s >= LONG_S:
        parts.append(f"its step has taken {report.computing_s:.1f} s so far")
    if report.queued:
        parts.append(f"{_count(report.queued, 'sequence')} waiting")
    return "; ".join(parts) or "waits for work from upstream"


def _worker_work(report: WorkerReport) -> str:
    parts = []
    if report.computing:
        parts.append(
            f"has been computing {_count(report.computing, 'request')} for "
            f"{report.computing_s:.3f} s"
        )
    if report.waiting_for_next:
        names = ", ".join(report.downstream) or "a replica of the next stage"
        count = _count(report.waiting_for_next, "output")
        parts.append(f"{count} waiting for room at {names}")
    if report.handed:
        parts.append(f"{report.handed} sent to the next stage but not started there")
    if report.queued:
        parts.append(f"{_count(report.queued, 'request')} waiting to be computed")
    return "; ".join(parts) or "waits for work from upstream"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@click.command()
@click.option(
    "-n",
    "--last",
    type=click.IntRange(0, 200),
    default=10,
    help="Number of decisions to show.",
)
@click.option(
    "--snapshots", is_flag=True, help="With --json: add the inputs of each decision."
)
@of_service
def explain(service: Service, last: int, snapshots: bool, as_json: bool) -> None:
    """Show what is wrong, which process waits for which, and the last decisions.

    The decisions concern scaling and placement.
    """
    found = service.ask(
        "GET", "/status", answers.StatusAnswer, params={"reports": True}
    )
    params = {"last": last, "snapshots": snapshots}
    decided = service.ask("GET", "/decisions", answers.DecisionsAnswer, params=params)
    facts = service.ask("GET", "/facts", Facts)
    processes = {p.name: _explained(p, found) for p in found.processes}
    models = facts.models.items()
    lacks = {name: each.bottleneck for name, each in models if each.bottleneck}
    if as_json:
        out = {
            "processes": processes,
            "troubles": facts.troubles,
            "slow": {name: r.slow for name, r in facts.replicas.items() if r.slow},
            "bottlenecks": lacks,
            "decisions": answers.plain(decided.decisions),
            "thoughts": answers.plain(decided.thoughts),
            "events": answers.plain(found.operations),
        }
        click.echo(json.dumps(out, indent=2))
        return
    if facts.troubles:
        click.echo("needs attention:")
        for trouble in facts.troubles:
            click.echo(f"  {trouble}")
        click.echo("")
    for name, line in processes.items():
        click.echo(f"{name}: {line}")
    for name, why in lacks.items():
        if not any(why in trouble for trouble in facts.troubles):
            click.echo(f"{name}: {why}")
    _show_events(found.operations)
    _show_assessments(decided.thoughts)
    _show_decisions(decided.decisions)
