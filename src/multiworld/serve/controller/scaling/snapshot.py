"""Input and output of scaling policies. Pure.

A policy is a function ``decide(snapshot) -> Decision`` without clock, network or
randomness. The same snapshot always gives the same decision, so decisions can be
tested, simulated, and explained afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Limits within which a stage is scaled; names and meanings are Ray Serve's.

    Attributes:
        min_replicas: Minimum number of replicas; with 0 an idle stage scales to zero.
        max_replicas: Maximum number of replicas.
        target_ongoing_requests: Target for the mean number of requests queued or in
            service per replica.
        upscale_delay_s: Seconds that a need for more replicas must last before some are
            started.
        downscale_delay_s: Seconds that fewer replicas must be enough before some are
            drained.
        downscale_to_zero_delay_s: ``downscale_delay_s`` of the last replica; None: the
            same delay.
        look_back_period_s: Seconds over which arrivals are averaged.
        upscaling_factor: Replicas to start at once, per missing replica.
        downscaling_factor: Share of the surplus replicas that is drained at once.
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
        """Return a number of replicas, clamped to the limits.

        Args:
            count: Number of replicas.
        """
        return min(max(count, self.min_replicas), self.max_replicas)

    @property
    def to_zero_s(self) -> float:
        """Seconds without need before the last replica is drained."""
        if self.downscale_to_zero_delay_s is None:
            return self.downscale_delay_s
        return self.downscale_to_zero_delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNow:
    """Desired state of one stage.

    Attributes:
        name: Name of the stage, or its number.
        replicas: Desired number of replicas.
        limits: Scaling limits; None if the number of replicas is fixed.
        item_s: Seconds per request in a full batch, as declared or measured earlier;
            None if unknown.
    """

    name: str
    replicas: int
    limits: StageLimits | None = None
    item_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeen:
    """Observed state of one stage at the time of a sample.

    Attributes:
        ongoing: Requests waiting for the stage or computed by it.
        ready: Replicas that were ready.
        requests: Requests computed so far; never decreases.
        batches: Batches (steps, if the model generates text) computed so far; never
            decreases.
        busy_s: Seconds of computing so far, summed over all replicas.
        rows: Prompt and output tokens computed so far by a model that generates text.
    """

    ongoing: float
    ready: int
    requests: int = 0
    batches: int = 0
    busy_s: float = 0.0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Observed state of a model at one moment.

    Attributes:
        at: Time in seconds, of a monotonic clock.
        arrived: Requests so far, including refused ones.
        stages: Observed state of the stages, in order.
        missed: Requests so far that were answered after the objective or refused
            because of a full queue. Errors of clients and models do not count.
        refused: Requests so far that were refused because of a full queue.
        tokens: Output tokens so far.
        completions: Sequences finished so far.
        prompt_tokens: Prompt tokens of the finished sequences.
        generated_tokens: Output tokens of the finished sequences.
        kv_usage: Share of the KV blocks in use, at the stage 0 replica with the highest
            usage.
    """

    at: float
    arrived: int
    stages: tuple[StageSeen, ...]
    missed: int = 0
    refused: int = 0
    tokens: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextObjectives:
    """Objectives and limits of a model that generates text.

    Attributes:
        ttft_s: Seconds within which the first token should arrive; None: no objective.
        tpot_s: Mean seconds per further token of a sequence; None: no objective.
        step_tokens: Maximum tokens of a step (``max_num_batched_tokens``).
        max_num_seqs: Maximum number of running sequences of a stage 0 replica
            (``max_num_seqs``).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    step_tokens: int = 256
    max_num_seqs: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Input of one decision.

    Attributes:
        model: Name of the model.
        now: Time of the decision in seconds, of the same clock as the samples.
        stages: Desired state of the stages, in order.
        samples: Samples, oldest first; the last one was taken at ``now``.
        objective_s: Seconds within which requests should be answered; None: no
            objective.
        objective_share: Share of the requests that should meet the objective.
        deadline_s: Seconds after which a request is abandoned, unless it sets its own
            deadline.
        start_s: Seconds from the decision to start a replica until it is ready.
        interval_s: Seconds between two decisions.
        text: Objectives of a model that generates text; None for others.
        memory: ``Decision.memory`` of the previous decision; None at first.
    """

    model: str
    now: float
    stages: tuple[StageNow, ...]
    samples: tuple[Sample, ...]
    text: TextObjectives | None = None
    objective_s: float | None = None
    objective_share: float = 0.99
    deadline_s: float = 30.0
    start_s: float = 1.0
    interval_s: float = 1.0
    memory: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Number of replicas that each stage should have, and the reason.

    Attributes:
        replicas: Replicas by stage.
        why: Reason in one line, for people.
        facts: Numbers behind the decision, as plain data.
        memory: State that the policy receives in the next snapshot.
    """

    replicas: tuple[int, ...]
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    memory: Any = None


Policy = Callable[[Snapshot], Decision]
"""Type of the function that ``scaling:`` in a spec names."""
