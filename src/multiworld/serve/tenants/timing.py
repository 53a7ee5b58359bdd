"""Times of a client's request on its way through the pipeline. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Phases(NamedTuple):
    """Seconds of one request, by what they were spent on.

    Attributes:
        parse: From its head to the parsed and checked inputs.
        queue: Waiting, at the gateway and at replicas.
        hop: The way between processes, and whatever else is none of the others.
        compute: In the stages' functions.
        render: From the answer's tensors to the response.
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
    """Times of one request, which may have several parts (texts to embed, say).

    Attributes:
        asked_at: Monotonic time at which its first part was submitted; None: not yet.
        answered_at: Monotonic time at which its last part was answered.
        queued_s: Seconds that its parts have waited, together.
        computed_s: Seconds that its parts were computed, together.
        parts: Parts that were answered.
    """

    asked_at: float | None = None
    answered_at: float = 0.0
    queued_s: float = 0.0
    computed_s: float = 0.0
    parts: int = 0

    def asked(self, now: float) -> None:
        """Note that a part is submitted."""
        if self.asked_at is None:
            self.asked_at = now

    def answered(self, now: float, queued_s: float, computed_s: float) -> None:
        """Note that a part is answered.

        Args:
            now: Monotonic time, in seconds.
            queued_s: Seconds that it waited, at the gateway and at replicas.
            computed_s: Seconds that it was computed.
        """
        self.answered_at = now
        self.queued_s += queued_s
        self.computed_s += computed_s
        self.parts += 1

    def phases(self, began_at: float, ended_at: float) -> Phases | None:
        """Return the phases; None if no part was answered.

        Waiting and computing are those of an average part.

        Args:
            began_at: Monotonic time of the request, in seconds.
            ended_at: Monotonic time of the response, in seconds.
        """
        if self.asked_at is None or not self.parts:
            return None
        queue, compute = self.queued_s / self.parts, self.computed_s / self.parts
        hop = max(0.0, self.answered_at - self.asked_at - queue - compute)
        render = ended_at - self.answered_at
        return Phases(self.asked_at - began_at, queue, hop, compute, render)
