"""The spans of a request at its gateway, kept until it ends. Pure.

The spans are exported if the trace is sampled, if the request failed, or if it
recovered from a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from multiworld.serve.tracing.spans import MAX_EVENTS, Attributes, Kind, Span, Value
from multiworld.serve.wire.origin import Parent

MAX_SPANS = 1024
"""Maximum number of spans kept for a request."""

FAILED = 500
"""Lowest HTTP status with which a request counts as failed."""


class RequestTrace:
    """The span of a request, and its children; ``client``: the span its client sent."""

    # Most requests are not sampled, so their traces should cost little.
    __slots__ = (
        "_children",
        "_client",
        "_events",
        "attributes",
        "began_at",
        "is_recovered",
        "own",
    )

    def __init__(self, own: Parent, client: Parent | None, began_at: float) -> None:
        self.own, self._client, self.began_at = own, client, began_at
        self.attributes: dict[str, Value] = {}
        self.is_recovered = False
        # Name, start, end, attributes and error of each child; most are never exported.
        self._children: list[tuple[str, float, float, Attributes, str]] = []
        self._events: list[tuple[str, float, Attributes]] = []

    @property
    def is_wanted(self) -> bool:
        """Whether the spans will be exported, whatever the status of the request."""
        return self.own.is_sampled or self.is_recovered

    def add(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """Add a child span of the request's span."""
        if len(self._children) < MAX_SPANS:
            self._children.append((name, began_at, ended_at, attributes, error))

    def event(self, name: str, at: float, attributes: Attributes) -> None:
        """Add an event to the request's span."""
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, at, attributes))

    def is_kept(self, status: int) -> bool:
        """Return whether the spans are exported if the request ends with ``status``."""
        return self.is_wanted or status >= FAILED

    def ended(
        self, name: str, now: float, status: int, *, is_continued: bool = False
    ) -> list[Span]:
        """Return all spans to export after the end of the request.

        If another gateway continues the request, that one exports the root span.
        """
        is_failed = status >= FAILED
        if not self.is_kept(status):
            return []
        client = self._client
        if client is None:  # the trace begins here
            client = Parent(self.own.trace, "", self.own.is_sampled)
        attributes = {**self.attributes, "http.response.status_code": status}
        if is_failed:
            attributes["error.type"] = str(status)
        if self.is_recovered:
            attributes["multiworld.recovered"] = True
        root = Span(
            name,
            client,
            self.began_at,
            now,
            attributes,
            Kind.SERVER,
            self.own.span,
            f"answered with {status}" if is_failed else "",
            self._events,
        )
        children = [
            Span(name, self.own, began_at, ended_at, about, error=error)
            for name, began_at, ended_at, about, error in self._children
        ]
        return children if is_continued else [root, *children]


class WorkTrace:
    """Attempts of one stream, or of one part of a request."""

    def __init__(
        self,
        trace: RequestTrace,
        opened_at: float,
        first: str = "prefill",  # span from an attempt's start to its first token
    ) -> None:
        self._trace, self._since = trace, opened_at
        self._number = -1  # number of the current attempt
        self._about: dict[str, Value] = {}
        self._phase, self._first = "queue", first
        # Start and attributes of the hedged attempts, which began because the replica
        # of the first attempt was silent.
        self._hedges: list[tuple[float, dict[str, Value]]] = []

    def attempt(self, number: int, replicas: Sequence[str], now: float) -> None:
        """Begin the span of an attempt; ``replicas`` is its replica chain."""
        if number == self._number:  # another message of the same attempt
            return
        self._end(now)
        self._number, self._phase, self._since = number, self._first, now
        self._about = {
            "multiworld.attempt": number,
            "multiworld.replicas": tuple(replicas),
        }

    def hedge(self, number: int, replica: str, now: float) -> None:
        """Begin the span of a hedged attempt; the first attempt's replica is silent."""
        self._trace.is_recovered = True
        about: dict[str, Value] = {
            "multiworld.attempt": number,
            "multiworld.replicas": (replica,),
        }
        self._hedges.append((now, about))

    @property
    def is_computed(self) -> bool:
        """True while an attempt is in progress, false while the work is queued."""
        return self._phase != "queue"

    def answered(self, now: float) -> None:
        """Begin the decode span at the first token."""
        if self._phase == self._first:
            self._end(now)
            self._phase, self._since = "decode", now

    def note(self, text: str, now: float) -> None:
        """Add an event to the request's span."""
        self._trace.event(text, now, self._about)

    def ended(self, now: float, error: str = "") -> None:
        """End the open spans; ``error`` is empty on success."""
        self._end(now, error)
        for since, about in self._hedges:
            self._trace.add("hedge", since, now, about, error)

    def lost(self, why: str, now: float) -> None:
        """End the current attempt, which was lost; another one follows."""
        self._trace.is_recovered = True
        self._end(now, why)
        self._phase, self._since = "queue", now

    def _end(self, now: float, error: str = "") -> None:
        self._trace.add(self._phase, self._since, now, self._about, error)


CURRENT: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
"""Trace of the request that the current task answers; None: not traced."""
