"""Terminal output of the demo: a live table or plain lines, and a summary."""

from __future__ import annotations

import asyncio

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multiworld.demo.worlds.leader import DemoOutcome, Leader

REFRESH_S = 0.2
"""Seconds between refreshes of the live table."""


def live_view(leader: Leader) -> Group:
    """Return a table of every world's state, and the totals."""
    table = Table(title=f"{leader.elapsed_s:5.1f} s")
    for column in ("world", "epoch", "state"):
        table.add_column(column)
    for column in ("in flight", "images answered"):
        table.add_column(column, justify="right")
    for name, account in leader.ledger.worlds.items():
        style = "green" if account.state == "ready" else "red"
        in_flight = str(len(account.in_flight))
        row = (str(account.epoch), Text(account.state, style=style), in_flight)
        table.add_row(name, *row, str(account.images))
    ledger = leader.ledger
    rate = ledger.answered / max(leader.elapsed_s, 1e-9)
    totals = f"accuracy {ledger.accuracy:.3f} · {rate:.0f} images/s"
    return Group(table, Text(totals))


async def show(leader: Leader, console: Console) -> None:
    """Refresh the live view until cancelled.

    Without a terminal, print one line every two seconds instead.

    Cancellation:
        Ends the view; this is the only way to end it.
    """
    if not console.is_terminal:
        while True:
            await asyncio.sleep(2)
            tell(leader, console, _line(leader))
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(live_view(leader), refresh=True)
            await asyncio.sleep(REFRESH_S)


def _line(leader: Leader) -> str:
    worlds = " · ".join(
        f"{name} {account.state} ({account.images} images)"
        for name, account in leader.ledger.worlds.items()
    )
    return f"{worlds} · accuracy {leader.ledger.accuracy:.3f}"


def tell(leader: Leader, console: Console, text: str) -> None:
    """Print one line after the seconds since the start."""
    console.print(f"[dim]{leader.elapsed_s:6.2f} s[/]  {text}", highlight=False)


def summary(outcome: DemoOutcome) -> Table:
    """Return the summary as a table."""
    table = Table(title="Summary", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, images in outcome.images.items():
        table.add_row(f"images answered by {name}", str(images))
    table.add_row("images answered by the replacement", str(outcome.replacement_images))
    table.add_row("accuracy", f"{outcome.accuracy:.3f}")
    table.add_row("images sent", str(outcome.sent))
    table.add_row("images sent again after the kill", str(outcome.resent))
    table.add_row("images lost", str(outcome.lost))
    table.add_row("p99 gap between the survivor's answers", _ms(outcome.p99_before_s))
    pause = f"{_ms(outcome.longest_pause_s)} (limit {_ms(outcome.pause_limit_s)})"
    table.add_row("survivor's longest pause", pause)
    table.add_row("time to detect", _ms(outcome.detect_s))
    table.add_row("time to recover", _ms(outcome.recover_s))
    return table


def _ms(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds * 1e3:,.1f} ms"
