"""One request of a trace. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request.

    Attributes:
        at: Seconds since the first one.
        work: What it takes, beside others of its trace; 1 on average.
        model: The model it asks for; empty where the trace names none.
    """

    at: float
    work: float = 1.0
    model: str = ""
