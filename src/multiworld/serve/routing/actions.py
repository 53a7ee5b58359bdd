"""What a router has done. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.errors import ServeError
from multiworld.serve.transport.protocol import Attempt


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send a request to a replica of stage 0."""

    replica: str
    attempt: Attempt
    is_solo: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell a replica that nobody wants this any more."""

    replica: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the answer that has just arrived to the client."""

    number: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer with an error."""

    number: int
    error: ServeError


@dataclass(frozen=True, slots=True)
class Replayed:
    """A request will be sent again; for the log and the metrics."""

    number: int
    replica: str
    why: str


Action = Dispatch | Cancel | Deliver | Reject | Replayed
