"""Terminal output of the chat demo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from multiworld.demo.chats.chats import Chat, Chats
from multiworld.demo.chats.story import Scene, Story

REFRESH_S = 0.2  # seconds between refreshes of the live view
PLAIN_S = 5.0  # seconds between lines of progress if there is no terminal
LINES = 5  # number of lines about events in the live view
SHOWN = 110  # number of last characters of an answer to show
# Colors of a replica's phases; all others are red.
PHASES = {"ready": "green", "draining": "yellow", "finishing": "yellow"}


class ChatScreen:
    """Live view of the answers on a terminal, and plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []
        self._chats: Chats | None = None
        self._now: Callable[[], float] = lambda: 0.0

    def tell(self, text: str) -> None:
        line = text if self._chats is None else f"[dim]{self._now():6.2f} s[/]  {text}"
        self._lines.append(line)
        if self._chats is None or not self._console.is_terminal:
            self._console.print(line, highlight=False, soft_wrap=True)

    async def show(self, story: Story, chats: Chats) -> None:
        """Refresh the view until cancelled."""
        loop = asyncio.get_running_loop()
        self._chats, self._now = chats, lambda: loop.time() - chats.began_at
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(PLAIN_S)
                self.tell(f"[dim]{_totals(chats)}[/]")
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(self._view(story, chats), refresh=True)
                await asyncio.sleep(REFRESH_S)

    def finish(self) -> None:
        """Print all lines again, because the live view has disappeared."""
        if self._console.is_terminal:
            for line in self._lines:
                self._console.print(line, highlight=False)

    def _view(self, story: Story, chats: Chats) -> Group:
        texts = Table(box=SIMPLE, show_header=False, padding=(0, 1, 0, 0))
        for chat in chats.slots:
            if chat is not None:
                shown = chat.text.replace("\n", " ")[-SHOWN:]
                texts.add_row(Text(chat.question[:28], "cyan"), Text(shown))
        stages = Text("  ")
        for process in story.status.processes:
            if process.model:
                color = PHASES.get(process.phase, "red")
                name = f"{story.label_of(process)}/{process.name.rpartition('/')[2]}"
                stages.append(f"{name} {process.phase}   ", color)
        lines = [Text.from_markup(line) for line in self._lines[-LINES:]]
        head = Text(f"{self._now():6.1f} s  {_totals(chats)}", "bold")
        return Group(head, texts, stages, Text(), *lines)


def _totals(chats: Chats) -> str:
    tokens = sum(len(chat.tokens) for chat in chats.all)
    done = sum(bool(chat.finish) for chat in chats.all)
    failed = sum(bool(chat.error) for chat in chats.all)
    streaming = len(chats.all) - done - failed
    return (
        f"chats: {streaming} streaming, {done} complete, {failed} failed; "
        f"{tokens} tokens"
    )


def pause_table(scenes: list[Scene], chats: list[Chat], usual_s: float) -> Table:
    """Return the table of events and the pauses that they caused."""
    title = f"longest pause of each stream (usual: {usual_s * 1000:.0f} ms a token)"
    table = Table(title=title, box=SIMPLE)
    table.add_column("event")
    for name in ("detected in", "recovered in", "shortest", "median", "longest"):
        table.add_column(name, justify="right")
    for scene in scenes:
        end_s = max(scene.end_s, scene.begin_s + 1.0)
        pauses = sorted(
            pause
            for chat in chats
            if (pause := chat.pause_after(scene.begin_s, end_s)) > 0
        )
        detected = "" if scene.detect_s is None else f"{scene.detect_s * 1000:.0f} ms"
        spread = (pauses[0], pauses[len(pauses) // 2], pauses[-1]) if pauses else ()
        table.add_row(
            escape(scene.title),
            detected,
            f"{scene.recovery_s:.2f} s",
            *(f"{pause:.2f} s" for pause in spread),
        )
    return table
