"""Terminal output of the demo, while it runs and at the end."""

from __future__ import annotations

import asyncio
import math

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multiworld.demo.pipeline.story import Scene, Story
from multiworld.serve.load.generator import Load
from multiworld.serve.load.summary import Sample, summarise

REFRESH_S = 0.1
"""Seconds between refreshes of the live view."""

RECENT_S = 3.0
"""Seconds before and after an event that its row of the table covers."""

LINES = 6
"""Log lines that the live view shows."""

BARS = " ▁▂▃▄▅▆▇█"
PHASES = {"ready": "green", "draining": "yellow", "finishing": "yellow"}
"""Colors of a replica's phases; all others are red."""


class Screen:
    """Shows a live table on a terminal, and plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []
        self._loads: dict[str, Load] = {}
        self._story: Story | None = None

    def tell(self, text: str) -> None:
        """Show one line."""
        at = f"[dim]{self._now():6.2f} s[/]  " if self._loads else ""
        self._lines.append(at + text)
        if not self._loads or not self._console.is_terminal:
            self._console.print(at + text, highlight=False, soft_wrap=True)

    def _now(self) -> float:
        first = next(iter(self._loads.values()))
        return asyncio.get_running_loop().time() - first.began_at

    async def show(self, story: Story, loads: dict[str, Load]) -> None:
        """Refresh the live view until cancelled.

        Args:
            story: Story whose processes are shown.
            loads: Loads to show, by model or tenant.

        Cancellation:
            Ends the live view; this is the only way to end it.
        """
        self._story, self._loads = story, loads
        if not self._console.is_terminal:
            await asyncio.Event().wait()
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(self._view(), refresh=True)
                await asyncio.sleep(REFRESH_S)

    def finish(self) -> None:
        """Print all lines again, since a live view leaves nothing behind."""
        if self._console.is_terminal:
            for line in self._lines:
                self._console.print(line, highlight=False)

    def _view(self) -> Group:
        assert self._story is not None
        table = Table(title=f"{self._now():5.1f} s")
        for title in ("process", "phase", "version", "node", "pid"):
            table.add_column(title)
        for process in self._story.status.processes:
            color = PHASES.get(process.phase, "red")
            table.add_row(
                process.name,
                Text(process.phase, style=color),
                process.version or "-",
                process.node or "-",
                str(process.pid or "-"),
            )
        lines = []
        for name, load in self._loads.items():
            lines += [_totals(name, load), Text(self._bars(load))]
        return Group(
            table, *lines, *(Text.from_markup(t) for t in self._lines[-LINES:])
        )

    def _bars(self, load: Load) -> str:
        """Return the highest latency of each fifth of a second as a bar chart."""
        slots = [0.0] * 60
        now = self._now()
        for sample in load.samples[-2000:]:
            slot = 59 - int((now - sample.due_s) * 5)
            if 0 <= slot < 60:
                slots[slot] = max(slots[slot], sample.latency_s)
        top = max(*slots, 0.05)
        bars = "".join(BARS[math.ceil(s / top * (len(BARS) - 1))] for s in slots)
        return f"latency of the last 12 s (█ = {top * 1000:.0f} ms)  {bars}"


def _totals(name: str, load: Load) -> Text:
    found = summarise(load.samples)
    bad = found.failed + found.wrong
    return Text(
        f"{name}: {load.sent} sent · {found.answered} answered · {found.failed} failed "
        f"· {found.wrong} wrong · p50 {found.p50_s * 1000:.0f} ms",
        style="red" if bad else "green",
    )


def event_table(scenes: list[Scene], samples: list[Sample]) -> Table:
    """Return the table of latencies before, during and after each event."""
    table = Table(title="latency before, during and after each event (p50 / p99, ms)")
    table.add_column("event")
    for title in ("detected in", "recovered in", "before", "during", "after"):
        table.add_column(title, justify="right")
    for scene in scenes:
        begin, end = scene.begin_s, max(scene.end_s, scene.begin_s + 0.25)
        noticed = "" if scene.detect_s is None else f"{scene.detect_s * 1000:.0f} ms"
        table.add_row(
            scene.title,
            noticed,
            f"{scene.recovery_s:.2f} s",
            _span(samples, begin - RECENT_S, begin),
            _span(samples, begin, end),
            _span(samples, end, end + RECENT_S),
        )
    return table


def _span(samples: list[Sample], begin_s: float, end_s: float) -> str:
    found = summarise(s for s in samples if begin_s <= s.due_s < end_s)
    if not found.answered:
        return "-"
    return f"{found.p50_s * 1000:.0f} / {found.p99_s * 1000:.0f}"
