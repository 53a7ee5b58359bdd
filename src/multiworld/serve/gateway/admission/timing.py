"""Time that a client's request spends in each phase. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Phases(NamedTuple):
    """Seconds of one request, by phase."""

    parse: float  # from the head of the request until its inputs are checked
    queue: float  # waiting at the gateway and at replicas
    hop: float  # sending between processes, and all other time
    compute: float  # running the stages' functions
    render: float  # from the output tensors to the response

    @property
    def header(self) -> str:
        """Value of ``Server-Timing`` (W3C), in milliseconds."""
        return ", ".join(
            f"{name};dur={1000 * seconds:.3f}"
            for name, seconds in zip(self._fields, self, strict=True)
        )


@dataclass(slots=True)
class Timing:
    """Times of one request, which may have several parts (such as texts to embed)."""

    asked_at: float | None = None  # time at which the first part was submitted
    answered_at: float = 0.0  # time at which the last part was answered
    queued_s: float = 0.0  # sum over the parts
    computed_s: float = 0.0  # sum over the parts
    parts: int = 0

    def asked(self, now: float) -> None:
        if self.asked_at is None:
            self.asked_at = now

    def answered(self, now: float, queued_s: float, computed_s: float) -> None:
        self.answered_at = now
        self.queued_s += queued_s
        self.computed_s += computed_s
        self.parts += 1

    def phases(self, began_at: float, ended_at: float) -> Phases | None:
        """Return the phases; None if no part was answered."""
        if self.asked_at is None or not self.parts:
            return None
        queue, compute = self.queued_s / self.parts, self.computed_s / self.parts
        hop = max(0.0, self.answered_at - self.asked_at - queue - compute)
        render = ended_at - self.answered_at
        return Phases(self.asked_at - began_at, queue, hop, compute, render)
