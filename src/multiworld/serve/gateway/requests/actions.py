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
    """Cancel an attempt at a replica."""

    replica: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver the answer that has just arrived to the client."""

    number: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer the client with an error."""

    number: int
    error: ServeError


@dataclass(frozen=True, slots=True)
class Replayed:
    """Log and count a request that ``replica`` had and that is queued again."""

    number: int
    replica: str
    why: str


Action = Dispatch | Cancel | Deliver | Reject | Replayed
