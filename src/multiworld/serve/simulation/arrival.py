"""One request of a trace. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at: Seconds since the first request.
        work: Work of the request, relative to the mean of its trace.
        model: Name of the requested model; empty where the trace names none.
        prompt: Tokens of its prompt; 0 where the trace does not say.
        answer: Tokens that are generated for it.
    """

    at: float
    work: float = 1.0
    model: str = ""
    prompt: int = 0
    answer: int = 0
