"""Times of a client's request on its way through the pipeline. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Phases(NamedTuple):
    """Seconds of one request, by phase.

    Attributes:
        parse: From the head of the request to parsed and checked inputs.
        queue: Waiting, at the gateway and at replicas.
        hop: Between processes, and everything that is in no other phase.
        compute: In the stages' functions.
        render: From the output tensors to the response.
    """

    parse: float
    queue: float
    hop: float
    compute: float
    render: float

    @property
    def header(self) -> str:
        """Value of ``Server-Timing`` (W3C), in milliseconds."""
        return ", ".join(
            f"{name};dur={1000 * seconds:.3f}"
            for name, seconds in zip(self._fields, self, strict=True)
        )


@dataclass(slots=True)
class Timing:
    """Times of one request, which may have several parts (such as texts to embed).

    ``asked_at`` is when the first part was submitted, ``answered_at`` when the last one
    was answered; ``queued_s`` and ``computed_s`` are sums over the parts.
    """

    asked_at: float | None = None
    answered_at: float = 0.0
    queued_s: float = 0.0
    computed_s: float = 0.0
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
        """Return the phases; None if no part was answered.

        ``queue`` and ``compute`` are those of an average part.
        """
        if self.asked_at is None or not self.parts:
            return None
        queue, compute = self.queued_s / self.parts, self.computed_s / self.parts
        hop = max(0.0, self.answered_at - self.asked_at - queue - compute)
        render = ended_at - self.answered_at
        return Phases(self.asked_at - began_at, queue, hop, compute, render)
