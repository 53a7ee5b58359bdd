"""Spans of the controller's operations: starts and losses of processes, updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from multiworld.serve.controller.fleet.state import Process, ProcessPhase
from multiworld.serve.tracing.spans import Attributes, Span, Value
from multiworld.serve.tracing.tracer import Tracer
from multiworld.serve.wire.origin import Parent

NO_ATTRIBUTES: Attributes = {}

STARTED = ("ready", "spare")
"""Kinds of events that end the start of a process."""

BROKEN_OFF = ("lost", "refused")
"""Kinds of events of a process that has exited unexpectedly."""

UPDATED = ("updated", "rolled back")
"""Kinds of events that end a model's update."""


class OperationTrace:
    def __init__(
        self,
        tracer: Tracer,
        processes: Mapping[str, Process],
        stage_name: Callable[[Process], str],
        clock: Callable[[], float],
    ) -> None:
        self._tracer, self._processes = tracer, processes
        self._stage_name, self._clock = stage_name, clock
        self._updates: dict[str, float] = {}  # start time of each model's update

    def happened(self, kind: str, text: str, name: str) -> None:
        """Export a span if an event ends one; ``name``: its process, if any."""
        now = self._clock()
        process = self._processes.get(name)
        model = text.partition(":")[0]
        if kind in STARTED and process is not None:
            self._started(process, now)
        elif kind == "update":
            self._updates[model] = now
        elif kind in UPDATED:
            began_at = self._updates.pop(model, now)
            error = text if kind == "rolled back" else ""
            about = {"multiworld.model": model, "multiworld.event": text}
            self._export(f"update {model}", began_at, now, about, error)
        elif kind in BROKEN_OFF:
            about = {"multiworld.process": name, "multiworld.event": text}
            self._export(f"{kind} {name}", now, now, about, text)

    def _started(self, process: Process, now: float) -> None:
        launched_at = process.entered.get(ProcessPhase.LAUNCHING)
        if launched_at is None:
            # An earlier controller launched it, so its times are unknown.
            return
        what = "gateway"
        if process.model:
            what = f"{process.model}/{self._stage_name(process)}"
        about = {"multiworld.process": process.name, "multiworld.model": process.model}
        events = [
            (phase.value, at)
            for phase, at in process.entered.items()
            if phase is not ProcessPhase.LAUNCHING
        ]
        self._export(f"start {what}", launched_at, now, about, events=events)

    def _export(
        self,
        name: str,
        began_at: float,
        now: float,
        about: Mapping[str, Value],
        error: str = "",
        events: list[tuple[str, float]] | None = None,
    ) -> None:
        own = self._tracer.begun(name)
        parent = Parent(own.trace, "", own.is_sampled)
        happened = [(what, at, NO_ATTRIBUTES) for what, at in events or ()]
        span = Span(
            name,
            parent,
            began_at,
            now,
            about,
            id=own.span,
            error=error,
            events=happened,
        )
        self._tracer.export([span])
