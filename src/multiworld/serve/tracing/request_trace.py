"""The spans of a request at its gateway, kept until it ends. Pure.

Then they are exported, if the trace is sampled, if the request has failed, or if a loss
was recovered from.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from multiworld.serve.tracing.spans import MAX_EVENTS, Attributes, Kind, Span, Value
from multiworld.serve.wire.origin import Parent

MAX_SPANS = 1024
"""Maximum number of spans that are kept of a request."""

FAILED = 500
"""HTTP status from which on a request counts as failed."""


class RequestTrace:
    """The span of a request, and those below it.

    Args:
        own: Its own span.
        client: Span of its client; None: it has none.
        began_at: Monotonic time.
    """

    def __init__(self, own: Parent, client: Parent | None, began_at: float) -> None:
        self.own, self._client, self.began_at = own, client, began_at
        self.attributes: dict[str, Value] = {}
        self.is_recovered = False
        self._spans: list[Span] = []
        self._events: list[tuple[str, float, Attributes]] = []

    def add(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """Add a span below that of the request."""
        if len(self._spans) < MAX_SPANS:
            self._spans.append(
                Span(name, self.own, began_at, ended_at, attributes, error=error)
            )

    def event(self, name: str, at: float, attributes: Attributes) -> None:
        """Add an event to the request's span."""
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, at, attributes))

    def is_kept(self, status: int) -> bool:
        """Return whether its spans are exported, when it has ended with a status."""
        return self.own.is_sampled or self.is_recovered or status >= FAILED

    def ended(self, name: str, now: float, status: int) -> list[Span]:
        """Return all spans to export, at the end of the request."""
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
        return [root, *self._spans]


class WorkTrace:
    """Attempts of one stream, or of one part of a request.

    Args:
        trace: Of its request.
        opened_at: Monotonic time.
        first: What an attempt does until something has arrived of it.
    """

    def __init__(
        self, trace: RequestTrace, opened_at: float, first: str = "prefill"
    ) -> None:
        self._trace, self._since = trace, opened_at
        self._number = -1  # of the current attempt
        self._about: dict[str, Value] = {}
        self._phase, self._first = "queue", first

    def attempt(self, number: int, replicas: Sequence[str], now: float) -> None:
        """An attempt begins, at these replicas, by stage."""
        if number == self._number:  # a message to another of its replicas
            return
        self._end(now)
        self._number, self._phase, self._since = number, self._first, now
        self._about = {
            "multiworld.attempt": number,
            "multiworld.replicas": tuple(replicas),
        }

    def answered(self, now: float) -> None:
        """A token has arrived."""
        if self._phase == self._first:
            self._end(now)
            self._phase, self._since = "decode", now

    def note(self, text: str, now: float) -> None:
        """Something has happened, in words."""
        self._trace.event(text, now, self._about)

    def ended(self, now: float, error: str = "") -> None:
        """It is complete, or has failed."""
        self._end(now, error)

    def lost(self, why: str, now: float) -> None:
        """The current attempt is over; another one follows."""
        self._trace.is_recovered = True
        self._end(now, why)
        self._phase, self._since = "queue", now

    def _end(self, now: float, error: str = "") -> None:
        self._trace.add(self._phase, self._since, now, self._about, error)


CURRENT: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
"""Trace of the request that the current task answers; None: it is not traced."""
