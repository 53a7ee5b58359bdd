"""The spans of a replica: one per sampled request, or per attempt of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from multiworld.serve.tracing.spans import (
    MAX_EVENTS,
    Attributes,
    Export,
    Kind,
    Span,
    Value,
)
from multiworld.serve.wire.origin import Origin
from multiworld.serve.wire.protocol import Key, StreamId


@dataclass(slots=True)
class _Sequence:
    """The latest attempt of a sequence at this replica."""

    origin: Origin
    attempt: int
    opened_at: float
    steps: int = 0
    rows: int = 0
    computed_s: float = 0.0
    events: list[tuple[str, float, Attributes]] = field(default_factory=list)


class StageTrace:
    """Spans of one replica's computations, each exported once it has ended."""

    def __init__(self, replica: str, stage: str, export: Export) -> None:
        self._export = export
        self._name = f"stage {stage}"
        self._about: dict[str, Value] = {
            "multiworld.replica": replica,
            "multiworld.stage": stage,
        }
        self._sequences: dict[StreamId, _Sequence] = {}

    def computed(
        self,
        origin: Origin,
        attempt: int | None,  # None: unknown
        times: tuple[float, float, float],  # of arrival, start and end; monotonic
        rows: int,  # of the batch
        error: str = "",
    ) -> None:
        """Export the span of one request's computation, if it is sampled."""
        if origin.parent is None or not origin.parent.is_sampled:
            return
        arrived_at, began_at, ended_at = times
        about: dict[str, Value] = {
            **self._about,
            "multiworld.batch_rows": rows,
            "multiworld.queued_s": began_at - arrived_at,
            "multiworld.computed_s": ended_at - began_at,
        }
        if attempt is not None:
            about["multiworld.attempt"] = attempt
        span = Span(
            self._name,
            origin.parent,
            arrived_at,
            ended_at,
            about,
            Kind.CONSUMER,
            error=error,
            events=[("computing", began_at, {})],
        )
        self._export([span])

    def opened(self, key: Key, origin: Origin, now: float) -> None:
        """Begin an attempt of a sequence; end the sequence's previous attempt."""
        self.closed(key[:2], now)
        if origin.is_sampled:
            self._sequences[key[:2]] = _Sequence(origin, key[2], now)

    def step(
        self,
        parts: Iterable[tuple[StreamId, int]],  # sequences, and their rows
        began_at: float,
        now: float,
        what: str = "",  # name of other work; empty: a step
    ) -> None:
        """Count the rows of sequences that were computed in one step."""
        if not self._sequences:
            return
        for stream, rows in parts:
            if (found := self._sequences.get(stream)) is None:
                continue
            if what:
                found.events.append((what, began_at, {"multiworld.rows": rows}))
            elif not found.steps:
                found.events.append(("first step", began_at, {"multiworld.rows": rows}))
            found.steps += 1
            found.rows += rows
            found.computed_s += now - began_at

    def closed(self, stream: StreamId, now: float) -> None:
        """End a sequence, and export its span if it is sampled."""
        found = self._sequences.pop(stream, None)
        if found is None or found.origin.parent is None:
            return
        about: dict[str, Value] = {
            **self._about,
            "multiworld.attempt": found.attempt,
            "multiworld.steps": found.steps,
            "multiworld.rows": found.rows,
            "multiworld.computed_s": found.computed_s,
        }
        span = Span(
            self._name,
            found.origin.parent,
            found.opened_at,
            now,
            about,
            Kind.CONSUMER,
            events=found.events[:MAX_EVENTS],
        )
        self._export([span])
