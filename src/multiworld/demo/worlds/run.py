"""The worlds demo, from start to report."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict

import click
from rich.console import Console

from multiworld.demo.worlds.leader import Leader, Outcome


def run(backend: str, phase_s: float, *, as_json: bool) -> int:
    """Run the demo, print the outcome, and return the exit code."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    began = time.monotonic()

    def tell(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.2f} s[/]  {text}")

    tell("this process is rank 0 of three worlds; two workers are rank 1")
    outcome = asyncio.run(Leader(backend, phase_s, tell).run())
    if as_json:
        click.echo(json.dumps(asdict(outcome), indent=2))
    console.print("\nSummary")
    for name, value in _summary(outcome).items():
        console.print(f"  {name:<38}{value}")
    for failure in outcome.failures:
        console.print(f"[red]FAILED:[/] {failure}")
    if not outcome.failures:
        console.print("[green]only the worlds of the killed worker broke[/]")
    return 1 if outcome.failures else 0


def _summary(outcome: Outcome) -> dict[str, str]:
    trips = (f"{name} {count:,}" for name, count in outcome.round_trips.items())
    return {
        "round trips": " · ".join(trips),
        "wrong answers": str(outcome.wrong),
        "broken worlds": " · ".join(outcome.broken) or "none",
        "lost member, as the error names it": outcome.lost_reason or "none",
        "noticed after": _ms(outcome.detect_s),
        "replacement answered after": _ms(outcome.recover_s),
        "red's longest pause before the kill": _ms(outcome.pause_before_s),
        "red's longest pause since": (
            f"{_ms(outcome.pause_after_s)} (limit {_ms(outcome.pause_limit_s)})"
        ),
    }


def _ms(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds * 1e3:,.1f} ms"
