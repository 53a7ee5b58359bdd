"""Spans of traces, independent of OpenTelemetry's SDK. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from multiworld.serve.wire.origin import Parent

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]

Export = Callable[[Iterable["Span"]], None]
"""Function that exports spans."""

MAX_EVENTS = 64
"""Maximum number of events that a span keeps."""


class Kind(Enum):
    """The kinds of spans of OpenTelemetry that this package uses."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CONSUMER = "CONSUMER"


@dataclass(slots=True)
class Span:
    """Operation with a start and an end, in seconds of the monotonic clock."""

    name: str
    parent: Parent  # a trace's root has a parent with an empty span id
    began_at: float
    ended_at: float
    attributes: Attributes = field(default_factory=dict)
    kind: Kind = Kind.INTERNAL
    id: str = ""  # hexadecimal digits; empty: the exporter generates an id
    error: str = ""  # description of the failure; empty: success
    events: Sequence[tuple[str, float, Attributes]] = ()
