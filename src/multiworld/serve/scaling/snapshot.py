"""What a scaling policy is asked, and what it answers. Pure.

A policy is ``decide(snapshot) -> Decision``, without clock, network or randomness: the
same snapshot gets the same answer, which is how decisions are tested, simulated and
explained afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Within what a stage is scaled; names and meanings are Ray Serve's.

    Attributes:
        min_replicas: Fewest; 0: none run while nobody asks.
        max_replicas: Most.
        target_ongoing_requests: Requests that are queued for or computed by a replica,
            on average, when there are as many replicas as there should be.
        upscale_delay_s: For how long more must be needed before more are started.
        downscale_delay_s: For how long fewer must do before some are drained.
        downscale_to_zero_delay_s: The same for the last one; by default as for others.
        look_back_period_s: Over which what arrives is averaged.
        upscaling_factor: Of the replicas that are missing, how many are started.
        downscaling_factor: Of those that are too many, how many are drained.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 2.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    downscale_to_zero_delay_s: float | None = None
    look_back_period_s: float = 30.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0

    def within(self, count: int) -> int:
        """Return a number of replicas, brought within the fewest and the most."""
        return min(max(count, self.min_replicas), self.max_replicas)

    @property
    def to_zero_s(self) -> float:
        """Seconds without any need before the last replica is drained."""
        if self.downscale_to_zero_delay_s is None:
            return self.downscale_delay_s
        return self.downscale_to_zero_delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNow:
    """One stage, as it is wanted at this moment.

    Attributes:
        replicas: How many are wanted now.
        limits: None for a stage whose number somebody has set.
        item_s: Seconds that a replica needs for a request in a full batch, as declared
            or measured before; None if nobody knows.
    """

    name: str
    replicas: int
    limits: StageLimits | None = None
    item_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeen:
    """One stage, as it was at the moment of a sample.

    Attributes:
        ongoing: Requests that waited for it or were computed by it.
        ready: Its replicas that were ready.
        requests: Computed so far, since the model is served; never less.
        batches: The same, of batches.
        busy_s: Seconds of computing so far, of all its replicas together.
    """

    ongoing: float
    ready: int
    requests: int = 0
    batches: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What was seen of a model at one moment.

    Attributes:
        at: Seconds, of a clock that never goes back.
        arrived: Requests so far, those that were refused included.
        stages: In order.
        missed: Requests so far that were answered after the objective, or not at all
            because too many waited. Mistakes of clients and of models are none.
        refused: Those of them that were refused as too many waited.
    """

    at: float
    arrived: int
    stages: tuple[StageSeen, ...]
    missed: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a decision is made from.

    Attributes:
        samples: Oldest first; the last one is of now.
        objective_s: Within which answers should come; None: no objective.
        objective_share: Of the answers, that should.
        deadline_s: After which a request is given up, unless it says otherwise.
        start_s: Seconds from the decision to start a replica until it is ready.
        interval_s: Seconds between two decisions.
        memory: What the policy itself put into its last decision; None at first.
    """

    model: str
    now: float
    stages: tuple[StageNow, ...]
    samples: tuple[Sample, ...]
    objective_s: float | None = None
    objective_share: float = 0.99
    deadline_s: float = 30.0
    start_s: float = 1.0
    interval_s: float = 1.0
    memory: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas each stage should have, and why.

    Attributes:
        replicas: By stage.
        why: For people, one line.
        facts: The numbers behind it, plain.
        memory: What the policy wants to find in the next snapshot.
    """

    replicas: tuple[int, ...]
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    memory: Any = None


Policy = Callable[[Snapshot], Decision]
"""What ``scaling:`` in a spec names."""
