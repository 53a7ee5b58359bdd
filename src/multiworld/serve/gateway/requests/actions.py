"""Actions that a router asks its dispatcher to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.errors import ServeError
from multiworld.serve.wire.inference_messages import Attempt


@dataclass(frozen=True, slots=True)
class Dispatch:
    replica: str
    attempt: Attempt
    is_isolated: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    replica: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Deliver:
    """Delivery of the answer in the current event to the client."""

    number: int


@dataclass(frozen=True, slots=True)
class Reject:
    number: int
    error: ServeError


@dataclass(frozen=True, slots=True)
class Replayed:
    """A request queued again after an attempt at ``replica``; to log and to count."""

    number: int
    replica: str
    why: str


Action = Dispatch | Cancel | Deliver | Reject | Replayed
