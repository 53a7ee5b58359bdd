"""One request of a trace. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request of a trace, ``at`` seconds after the first."""

    at: float
    work: float = 1.0  # relative to the mean of its trace
    model: str = ""
    prompt: int = 0  # tokens; 0 if unknown
    answer: int = 0  # tokens; 0 if unknown
