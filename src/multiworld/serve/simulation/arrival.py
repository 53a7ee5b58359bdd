"""One request of a trace. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request of a trace, ``at`` seconds after the first.

    Attributes:
        work: Work, relative to the mean of its trace.
        prompt: Prompt tokens; 0 if unknown.
        answer: Output tokens; 0 if unknown.
    """

    at: float
    work: float = 1.0
    model: str = ""
    prompt: int = 0
    answer: int = 0
