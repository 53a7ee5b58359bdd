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
        min_replicas: Least number of replicas; with 0 the stage scales to zero when
            idle.
        max_replicas: Greatest number of replicas.
        target_ongoing_requests: Mean number of requests queued for or computed by each
            replica that is aimed at.
        upscale_delay_s: Seconds that a need for more replicas must last before some are
            started.
        downscale_delay_s: Seconds that fewer replicas must be enough before some are
            drained.
        downscale_to_zero_delay_s: The same for the last replica; None:
            ``downscale_delay_s``.
        look_back_period_s: Seconds over which arrivals are averaged.
        upscaling_factor: Share of the missing replicas that is started at once.
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
        """Return a number of replicas, brought within the limits.

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
        limits: Limits of scaling; None if the number of replicas is fixed.
        item_s: Seconds that a replica needs for a request in a full batch, as declared
            or measured earlier; None if not known.
    """

    name: str
    replicas: int
    limits: StageLimits | None = None
    item_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeen:
    """Observed state of one stage at the moment of a sample.

    Attributes:
        ongoing: Requests waiting for the stage or computed by it.
        ready: Replicas that were ready.
        requests: Requests computed so far; never decreases.
        batches: Batches computed so far; never decreases.
        busy_s: Seconds of computing so far, of all replicas together.
        rows: Of a model that generates text, tokens computed so far, those of prompts
            and answers; ``batches`` are then its steps.
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
        missed: Requests so far that were answered after the objective, or refused
            because too many waited. Errors of clients and of models do not count.
        refused: Requests so far that were refused because too many waited.
        tokens: Tokens that were generated so far.
        texts: Generated texts that have ended so far.
        prompt_tokens: Tokens of their prompts.
        generated_tokens: Tokens that were generated for them.
        kv_usage: Share of the memory for keys and values that is in use, of the replica
            of stage 0 with the largest.
    """

    at: float
    arrived: int
    stages: tuple[StageSeen, ...]
    missed: int = 0
    refused: int = 0
    tokens: int = 0
    texts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextObjectives:
    """Objectives and limits of a model that generates text.

    Attributes:
        ttft_s: Seconds within which the first token should come; None: no objective.
        tpot_s: Seconds that each further token should take, on average over a text;
            None: no objective.
        step_tokens: Most tokens of a step (``max_num_batched_tokens``).
        texts: Most texts that a replica of stage 0 generates at once
            (``max_num_seqs``).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    step_tokens: int = 256
    texts: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a decision is made from.

    Attributes:
        model: Name of the model.
        now: Time of the decision in seconds, of the same clock as the samples.
        stages: Desired state of the stages, in order.
        samples: Samples, oldest first; the last one is of now.
        objective_s: Seconds within which requests should be answered; None: no
            objective.
        objective_share: Share of the requests that should meet the objective.
        deadline_s: Seconds after which a request is given up, unless it sets its own
            deadline.
        start_s: Seconds from the decision to start a replica until it is ready.
        interval_s: Seconds between two decisions.
        text: Its objectives, if it generates text.
        memory: ``Decision.memory`` of the decision before; None at first.
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
    """Replicas that each stage should have, and the reason.

    Attributes:
        replicas: Replicas by stage.
        why: Reason for people, in one line.
        facts: Numbers behind the decision, as plain data.
        memory: State that the policy gets back in the next snapshot.
    """

    replicas: tuple[int, ...]
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    memory: Any = None


Policy = Callable[[Snapshot], Decision]
"""Function that ``scaling:`` in a spec names."""
